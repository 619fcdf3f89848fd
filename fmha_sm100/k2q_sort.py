# SPDX-License-Identifier: MIT
"""The stable sort that turns a selection around, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGE = 1 << 24  # entries sorted at once


def sort_heads(value: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Each head of int32 ``[heads, entries]`` sorted, equal values in their order: values, those above `most` as `most`, and
    the entry, int64, that each came from. One sort of all heads together, where PyTorch would sort segments in two, and of
    keys of two bytes where they are enough, as a radix sort takes its time by the byte."""
    heads, entries = value.shape
    width = most + 1
    kind = torch.int16 if heads * width <= 2**15 else torch.int32 if heads * width <= 2**31 else torch.int64
    base = (torch.arange(heads, device=value.device)[:, None] * width).to(kind)
    key, entry = (value.clamp(max=most).to(kind) + base).flatten().sort(stable=True)
    return key.view(heads, entries) - base, entry.remainder_(max(entries, 1)).view(heads, entries)


def by_heads(function: Callable[..., tuple[Tensor, ...]], *heads: Tensor) -> tuple[Tensor, ...]:
    """``function(*heads)`` of tensors ``[heads, ...]``, one head at a time where together they are large: a sort holds int64
    numbers of all its entries."""
    if heads[0].shape[0] < 2 or heads[0].numel() <= LARGE:
        return function(*heads)
    parts = [function(*(x[h : h + 1] for x in heads)) for h in range(heads[0].shape[0])]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))
