# SPDX-License-Identifier: MIT
"""Tests of the drop-in package."""
