# SPDX-License-Identifier: MIT
"""This folder serves decode steps, with `DecodePlan` and the kernel that runs a layer of a small batch in one launch."""

from openmsa.decode.plan import DecodePlan

__all__ = ["DecodePlan"]
