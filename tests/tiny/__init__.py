# SPDX-License-Identifier: MIT
"""Tests of openmsa.tiny."""
