# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""These are the lists of KV-outer's form for few queries: which queries read a block.

They have room for every query of a sequence and are written at once: `tile_lists` makes the entries of a tile that does not
stay together with `few_entries`, `few_units` (`triton_few`) cuts them into units.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

UNIT_FIELDS = tl.constexpr(8)
"""A unit is its first key row, keys to read, block, sequence, keys of the sequence, position of token 0; two are unused."""
COUNT_FIELDS = tl.constexpr(2)
"""The units of a head are counted twice: those from the front, those from the back."""


class FewLists(NamedTuple):
    """Says which queries read a block, where these are few; int32 where nothing else is said.

    counts:        [key heads, num_buckets], queries a block.
    partly:        the same shape: the most keys that a query sees where not all see the whole block, else 0.
    slots:         int64 [total_q, key heads], bit i says that slot i has a partial.
    entries:       [key heads, num_buckets, room], token * topk + slot.
    units:         [key heads, units, UNIT_FIELDS].
    unit_entries:  [key heads, units, tokens], entries of a unit, -1 where there is none.
    num_units:     [key heads, COUNT_FIELDS].
    """

    counts: Tensor
    partly: Tensor
    slots: Tensor
    entries: Tensor
    units: Tensor
    unit_entries: Tensor
    num_units: Tensor


def most_units(entries: int, buckets: int, tokens: int) -> int:
    """Returns how many units of so many tokens a head has at most."""
    return entries // tokens + min(buckets, entries)


def few_sizes(heads: int, buckets: int, room: int, entries: int, tokens: int) -> tuple[int, ...]:
    """Returns how many elements entries, units, unit_entries and num_units of `FewLists` have. buckets, entries: of a head."""
    units = heads * most_units(entries, buckets, tokens)
    return heads * buckets * room, units * UNIT_FIELDS.value, units * tokens, heads * COUNT_FIELDS.value


@triton.jit
def few_entries(
    few,  # FewLists, of which counts, partly, entries and slots are written; counts and partly must be 0 before
    b_ids,  # [TOKENS, SLOTS], blocks that the queries of a tile selected
    m_read,  # the same shape: whether they read them
    last_key,  # [TOKENS], the last key that each query sees
    common,  # the last key that every query of the sequence sees
    bucket,  # the sequence's first bucket, among those of all heads
    first, tokens, i_h, num_kv_heads, room,
    TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes an entry in its block's list for each (query, slot) of a tile and KV head."""
    o_t, o_s = tl.arange(0, b_ids.shape[0]), tl.arange(0, b_ids.shape[1])
    o_b = bucket + tl.where(m_read, b_ids, 0)
    rank = tl.atomic_add(few.counts + o_b, 1, mask=m_read, sem="relaxed")
    m_read &= rank < room  # Nothing is written past the list, even if ids are not distinct.
    tl.store(few.entries + o_b.to(tl.int64) * room + rank, (first + o_t)[:, None] * TOPK + o_s[None, :], mask=m_read)
    seen = tl.minimum(last_key[:, None] - b_ids * BLOCK + 1, BLOCK)
    m_part = m_read & (b_ids * BLOCK + BLOCK - 1 > common)
    tl.atomic_max(few.partly + o_b, seen, mask=m_part, sem="relaxed")
    filled = tl.sum(m_read.to(tl.int64) << o_s[None, :].to(tl.int64), 1)
    tl.store(few.slots + (first + o_t).to(tl.int64) * num_kv_heads + i_h, filled, mask=o_t < tokens)
