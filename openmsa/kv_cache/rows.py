# SPDX-License-Identifier: MIT
"""Functions that take rows whether they are plain tensors or stored in a format stand here; and `Rows`, those of one sequence,
packed or paged, where the CPU implementations read keys and values.

A plain tensor has the format "plain": elements as PyTorch stores them, little endian, element 0 of a row first, and no scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from openmsa.kv_cache.stored import Stored
from openmsa.runtime import checks

PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Plain pools have one of these dtypes; float64 serves checks against the truth."""
KEY_FORMATS = ("e4m3", "nvfp4")
"""Keys and values may be stored in these formats beside plain tensors."""
INDEX_FORMATS = ("e4m3", "int8", "nvfp4", "mxfp4", "certified")
"""Index keys may be stored in these formats."""
QUERY_FORMATS = ("e4m3",)
"""Queries and index queries may be stored in these formats."""


def format_of(value: Any) -> str:
    """Gives "plain" for a tensor, else the name of its format."""
    return getattr(value, "format", "plain")


def kind_of(value: Tensor | Stored) -> str:
    """Names what keys and values must share: the format, and the layout of its scales where it has several."""
    return f"{value.format} {getattr(value, 'layout', '')}".strip() if isinstance(value, Stored) else "plain"


def rows_of(value: Tensor | Stored, *index: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gives ``value[index]``: of a tensor as it is, of a format as numbers of `dtype`."""
    if isinstance(value, Stored):
        return value.rows(*index, dtype=dtype)
    return value[index] if index else value


def dequantized(value: Tensor | Stored, dtype: torch.dtype) -> Tensor:
    """Gives all rows as numbers of `dtype`."""
    return value.dequantize(dtype) if isinstance(value, Stored) else value.to(dtype)


def wide_dtype(q: Tensor | Stored) -> torch.dtype:
    """A stage computes in this dtype: float64 for float64 queries, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def out_dtype(q: Tensor | Stored) -> torch.dtype:
    """Attention returns this dtype: the queries' own, bfloat16 where they are stored in a format."""
    return torch.bfloat16 if isinstance(q, Stored) else q.dtype


def check_rows(
    name: str, value: Any, shape: str, formats: tuple[str, ...], dtypes: tuple[torch.dtype, ...] = checks.FLOATS
) -> None:
    """`value` must be a tensor of one of `dtypes`, or stored in one of `formats`, with the rank that `shape` shows."""
    if not isinstance(value, Stored):
        checks.tensor(name, value, shape, dtypes)
        return
    if value.format not in formats:
        raise TypeError(f"{name} must be a torch.Tensor or stored as {' or '.join(formats)}, got {value.format}")
    if value.dim() != shape.count(",") + 1:
        raise checks.wrong_rank(name, value, shape)


def check_alike(name: str, value: Tensor | Stored, other_name: str, other: Tensor | Stored) -> None:
    """Raises unless both are on one device; two plain tensors must share a dtype as well."""
    plain = isinstance(value, Tensor) and isinstance(other, Tensor)
    checks.alike(name, value, other_name, other, dtype=plain)


def check_values(name: str, value: Tensor | Stored) -> None:
    """Raises where a number is NaN, for which it reads the tensor."""
    checks.finite(name, value.dequantize() if isinstance(value, Stored) else value)


@dataclass(frozen=True)
class Rows:
    """These are keys or values of one sequence.

    rows:   packed ``[total_k, heads, dim]``, or a pool ``[num_pages, heads, page_size, dim]``; plain or in a format.
    start:  the sequence's first packed row; not used with pages.
    pages:  physical pages of the sequence, in order; None when packed.
    dtype:  of the numbers that a format gives; plain rows come in their own.
    """

    rows: Tensor | Stored
    start: int = 0
    pages: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def span(self, head: int, first: int, stop: int) -> Tensor:
        """Gives rows [first, stop) of a head, ``[stop - first, dim]``: a view when packed and plain, a copy otherwise."""
        if self.pages is None:
            return rows_of(self.rows, slice(self.start + first, self.start + stop), head, dtype=self.dtype)
        size = self.rows.shape[2]
        pages = self.pages[first // size : -(-stop // size)]
        if isinstance(self.rows, Stored):
            whole = self.rows.rows(pages.long(), head, dtype=self.dtype).flatten(0, 1)  # [pages * size, dim]
        else:
            whole = self.rows[:, head].index_select(0, pages).flatten(0, 1)
        return whole[first % size : first % size + stop - first]

    def heads(self, first: int, stop: int) -> Tensor:
        """Gives rows [first, stop) of all heads, ``[heads, stop - first, dim]``: a view when packed and plain."""
        if self.pages is None:
            return rows_of(self.rows, slice(self.start + first, self.start + stop), dtype=self.dtype).transpose(0, 1)
        return torch.stack([self.span(head, first, stop) for head in range(self.rows.shape[1])])

    def take(self, position: Tensor, head: Tensor) -> Tensor:
        """Gives the rows at `position` of `head` (int64, shapes that broadcast): ``[..., dim]``."""
        if self.pages is None:
            return rows_of(self.rows, self.start + position, head, dtype=self.dtype)
        size = self.rows.shape[2]
        return rows_of(self.rows, self.pages[position // size].long(), head, position % size, dtype=self.dtype)

    def blocks(self, ids: list[list[int]], heads: range, block_size: int, count: int) -> Tensor:
        """Gives the first `count` rows of the blocks ``ids[i]`` of each head ``heads[i]``, ``[heads, count, dim]``, a copy."""
        within = torch.arange(block_size)
        size = block_size if self.pages is None else self.rows.shape[2]
        if isinstance(self.rows, Stored) or size % block_size:
            position = (torch.tensor(ids)[..., None] * block_size + within).flatten(1)[:, :count]
            return self.take(position, torch.arange(heads.start, heads.stop)[:, None])
        *strides, last = self.rows.stride()  # Blocks are runs of rows with one stride, wherever they begin.
        step = gcd(*strides) or 1
        *steps, row = [stride // step for stride in strides]
        if self.pages is None:
            row, of_head = steps[0], row
            starts = [
                [(self.start + i * block_size) * row + head * of_head for i in of] for head, of in zip(heads, ids, strict=True)
            ]
        else:
            page = self.pages[torch.tensor(ids) * block_size // size].tolist()
            starts = [
                [at * steps[0] + head * steps[1] + i * block_size % size * row for at, i in zip(pages, of, strict=True)]
                for head, pages, of in zip(heads, page, ids, strict=True)
            ]
        index = (torch.tensor(starts)[..., None] + within * row).flatten(1)[:, :count]
        dim = self.rows.shape[-1]
        extent = sum((n - 1) * stride for n, stride in zip(self.rows.shape, strides, strict=False)) // step + 1
        everything = self.rows.as_strided((extent, dim), (step, last))
        return everything.index_select(0, index.flatten()).view(len(heads), count, dim)
