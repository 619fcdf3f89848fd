# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""These are the kernels of KV-outer attention in Triton: `attend_outer` writes partials, and `combine_outer` merges them. On
Hopper, 16-bit keys have kernels of their own, `gluon_sm90_outer.py` and `gluon_sm90_merge.py`.

A program that attends holds the keys and values of an item's block, and gathers the item's queries a few at a time. The causal
mask is applied only where some query in the block's list does not see the whole block. Rows of K and V past the last key that
any query of the item sees are not loaded; those in front of it must be finite.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from openmsa.primitives.results import inverse_sums, store_result
from openmsa.primitives.softmax import Partials
from openmsa.runtime.launch import launch_kernel
from openmsa.sparse_attention.triton_keys import (
    SMALLEST_SCALE,
    HeadRows,
    KeyCut,
    converted,
    factor_at,
    head_start,
    key_place,
    load_codes,
    numbers,
    products,
)
from openmsa.sparse_attention.triton_lists import (
    ITEM_FIELDS,
    SIZE_FIELDS,
    TILE_FIELDS,
    OuterLists,
    PrefillCall,
    load_tile,
    position_of_token_zero,
)


@triton.jit(do_not_specialize=["num_pages", "i_chunk", "chunk_tiles", "chunk_entries", "item_bound"])
def attend_outer(
    queries,  # QueryRows
    keys,  # KeyRows
    values,
    table,  # PageTable
    partials,  # Partials, rows [chunk tokens, kv_heads, TOPK * CUTS, group, dim]
    bounds,  # Bounds
    tiles,
    outer,  # OuterLists
    scale,  # the softmax scale times log2(e), not negative
    i_chunk,
    chunk_tiles,
    chunk_entries,
    item_bound,
    num_kv_heads,
    num_pages,
    TILE: tl.constexpr,  # RowTile
    CUT: tl.constexpr,  # KeyCut
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    PRODUCTS: tl.constexpr,
    TOPK: tl.constexpr,
    ITEM: tl.constexpr,
    NEGATIVE: tl.constexpr,  # whether the softmax scale is negative
):
    """Writes the partials of an item. A program serves an item of the chunk, a KV head, a part of its group and a cut of the
    block."""
    # 1. The program finds its item.
    GROUP: tl.constexpr = TILE.group
    HEADS: tl.constexpr = TILE.heads
    TOKENS: tl.constexpr = TILE.tokens
    DIM: tl.constexpr = TILE.dim
    DIM_PAD: tl.constexpr = TILE.dim_pad
    BLOCK: tl.constexpr = CUT.block
    KEYS: tl.constexpr = CUT.keys
    PAGE_SIZE: tl.constexpr = CUT.page_size
    CUTS: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    ONE_PAGE: tl.constexpr = PAGE_SIZE > 0 and PAGE_SIZE % BLOCK == 0  # It holds the block, which then has one factor.
    i_item = item_bound - 1 - tl.program_id(0)  # The newest blocks come first: their lists are longest.
    i_h = tl.program_id(1)
    i_part = tl.program_id(2) % TILE.parts
    i_cut = tl.program_id(2) // TILE.parts
    i_segment = (i_chunk * num_kv_heads + i_h).to(tl.int64)
    p_item = outer.items + (i_segment * item_bound + i_item) * ITEM_FIELDS
    begin, end, i_b, marked = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3)
    # No list begins before 0; past the last item `begin` holds anything. To test it here puts its load beside the count's.
    if (i_item >= tl.load(outer.num_items + i_segment)) | (begin < 0):
        return
    entries = outer.entries + i_segment * chunk_entries
    first_token = tl.load(tiles + i_chunk * chunk_tiles * TILE_FIELDS)
    k_begin = tl.load(bounds.cu_k + i_b)
    k_len = tl.load(bounds.cu_k + i_b + 1) - k_begin
    q_begin, q_end = tl.load(bounds.cu_q + i_b), tl.load(bounds.cu_q + i_b + 1)
    position = position_of_token_zero(bounds.q_offset, i_b, q_begin, q_end, k_len)

    # 2. It loads its first queries. Queries are loaded a step ahead of their use, entries two steps ahead.
    o_r, o_n, o_d = tl.arange(0, TOKENS * HEADS), tl.arange(0, KEYS), tl.arange(0, DIM_PAD)
    head = i_part * HEADS + o_r % HEADS
    m_d = o_d < DIM
    o_e = begin + o_r // HEADS
    entry = tl.load(entries + o_e, mask=o_e < end, other=0)
    ahead = tl.load(entries + o_e + TOKENS, mask=o_e + TOKENS < end, other=0)
    q = queries.data + i_h * GROUP * queries.s_head
    o_head = (head * queries.s_head)[:, None] + o_d[None, :] * queries.s_dim
    m_q = ((o_e < end) & (head < GROUP))[:, None] & m_d[None, :]
    b_q = tl.load(q + ((entry // TOPK).to(tl.int64) * queries.s_token)[:, None] + o_head, mask=m_q, other=0.0)

    # 3. It finds where its keys lie, and the last one that any query sees.
    is_masked = marked < 0
    block = tl.where(is_masked, -1 - marked, marked)
    last_of_item = block * BLOCK + BLOCK - 1
    if is_masked:
        o_i = begin + tl.arange(0, ITEM)
        newest = tl.max(tl.load(entries + o_i, mask=o_i < end, other=0) // TOPK, 0)
        last_of_item = tl.minimum(last_of_item, tl.minimum(position + newest, k_len - 1))
    o_key = i_cut * KEYS + o_n
    key = block * BLOCK + o_key
    m_key = (o_key < BLOCK) & (key <= last_of_item)
    table_row = table.ids
    if PAGE_SIZE > 0:
        table_row += i_b * table.s_sequence
    p_k, p_ks = head_start(keys, i_h, K_FORM)
    p_v, p_vs = head_start(values, i_h, V_FORM)
    k_head, v_head = HeadRows(keys, p_k, p_ks), HeadRows(values, p_v, p_vs)
    if ONE_PAGE:
        page, row = key_place(block * BLOCK, block >= 0, k_begin, table_row, num_pages, table.s_page, PAGE_SIZE)
        row += o_key
    else:
        page, row = key_place(key, m_key, k_begin, table_row, num_pages, table.s_page, PAGE_SIZE)

    # 4. It loads keys and values, on their way together with the first queries; then codes are converted.
    b_k, b_gk = load_codes(k_head, page, row, m_key, i_h, num_kv_heads, K_FORM, DIM, DIM_PAD, PAGE_SIZE, True)
    b_v, b_gv = load_codes(v_head, page, row, m_key, i_h, num_kv_heads, V_FORM, DIM, DIM_PAD, PAGE_SIZE, True)
    if K_FORM.factor == 2 and not ONE_PAGE:
        key_scale = tl.load(factor_at(keys, i_h, page, True), mask=m_key, other=1.0)  # [KEYS]
    elif K_FORM.factor > 0:
        scale = tl.maximum(scale * tl.load(factor_at(keys, i_h, page, K_FORM.factor == 2)), SMALLEST_SCALE)
    if V_FORM.factor == 2 and not ONE_PAGE:
        value_scale = tl.load(factor_at(values, i_h, page, True), mask=m_key, other=0.0)  # [KEYS]
    elif V_FORM.factor > 0:
        v_scale = tl.load(factor_at(values, i_h, page, V_FORM.factor == 2))
    if queries.factor is not None:  # There is one factor a row.
        p_factor = queries.factor + (i_h * GROUP + head) * queries.s_factor_head
        row_factor = tl.load(p_factor, mask=head < GROUP, other=1.0)
    b_k, b_v = tl.trans(numbers(b_k, b_gk, K_FORM, PRODUCTS.qk)), numbers(b_v, b_gv, V_FORM, PRODUCTS.v)
    if BLOCK % KEYS != 0:
        is_masked = True
        key = tl.where(o_key < BLOCK, key, 2147483647)

    # 5. It computes the softmax of each query over the block. A partial's row is
    # (((token of the chunk * heads + this head) * TOPK + slot) * CUTS + cut) * GROUP + head in the group.
    other_heads = (num_kv_heads - 1) * TOPK
    o_first = (i_h - first_token.to(tl.int64) * num_kv_heads) * TOPK * CUTS + i_cut
    lse_part = partials.lse + o_first * GROUP
    o_part = partials.rows + o_first * GROUP * DIM
    o_within = (head * DIM)[:, None] + o_d[None, :]
    for i in range(begin, end, TOKENS):
        o_e = i + o_r // HEADS
        m_row = (o_e < end) & (head < GROUP)
        m_q = ((o_e + TOKENS < end) & (head < GROUP))[:, None] & m_d[None, :]
        b_next = tl.load(q + ((ahead // TOPK).to(tl.int64) * queries.s_token)[:, None] + o_head, mask=m_q, other=0.0)
        after = tl.load(entries + o_e + 2 * TOKENS, mask=o_e + 2 * TOKENS < end, other=0)
        b_a = converted(b_q, PRODUCTS.qk)
        if NEGATIVE:
            b_a = (-b_a.to(tl.float32)).to(PRODUCTS.qk)
        s = tl.dot(b_a, b_k)  # [ROWS, KEYS]
        if queries.factor is not None:
            s *= row_factor[:, None]
        if K_FORM.factor == 2 and not ONE_PAGE:
            s *= key_scale[None, :]
        if is_masked:
            last_key = tl.minimum(position + entry // TOPK, k_len - 1)
            s = tl.where(key[None, :] <= last_key[:, None], s, -float("inf"))
        m_i = tl.max(s, 1) * scale
        m_i = tl.where(m_i == -float("inf"), 0.0, m_i)  # The query sees nothing of this cut, or all its logits are -inf.
        p = tl.exp2(s * scale - m_i[:, None])
        l_i = tl.sum(p, 1)
        inverse = 1.0 / tl.maximum(l_i, 1e-30)
        if V_FORM.factor == 2 and not ONE_PAGE:
            p *= value_scale[None, :]
        elif V_FORM.factor > 0:
            inverse *= v_scale
        o = tl.dot(p.to(PRODUCTS.v), b_v) * inverse[:, None]
        o_row = (entry + entry // TOPK * other_heads).to(tl.int64) * (CUTS * GROUP)
        m_o = m_row[:, None] & m_d[None, :]
        p_o = o_part + (o_row * DIM)[:, None] + o_within
        tl.store(p_o, o.to(o_part.dtype.element_ty), mask=m_o, cache_modifier=".cs")  # Queries stay in the L2 cache.
        tl.store(lse_part + o_row + head, m_i + tl.log2(l_i), mask=m_row)
        b_q, entry, ahead = b_next, ahead, after


@triton.jit(do_not_specialize=["first_tile"])
def combine_outer(
    partials,  # Partials of `attend_outer` or of `attend_few`
    slots,  # int64 [total_q, kv_heads], where bit i says that slot i has a partial
    union,  # UnionLists
    result,  # Result
    first_tile,
    num_kv_heads,
    TILE: tl.constexpr,  # RowTile of a step
    TILE_TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
    CUTS: tl.constexpr,
):
    """Merges the partials of each query. The grid is ((tile, KV head) of the chunk, part of the group, programs that share a
    tile's queries). Slots are added in order, so that the sum is always the same."""
    GROUP: tl.constexpr = TILE.group
    HEADS: tl.constexpr = TILE.heads
    DIM: tl.constexpr = TILE.dim
    DIM_PAD: tl.constexpr = TILE.dim_pad
    ROWS: tl.constexpr = TILE.tokens * HEADS
    PARTIALS: tl.constexpr = TOPK * CUTS
    UNROLL: tl.constexpr = PARTIALS if PARTIALS <= 16 else 8
    i_part = tl.program_id(1)
    i_h = tl.program_id(0) % num_kv_heads
    i_tile = first_tile + tl.program_id(0) // num_kv_heads
    size = tl.load(union.sizes + (i_tile * num_kv_heads + i_h) * SIZE_FIELDS)
    first, tokens, _, _ = load_tile(union.tiles, i_tile)
    first_of_chunk = tl.load(union.tiles + first_tile * TILE_FIELDS)
    if size >= 0:
        return
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    head = i_part * HEADS + o_r % HEADS
    for i_share in range(tl.program_id(2), TILE_TOKENS // TILE.tokens, tl.num_programs(2)):
        in_tile = i_share * TILE.tokens + o_r // HEADS
        m_row = (in_tile < tokens) & (head < GROUP)
        m_o = m_row[:, None] & (o_d < DIM)[None, :]
        token = first + in_tile
        filled = tl.load(slots + token.to(tl.int64) * num_kv_heads + i_h, mask=m_row, other=0)
        local = (token - first_of_chunk).to(tl.int64)
        o_p = (local * num_kv_heads + i_h) * PARTIALS * GROUP + head  # the partial of slot 0

        m_i = tl.full([ROWS], -float("inf"), tl.float32)
        for i_0 in range(0, PARTIALS, UNROLL):
            for i_u in tl.static_range(UNROLL):
                i_s = i_0 + i_u
                m_slot = (((filled >> (i_s // CUTS)) & 1) != 0) & (i_s < PARTIALS)
                m_i = tl.maximum(m_i, tl.load(partials.lse + o_p + i_s * GROUP, mask=m_slot, other=-float("inf")))
        highest = tl.where(m_i == -float("inf"), 0.0, m_i)
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        l_i = tl.zeros([ROWS], tl.float32)
        for i_0 in range(0, PARTIALS, UNROLL):
            for i_u in tl.static_range(UNROLL):
                i_s = i_0 + i_u
                m_slot = (((filled >> (i_s // CUTS)) & 1) != 0) & (i_s < PARTIALS)
                w = tl.exp2(tl.load(partials.lse + o_p + i_s * GROUP, mask=m_slot, other=-float("inf")) - highest)
                p_o = partials.rows + (o_p + i_s * GROUP)[:, None] * DIM + o_d[None, :]
                b_o = tl.load(p_o, mask=m_slot[:, None] & m_o, other=0.0)
                l_i += w
                acc += w[:, None] * b_o.to(tl.float32)
        o_row = token.to(tl.int64) * num_kv_heads * GROUP + i_h * GROUP + head
        store_result(result, o_row, acc, inverse_sums(l_i), highest, l_i, 1.0, m_row, DIM)


def launch_attend(call: PrefillCall, outer: OuterLists, partials: Partials, i_chunk: int) -> None:
    """Launches `attend_outer` of a chunk."""
    keys, plan, config = call.keys, call.plan, call.config
    launch_kernel(
        attend_outer,
        (plan.chunk.items, keys.heads, plan.parts * plan.cuts),
        call.queries,
        *keys.operands,
        partials,
        call.bounds,
        call.lists.union.tiles,
        outer,
        call.scale,
        i_chunk,
        *plan.chunk,
        keys.heads,
        keys.k.num_pages,
        TILE=call.row_tile(config.outer_tokens),
        CUT=KeyCut(plan.block_size, config.outer_keys, keys.page_size, False),
        **keys.forms,
        PRODUCTS=products(call.queries.data.dtype, keys.dtype, keys.k.form, keys.v.form, False),
        TOPK=plan.topk,
        ITEM=config.outer_item,
        NEGATIVE=call.negative,
        num_warps=config.outer_warps,
    )


def combine(
    call: PrefillCall, partials: Partials, slots: Tensor, first_tile: int, num_tiles: int, shares: int, num_warps: int
) -> None:
    """Launches the merge of the partials of so many tiles. shares: programs that share the queries of a tile."""
    config, plan, heads = call.config, call.plan, call.keys.heads
    launch_kernel(
        combine_outer,
        (num_tiles * heads, plan.parts, shares),
        partials,
        slots,
        call.lists.union,
        call.result,
        first_tile,
        heads,
        TILE=call.row_tile(config.combine_tokens),
        TILE_TOKENS=config.union_tokens,
        TOPK=plan.topk,
        CUTS=plan.cuts,
        num_warps=num_warps,
    )
