# SPDX-License-Identifier: MIT
"""Whole numbers of the host. Triton's functions of this kind are made for kernels and take a hundred times as long."""

from __future__ import annotations


def ceil_div(value: int, by: int) -> int:
    """value / by, rounded up."""
    return -(-value // by)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()
