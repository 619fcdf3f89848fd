# SPDX-License-Identifier: MIT
"""These are tests of openmsa.capacity, which says what fits where."""
