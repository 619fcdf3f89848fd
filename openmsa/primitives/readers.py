# SPDX-License-Identifier: MIT
"""This module lists the readers of every key block, for gradients: a stable sort puts them in ascending order, so that sums
over them are always taken in the same order. On GPUs `triton_readers.py` makes the same lists without a sort.

Blocks are numbered over all sequences: block j of sequence b is bucket ``cu_k[b] // block_size + b + j``.
A list belongs to a bucket and a selection head, of which there are as many as KV heads or 1. An item is up to `item` readers of
one list. Nothing is read on the host; every size follows from shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.runtime.lengths import starts_of
from openmsa.types import Layout


class Readers(NamedTuple):
    """Says which queries read a block; int32 where nothing else is said.

    entries:      [heads * total_q * topk], token * topk + slot, list after list, ascending in each.
    starts:       [heads * num_buckets + 1], where each list starts in the entries.
    item_starts:  the same shape: the number of each list's first item.
    extra_starts: the same shape: how many items that are not the first of their list are in front of each list.
    lists:        [most_items], the list of each item; heads * num_buckets past the last item.
    sequences:    [num_buckets], the sequence of each bucket; batch where there is none.
    reads:        bool [total_q, heads, topk], the slots that are read.
    """

    entries: Tensor
    starts: Tensor
    item_starts: Tensor
    extra_starts: Tensor
    lists: Tensor
    sequences: Tensor
    reads: Tensor


def buckets_of(total_k: int, batch: int, block_size: int) -> int:
    """Returns a bound on the blocks of all sequences together, as they are numbered."""
    return -(-total_k // block_size) + max(batch - 1, 0)


def most_extra(entries: int, item: int) -> int:
    """Returns a bound on the items that are not the first of their list."""
    return entries // item


def readers(blocks: Tensor, seqs: Layout, total_k: int, block_size: int, item: int) -> Readers:
    """Lists the readers that ``blocks [total_q, heads, topk]`` name."""
    total_q, heads, topk = blocks.shape
    num_buckets, device = buckets_of(total_k, seqs.batch, block_size), blocks.device

    # 1. Every (query, head, slot) is numbered by its list; the number past the last list stands for nothing to read.
    sequence, last_key = seqs.tokens(total_q)
    first_bucket = torch.div(seqs.cu_seqlens_k[:-1], block_size, rounding_mode="floor")
    first_bucket = first_bucket + torch.arange(seqs.batch, dtype=torch.int32, device=device)
    last_block = torch.div(last_key, block_size, rounding_mode="floor")
    reads = (blocks >= 0) & (blocks <= last_block[:, None, None])
    of_head = torch.arange(heads, dtype=torch.int32, device=device)[:, None] * num_buckets
    number = (blocks + first_bucket[sequence][:, None, None] + of_head).masked_fill(~reads, heads * num_buckets)

    # 2. They are sorted by list, then by query. Slots of a query lie in different lists.
    ordered, order = number.transpose(0, 1).flatten().sort(stable=True)
    entries = (order % max(total_q * topk, 1)).to(torch.int32)
    every_list = torch.arange(heads * num_buckets + 1, dtype=torch.int32, device=device)
    starts = torch.searchsorted(ordered, every_list, out_int32=True)

    # 3. Lists are cut into items.
    items = torch.div(starts.diff() + (item - 1), item, rounding_mode="floor")
    item_starts, extra_starts = starts_of(items), starts_of((items - 1).clamp(min=0))
    most_items = most_extra(entries.numel(), item) + min(heads * num_buckets, entries.numel())
    every_item = torch.arange(most_items, dtype=torch.int32, device=device)
    lists = torch.searchsorted(item_starts[1:], every_item, right=True, out_int32=True)
    every_bucket = torch.arange(num_buckets, dtype=torch.int32, device=device)
    sequences = torch.searchsorted(first_bucket, every_bucket, right=True, out_int32=True) - 1
    return Readers(entries, starts, item_starts, extra_starts, lists, sequences, reads)
