# SPDX-License-Identifier: MIT
"""Tests of openmsa.block_scores."""
