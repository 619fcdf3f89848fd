# SPDX-License-Identifier: MIT
"""How the public decode kernels split their work: exact numbers for callers that read them. Our kernels do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.runtime import devices

TILE = 128  # (token, head) rows of a query tile
LEAST_PAGES = 16  # a chunk is not split below this
MOST_SPLITS = 256
UNEVEN = 1.5  # longest over mean from which chunks follow the mean


@dataclass(frozen=True)
class DecodeAttentionSchedule:
    """Work items are (sequence, query tile, chunk of keys), sequences outermost.

    split_kv:            whether any sequence has more than one chunk.
    cta_tile_q, num_q_tiles:  (token, head) rows of a query tile, and tiles of a sequence and KV head.
    kv_chunk_size_pages, kv_chunk_size_tokens:  keys of a chunk.
    work_count, padded_work_count:  items; entries of the lists below, more than items only with enable_cuda_graph.
    partial_rows, max_split_count:  rows of partial results, and the most chunks of a sequence.
    request_indices, qo_tile_indices, kv_tile_indices:  int32 ``[padded_work_count]``, the parts of each item, 0 in the padding.
    merge_indptr:        int32 ``[batch * seqlen_q + 1]``, first partial row of each query token.
    o_indptr:            int32 ``[batch + 1]``, first partial row of each sequence.
    block_valid_mask:    int32 ``[padded_work_count]``, 1 for items, 0 for padding.
    kv_pages, split_counts:  int32 ``[batch]``, pages and chunks of each sequence.
    """

    split_kv: bool
    cta_tile_q: int
    num_q_tiles: int
    kv_chunk_size_pages: int
    kv_chunk_size_tokens: int
    work_count: int
    padded_work_count: int
    partial_rows: int
    max_split_count: int
    max_grid_size: int
    num_sms: int
    request_indices: Tensor
    qo_tile_indices: Tensor
    kv_tile_indices: Tensor
    merge_indptr: Tensor
    o_indptr: Tensor
    block_valid_mask: Tensor
    kv_pages: Tensor
    split_counts: Tensor


def decode_schedule(
    seqused_k: Tensor,
    page_size: int,
    seqlen_q: int,
    group: int,
    num_kv_heads: int,
    max_seqlen_k: int,
    *,
    enable_cuda_graph: bool = False,
    max_grid_size: int | None = None,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
) -> DecodeAttentionSchedule:
    """The split for these lengths, which it reads on the host."""
    device, num_sms = seqused_k.device, devices.facts(seqused_k.device).num_sms
    grid = max_grid_size or 2 * num_sms
    pages = [-(-max(n, 0) // page_size) for n in seqused_k.tolist()]
    tiles = -(-seqlen_q * group // TILE)
    most = max([*pages, 1])
    if disable_split_kv:
        chunk = max(most, -(-max_seqlen_k // page_size))
    elif fixed_split_size is not None:
        chunk = fixed_split_size
    else:
        chunk = _chunk(pages, tiles * num_kv_heads, grid)
    splits = [max(-(-n // chunk), 1) for n in pages]
    items = [(b, tile, part) for b, count in enumerate(splits) for tile in range(tiles) for part in range(count)]
    room = max(len(items), grid) if enable_cuda_graph else len(items)
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
    """Pages of a chunk: the fewest, but LEAST_PAGES, with which the items fit the grid; at most MOST_SPLITS of a sequence; a
    quarter of the mean where one sequence is much longer than the others."""
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
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts
