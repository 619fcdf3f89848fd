# SPDX-License-Identifier: MIT
"""Computes how the public kernels split the work of paged decode.

The numbers are exact, for callers that read them. The kernels here split their own work and read none of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.runtime import devices

MOST_ROWS = 128
"""A query tile of decode has at most so many (query token, head) rows, and partial results have room for as many."""

LEAST_PAGES, SHORT_PAGES = 16, 8
"""A decode chunk has at least so many pages; sequences of at most so many pages are not cut."""

MOST_SPLITS = 256
"""A sequence has at most so many decode chunks, unless the caller fixes their size."""


@dataclass(frozen=True)
class DecodeAttentionSchedule:
    """Cuts paged decode into work items (sequence, query tile, chunk of keys), sequences outermost, then query tiles."""

    split_kv: bool  # whether sequences are cut into chunks
    cta_tile_q: int  # the (token, head) rows of a query tile
    num_q_tiles: int  # the query tiles of a sequence and KV head
    kv_chunk_size_pages: int
    kv_chunk_size_tokens: int
    work_count: int  # the items of a KV head, with the padding where split_kv
    padded_work_count: int  # the entries of the lists below, more than items only with enable_cuda_graph
    partial_rows: int  # the rows of partial results: MOST_ROWS (token, head) rows a query tile and chunk
    max_split_count: int  # the most chunks of a sequence
    max_grid_size: int  # the programs that the chunks are to fill
    active_blocks_per_sm: int  # that many of them share a multiprocessor
    num_sms: int
    base_cta: int  # the programs without chunks: sequences * query tiles * KV heads
    request_indices: Tensor  # int32 [padded_work_count], the sequence of each item, 0 in the padding
    qo_tile_indices: Tensor  # int32 [padded_work_count], the query tile of each item
    kv_tile_indices: Tensor  # int32 [padded_work_count], the chunk of each item
    merge_indptr: Tensor  # int32 [batch * seqlen_q + 1], the running sum of the chunks of each query token
    o_indptr: Tensor  # int32 [batch + 1], the first partial row of each sequence
    block_valid_mask: Tensor  # int32 [padded_work_count], 1 for items, 0 for padding
    kv_pages: Tensor  # int32 [batch], the pages of each sequence, at least 1
    split_counts: Tensor  # int32 [batch], the chunks of each sequence

    def partials(self, num_qo_heads: int | None, head_dim: int | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns memory for partial outputs, float32 ``[partial_rows, num_qo_heads, head_dim]``, and for their lse; None where
        nothing is split."""
        if not self.split_kv:
            return None, None
        if num_qo_heads is None or head_dim is None:
            raise ValueError("plan() must be given num_qo_heads and head_dim for O_partial and LSE_partial, got None")
        shape, device = (self.partial_rows, num_qo_heads, head_dim), self.kv_pages.device
        return torch.empty(shape, device=device), torch.empty(shape[:2], device=device)


UNPLANNED = {
    field.name: {"bool": False, "int": 0}.get(str(field.type)) for field in dataclasses.fields(DecodeAttentionSchedule)
}
"""The fields of a schedule have these values where there is none yet."""


class SplitRules(NamedTuple):
    """This holds what a caller may say about the split of decode; `SparseDecodePagedAttentionWrapper.plan` takes it."""

    enable_cuda_graph: bool = False  # always cuts where it may, and pads the lists of items to the grid
    max_grid_size: int | None = None  # the programs to aim at; None: one for each multiprocessor
    fixed_split_size: int | None = None  # the pages of a chunk; None: found from the lengths
    disable_split_kv: bool = False  # gives each sequence one chunk


class DecodeShape(NamedTuple):
    """This holds the sizes that the split of decode depends on, beside the lengths."""

    page_size: int
    seqlen_q: int
    group: int  # query heads of a KV head
    num_kv_heads: int
    head_dim: int

    @property
    def tile(self) -> int:
        """Returns the (token, head) rows of a query tile: 16, 64 or 128."""
        rows = self.seqlen_q * self.group
        return MOST_ROWS if rows > 64 and self.head_dim < 256 else 64 if rows > 16 else 16


