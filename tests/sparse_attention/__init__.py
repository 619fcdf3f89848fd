# SPDX-License-Identifier: MIT
"""Tests of openmsa.sparse_attention."""
