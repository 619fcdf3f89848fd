# SPDX-License-Identifier: MIT
"""These are tests of openmsa.sparse_attention."""
