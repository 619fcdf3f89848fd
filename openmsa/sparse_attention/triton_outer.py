# SPDX-License-Identifier: MIT
"""KV-outer: one program an item, up to some hundred queries of one block. It holds the block's keys and values, gathers the
queries a few at a time, and writes a partial for each (query, slot); a second kernel merges each query's partials.

The causal mask is applied only where some query in the block's list does not see the whole block. Rows of K and V past the last
key that any query of the item sees are not loaded; those in front of it must be finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.sparse_attention.triton_keys import converted, key_place, load_codes, numbers, whole_factor
from openmsa.sparse_attention.triton_lists import position_of_token_zero


@triton.jit(do_not_specialize=["num_pages", "i_chunk", "chunk_tiles", "chunk_entries", "item_bound"])
def attend_outer(
    q,
    k,
    v,
    o_part,  # [chunk tokens, kv_heads, TOPK * CUTS, GROUP, DIM]
    lse_part,  # float32, the same less DIM, base 2
    cu_q,
    cu_k,
    q_offset,
    page_table,
    tiles,
    entries,
    items,
    num_items,
    scale,  # times log2(e), not negative
    i_chunk,
    chunk_tiles,
    chunk_entries,
    item_bound,
    num_kv_heads,
    num_pages,
    stride_q_t,
    stride_q_h,
    stride_q_d,
    stride_k_page,
    stride_k_h,
    stride_k_row,
    stride_k_dim,
    stride_v_page,
    stride_v_h,
    stride_v_row,
    stride_v_dim,
    stride_table_b,
    stride_table_p,
    k_factor,  # float32 factors and bytes of group scales, or None
    stride_kf_page,
    stride_kf_h,
    k_groups,
    stride_kg_page,
    stride_kg_h,
    stride_kg_row,
    stride_kg_dim,
    v_factor,
    stride_vf_page,
    stride_vf_h,
    v_groups,
    stride_vg_page,
    stride_vg_h,
    stride_vg_row,
    stride_vg_dim,
    q_factor,
    stride_qf_h,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    ITEM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NEGATIVE: tl.constexpr,
    FORMAT: tl.constexpr,  # of K and V
    K_SCALE: tl.constexpr,  # 0: no factor; 1: of the tensor or a head; 2: of a page
    V_SCALE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    QK_TYPE: tl.constexpr,  # in which queries are multiplied with keys
    V_TYPE: tl.constexpr,  # in which weights are multiplied with values
):
    """One program a (item of the chunk, KV head, part of its group and cut of the block)."""
    CUTS: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    ONE_PAGE: tl.constexpr = PAGE_SIZE > 0 and PAGE_SIZE % BLOCK == 0  # holds the block, which then has one factor
    i_item = item_bound - 1 - tl.program_id(0)  # the newest blocks first: their lists, with their own queries, are the longest
    i_h = tl.program_id(1)
    i_part = tl.program_id(2) % PARTS
    i_cut = tl.program_id(2) // PARTS
    i_segment = (i_chunk * num_kv_heads + i_h).to(tl.int64)
    p_item = items + (i_segment * item_bound + i_item) * 4
    begin, end, i_b, marked = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3)
    # A list begins at 0 or later; past the last item, whatever it says. Named here, its load goes beside the count's.
    if (i_item >= tl.load(num_items + i_segment)) | (begin < 0):
        return
    entries += i_segment * chunk_entries
    first_token = tl.load(tiles + i_chunk * chunk_tiles * 4)
    k_begin = tl.load(cu_k + i_b)
    k_len = tl.load(cu_k + i_b + 1) - k_begin
    position = position_of_token_zero(q_offset, i_b, tl.load(cu_q + i_b), tl.load(cu_q + i_b + 1), k_len)

    o_r, o_n, o_d = tl.arange(0, TOKENS * HEADS), tl.arange(0, KEYS), tl.arange(0, DIM_PADDED)
    head = i_part * HEADS + o_r % HEADS
    m_d = o_d < DIM
    # Queries are loaded a step ahead of their use, entries two steps ahead.
    o_e = begin + o_r // HEADS
    entry = tl.load(entries + o_e, mask=o_e < end, other=0)
    ahead = tl.load(entries + o_e + TOKENS, mask=o_e + TOKENS < end, other=0)
    q += i_h * GROUP * stride_q_h
    o_head = (head * stride_q_h)[:, None] + o_d[None, :] * stride_q_d
    m_q = ((o_e < end) & (head < GROUP))[:, None] & m_d[None, :]
    b_q = tl.load(q + ((entry // TOPK).to(tl.int64) * stride_q_t)[:, None] + o_head, mask=m_q, other=0.0)

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
    table_row = page_table
    if PAGE_SIZE > 0:
        table_row += i_b * stride_table_b
    k += i_h.to(tl.int64) * stride_k_h
    v += i_h.to(tl.int64) * stride_v_h
    if ONE_PAGE:
        page, row = key_place(block * BLOCK, block >= 0, k_begin, table_row, num_pages, stride_table_p, PAGE_SIZE)
        row += o_key
    else:
        page, row = key_place(key, m_key, k_begin, table_row, num_pages, stride_table_p, PAGE_SIZE)
    if FORMAT == 3 and not SWIZZLED:
        k_groups += i_h.to(tl.int64) * stride_kg_h
        v_groups += i_h.to(tl.int64) * stride_vg_h
    # Keys, values and the first queries are on their way together; then codes are converted.
    b_k, b_gk = load_codes(
        k, k_groups, page, row, m_key, i_h, num_kv_heads, stride_k_page, stride_k_row, stride_k_dim,
        stride_kg_page, stride_kg_row, stride_kg_dim, FORMAT, SWIZZLED, DIM, DIM_PADDED, PAGE_SIZE, True,
    )  # fmt: skip
    b_v, b_gv = load_codes(
        v, v_groups, page, row, m_key, i_h, num_kv_heads, stride_v_page, stride_v_row, stride_v_dim,
        stride_vg_page, stride_vg_row, stride_vg_dim, FORMAT, SWIZZLED, DIM, DIM_PADDED, PAGE_SIZE, True,
    )  # fmt: skip
    if K_SCALE == 2 and not ONE_PAGE:
        key_scale = tl.load(k_factor + page * stride_kf_page + i_h * stride_kf_h, mask=m_key, other=1.0)  # [KEYS]
    elif K_SCALE > 0:
        p_factor = k_factor + page * stride_kf_page if K_SCALE == 2 else k_factor
        scale = tl.maximum(scale * whole_factor(p_factor, i_h, stride_kf_h, 1), 1e-37)
    if V_SCALE == 2 and not ONE_PAGE:
        value_scale = tl.load(v_factor + page * stride_vf_page + i_h * stride_vf_h, mask=m_key, other=0.0)  # [KEYS]
    elif V_SCALE > 0:
        p_factor = v_factor + page * stride_vf_page if V_SCALE == 2 else v_factor
        v_scale = whole_factor(p_factor, i_h, stride_vf_h, 1)
    if q_factor is not None:  # one factor a row
        row_factor = tl.load(q_factor + (i_h * GROUP + head) * stride_qf_h, mask=head < GROUP, other=1.0)
    b_k, b_v = tl.trans(numbers(b_k, b_gk, FORMAT, QK_TYPE)), numbers(b_v, b_gv, FORMAT, V_TYPE)
    if BLOCK % KEYS != 0:
        is_masked = True
        key = tl.where(o_key < BLOCK, key, 2147483647)

    # A partial's row: (((token of the chunk * heads + this head) * TOPK + slot) * CUTS + cut) * GROUP + head in the group.
    other_heads = (num_kv_heads - 1) * TOPK
    o_first = (i_h - first_token.to(tl.int64) * num_kv_heads) * TOPK * CUTS + i_cut
    lse_part += o_first * GROUP
    o_part += o_first * GROUP * DIM
    o_within = (head * DIM)[:, None] + o_d[None, :]
    for i in range(begin, end, TOKENS):
        o_e = i + o_r // HEADS
        m_row = (o_e < end) & (head < GROUP)
        m_q = ((o_e + TOKENS < end) & (head < GROUP))[:, None] & m_d[None, :]
        b_next = tl.load(q + ((ahead // TOPK).to(tl.int64) * stride_q_t)[:, None] + o_head, mask=m_q, other=0.0)
        after = tl.load(entries + o_e + 2 * TOKENS, mask=o_e + 2 * TOKENS < end, other=0)
        b_a = converted(b_q, QK_TYPE)
        if NEGATIVE:
            b_a = (-b_a.to(tl.float32)).to(QK_TYPE)
        s = tl.dot(b_a, b_k)  # [ROWS, KEYS]
        if q_factor is not None:
            s *= row_factor[:, None]
        if K_SCALE == 2 and not ONE_PAGE:
            s *= key_scale[None, :]
        if is_masked:
            last_key = tl.minimum(position + entry // TOPK, k_len - 1)
            s = tl.where(key[None, :] <= last_key[:, None], s, -float("inf"))
        m_i = tl.max(s, 1) * scale
        if CUTS > 1:
            m_i = tl.where(m_i == -float("inf"), 0.0, m_i)  # a cut of the block that this query does not see
        p = tl.exp2(s * scale - m_i[:, None])
        l_i = tl.sum(p, 1)
        inverse = 1.0 / (tl.maximum(l_i, 1e-30) if CUTS > 1 else l_i)
        if V_SCALE == 2 and not ONE_PAGE:
            p *= value_scale[None, :]
        elif V_SCALE > 0:
            inverse *= v_scale
        o = tl.dot(p.to(V_TYPE), b_v) * inverse[:, None]
        o_row = (entry + entry // TOPK * other_heads).to(tl.int64) * (CUTS * GROUP)
        m_o = m_row[:, None] & m_d[None, :]
        p_o = o_part + (o_row * DIM)[:, None] + o_within
        tl.store(p_o, o.to(o_part.dtype.element_ty), mask=m_o, cache_modifier=".cs")  # queries stay in the L2 cache
        tl.store(lse_part + o_row + head, m_i + tl.log2(l_i), mask=m_row)
        b_q, entry, ahead = b_next, ahead, after


@triton.jit(do_not_specialize=["first_tile"])
def combine_outer(
    o_part,
    lse_part,
    slots,
    tiles,
    union_sizes,
    out,  # [total_q, num_q_heads, DIM], contiguous
    lse,  # float32 [total_q, num_q_heads]
    first_tile,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,  # of the tile, a step
    TOPK: tl.constexpr,
    CUTS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Grid ((tile, KV head) of the chunk, part of the group, programs that share a tile's queries). Slots in order, so that
    the sum is always the same."""
    SHARES: tl.constexpr = TILE_TOKENS // TOKENS
    PARTIALS: tl.constexpr = TOPK * CUTS
    UNROLL: tl.constexpr = PARTIALS if PARTIALS <= 16 else 8
    i_part = tl.program_id(1)
    i_h = tl.program_id(0) % num_kv_heads
    i_tile = first_tile + tl.program_id(0) // num_kv_heads
    size = tl.load(union_sizes + (i_tile * num_kv_heads + i_h) * 2)
    first, tokens = tl.load(tiles + i_tile * 4), tl.load(tiles + i_tile * 4 + 1)
    first_of_chunk = tl.load(tiles + first_tile * 4)
    if size >= 0:
        return
    o_r, o_d = tl.arange(0, TOKENS * HEADS), tl.arange(0, DIM_PADDED)
    head = i_part * HEADS + o_r % HEADS
    for i_share in range(tl.program_id(2), SHARES, tl.num_programs(2)):
        in_tile = i_share * TOKENS + o_r // HEADS
        m_row = (in_tile < tokens) & (head < GROUP)
        m_o = m_row[:, None] & (o_d < DIM)[None, :]
        token = first + in_tile
        filled = tl.load(slots + token.to(tl.int64) * num_kv_heads + i_h, mask=m_row, other=0)
        local = (token - first_of_chunk).to(tl.int64)
        o_p = (local * num_kv_heads + i_h) * PARTIALS * GROUP + head  # of slot 0

        m_i = tl.full([TOKENS * HEADS], -float("inf"), tl.float32)
        for i_0 in range(0, PARTIALS, UNROLL):
            for i_u in tl.static_range(UNROLL):
                i_s = i_0 + i_u
                m_slot = (((filled >> (i_s // CUTS)) & 1) != 0) & (i_s < PARTIALS)
                m_i = tl.maximum(m_i, tl.load(lse_part + o_p + i_s * GROUP, mask=m_slot, other=-float("inf")))
        highest = tl.where(m_i == -float("inf"), 0.0, m_i)
        acc = tl.zeros([TOKENS * HEADS, DIM_PADDED], tl.float32)
        l_i = tl.zeros([TOKENS * HEADS], tl.float32)
        for i_0 in range(0, PARTIALS, UNROLL):
            for i_u in tl.static_range(UNROLL):
                i_s = i_0 + i_u
                m_slot = (((filled >> (i_s // CUTS)) & 1) != 0) & (i_s < PARTIALS)
                w = tl.exp2(tl.load(lse_part + o_p + i_s * GROUP, mask=m_slot, other=-float("inf")) - highest)
                p_o = o_part + (o_p + i_s * GROUP)[:, None] * DIM + o_d[None, :]
                b_o = tl.load(p_o, mask=m_slot[:, None] & m_o, other=0.0)
                l_i += w
                acc += w[:, None] * b_o.to(tl.float32)
        m_any = l_i > 0
        inverse = tl.where(m_any, 1.0 / tl.where(m_any, l_i, 1.0), 0.0)
        o_out = token.to(tl.int64) * num_kv_heads * GROUP + i_h * GROUP + head
        tl.store(out + o_out[:, None] * DIM + o_d[None, :], (acc * inverse[:, None]).to(out.dtype.element_ty), mask=m_o)
        b_lse = (highest + tl.log2(tl.where(m_any, l_i, 1.0))) * 0.6931471805599453
        tl.store(lse + o_out, tl.where(m_any, b_lse, l_i - float("inf")), mask=m_row)  # of a NaN query NaN
