# SPDX-License-Identifier: MIT
"""Decode steps: `DecodePlan` and the kernel that runs a whole layer of a small batch in one launch."""

from openmsa.decode.plan import DecodePlan

__all__ = ["DecodePlan"]
