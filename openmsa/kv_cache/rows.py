# SPDX-License-Identifier: MIT
"""`Rows` are those of one sequence, packed or paged, plain or stored: the CPU implementations read keys and values there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.kv_cache.stored import Stored, rows_of


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

    def take(self, position: Tensor, head: Tensor) -> Tensor:
        """Gives the rows at `position` of `head` (int64, shapes that broadcast): ``[..., dim]``."""
        if self.pages is None:
            return rows_of(self.rows, self.start + position, head, dtype=self.dtype)
        size = self.rows.shape[2]
        return rows_of(self.rows, self.pages[position // size].long(), head, position % size, dtype=self.dtype)
