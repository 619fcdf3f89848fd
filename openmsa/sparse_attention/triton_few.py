# SPDX-License-Identifier: MIT
"""KV-outer for few queries: a block is read by one or a handful of them, and bytes bound the call.

Every (query, slot) has a place in its block's list, which has room for all queries of a sequence (`tile_lists`).
`few_units`: a unit is up to TOKENS queries of one block; units are numbered block after block, from the front those whose
queries see the whole block, from the back the others. `attend_few`: a fixed number of programs, each of which walks its share
of the units in one flat loop over (unit, part of its block), so that the next keys are under way while these are multiplied.
Each unit ends in partials, merged by `combine_outer`. Plain tensors only.
The order within a list depends on timing; no result does, as the slot in the query's own row says where a partial goes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.sparse_attention.triton_keys import key_place, row_place
from openmsa.sparse_attention.triton_lists import position_of_token_zero

UNIT_FIELDS = 8  # first key row, keys to read, block, sequence, k_len, position of token 0; two unused

_LENGTHS = ["batch", "search_steps", "num_buckets", "room", "unit_bound", "num_pages"]


@triton.jit
def _units_of(counts, partly, o_b, m_b, i_h, num_buckets, room, TOKENS: tl.constexpr):
    """Queries, units and keys seen (0: all by all) of buckets."""
    count = tl.minimum(tl.load(counts + i_h * num_buckets + o_b, mask=m_b, other=0), room)
    seen = tl.load(partly + i_h * num_buckets + o_b, mask=m_b, other=0)
    return count, (count + TOKENS - 1) // TOKENS, seen


@triton.jit(do_not_specialize=_LENGTHS)
def few_units(
    cu_q,
    cu_k,
    q_offset,
    page_table,
    counts,  # int32 [kv_heads, num_buckets]: queries a block
    partly,  # the same shape: keys seen where not all see all of it, else 0
    entries,  # int32 [kv_heads, num_buckets, room]: token * TOPK + slot
    units,  # int32 [kv_heads, unit_bound, UNIT_FIELDS], written
    unit_entries,  # int32 [kv_heads, unit_bound, TOKENS], written: entries, -1 where there is none
    num_units,  # int32 [kv_heads, 2], written: from the front, from the back
    stride_table_b,
    stride_table_p,
    num_kv_heads,
    batch,
    search_steps,
    num_buckets,
    room,
    unit_bound,
    num_pages,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: flat keys, or pages that blocks may cross
    STEP: tl.constexpr,
    BUCKETS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program a (KV head, BUCKETS neighbouring buckets)."""
    i_h = tl.program_id(0)
    front, back = 0, 0
    for start in range(0, tl.program_id(1) * BUCKETS, STEP):
        o_b = start + tl.arange(0, STEP)
        m_b = o_b < tl.program_id(1) * BUCKETS
        _, own, seen = _units_of(counts, partly, o_b, m_b, i_h, num_buckets, room, TOKENS)
        front += tl.sum(tl.where(seen == 0, own, 0), 0)
        back += tl.sum(tl.where(seen == 0, 0, own), 0)

    o_b = tl.program_id(1) * BUCKETS + tl.arange(0, BUCKETS)
    count, own, seen = _units_of(counts, partly, o_b, o_b < num_buckets, i_h, num_buckets, room, TOKENS)
    is_part = seen > 0
    own_front, own_back = tl.where(is_part, 0, own), tl.where(is_part, own, 0)
    i_front = front + tl.cumsum(own_front, 0) - own_front
    i_back = unit_bound - 1 - (back + tl.cumsum(own_back, 0) - own_back)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        tl.store(num_units + i_h * 2, front + tl.sum(own_front, 0))
        tl.store(num_units + i_h * 2 + 1, back + tl.sum(own_back, 0))

    low, high = tl.zeros_like(o_b), tl.zeros_like(o_b) + batch - 1
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        reached = tl.load(cu_k + middle) // BLOCK + middle <= o_b
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    i_b = low
    k_begin, k_end = tl.load(cu_k + i_b), tl.load(cu_k + i_b + 1)
    q_begin, q_end = tl.load(cu_q + i_b), tl.load(cu_q + i_b + 1)
    position = position_of_token_zero(q_offset, i_b, q_begin, q_end, k_end - k_begin)
    block = o_b - k_begin // BLOCK - i_b
    row = k_begin + block * BLOCK
    if PAGE_SIZE > 0:
        p_page = page_table + i_b.to(tl.int64) * stride_table_b + (block * BLOCK // PAGE_SIZE) * stride_table_p
        page = tl.load(p_page, mask=count > 0, other=0)
        row = tl.minimum(tl.maximum(page, 0), num_pages - 1) * PAGE_SIZE + block * BLOCK % PAGE_SIZE
    seen = tl.where(is_part, seen, BLOCK)

    p_entries = entries + (i_h.to(tl.int64) * num_buckets + o_b) * room
    o_j = tl.arange(0, AT_ONCE)[None, :]
    shape: tl.constexpr = [BUCKETS, AT_ONCE]
    for j in range(0, tl.max(own, 0), AT_ONCE):
        m_unit = j + o_j < own[:, None]
        i_unit = tl.where(is_part[:, None], i_back[:, None] - j - o_j, i_front[:, None] + j + o_j)
        i_unit = i_h.to(tl.int64) * unit_bound + i_unit
        p_unit = units + i_unit * 8
        tl.store(p_unit, tl.broadcast_to(row[:, None], shape), mask=m_unit)
        tl.store(p_unit + 1, tl.broadcast_to(seen[:, None], shape), mask=m_unit)
        tl.store(p_unit + 2, tl.broadcast_to(block[:, None], shape), mask=m_unit)
        tl.store(p_unit + 3, tl.broadcast_to(i_b[:, None], shape), mask=m_unit)
        tl.store(p_unit + 4, tl.broadcast_to((k_end - k_begin)[:, None], shape), mask=m_unit)
        tl.store(p_unit + 5, tl.broadcast_to(position[:, None], shape), mask=m_unit)
        for t in tl.static_range(TOKENS):
            i_e = (j + o_j) * TOKENS + t
            entry = tl.load(p_entries[:, None] + i_e, mask=i_e < count[:, None], other=-1)
            tl.store(unit_entries + i_unit * TOKENS + t, entry, mask=m_unit)


@triton.jit
def _walk(
    q,
    k,
    v,
    o_part,
    lse_part,
    page_table,
    units,  # at the first unit of the share
    unit_entries,
    n_units,
    scale,
    head,
    i_h,
    num_kv_heads,
    num_pages,
    stride_q_t,
    stride_q_h,
    stride_q_d,
    stride_k_page,
    stride_k_row,
    stride_k_dim,
    stride_v_page,
    stride_v_row,
    stride_v_dim,
    stride_table_b,
    stride_table_p,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NEGATIVE: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    HOLD: tl.constexpr,
):
    """A share of the units. MASKED: keys may lie past block, sequence or query, and blocks may cross pages."""
    STEPS: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    o_n, o_d = tl.arange(0, KEYS), tl.arange(0, DIM_PADDED)
    o_t = tl.arange(0, TOKENS * HEADS) // HEADS
    m_d, m_head = o_d < DIM, head < GROUP
    o_head = (head * stride_q_h)[:, None] + o_d[None, :] * stride_q_d
    o_within = (head * DIM)[:, None] + o_d[None, :]

    # Queries are loaded a step ahead of their use (HOLD: only where a unit begins), their entries two steps ahead, a unit's
    # fields one.
    b_q = tl.zeros([TOKENS * HEADS, DIM_PADDED], q.dtype.element_ty)
    ahead, row = o_t, 0
    seen, block, i_b, k_len, position = 0, 0, 0, 0, 0
    if n_units > 0:
        entry = tl.load(unit_entries + o_t)
        ahead = tl.load(unit_entries + tl.minimum(1 // STEPS, n_units - 1) * TOKENS + o_t)
        m_q = ((entry >= 0) & m_head)[:, None] & m_d[None, :]
        b_q = tl.load(q + ((entry // TOPK).to(tl.int64) * stride_q_t)[:, None] + o_head, mask=m_q, other=0.0)
        row = tl.load(units)
        if MASKED:
            seen, block, i_b = tl.load(units + 1), tl.load(units + 2), tl.load(units + 3)
            k_len, position = tl.load(units + 4), tl.load(units + 5)
    acc = tl.zeros([TOKENS * HEADS, DIM_PADDED], tl.float32)
    m_i = tl.full([TOKENS * HEADS], -1e30, tl.float32)
    l_i = tl.zeros([TOKENS * HEADS], tl.float32)
    for i in tl.range(0, n_units * STEPS, num_stages=STAGES):
        step = i % STEPS
        o_key = step * KEYS + o_n  # within the block
        if TMA:
            page = 0
            at = row + step * KEYS
            if PAGE_SIZE > 0:
                page = at // PAGE_SIZE
                at = at % PAGE_SIZE
            b_k = tl.reshape(k.load([page, i_h, at, 0]), [KEYS, DIM_PADDED])
            b_v = tl.reshape(v.load([page, i_h, at, 0]), [KEYS, DIM_PADDED])
        else:
            if MASKED:
                m_key = o_key < seen
                table_row = page_table
                if PAGE_SIZE > 0:
                    table_row += i_b.to(tl.int64) * stride_table_b
                first_row = row - block * BLOCK
                page, at = key_place(block * BLOCK + o_key, m_key, first_row, table_row, num_pages, stride_table_p, PAGE_SIZE)
            else:
                m_key = o_key >= 0
                page, at = row_place(row + step * KEYS, PAGE_SIZE)
                at += o_n.to(tl.int64)
            m_kv = m_key[:, None] & m_d[None, :]
            o_k, o_v = page * stride_k_page + at * stride_k_row, page * stride_v_page + at * stride_v_row
            b_k = tl.load(k + o_k[:, None] + o_d[None, :] * stride_k_dim, mask=m_kv, other=0.0)
            b_v = tl.load(v + o_v[:, None] + o_d[None, :] * stride_v_dim, mask=m_kv, other=0.0)
        b_a = (-b_q.to(tl.float32)).to(b_q.dtype) if NEGATIVE else b_q
        s = tl.dot(b_a, tl.trans(b_k))  # [ROWS, KEYS]
        m_next = (ahead >= 0) & m_head & (step == STEPS - 1) if HOLD else (ahead >= 0) & m_head
        p_q = q + ((ahead // TOPK).to(tl.int64) * stride_q_t)[:, None] + o_head
        b_q = tl.load(p_q, mask=m_next[:, None] & m_d[None, :], other=b_q if HOLD else 0.0)
        ahead = tl.load(unit_entries + tl.minimum((i + 2) // STEPS, n_units - 1) * TOKENS + o_t)
        if MASKED:
            reader = tl.load(unit_entries + i // STEPS * TOKENS + o_t)
            last_key = tl.minimum(position + reader // TOPK, k_len - 1) - block * BLOCK
            s = tl.where(o_key[None, :] <= tl.minimum(last_key, BLOCK - 1)[:, None], s, -float("inf"))
        m_old = tl.where(step == 0, -1e30, m_i)  # a new unit: what was gathered counts for nothing
        m_i = tl.maximum(m_old, tl.max(s, 1))
        p = tl.exp2(s * scale - (m_i * scale)[:, None])
        alpha = tl.exp2((m_old - m_i) * scale)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None])
        if step == STEPS - 1:
            writer = tl.load(unit_entries + i // STEPS * TOKENS + o_t)
            o_row = (writer + writer // TOPK * ((num_kv_heads - 1) * TOPK)).to(tl.int64) * GROUP
            m_row = (writer >= 0) & m_head
            b_o = (acc * (1.0 / tl.maximum(l_i, 1e-30))[:, None]).to(o_part.dtype.element_ty)
            tl.store(o_part + (o_row * DIM)[:, None] + o_within, b_o, mask=m_row[:, None] & m_d[None, :])
            tl.store(lse_part + o_row + head, m_i * scale + tl.log2(l_i), mask=m_row)
        p_unit = units + tl.minimum((i + 1) // STEPS, n_units - 1) * 8
        row = tl.load(p_unit)
        if MASKED:
            seen, block, i_b = tl.load(p_unit + 1), tl.load(p_unit + 2), tl.load(p_unit + 3)
            k_len, position = tl.load(p_unit + 4), tl.load(p_unit + 5)


@triton.jit(do_not_specialize=_LENGTHS)
def attend_few(
    q,
    k,  # packed rows or pool
    v,
    k_tma,  # descriptors of the same, used for fully visible blocks; None unless TMA
    v_tma,
    o_part,  # [total_q, kv_heads, TOPK, GROUP, DIM]
    lse_part,  # float32, the same less DIM, base 2
    page_table,
    units,
    unit_entries,
    num_units,
    scale,  # times log2(e), not negative
    unit_bound,
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
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BY_ROW: tl.constexpr,  # a block's rows follow its first one and are cut evenly by KEYS
    NEGATIVE: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    HOLD: tl.constexpr,
):
    """Grid (shares of the units, KV heads * parts of the group)."""
    i_h, i_part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    i_p, n_p = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    n_front, n_back = tl.load(num_units + i_h * 2), tl.load(num_units + i_h * 2 + 1)
    i_front, i_back = (i_p * n_front // n_p).to(tl.int32), (i_p * n_back // n_p).to(tl.int32)
    n_front, n_back = ((i_p + 1) * n_front // n_p).to(tl.int32) - i_front, ((i_p + 1) * n_back // n_p).to(tl.int32) - i_back
    head = i_part * HEADS + tl.arange(0, TOKENS * HEADS) % HEADS
    q += i_h * GROUP * stride_q_h
    k += i_h.to(tl.int64) * stride_k_h
    v += i_h.to(tl.int64) * stride_v_h
    lse_part += i_h.to(tl.int64) * TOPK * GROUP
    o_part += i_h.to(tl.int64) * TOPK * GROUP * DIM
    first = i_h.to(tl.int64) * unit_bound + i_front
    _walk(
        q, k_tma if TMA else k, v_tma if TMA else v, o_part, lse_part, page_table, units + first * 8,
        unit_entries + first * TOKENS, n_front, scale, head, i_h, num_kv_heads, num_pages, stride_q_t, stride_q_h, stride_q_d,
        stride_k_page, stride_k_row, stride_k_dim, stride_v_page, stride_v_row, stride_v_dim, stride_table_b, stride_table_p,
        GROUP, HEADS, TOKENS, TOPK, DIM, DIM_PADDED, BLOCK, KEYS, PAGE_SIZE, NEGATIVE, not BY_ROW, TMA, STAGES, HOLD,
    )  # fmt: skip
    first = (i_h + 1).to(tl.int64) * unit_bound - i_back - n_back
    _walk(
        q, k, v, o_part, lse_part, page_table, units + first * 8, unit_entries + first * TOKENS, n_back, scale, head, i_h,
        num_kv_heads, num_pages, stride_q_t, stride_q_h, stride_q_d, stride_k_page, stride_k_row, stride_k_dim,
        stride_v_page, stride_v_row, stride_v_dim, stride_table_b, stride_table_p,
        GROUP, HEADS, TOKENS, TOPK, DIM, DIM_PADDED, BLOCK, KEYS, PAGE_SIZE, NEGATIVE, True, False, 1, HOLD,
    )  # fmt: skip
