# SPDX-License-Identifier: MIT
"""How the CSR form of a selection numbers its rows: level by level.

A row is one key block of one sequence. Block 0 of every sequence comes first, in the order of the batch, then block 1 of every
sequence that has one, and so on.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmsa.runtime import checks
from openmsa.types import starts

NOTHING = 2**31 - 1
"""A row, or a block, that does not exist; every block id past the visible ones is skipped."""


@dataclass(frozen=True)
class Rows:
    """The numbering for one batch. Nothing here reads the device."""

    cu_seqlens_q: Tensor  # int32 [batch + 1]
    blocks: Tensor  # int32 [batch], blocks of each sequence
    levels: int  # a bound on the blocks of one sequence

    @classmethod
    def of(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_size: int, levels: int) -> Rows:
        """From checked lengths."""
        return cls(cu_seqlens_q, (cu_seqlens_k.diff() + block_size - 1) // block_size, levels)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.blocks.numel()

    def _table(self) -> Tensor:
        """int32 [levels, batch]: how many rows come up to and with this one."""
        level = torch.arange(self.levels, device=self.blocks.device, dtype=torch.int32)
        return (level[:, None] < self.blocks).flatten().cumsum(0, dtype=torch.int32).view(self.levels, self.batch)

    def of_blocks(self, sequence: Tensor, block: Tensor) -> Tensor:
        """Rows, int32 ``[..., total_q, topk]``, of the blocks of each token (sequence: int64 ``[total_q]``); NOTHING where
        there is no such block."""
        if not self.levels:
            return torch.full_like(block, NOTHING)
        limit = self.blocks.clamp(max=self.levels)
        limit = limit if self.batch == 1 else limit[sequence][:, None]
        held = (block >= 0) & (block < limit)
        if self.batch == 1:
            return torch.where(held, block, NOTHING)
        row = self._table().view(-1)[torch.where(held, block * self.batch + sequence[:, None].int(), 0)]
        return torch.where(held, row - 1, NOTHING)

    def of_rows(self, total_rows: int) -> tuple[Tensor, Tensor]:
        """The sequence and the block, int64 [total_rows], of each row; 0 for rows past the last."""
        device = self.blocks.device
        if self.batch == 1:
            block = torch.arange(total_rows, device=device)
            return torch.zeros_like(block), block
        table = self._table()
        level = torch.arange(self.levels, device=device)[:, None]
        row = torch.where((level < self.blocks) & (table <= total_rows), table - 1, total_rows).long()  # [levels, batch]
        place = torch.zeros(total_rows + 1, dtype=torch.int64, device=device)  # the last one takes what has no row
        place.scatter_(0, row.flatten(), torch.arange(row.numel(), device=device))
        return place[:-1] % max(self.batch, 1), place[:-1] // max(self.batch, 1)

    def of_tokens(self, total_q: int) -> tuple[Tensor, Tensor]:
        """For each query token its sequence, int64 [total_q], and its number within it, int32 [total_q]."""
        token = torch.arange(total_q, device=self.blocks.device, dtype=torch.int32)
        if self.batch == 1:
            return torch.zeros_like(token, dtype=torch.int64), token
        sequence = torch.searchsorted(self.cu_seqlens_q[1:], token, right=True).clamp_(max=max(self.batch - 1, 0))
        return sequence, token - self.cu_seqlens_q[sequence]


def checked_starts(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both as int32 [batch + 1]. On a CPU the values are read too; on a GPU they are not."""
    readable = device.type == "cpu"
    cu_q = starts("cu_seqlens_q", cu_seqlens_q, device, total_q, "the number of queries" if readable else "")
    cu_k = starts("cu_seqlens_k", cu_seqlens_k, device, None, "the number of keys" if readable else "")
    if cu_q.numel() != cu_k.numel():
        raise ValueError(
            f"cu_seqlens_k must have as many entries as cu_seqlens_q (batch + 1 = {cu_q.numel()}), got {cu_k.numel()}"
        )
    return cu_q, cu_k


def length(name: str, value: Any) -> int:
    """An int at least 0; integers of other libraries and tensors of one integer are taken too."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})") from None
    return checks.integer(name, value, 0)


def longest(name: str, bound: int | None, cu_seqlens: Tensor) -> int | None:
    """`bound` as an int; on a CPU it must reach the longest sequence, which stands in for None."""
    if bound is not None:
        bound = length(name, bound)
    if cu_seqlens.device.type != "cpu":
        return bound
    most = int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0
    if bound is not None and bound < most:
        raise ValueError(f"{name} must be at least the longest sequence ({most}), got {bound}")
    return most if bound is None else bound


def given_longest(name: str, bound: int, cu_seqlens: Tensor) -> int:
    """`longest` where the bound is required."""
    found = longest(name, length(name, bound), cu_seqlens)
    assert found is not None
    return found
