# SPDX-License-Identifier: MIT
"""Computes how the public kernels split their work: the schedules of attention over a CSR and of paged decode.

The numbers are exact, for callers that read them (a backward pass, for example). The kernels here split their own work and
read none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fmha_sm100.k2q_rows import Rows, by_heads, sort_heads
from openmsa.runtime import devices

TILE = 128
"""A query tile has so many (query token, head) rows."""

LEAST_PAGES = 16
"""A decode chunk has at least so many pages."""

MOST_SPLITS = 256
"""A sequence has at most so many decode chunks."""

UNEVEN = 1.5
"""From this ratio of the longest sequence to the mean on, decode chunks follow the mean."""


class SparseAttentionSchedule:
    """Cuts the rows of a CSR into work items: the third result of `build_k2q_csr`.

    Its tensors are made on the device, without a host sync, when they are first read, and describe the selection of the moment
    of building. While a CUDA graph is captured they are made at once, and every replay renews them.

    enabled:             True.
    scheduler_metadata:  int32 ``[work_capacity, 6]``, (kv head, row, first query of the row, queries, sequence, key block) of
                         each item, ordered by head and row; zeros behind the last.
    work_count:          int32 ``[1]``, how many items there are.
    qsplit_indices:      int32 ``[num_kv_heads, total_q * topk]``, as ``k2q_q_indices``, with the slot of the block among the
                         query's blocks in the upper 8 bits (24 bits for the query); -1 where unused.
    split_counts:        int32 ``[total_q, num_kv_heads]``, the blocks that each query reads.
    target_q_per_cta:    the most queries of an item: about two items a multiprocessor, in units of 128 (query, head) rows,
                         and no more than ``2 * topk * block_size``, so that a block that everyone reads is shared out.
    """

    enabled = True

    def __init__(self, row: Tensor, counts: Tensor, rows: Rows, group: int, block_size: int) -> None:
        """Takes the row of each entry, int32 ``[heads, total_q, topk]``, and the queries of each row, int32 ``[heads *
        num_rows]``. `group` is the query heads of a KV head."""
        self._row, self._counts, self._rows = row, counts, rows
        self._num_rows = counts.numel() // max(row.shape[0], 1)
        self.shape = (row.shape[1], row.shape[0])  # (total_q, num_kv_heads)
        self.target_q_per_cta = _target(row, block_size, group)
        if devices.capturing(row.device):
            _ = self.split_counts, self.qsplit_indices, self.work_count, self.scheduler_metadata

    @cached_property
    def _valid(self) -> Tensor:
        """Marks the entries that name a row, bool ``[heads, total_q, topk]``."""
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
        """Counts the items of each row, int32 ``[heads * num_rows]``."""
        return (self._counts + self.target_q_per_cta - 1) // self.target_q_per_cta

    @cached_property
    def work_count(self) -> Tensor:
        return self._pieces.sum(dtype=torch.int32).view(1)

    @property
    def work_capacity(self) -> int:
        """Returns how many items `scheduler_metadata` has room for."""
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
    """Returns `target_q_per_cta` for the row of each entry, int32 ``[heads, total_q, topk]``."""
    heads, total_q, topk = row.shape
    unit = max(TILE // group, 1)
    items = 2 * devices.facts(row.device).num_sms
    units = min(max(-(-total_q * topk * heads // (unit * items)), 1), 512)
    most = max(2 * topk * block_size, unit)
    return -(-min(units * unit, most) // unit) * unit


@dataclass(frozen=True)
class DecodeAttentionSchedule:
    """Cuts paged decode into work items (sequence, query tile, chunk of keys), sequences outermost."""

    split_kv: bool  # whether any sequence has more than one chunk
    cta_tile_q: int  # the (token, head) rows of a query tile
    num_q_tiles: int  # the query tiles of a sequence and KV head
    kv_chunk_size_pages: int
    kv_chunk_size_tokens: int
    work_count: int  # the items
    padded_work_count: int  # the entries of the lists below, more than items only with enable_cuda_graph
    partial_rows: int  # the rows of partial results
    max_split_count: int  # the most chunks of a sequence
    max_grid_size: int
    num_sms: int
    request_indices: Tensor  # int32 [padded_work_count], the sequence of each item, 0 in the padding
    qo_tile_indices: Tensor  # int32 [padded_work_count], the query tile of each item
    kv_tile_indices: Tensor  # int32 [padded_work_count], the chunk of each item
    merge_indptr: Tensor  # int32 [batch * seqlen_q + 1], the first partial row of each query token
    o_indptr: Tensor  # int32 [batch + 1], the first partial row of each sequence
    block_valid_mask: Tensor  # int32 [padded_work_count], 1 for items, 0 for padding
    kv_pages: Tensor  # int32 [batch], the pages of each sequence
    split_counts: Tensor  # int32 [batch], the chunks of each sequence


class SplitRules(NamedTuple):
    """This holds what a caller may say about the split of decode; `SparseDecodePagedAttentionWrapper.plan` takes it."""

    enable_cuda_graph: bool = False  # pads the lists of items to the grid
    max_grid_size: int | None = None  # the items to aim at; None: two for each multiprocessor
    fixed_split_size: int | None = None  # the pages of a chunk; None: found from the lengths
    disable_split_kv: bool = False  # gives each sequence one chunk


def decode_schedule(
    seqused_k: Tensor,
    page_size: int,
    seqlen_q: int,
    group: int,
    num_kv_heads: int,
    max_seqlen_k: int,
    rules: SplitRules,
) -> DecodeAttentionSchedule:
    """Splits decode for these lengths, int32 or int64 ``[batch]``, which it reads on the host."""
    device, num_sms = seqused_k.device, devices.facts(seqused_k.device).num_sms
    grid = rules.max_grid_size or 2 * num_sms
    pages = [-(-max(n, 0) // page_size) for n in seqused_k.tolist()]
    tiles = -(-seqlen_q * group // TILE)
    most = max([*pages, 1])
    if rules.disable_split_kv:
        chunk = max(most, -(-max_seqlen_k // page_size))
    elif rules.fixed_split_size is not None:
        chunk = rules.fixed_split_size
    else:
        chunk = _chunk(pages, tiles * num_kv_heads, grid)
    splits = [max(-(-n // chunk), 1) for n in pages]
    items = [(b, tile, part) for b, count in enumerate(splits) for tile in range(tiles) for part in range(count)]
    room = max(len(items), grid) if rules.enable_cuda_graph else len(items)
    padded = items + [(0, 0, 0)] * (room - len(items))
    request, tile, part = (list(column) for column in zip(*padded, strict=True)) if padded else ([], [], [])
    per_token = [count for count in splits for _ in range(seqlen_q)]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return DecodeAttentionSchedule(
        split_kv=max([*splits, 1]) > 1,
        cta_tile_q=TILE,
        num_q_tiles=tiles,
        kv_chunk_size_pages=chunk,
        kv_chunk_size_tokens=chunk * page_size,
        work_count=len(items),
        padded_work_count=room,
        partial_rows=sum(per_token),
        max_split_count=max([*splits, 1]),
        max_grid_size=grid,
        num_sms=num_sms,
        request_indices=ints(request),
        qo_tile_indices=ints(tile),
        kv_tile_indices=ints(part),
        merge_indptr=ints(_starts(per_token)),
        o_indptr=ints(_starts([count * seqlen_q for count in splits])),
        block_valid_mask=ints([1] * len(items) + [0] * (room - len(items))),
        kv_pages=ints(pages),
        split_counts=ints(splits),
    )


def _chunk(pages: list[int], programs: int, grid: int) -> int:
    """Returns the pages of a chunk, for the pages of each sequence and the programs that work on each chunk.

    They are the fewest, from LEAST_PAGES on, with which all items fit the grid; a quarter of the mean where one sequence is
    much longer than the others; and enough that no sequence has more than MOST_SPLITS chunks."""
    most = max([*pages, 1])
    low, high = LEAST_PAGES, max(most, LEAST_PAGES)
    while low < high:
        middle = (low + high) // 2
        fits = sum(max(-(-n // middle), 1) for n in pages) * programs <= grid
        low, high = (low, middle) if fits else (middle + 1, high)
    mean = sum(pages) / max(len(pages), 1)
    if mean and most / mean >= UNEVEN:
        low = min(low, max(LEAST_PAGES, int(mean / 4)))
    return max(low, -(-most // MOST_SPLITS))


def _starts(counts: list[int]) -> list[int]:
    """Returns 0 and the running sums of `counts`."""
    return list(accumulate(counts, initial=0))
