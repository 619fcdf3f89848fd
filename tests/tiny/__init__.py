# SPDX-License-Identifier: MIT
"""These are tests of openmsa.tiny."""
