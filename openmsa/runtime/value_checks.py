# SPDX-License-Identifier: MIT
"""These checks look at values: at those of lists, and at those of tensors, which they read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from openmsa.runtime.checks import integer


def has_values(name: str, value: Any) -> None:
    """`value` must not be on the meta device, whose tensors hold no values."""
    if value.device.type == "meta":
        raise NotImplementedError(f"{name} must hold values, which tensors on the meta device do not")


def lengths(name: str, value: Any, most: int) -> None:
    """`value` must be a list, or another sequence, of ints of at least 0 whose sum is at most `most`."""
    if not isinstance(value, Sequence):
        hint = f"; pass {name}.tolist()" if hasattr(value, "tolist") else ""
        raise TypeError(f"{name} must be a list of ints, one a sequence, got {type(value).__name__}{hint}")
    integer(f"sum({name})", sum(integer(f"{name}[{i}]", length, 0) for i, length in enumerate(value)), 0, most)


def starts(name: str, value: Tensor, total: int | None, what: str) -> None:
    """Starts of sequences begin at 0, do not decrease, and end at `total`, the number of `what` (None: at any number). Reads
    the tensor."""
    values = value.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}; Sequences.from_lengths makes starts from lengths")
    for b, (start, stop) in enumerate(pairwise(values)):
        if stop < start:
            raise ValueError(f"{name} must not decrease, got {start} then {stop} at index {b + 1}")
    integer(f"{name}[{len(values) - 1}]", values[-1], 0, 2**31 - 1)  # Starts are kept as int32.
    if total is not None and values[-1] != total:
        raise ValueError(f"{name} must end at {what} ({total}), got {values[-1]}")


def reaches(name: str, value: Any, cu_seqlens_k: Tensor | None) -> None:
    """Packed keys must reach to the last start (None: keys are paged). The starts are read on a CPU alone."""
    if cu_seqlens_k is None or cu_seqlens_k.device.type != "cpu" or len(getattr(value, "shape", ())) != 3:
        return
    if value.shape[0] < (end := int(cu_seqlens_k[-1])):
        raise ValueError(f"{name}.shape[0] must be at least the end of cu_seqlens_k ({end}), got {value.shape[0]}")


def indices(name: str, value: Any, size: int) -> None:
    """`value` must be a tensor of ints, each of which lies in [0, size); the tensor is read on a CPU alone, and not in a traced
    graph."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a tensor of torch.int32 or torch.int64, got {got}")
    if value.device.type == "cpu" and not torch.compiler.is_compiling():
        in_range(name, value, 0, size)


def none(name: str, bad: Tensor, values: Tensor, rule: str) -> None:
    """Raises ValueError for the first element of `values` that the mask `bad` marks. Reads the tensors."""
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        index = ", ".join(map(str, where))
        raise ValueError(f"{name}[{index}] must be {rule}, got {int(values[where])}")


def held(name: str, lens: Tensor, cached_lens: Tensor) -> None:
    """No sequence may have more keys, `lens`, than its cache holds. Reads the tensors."""
    short = (lens > cached_lens).nonzero().flatten()
    if short.numel():
        b = int(short[0])
        raise ValueError(
            f"{name} must not ask for more keys than the cache holds ({int(cached_lens[b])} for sequence {b}), "
            f"got {int(lens[b])}"
        )


def finite(name: str, value: Tensor) -> None:
    """No element may be NaN. Reads the tensor: call it only when the user asked for value checks."""
    bad = torch.isnan(value)
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name} must hold no NaN, got NaN at {where}")


def in_range(name: str, value: Tensor, low: int, high: int) -> None:
    """Every element lies in [low, high). Reads the tensor: on a GPU call it only when the user asked for value checks."""
    bad = (value < low) | (value >= high)
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name} must lie from {low} to {high - 1}, got {value[where].item()} at {where}")
