# SPDX-License-Identifier: MIT
"""These are tests of openmsa.kv_cache."""
