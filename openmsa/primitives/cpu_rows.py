# SPDX-License-Identifier: MIT
"""C kernels of a CPU read queries, keys and values here where they lie and as they are stored."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

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


PACKED = 1 << 62  # rows of the one run of packed keys


class CRows(ctypes.Structure):
    """These are keys or values of a sequence: `Rows` of lanes.h."""

    _fields_ = tuple(sizes("first", "pages", "page", "head", "stride", "run", "type"))


SpanT = TypeVar("SpanT", bound="Span")


@dataclass(frozen=True)
class Span:
    """These are queries of one sequence: packed rows `first` to `stop`, the first of which stands at `position`."""

    first: int
    stop: int
    position: int
    keys: Rows
    k_len: int

    def part(self: SpanT, first: int, stop: int) -> SpanT:
        """Returns the span of the packed rows `first` to `stop`."""
        return replace(self, first=first, stop=stop, position=self.position + first - self.first)


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
    return torch.ones(heads, dtype=torch.float32, device="cpu") if scale is None else scale.expand(heads).contiguous()


def product_factors(q: Tensor | Stored, keys: Tensor | Stored, factor: float) -> Tensor:
    """Returns what the products of each head of queries are multiplied by, float32."""
    heads = q.shape[1]
    if isinstance(q, Tensor) and isinstance(keys, Tensor):
        return torch.full((heads,), factor, dtype=torch.float32, device="cpu")
    return factors(q) * factors(keys).repeat_interleave(heads // keys.shape[1]) * factor


def address(x: Tensor, row: int, head: int) -> int:
    """Returns where ``x[row, head]`` lies."""
    return x.data_ptr() + (row * x.stride(0) + head * x.stride(1)) * x.element_size()


def strides(x: Tensor) -> tuple[int, int]:
    """Returns the bytes from a row of x to the next and from a head to the next."""
    return x.stride(0) * x.element_size(), x.stride(1) * x.element_size()


def c_rows(rows: Rows) -> tuple[CRows, Tensor | None]:
    """Describes the rows of a sequence, which `numbers` gives, and returns its pages, which must be kept as long."""
    pool = numbers(rows.rows)
    assert pool is not None
    size, kind = pool.element_size(), TYPES[pool.dtype]
    if rows.pages is None:
        stride, head = strides(pool)
        return CRows(pool.data_ptr() + rows.start * stride, 0, 0, head, stride, PACKED, kind), None
    page, head, stride, _ = (n * size for n in pool.stride())
    pages = rows.pages.contiguous()
    return CRows(pool.data_ptr(), pages.data_ptr(), page, head, stride, pool.shape[2], kind), pages
