# SPDX-License-Identifier: MIT
"""These are tests of the drop-in package."""
