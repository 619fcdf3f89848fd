# SPDX-License-Identifier: MIT
"""C kernels of a CPU read queries, keys and values here where they lie and as they are stored."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from openmsa.kv_cache import E4M3, Stored
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.runtime import c_library

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
"""The kernels call the dtypes so; lanes.h has the same list."""


def sizes(*names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    """Declares fields of a call for addresses, strides and sizes, 8 bytes each."""
    return [(name, ctypes.c_int64) for name in names]


class CRows(ctypes.Structure):
    """These are keys or values of one head of a sequence, as lanes.h describes them."""

    _fields_ = tuple(sizes("runs", "run", "stride", "type"))


@dataclass(frozen=True)
class Span:
    """These are queries of one sequence: packed rows `first` to `stop`, the first of which stands at `position`."""

    first: int
    stop: int
    position: int
    keys: Rows
    k_len: int


def reads(source: Path, *values: Tensor | Stored) -> bool:
    """Says whether the kernels of a C file read these queries, and keys and values, packed or pools, and can be compiled."""
    return all(numbers(x) is not None for x in values) and c_library.library(source).functions is not None


def numbers(value: Tensor | Stored) -> Tensor | None:
    """Returns the numbers or codes that a kernel reads of queries, keys or values, or None where it does not read them: their
    dtype, format or strides are others, or there is a scale for each page."""
    found = value.data if isinstance(value, E4M3) else value
    if not isinstance(found, Tensor) or found.dtype not in TYPES or found.stride(-1) != 1:
        return None
    paged = isinstance(value, E4M3) and value.scale is not None and value.scale.dim() == 2
    return None if paged else found.detach()


def factors(value: Tensor | Stored) -> Tensor:
    """Returns the scale of each head, float32, 1 of plain tensors."""
    heads = value.shape[1]
    scale = value.scale if isinstance(value, E4M3) else None
    return torch.ones(heads, device="cpu") if scale is None else scale.expand(heads)


def address(x: Tensor, row: int, head: int) -> int:
    """Returns where ``x[row, head]`` lies."""
    return x.data_ptr() + (row * x.stride(0) + head * x.stride(1)) * x.element_size()


def strides(x: Tensor) -> tuple[int, int]:
    """Returns the bytes from a row of x to the next and from a head to the next."""
    return x.stride(0) * x.element_size(), x.stride(1) * x.element_size()


def rows_of_heads(rows: Rows) -> tuple[list[CRows], Tensor]:
    """Describes the rows of each head of a sequence, which `numbers` gives. The addresses of their runs, returned beside them,
    must be kept as long as these."""
    pool = numbers(rows.rows)
    assert pool is not None
    heads, size, kind = pool.shape[1], pool.element_size(), TYPES[pool.dtype]
    starts = torch.tensor([[address(pool, 0, head)] for head in range(heads)], dtype=torch.int64, device="cpu")
    if rows.pages is None:
        runs, run, stride = starts.add_(rows.start * pool.stride(0) * size), max(1, pool.shape[0]), pool.stride(0)
    else:
        runs, run, stride = starts + rows.pages.long() * (pool.stride(0) * size), pool.shape[2], pool.stride(2)
    apart = runs.stride(0) * runs.element_size()
    return [CRows(runs.data_ptr() + head * apart, run, stride * size, kind) for head in range(heads)], runs