def decode_schedule(seqused_k: Tensor, shape: DecodeShape, rules: SplitRules) -> DecodeAttentionSchedule:
    """Splits decode for these lengths, int32 or int64 ``[batch]``, which it reads on the host, by the public rules."""
    device, num_sms = seqused_k.device, devices.facts(seqused_k.device).num_sms
    pages = [max(-(-n // shape.page_size), 1) for n in seqused_k.tolist()]
    tiles = -(-shape.seqlen_q * shape.group // shape.tile)
    grid = rules.max_grid_size or num_sms
    base_cta = len(pages) * tiles * shape.num_kv_heads
    chunk = _chunk(pages, shape, tiles, grid, base_cta, rules)
    most = max(pages, default=1)
    splits = [1] * len(pages) if chunk is None else [-(-n // chunk) for n in pages]
    items = [(b, tile, part) for b, count in enumerate(splits) for tile in range(tiles) for part in range(count)]
    room = len(items)
    if rules.enable_cuda_graph and chunk is not None:
        room = max(room, grid // shape.num_kv_heads, 1)
    padded = items + [(0, 0, 0)] * (room - len(items))
    request, tile, part = (list(column) for column in zip(*padded, strict=True)) if padded else ([], [], [])
    per_token = [count for count in splits for _ in range(shape.seqlen_q)]
    partial = list(accumulate((count * tiles * max(MOST_ROWS // shape.group, 1) for count in splits), initial=0))

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return DecodeAttentionSchedule(
        split_kv=chunk is not None,
        cta_tile_q=shape.tile,
        num_q_tiles=tiles,
        kv_chunk_size_pages=chunk or most,
        kv_chunk_size_tokens=(chunk or most) * shape.page_size,
        work_count=room,
        padded_work_count=room,
        partial_rows=partial[-1],
        max_split_count=max(splits, default=1),
        max_grid_size=grid,
        active_blocks_per_sm=-(-grid // num_sms),
        num_sms=num_sms,
        base_cta=base_cta,
        request_indices=ints(request),
        qo_tile_indices=ints(tile),
        kv_tile_indices=ints(part),
        merge_indptr=ints(list(accumulate(per_token, initial=0))),
        o_indptr=ints(partial),
        block_valid_mask=ints([1] * len(items) + [0] * (room - len(items))),
        kv_pages=ints(pages),
        split_counts=ints(splits),
    )


def _chunk(pages: list[int], shape: DecodeShape, tiles: int, grid: int, base_cta: int, rules: SplitRules) -> int | None:
    """Returns the pages of a chunk, for the pages of each sequence; None where sequences are not cut.

    Nothing is cut where the programs without chunks fill the grid, or where sequences are short. Else chunks are the smallest,
    from LEAST_PAGES on, with which all programs fit the grid; a quarter of the mean where one sequence is much longer than the
    others; and large enough that no sequence has more than MOST_SPLITS chunks."""
    most, batch = max(pages, default=1), len(pages)

    def items(chunk: int) -> int:
        return sum(-(-n // chunk) for n in pages) * tiles

    if rules.disable_split_kv or not batch:
        return None
    if rules.fixed_split_size is not None:
        return rules.fixed_split_size if items(rules.fixed_split_size) != batch * tiles else None
    if base_cta >= grid or most <= SHORT_PAGES:
        return None
    least = max(128 // shape.page_size, LEAST_PAGES)  # at least 128 keys
    low, high = min(least, most), most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if items(middle) * shape.num_kv_heads <= grid else (middle + 1, high)
    mean = -(-sum(pages) // batch)
    if 2 * most >= 3 * mean and mean >= 4 and most > max(least, mean // 4):
        low = min(low, max(least, mean // 4))
    low = max(low, -(-most // MOST_SPLITS))
    return low if rules.enable_cuda_graph or items(low) != batch * tiles else None
