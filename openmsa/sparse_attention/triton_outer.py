# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This is KV-outer attention: a program serves an item, up to some hundred queries of one block, and writes a partial for each
(query, slot); a second kernel merges each query's partials. In front of both, `fill` writes the list of each block and its
items, for which `triton_lists` has counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from openmsa.primitives.softmax import Partials
from openmsa.runtime.launch import launch_kernel
from openmsa.sparse_attention.triton_config import PrefillConfig
from openmsa.sparse_attention.triton_lists import (
    HOME_BIT,
    ITEM_FIELDS,
    SIZE_FIELDS,
    Lists,
    OuterLists,
    Plan,
    PrefillCall,
    load_tile,
    selected_at,
    selection_of,
)

if TYPE_CHECKING:
    from openmsa.sparse_attention.gluon_sm90_outer import Operands

_SIZES = ["num_buckets", "spread", "chunk_tiles", "chunk_entries", "item_bound"]


@triton.jit(do_not_specialize=_SIZES)
def fill_lists(
    selection,  # Selection
    cu_k,
    union,  # UnionLists
    outer,  # OuterLists, of which entries, items and slots are written
    num_kv_heads,
    num_buckets,
    spread,
    chunk_tiles,
    chunk_entries,
    item_bound,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Writes, in each program, the entries of one KV-outer tile and KV head, and the items that begin with them."""
    # 1. The blocks of the tile, and its queries' places in their lists, are loaded.
    i_tile = tl.program_id(0) // num_kv_heads
    i_h = tl.program_id(0) % num_kv_heads
    if tl.load(union.sizes + (i_tile * num_kv_heads + i_h) * SIZE_FIELDS) >= 0:
        return
    first, tokens, i_b, _ = load_tile(union.tiles, i_tile)
    o_t, o_s = tl.arange(0, TOKENS), tl.arange(0, SLOTS)
    row = (first + o_t).to(tl.int64)
    m_slot = (o_t < tokens)[:, None] & (o_s < TOPK)[None, :]
    rank = tl.load(outer.ranks + (row[:, None] * num_kv_heads + i_h) * TOPK + o_s[None, :], mask=m_slot, other=-1)
    m_read = rank >= 0  # [TOKENS, SLOTS]
    b_ids = tl.load(selected_at(selection, row, i_h, SLOTS), mask=m_read, other=0)

    # 2. An entry is written for each (query, slot).
    i_segment = (i_tile // chunk_tiles * num_kv_heads + i_h).to(tl.int64)
    o_b = i_segment * num_buckets + tl.load(cu_k + i_b) // BLOCK + i_b + b_ids
    begin = tl.load(outer.entry_offsets + o_b, mask=m_read, other=0)
    here = begin + rank
    token = (first + o_t)[:, None]
    tl.store(outer.entries + i_segment * chunk_entries + here, token * TOPK + o_s[None, :], mask=m_read)

    # 3. Every ITEM-th entry of a list begins an item.
    m_item = m_read & (rank % ITEM == 0)
    end = begin + tl.load(outer.counts + o_b * spread, mask=m_item, other=0)
    i_item = tl.load(outer.item_offsets + o_b, mask=m_item, other=0) + rank // ITEM
    p_item = outer.items + (i_segment * item_bound + i_item) * ITEM_FIELDS
    tl.store(p_item, here, mask=m_item)
    tl.store(p_item + 1, tl.minimum(here + ITEM, end), mask=m_item)
    tl.store(p_item + 2, tl.zeros_like(b_ids) + i_b, mask=m_item)
    is_partly = tl.load(outer.partly + o_b, mask=m_item, other=0) != 0
    tl.store(p_item + 3, tl.where(is_partly, -1 - b_ids, b_ids), mask=m_item)
    filled = tl.sum(m_read.to(tl.int64) << o_s[None, :].to(tl.int64), 1)
    filled += tl.max((rank == -2).to(tl.int64), 1) << HOME_BIT
    tl.store(outer.slots + row * num_kv_heads + i_h, filled, mask=o_t < tokens)


def partials_of(call: PrefillCall, tokens: int) -> Partials:
    """Allocates room for the partials of so many queries."""
    plan = call.plan
    rows = tokens * call.keys.heads * plan.topk * plan.cuts * plan.group
    lse = call.result.lse
    return Partials(lse.new_empty(rows, call.queries.data.shape[2], dtype=plan.partial_dtype), lse.new_empty(rows))


def fill(lists: Lists, blocks: Tensor, cu_k: Tensor | None, heads: int, plan: Plan, config: PrefillConfig) -> None:
    """Writes the lists of KV-outer that need the counts of all tiles: entries and items."""
    outer, (selection, shape) = lists.outer, selection_of(blocks, plan, config)
    assert outer is not None
    launch_kernel(
        fill_lists,
        (plan.num_tiles * heads,),
        selection,
        cu_k,
        lists.union,
        outer,
        heads,
        plan.num_buckets,
        plan.spread,
        *plan.chunk,
        **shape,
        ITEM=config.outer_item,
    )


def launch_outer(
    call: PrefillCall, outer: OuterLists, attend_unions: Callable[..., None] | None, by_chunk: bool, read: Operands | None
) -> None:
    """Launches attention of the tiles that do not stay together, a chunk at a time, and `attend_unions`, that of the others, if
    there can be such, in front of the last merge, or (by_chunk) a chunk's share in front of each: on Hopper they run beside
    the merges. read: operands of Hopper's own kernels, where they serve."""
    plan = call.plan
    partials = partials_of(call, plan.chunk.tiles * call.config.union_tokens)
    if read is not None:
        from openmsa.sparse_attention.gluon_sm90_merge import launch_sm90_merge
        from openmsa.sparse_attention.gluon_sm90_outer import launch_sm90_outer
    else:
        from openmsa.sparse_attention.triton_outer_kernels import combine, launch_attend
    for i_chunk in range(plan.num_chunks):
        first_tile = i_chunk * plan.chunk.tiles
        tiles = first_tile, min(plan.chunk.tiles, plan.num_tiles - first_tile)
        if read is not None:
            launch_sm90_outer(read, call, outer, partials, i_chunk)
        else:
            launch_attend(call, outer, partials, i_chunk)
        unions = attend_unions if by_chunk or i_chunk == plan.num_chunks - 1 else None
        if unions is not None:
            unions(i_chunk) if by_chunk else unions()
        if read is not None:
            launch_sm90_merge(read, call, partials, outer.slots, *tiles, beside=unions is not None)
        else:
            combine(call, partials, outer.slots, *tiles, 1, call.config.combine_warps)
