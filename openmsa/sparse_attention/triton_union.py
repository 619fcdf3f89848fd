# SPDX-License-Identifier: MIT
"""Union tiles: neighbouring queries against the union of their blocks, membership masked, online softmax, no partials.

A key that another query of the tile reads and this one does not has weight exactly 0 here, but it is multiplied: rows of K
and V that some query of the tile reads must be finite. Rows that none reads are not loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.sparse_attention.triton_keys import key_offsets, row_offset


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
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Entries [begin, end) of the union list, KEYS keys a step. MASKED: keys may lie past block, sequence or query."""
    STEPS: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    o_d, o_n = tl.arange(0, DIM_PADDED), tl.arange(0, KEYS)
    m_d = o_d < DIM
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
            b_k = tl.reshape(k.load([page, i_h, at, 0]), [KEYS, DIM_PADDED])
            b_v = tl.reshape(v.load([page, i_h, at, 0]), [KEYS, DIM_PADDED])
        elif MASKED:
            position = block * BLOCK + o_key
            m_key = (o_key < BLOCK) & (position <= last_of_tile)
            m_kv = m_key[:, None] & m_d[None, :]
            o_k = key_offsets(
                position, m_key, first_row, table_row, num_pages, stride_table_p, stride_k_page, stride_k_row, PAGE_SIZE
            )
            o_v = key_offsets(
                position, m_key, first_row, table_row, num_pages, stride_table_p, stride_v_page, stride_v_row, PAGE_SIZE
            )
            b_k = tl.load(k + o_k[:, None] + o_d[None, :] * stride_k_dim, mask=m_kv, other=0.0)
            b_v = tl.load(v + o_v[:, None] + o_d[None, :] * stride_v_dim, mask=m_kv, other=0.0)
        else:
            at = row + i % STEPS * KEYS
            o_k = row_offset(at, stride_k_page, stride_k_row, PAGE_SIZE)
            o_v = row_offset(at, stride_v_page, stride_v_row, PAGE_SIZE)
            p_k = k + o_k + o_n[:, None].to(tl.int64) * stride_k_row + o_d[None, :] * stride_k_dim
            p_v = v + o_v + o_n[:, None].to(tl.int64) * stride_v_row + o_d[None, :] * stride_v_dim
            if DIM == DIM_PADDED:
                b_k, b_v = tl.load(p_k), tl.load(p_v)
            else:
                b_k, b_v = tl.load(p_k, mask=m_d[None, :], other=0.0), tl.load(p_v, mask=m_d[None, :], other=0.0)
        s = tl.dot(b_q, tl.trans(b_k))  # [ROWS, KEYS]
        if MASKED:
            s = tl.where((o_key < BLOCK)[None, :] & (position[None, :] <= last_key[:, None]), s, -float("inf"))
        m_member = ((bits >> token) & 1) != 0  # [ROWS]
        m_new = tl.maximum(m_i, tl.where(m_member, tl.max(s, 1), -1e30))
        # Rows of other queries: an infinite offset makes every weight exactly 0 at no cost an element.
        offset = tl.where(m_member, m_new * scale, float("inf"))
        p = tl.exp2(s * scale - offset[:, None])
        alpha = tl.exp2((m_i - m_new) * scale)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None])
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
    if NEGATIVE:
        b_q = (-b_q.to(tl.float32)).to(b_q.dtype)
    last_key = tl.minimum(position + token, k_len - 1)
    last_of_tile = tl.minimum(position + tokens - 1, k_len - 1)
    k += i_h.to(tl.int64) * stride_k_h
    v += i_h.to(tl.int64) * stride_v_h
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
            stride_v_page, stride_v_row, stride_v_dim, DIM, DIM_PADDED, BLOCK, KEYS, PAGE_SIZE, False, TMA, STAGES,
        )  # fmt: skip
    acc, m_i, l_i = _span(
        acc, m_i, l_i, b_q, k, v, p_ids, p_rows, p_bits, whole, size, token, last_key, last_of_tile, scale, k_begin, table_row,
        num_pages, i_h, stride_table_p, stride_k_page, stride_k_row, stride_k_dim, stride_v_page, stride_v_row, stride_v_dim,
        DIM, DIM_PADDED, BLOCK, KEYS, PAGE_SIZE, True, False, 1,
    )  # fmt: skip

    m_any = l_i > 0
    inverse = tl.where(m_any, 1.0 / tl.where(m_any, l_i, 1.0), 0.0)
    o_out = row * num_kv_heads * GROUP + head
    b_out = (acc * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(out + o_out[:, None] * DIM + o_d[None, :], b_out, mask=m_q)
    b_lse = (m_i * scale + tl.log2(tl.where(m_any, l_i, 1.0))) * 0.6931471805599453
    tl.store(lse + o_out, tl.where(m_any, b_lse, -float("inf")), mask=m_row)
