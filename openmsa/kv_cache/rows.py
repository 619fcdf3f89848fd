# SPDX-License-Identifier: MIT
"""Rows of one sequence, packed or paged, behind one face: what the CPU implementations read from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Keys (or values) of one sequence.

    rows:   packed ``[total_k, heads, dim]``, or a pool ``[num_pages, heads, page_size, dim]``.
    start:  the sequence's first packed row; not used with pages.
    pages:  physical pages of the sequence, in order; None when packed.
    """

    rows: Tensor
    start: int = 0
    pages: Tensor | None = None

    def span(self, head: int, first: int, stop: int) -> Tensor:
        """Rows [first, stop) of a head, ``[stop - first, dim]``: a view when packed, a copy of the pages otherwise."""
        if self.pages is None:
            return self.rows[self.start + first : self.start + stop, head]
        size = self.rows.shape[2]
        pages = self.pages[first // size : -(-stop // size)]
        whole = self.rows[:, head].index_select(0, pages).flatten(0, 1)  # [pages * size, dim]
        return whole[first % size : first % size + stop - first]

    def take(self, position: Tensor, head: Tensor) -> Tensor:
        """Rows at `position` of `head` (int64, shapes that broadcast): ``[..., dim]``."""
        if self.pages is None:
            return self.rows[self.start + position, head]
        size = self.rows.shape[2]
        return self.rows[self.pages[position // size], head, position % size]
