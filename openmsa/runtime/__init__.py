# SPDX-License-Identifier: MIT
"""Dispatch, argument checks, device facts and settings. Knows nothing of attention."""
