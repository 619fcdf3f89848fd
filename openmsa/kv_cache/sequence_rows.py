# SPDX-License-Identifier: MIT
"""The CPU implementations read keys and values of one sequence here, packed or paged, plain or in a format."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from openmsa.kv_cache.rows import rows_of
from openmsa.kv_cache.stored import Stored


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
        """Gives rows [first, stop) of all heads, ``[heads, stop - first, dim]``: a view when packed and plain, or where one
        head's pages follow each other."""
        if self.pages is None:
            if isinstance(self.rows, Tensor) and stop - first == self.rows.shape[0]:
                return self.rows.transpose(0, 1)
            return rows_of(self.rows, slice(self.start + first, self.start + stop), dtype=self.dtype).transpose(0, 1)
        heads, size = self.rows.shape[1:3]
        if isinstance(self.rows, Stored) or not self.rows.stride(1) or self.rows.stride(0) % self.rows.stride(1):
            return torch.stack([self.span(head, first, stop) for head in range(heads)])
        pages = self.pages[first // size : -(-stop // size)].tolist()
        within = slice(first % size, first % size + stop - first)
        if heads == 1 and pages == list(range(pages[0], pages[0] + len(pages))):
            run = self.rows[pages[0] : pages[-1] + 1, 0]
            if run.stride(0) == size * run.stride(1):
                return run.flatten(0, 1)[None, within]
        apart = self.rows.stride(0) // self.rows.stride(1)  # pages of one head from a page of the pool to the next
        shape = ((self.rows.shape[0] - 1) * apart + heads, *self.rows.shape[2:])
        everything = self.rows.as_strided(shape, self.rows.stride()[1:])
        index = torch.tensor([page * apart + head for head in range(heads) for page in pages], device="cpu")
        return everything.index_select(0, index).view(heads, -1, shape[-1])[:, within]

    def take(self, position: Tensor, head: Tensor) -> Tensor:
        """Gives the rows at `position` of `head` (int64, shapes that broadcast): ``[..., dim]``."""
        if self.pages is None:
            return rows_of(self.rows, self.start + position, head, dtype=self.dtype)
        size = self.rows.shape[2]
        return rows_of(self.rows, self.pages[position // size].long(), head, position % size, dtype=self.dtype)

    def blocks(self, ids: list[list[int]], heads: range, block_size: int, count: int) -> Tensor:
        """Gives the first `count` rows of the blocks ``ids[i]`` of each head ``heads[i]``, ``[heads, count, dim]``, a copy."""
        within = torch.arange(block_size, device="cpu")
        size = block_size if self.pages is None else self.rows.shape[2]
        if isinstance(self.rows, Stored) or size % block_size:
            position = (torch.tensor(ids, device="cpu")[..., None] * block_size + within).flatten(1)[:, :count]
            return self.take(position, torch.arange(heads.start, heads.stop, device="cpu")[:, None])
        if self.pages is not None and self.rows.is_contiguous():  # Blocks lie whole in pages.
            number = torch.tensor(ids, device="cpu")
            head = torch.arange(heads.start, heads.stop, device="cpu")[:, None]
            place = self.pages[number * block_size // size] * self.rows.shape[1] + head  # pages of a head
            place = place * (size // block_size) + number % (size // block_size)
            chosen = self.rows.view(-1, block_size, self.rows.shape[3]).index_select(0, place.flatten())
            return chosen.view(len(heads), -1, self.rows.shape[3])[:, :count]
        *strides, last = self.rows.stride()  # Blocks are runs of rows with one stride, wherever they begin.
        step = gcd(*strides) or 1
        *steps, row = [stride // step for stride in strides]
        if self.pages is None:
            row, of_head = steps[0], row
            starts = [
                [(self.start + i * block_size) * row + head * of_head for i in of] for head, of in zip(heads, ids, strict=True)
            ]
        else:
            page = self.pages[torch.tensor(ids, device="cpu") * block_size // size].tolist()
            starts = [
                [at * steps[0] + head * steps[1] + i * block_size % size * row for at, i in zip(pages, of, strict=True)]
                for head, pages, of in zip(heads, page, ids, strict=True)
            ]
        index = (torch.tensor(starts, device="cpu")[..., None] + within * row).flatten(1)[:, :count]
        dim = self.rows.shape[-1]
        extent = sum((n - 1) * stride for n, stride in zip(self.rows.shape, strides, strict=False)) // step + 1
        everything = self.rows.as_strided((extent, dim), (step, last))
        return everything.index_select(0, index.flatten()).view(len(heads), count, dim)
