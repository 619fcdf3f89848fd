# SPDX-License-Identifier: MIT
"""What fits where."""
