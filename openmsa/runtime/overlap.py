# SPDX-License-Identifier: MIT
"""Sizes and strides say where the elements of a tensor lie, and whether those of tensors that are written to share places."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_written(name: str, value: Tensor) -> None:
    """Each element of `value` must have a place of its own."""
    if not value.is_contiguous() and not distinct(value.shape, value.stride()):
        raise ValueError(f"{name} must not be expanded or overlap itself, as it is written to, got strides {value.stride()}")


def distinct(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Says whether each element has a place of its own. It takes strides for overlapping where some are no larger than what the
    smaller ones span together, which no slice, permutation or reshaping of whole memory has."""
    spanned = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= spanned:
                return False
            spanned += stride * (size - 1)
    return True


def span(value: Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first element and the one behind its last."""
    start = value.data_ptr()
    if value.numel() == 0:
        return start, start
    last = sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
    return start, start + (last + 1) * value.itemsize


def interleaved(first: Tensor, second: Tensor) -> bool:
    """Says whether two tensors of one shape, which may lie in the same memory, share no place: as halves of one tensor do,
    which have the same strides."""
    apart = abs(second.data_ptr() - first.data_ptr())
    if not first.numel() or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return True
    if first.stride() != second.stride():
        return apart > 0
    return apart % first.element_size() > 0 or distinct((2, *first.shape), (apart // first.element_size(), *first.stride()))
