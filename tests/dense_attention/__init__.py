# SPDX-License-Identifier: MIT
"""Tests of openmsa.dense_attention."""
