# SPDX-License-Identifier: MIT
"""Tests of openmsa.kv_cache."""
