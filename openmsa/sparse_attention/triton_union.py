# SPDX-License-Identifier: MIT
"""Union tiles: neighbouring queries against the union of their blocks, membership masked, online softmax, no partials.

A key that another query of the tile reads and this one does not has weight exactly 0 here, but it is multiplied: rows of K
and V that some query of the tile reads must be finite. Rows that none reads are not loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.sparse_attention.triton_keys import converted, key_place, load_keys, row_place, whole_factor


@triton.jit
def in_range(b_q, scale):
    """bfloat16 rows times powers of two, so that float16 holds them exactly (but for what is 2**30 times smaller than the
    largest of its row), and the scale of each row divided by them."""
    largest = tl.max(tl.abs(b_q.to(tl.float32)), 1)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    power = tl.minimum(268 - exponent, 187)  # the largest comes between 2**14 and 2**15, or is multiplied by 2**60
    factor = (power << 23).to(tl.float32, bitcast=True)
    scale = tl.maximum(scale * ((254 - power) << 23).to(tl.float32, bitcast=True), 1e-37)
    return b_q.to(tl.float32) * factor[:, None], scale


@triton.jit
def _span(
    acc,
    m_i,
    l_i,
    b_q,
    k,
    v,
    p_ids,
    p_rows,
    p_bits,
    begin,
    end,
    token,
    last_key,
    last_of_tile,
    scale,
    first_row,
    table_row,
    num_pages,
    i_h,
    stride_table_p,
    stride_k_page,
    stride_k_row,
    stride_k_dim,
    stride_v_page,
    stride_v_row,
    stride_v_dim,
    num_kv_heads,
    k_factor,
    stride_kf_page,
    stride_kf_h,
    k_groups,
    stride_kg_page,
    stride_kg_row,
    stride_kg_dim,
    v_factor,
    stride_vf_page,
    stride_vf_h,
    v_groups,
    stride_vg_page,
    stride_vg_row,
    stride_vg_dim,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    QK_TYPE: tl.constexpr,
    V_TYPE: tl.constexpr,
    ROW_SCALE: tl.constexpr,  # `scale` is [ROWS]
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Entries [begin, end) of the union list, KEYS keys a step. MASKED: keys may lie past block, sequence or query."""
    STEPS: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    o_n = tl.arange(0, KEYS)
    # What a step needs of the list is loaded a step ahead.
    bits, block, row = 0, 0, 0
    if begin < end:
        bits = tl.load(p_bits + begin)
        block = tl.load(p_ids + begin)
        row = tl.load(p_rows + begin)
    for i in tl.range(begin * STEPS, end * STEPS, num_stages=STAGES):
        o_key = i % STEPS * KEYS + o_n  # within the block
        i_next = tl.minimum((i + 1) // STEPS, end - 1)
        if TMA:
            page = 0
            at = row + i % STEPS * KEYS
            if PAGE_SIZE > 0:
                page = at // PAGE_SIZE
                at = at % PAGE_SIZE
            b_k = converted(tl.reshape(k.load([page, i_h, at, 0]), [KEYS, DIM_PADDED]), QK_TYPE)
            b_v = converted(tl.reshape(v.load([page, i_h, at, 0]), [KEYS, DIM_PADDED]), V_TYPE)
        else:
            if MASKED:
                position = block * BLOCK + o_key
                m_key = (o_key < BLOCK) & (position <= last_of_tile)
                page, at = key_place(position, m_key, first_row, table_row, num_pages, stride_table_p, PAGE_SIZE)
            else:
                m_key = o_key >= 0
                page, at = row_place(row + i % STEPS * KEYS, PAGE_SIZE)
            x_k, x_v, i_page = k, v, page
            if not MASKED and FORMAT == 3:  # whose scales may lie by row number
                at += o_n.to(tl.int64)
                i_page += at * 0
            elif not MASKED:
                x_k += page * stride_k_page + at * stride_k_row
                x_v += page * stride_v_page + at * stride_v_row
                at, i_page = o_n.to(tl.int64), page * 0
            b_k = load_keys(
                x_k, k_groups, i_page, at, m_key, i_h, num_kv_heads, stride_k_page, stride_k_row, stride_k_dim, stride_kg_page,
                stride_kg_row, stride_kg_dim, FORMAT, SWIZZLED, DIM, DIM_PADDED, PAGE_SIZE, QK_TYPE, MASKED,
            )  # fmt: skip
            b_v = load_keys(
                x_v, v_groups, i_page, at, m_key, i_h, num_kv_heads, stride_v_page, stride_v_row, stride_v_dim, stride_vg_page,
                stride_vg_row, stride_vg_dim, FORMAT, SWIZZLED, DIM, DIM_PADDED, PAGE_SIZE, V_TYPE, MASKED,
            )  # fmt: skip
        s = tl.dot(b_q, tl.trans(b_k))  # [ROWS, KEYS]
        if K_SCALE == 2:
            p_factor = k_factor + page.to(tl.int64) * stride_kf_page
            s *= tl.load(p_factor) if TMA or not MASKED else tl.load(p_factor, mask=m_key, other=1.0)[None, :]
        if MASKED:
            s = tl.where((o_key < BLOCK)[None, :] & (position[None, :] <= last_key[:, None]), s, -float("inf"))
        m_member = ((bits >> token) & 1) != 0  # [ROWS]
        m_new = tl.maximum(m_i, tl.where(m_member, tl.max(s, 1), -1e30))
        # Rows of other queries: an infinite offset makes every weight exactly 0 at no cost an element.
        offset = tl.where(m_member, m_new * scale, float("inf"))
        p = tl.exp2(s * (scale[:, None] if ROW_SCALE else scale) - offset[:, None])
        alpha = tl.exp2((m_i - m_new) * scale)
        l_i = l_i * alpha + tl.sum(p, 1)
        if V_SCALE == 2:
            p_factor = v_factor + page.to(tl.int64) * stride_vf_page
            p *= tl.load(p_factor) if TMA or not MASKED else tl.load(p_factor, mask=m_key, other=0.0)[None, :]
        acc = tl.dot(p.to(V_TYPE), b_v, acc * alpha[:, None])
        m_i = m_new
        bits = tl.load(p_bits + i_next)
        if MASKED:
            block = tl.load(p_ids + i_next)
        else:
            row = tl.load(p_rows + i_next)
    return acc, m_i, l_i


@triton.jit(do_not_specialize=["num_pages", "capacity"])
def attend_union(
    q,
    k,  # packed rows or pool
    v,
    k_tma,  # descriptors of the same, used for fully visible blocks; None unless TMA
    v_tma,
    out,  # [total_q, num_q_heads, DIM], contiguous
    lse,  # float32 [total_q, num_q_heads]
    cu_k,
    page_table,
    tiles,
    union_sizes,
    union_ids,
    union_rows,
    union_bits,
    scale,  # times log2(e), not negative
    num_kv_heads,
    num_pages,
    capacity,
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
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BY_ROW: tl.constexpr,  # union_rows may be used: no block crosses pages or is cut by KEYS
    NEGATIVE: tl.constexpr,  # the scale's sign
    FORMAT: tl.constexpr,  # of K and V
    K_SCALE: tl.constexpr,  # 0: no factor; 1: of the tensor or a head; 2: of a page
    V_SCALE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    QK_TYPE: tl.constexpr,  # in which queries are multiplied with keys
    V_TYPE: tl.constexpr,  # in which weights are multiplied with values
    IN_RANGE: tl.constexpr,  # bfloat16 queries become float16
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program a (tile, KV head, part of its group)."""
    ROWS: tl.constexpr = TOKENS * HEADS
    i_list = tl.program_id(0) // PARTS
    i_part = tl.program_id(0) % PARTS
    size = tl.load(union_sizes + i_list * 2)
    if size < 0:
        return
    i_h = i_list % num_kv_heads
    p_tile = tiles + i_list // num_kv_heads * 4
    first, tokens, i_b, position = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2), tl.load(p_tile + 3)
    if tokens <= 0:
        return
    k_begin = tl.load(cu_k + i_b)
    k_len = tl.load(cu_k + i_b + 1) - k_begin

    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    token = o_r // HEADS
    head = i_part * HEADS + o_r % HEADS
    m_row = (token < tokens) & (head < GROUP)
    m_q = m_row[:, None] & (o_d < DIM)[None, :]
    row = (first + token).to(tl.int64)
    head += i_h * GROUP
    b_q = tl.load(q + (row * stride_q_t + head * stride_q_h)[:, None] + o_d[None, :] * stride_q_d, mask=m_q, other=0.0)
    # A row of scales: of the queries, and where bfloat16 queries meet keys that are exact in float16, to their range.
    ROW_SCALE: tl.constexpr = (q_factor is not None) or IN_RANGE
    if K_SCALE == 1:
        scale = tl.maximum(scale * whole_factor(k_factor, i_h, stride_kf_h, K_SCALE), 1e-37)
    if q_factor is not None:
        scale = tl.maximum(scale * tl.load(q_factor + head * stride_qf_h, mask=m_row, other=1.0), 1e-37)  # [ROWS]
    if IN_RANGE:
        b_q, scale = in_range(b_q, scale)
    b_q = converted(b_q, QK_TYPE)
    if NEGATIVE:
        b_q = (-b_q.to(tl.float32)).to(QK_TYPE)
    last_key = tl.minimum(position + token, k_len - 1)
    last_of_tile = tl.minimum(position + tokens - 1, k_len - 1)
    k += i_h.to(tl.int64) * stride_k_h
    v += i_h.to(tl.int64) * stride_v_h
    if FORMAT == 3 and not SWIZZLED:
        k_groups += i_h.to(tl.int64) * stride_kg_h
        v_groups += i_h.to(tl.int64) * stride_vg_h
    if K_SCALE == 2:
        k_factor += i_h * stride_kf_h
    if V_SCALE == 2:
        v_factor += i_h * stride_vf_h
    table_row = page_table
    if PAGE_SIZE > 0:
        table_row += i_b * stride_table_b

    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    m_i = tl.full([ROWS], -1e30, tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    whole = 0
    o_list = i_list.to(tl.int64) * capacity
    p_ids, p_rows, p_bits = union_ids + o_list, union_rows + o_list, union_bits + o_list
    if BY_ROW:
        whole = tl.load(union_sizes + i_list * 2 + 1)
        acc, m_i, l_i = _span(
            acc, m_i, l_i, b_q, k_tma if TMA else k, v_tma if TMA else v, p_ids, p_rows, p_bits, 0, whole, token, last_key,
            last_of_tile, scale, k_begin, table_row, num_pages, i_h, stride_table_p, stride_k_page, stride_k_row, stride_k_dim,
            stride_v_page, stride_v_row, stride_v_dim, num_kv_heads,
            k_factor, stride_kf_page, stride_kf_h, k_groups, stride_kg_page, stride_kg_row, stride_kg_dim,
            v_factor, stride_vf_page, stride_vf_h, v_groups, stride_vg_page, stride_vg_row, stride_vg_dim,
            DIM, DIM_PADDED, BLOCK, KEYS, PAGE_SIZE, FORMAT, K_SCALE, V_SCALE, SWIZZLED, QK_TYPE, V_TYPE, ROW_SCALE,
            False, TMA, STAGES,
        )  # fmt: skip
    acc, m_i, l_i = _span(
        acc, m_i, l_i, b_q, k, v, p_ids, p_rows, p_bits, whole, size, token, last_key, last_of_tile, scale, k_begin, table_row,
        num_pages, i_h, stride_table_p, stride_k_page, stride_k_row, stride_k_dim,
        stride_v_page, stride_v_row, stride_v_dim, num_kv_heads,
        k_factor, stride_kf_page, stride_kf_h, k_groups, stride_kg_page, stride_kg_row, stride_kg_dim,
        v_factor, stride_vf_page, stride_vf_h, v_groups, stride_vg_page, stride_vg_row, stride_vg_dim,
        DIM, DIM_PADDED, BLOCK, KEYS, PAGE_SIZE, FORMAT, K_SCALE, V_SCALE, SWIZZLED, QK_TYPE, V_TYPE, ROW_SCALE,
        True, False, 1,
    )  # fmt: skip

    m_any = l_i > 0
    inverse = tl.where(m_any, 1.0 / tl.where(m_any, l_i, 1.0), 0.0)
    if V_SCALE == 1:
        inverse *= whole_factor(v_factor, i_h, stride_vf_h, V_SCALE)
    o_out = row * num_kv_heads * GROUP + head
    b_out = (acc * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(out + o_out[:, None] * DIM + o_d[None, :], b_out, mask=m_q)
    b_lse = (m_i * scale + tl.log2(tl.where(m_any, l_i, 1.0))) * 0.6931471805599453
    tl.store(lse + o_out, tl.where(m_any, b_lse, l_i - float("inf")), mask=m_row)  # of a NaN query NaN
