# SPDX-License-Identifier: MIT
"""Tests of openmsa.primitives."""
