# SPDX-License-Identifier: MIT
"""This room holds dispatch, launches, argument checks, device facts and settings; it knows nothing of attention."""
