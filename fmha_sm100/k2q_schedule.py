# SPDX-License-Identifier: MIT
"""How the public kernels cut the rows of a CSR into work items."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fmha_sm100.k2q_rows import Rows
from fmha_sm100.k2q_sort import by_heads, sort_heads
from openmsa.runtime import devices


class SparseAttentionSchedule:
    """The third result of `build_k2q_csr`. Our kernels find their own work and do not read it; it is exact, for callers (a
    backward pass, for example) that do. Its tensors are made on the device, without a host sync, when they are first read, and
    describe the selection of the moment of building; while a CUDA graph is captured, at once, and every replay renews them.

    enabled:             True.
    scheduler_metadata:  int32 ``[work_capacity, 6]``: (kv head, row, first query of the row, queries, sequence, key block) of
                         each item, ordered by head and row; zeros behind the last.
    work_count:          int32 ``[1]``: how many items there are.
    qsplit_indices:      int32 ``[num_kv_heads, total_q * topk]``: as ``k2q_q_indices``, with the slot of the block among the
                         query's blocks in the upper 8 bits (24 bits for the query); -1 where unused.
    split_counts:        int32 ``[total_q, num_kv_heads]``: blocks that each query reads.
    target_q_per_cta:    most queries of an item: about two items a multiprocessor, in units of 128 (query, head) rows, and no
                         more than ``2 * topk * block_size``, so that a block that everyone reads is shared out.
    """

    enabled = True

    def __init__(self, row: Tensor, counts: Tensor, rows: Rows, group: int, block_size: int) -> None:
        """row: int32 [heads, total_q, topk], of each entry. counts: int32 [heads * num_rows], queries of each row."""
        self._row, self._counts, self._rows = row, counts, rows
        self._num_rows = counts.numel() // max(row.shape[0], 1)
        self.shape = (row.shape[1], row.shape[0])  # queries and heads
        self.target_q_per_cta = _target(row, block_size, group)
        if devices.capturing(row.device):
            _ = self.split_counts, self.qsplit_indices, self.work_count, self.scheduler_metadata

    @cached_property
    def _valid(self) -> Tensor:
        return self._row < self._num_rows

    @cached_property
    def split_counts(self) -> Tensor:
        return self._valid.sum(2, dtype=torch.int32).T.contiguous()

    @cached_property
    def qsplit_indices(self) -> Tensor:
        query = self._rows.of_tokens(self._row.shape[1])[1]

        def of_heads(row: Tensor) -> tuple[Tensor]:
            topk, valid = row.shape[2], row < self._num_rows
            ordered, entry = sort_heads(row.flatten(1), self._num_rows)
            slot = valid.cumsum(2, dtype=torch.int32).sub(1).flatten(1).gather(1, entry)
            return (torch.where(ordered < self._num_rows, query[entry // topk] | (slot << 24), -1),)

        with torch.inference_mode(False):
            return by_heads(of_heads, self._row)[0]

    @cached_property
    def _pieces(self) -> Tensor:
        """The items of each row."""
        return (self._counts + self.target_q_per_cta - 1) // self.target_q_per_cta

    @cached_property
    def work_count(self) -> Tensor:
        return self._pieces.sum(dtype=torch.int32).view(1)

    @property
    def work_capacity(self) -> int:
        """Items that `scheduler_metadata` has room for."""
        entries = self._row.numel()
        return min(self._row.shape[0] * self._num_rows, entries) + entries // self.target_q_per_cta

    @cached_property
    def scheduler_metadata(self) -> Tensor:
        if not self.work_capacity or not self._num_rows:
            return torch.zeros((self.work_capacity, 6), dtype=torch.int32, device=self._row.device)
        pieces, counts = self._pieces, self._counts
        ends = pieces.cumsum(0)
        item = torch.arange(self.work_capacity, device=ends.device)
        at = torch.searchsorted(ends, item, right=True).clamp_(max=counts.numel() - 1)
        first = (item - ends[at] + pieces[at]) * self.target_q_per_cta
        sequence, block = self._rows.of_rows(self._num_rows)
        row = at % self._num_rows
        queries = (counts[at] - first).clamp_(max=self.target_q_per_cta)
        fields = torch.stack((at // self._num_rows, row, first, queries, sequence[row], block[row]), 1)
        return torch.where((item < ends[-1])[:, None], fields, 0).to(torch.int32)


def _target(row: Tensor, block_size: int, group: int) -> int:
    heads, total_q, topk = row.shape
    unit = max(128 // group, 1)
    items = 2 * devices.facts(row.device).num_sms
    units = min(max(-(-total_q * topk * heads // (unit * items)), 1), 512)
    most = max(2 * topk * block_size, unit)
    return -(-min(units * unit, most) // unit) * unit
