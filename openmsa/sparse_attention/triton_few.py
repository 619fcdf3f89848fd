# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""These kernels attend KV-outer where one or a few queries read a block, so that bytes bound the call; tensors are plain.

Every (query, slot) has a place in its block's list, which has room for all queries of a sequence (`tile_lists`).
`few_units` cuts the lists into units, up to TOKENS queries of one block each. Units are numbered block after block, from the
front those whose queries see the whole block, from the back the others. `attend_few` has a fixed number of programs, each of
which walks its share of the units in one flat loop over (unit, part of its block), so that the next keys are under way while
these are multiplied. Each unit ends in partials, which `combine_outer` merges.
The order within a list depends on timing; no result does, as the slot in the query's own row says where a partial goes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.primitives.operands import QueryRows
from openmsa.primitives.softmax import LEAST, Partials, nothing_read, online_step
from openmsa.runtime.devices import facts
from openmsa.runtime.launch import ceil_div, launch_kernel
from openmsa.sparse_attention.few_lists import COUNT_FIELDS, UNIT_FIELDS, FewLists, most_units
from openmsa.sparse_attention.triton_keys import HeadRows, KeyCut, key_place, row_place
from openmsa.sparse_attention.triton_lists import PrefillCall, position_of_token_zero, sequence_of
from openmsa.sparse_attention.triton_outer import partials_of
from openmsa.sparse_attention.triton_outer_kernels import combine

SCAN_STEP = 2048
"""A program adds up so many buckets at a time."""
UNITS_AT_ONCE = 16
"""A program writes so many units of each block at a time."""

_LENGTHS = ["batch", "search_steps", "num_buckets", "room", "unit_bound", "num_pages"]


@triton.jit
def _units_of(few, o_b, m_b, i_h, num_buckets, room, TOKENS: tl.constexpr):
    """Returns, of each of these buckets, its queries, its units, and the most keys that a query sees where not every query sees
    the whole block, else 0."""
    count = tl.minimum(tl.load(few.counts + i_h * num_buckets + o_b, mask=m_b, other=0), room)
    seen = tl.load(few.partly + i_h * num_buckets + o_b, mask=m_b, other=0)
    return count, (count + TOKENS - 1) // TOKENS, seen


@triton.jit(do_not_specialize=_LENGTHS)
def few_units(
    bounds,  # Bounds
    table,  # PageTable
    few,  # FewLists, of which units, unit_entries and num_units are written
    num_kv_heads,
    batch,
    search_steps,
    num_buckets,
    room,
    unit_bound,
    num_pages,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: packed keys, or pages that blocks may cross
    STEP: tl.constexpr,
    BUCKETS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Cuts the lists of blocks into units. A program serves a KV head and BUCKETS neighbouring buckets."""
    # 1. The units of the buckets in front are counted.
    i_h = tl.program_id(0)
    front, back = 0, 0
    for start in range(0, tl.program_id(1) * BUCKETS, STEP):
        o_b = start + tl.arange(0, STEP)
        m_b = o_b < tl.program_id(1) * BUCKETS
        _, own, seen = _units_of(few, o_b, m_b, i_h, num_buckets, room, TOKENS)
        front += tl.sum(tl.where(seen == 0, own, 0), 0)
        back += tl.sum(tl.where(seen == 0, 0, own), 0)

    # 2. The units of these buckets are counted, which says where each bucket's begin.
    o_b = tl.program_id(1) * BUCKETS + tl.arange(0, BUCKETS)
    count, own, seen = _units_of(few, o_b, o_b < num_buckets, i_h, num_buckets, room, TOKENS)
    is_part = seen > 0
    own_front, own_back = tl.where(is_part, 0, own), tl.where(is_part, own, 0)
    i_front = front + tl.cumsum(own_front, 0) - own_front
    i_back = unit_bound - 1 - (back + tl.cumsum(own_back, 0) - own_back)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        tl.store(few.num_units + i_h * COUNT_FIELDS, front + tl.sum(own_front, 0))
        tl.store(few.num_units + i_h * COUNT_FIELDS + 1, back + tl.sum(own_back, 0))

    # 3. The fields that the units of a bucket have in common are found.
    i_b = sequence_of(bounds.cu_k, o_b, batch, search_steps, BLOCK)
    k_begin, k_end = tl.load(bounds.cu_k + i_b), tl.load(bounds.cu_k + i_b + 1)
    q_begin, q_end = tl.load(bounds.cu_q + i_b), tl.load(bounds.cu_q + i_b + 1)
    position = position_of_token_zero(bounds.q_offset, i_b, q_begin, q_end, k_end - k_begin)
    block = o_b - k_begin // BLOCK - i_b
    row = k_begin + block * BLOCK
    if PAGE_SIZE > 0:
        p_page = table.ids + i_b.to(tl.int64) * table.s_sequence + (block * BLOCK // PAGE_SIZE) * table.s_page
        page = tl.load(p_page, mask=count > 0, other=0)
        row = tl.minimum(tl.maximum(page, 0), num_pages - 1) * PAGE_SIZE + block * BLOCK % PAGE_SIZE
    seen = tl.where(is_part, seen, BLOCK)

    # 4. The units are written.
    p_entries = few.entries + (i_h.to(tl.int64) * num_buckets + o_b) * room
    o_j = tl.arange(0, AT_ONCE)[None, :]
    shape: tl.constexpr = [BUCKETS, AT_ONCE]
    for j in range(0, tl.max(own, 0), AT_ONCE):
        m_unit = j + o_j < own[:, None]
        i_unit = tl.where(is_part[:, None], i_back[:, None] - j - o_j, i_front[:, None] + j + o_j)
        i_unit = i_h.to(tl.int64) * unit_bound + i_unit
        p_unit = few.units + i_unit * UNIT_FIELDS
        tl.store(p_unit, tl.broadcast_to(row[:, None], shape), mask=m_unit)
        tl.store(p_unit + 1, tl.broadcast_to(seen[:, None], shape), mask=m_unit)
        tl.store(p_unit + 2, tl.broadcast_to(block[:, None], shape), mask=m_unit)
        tl.store(p_unit + 3, tl.broadcast_to(i_b[:, None], shape), mask=m_unit)
        tl.store(p_unit + 4, tl.broadcast_to((k_end - k_begin)[:, None], shape), mask=m_unit)
        tl.store(p_unit + 5, tl.broadcast_to(position[:, None], shape), mask=m_unit)
        for t in tl.static_range(TOKENS):
            i_e = (j + o_j) * TOKENS + t
            entry = tl.load(p_entries[:, None] + i_e, mask=i_e < count[:, None], other=-1)
            tl.store(few.unit_entries + i_unit * TOKENS + t, entry, mask=m_unit)


@triton.jit
def _walk(
    queries,  # `QueryRows` of this head's group
    keys,  # HeadRows
    values,
    k_tma,
    v_tma,
    table,
    partials,  # Partials of this head
    units,  # the fields of the first unit of the share
    unit_entries,
    n_units,
    scale,
    head,
    i_h,
    num_kv_heads,
    num_pages,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
    TOPK: tl.constexpr,
    NEGATIVE: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    HOLD: tl.constexpr,
):
    """Attends to a share of the units. MASKED: keys may lie past block, sequence or query, and blocks may cross pages."""
    GROUP: tl.constexpr = TILE.group
    HEADS: tl.constexpr = TILE.heads
    TOKENS: tl.constexpr = TILE.tokens
    DIM: tl.constexpr = TILE.dim
    DIM_PAD: tl.constexpr = TILE.dim_pad
    BLOCK: tl.constexpr = CUT.block
    KEYS: tl.constexpr = CUT.keys
    PAGE_SIZE: tl.constexpr = CUT.page_size
    STEPS: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    o_n, o_d = tl.arange(0, KEYS), tl.arange(0, DIM_PAD)
    o_t = tl.arange(0, TOKENS * HEADS) // HEADS
    m_d, m_head = o_d < DIM, head < GROUP
    o_head = (head * queries.s_head)[:, None] + o_d[None, :] * queries.s_dim
    o_within = (head * DIM)[:, None] + o_d[None, :]

    # 1. The first unit is loaded. Queries are loaded a step ahead of their use (with HOLD only where a unit begins), their
    # entries two steps ahead, and a unit's fields one step.
    b_q = tl.zeros([TOKENS * HEADS, DIM_PAD], queries.data.dtype.element_ty)
    ahead, row = o_t, 0
    seen, block, i_b, k_len, position = 0, 0, 0, 0, 0
    if n_units > 0:
        entry = tl.load(unit_entries + o_t)
        ahead = tl.load(unit_entries + tl.minimum(1 // STEPS, n_units - 1) * TOKENS + o_t)
        m_q = ((entry >= 0) & m_head)[:, None] & m_d[None, :]
        p_q = queries.data + ((entry // TOPK).to(tl.int64) * queries.s_token)[:, None] + o_head
        b_q = tl.load(p_q, mask=m_q, other=0.0)
        row = tl.load(units)
        if MASKED:
            seen, block, i_b = tl.load(units + 1), tl.load(units + 2), tl.load(units + 3)
            k_len, position = tl.load(units + 4), tl.load(units + 5)
    acc, m_i, l_i = nothing_read(TOKENS * HEADS, DIM_PAD)
    for i in tl.range(0, n_units * STEPS, num_stages=STAGES):
        # 2. Keys and values of this step are loaded.
        step = i % STEPS
        o_key = step * KEYS + o_n  # places in the block
        if k_tma is not None:
            at = row + step * KEYS
            page = at // PAGE_SIZE if PAGE_SIZE > 0 else 0
            at = at % PAGE_SIZE if PAGE_SIZE > 0 else at
            b_k = tl.reshape(k_tma.load([page, i_h, at, 0]), [KEYS, DIM_PAD])
            b_v = tl.reshape(v_tma.load([page, i_h, at, 0]), [KEYS, DIM_PAD])
        else:
            if MASKED:
                m_key = o_key < seen
                table_row = table.ids
                if PAGE_SIZE > 0:
                    table_row += tl.cast(i_b, tl.int64) * table.s_sequence
                first_row = row - block * BLOCK
                page, at = key_place(block * BLOCK + o_key, m_key, first_row, table_row, num_pages, table.s_page, PAGE_SIZE)
            else:
                m_key = o_key >= 0
                page, at = row_place(row + step * KEYS, PAGE_SIZE)
                at += o_n.to(tl.int64)
            m_kv = m_key[:, None] & m_d[None, :]
            o_k = page * keys.rows.s_page + at * keys.rows.s_row
            o_v = page * values.rows.s_page + at * values.rows.s_row
            b_k = tl.load(keys.data + o_k[:, None] + o_d[None, :] * keys.rows.s_dim, mask=m_kv, other=0.0)
            b_v = tl.load(values.data + o_v[:, None] + o_d[None, :] * values.rows.s_dim, mask=m_kv, other=0.0)
        # 3. Logits are multiplied, and the queries of the next step loaded.
        b_a = (-b_q.to(tl.float32)).to(b_q.dtype) if NEGATIVE else b_q
        s = tl.dot(b_a, tl.trans(b_k))  # [ROWS, KEYS]
        m_next = (ahead >= 0) & m_head & (step == STEPS - 1) if HOLD else (ahead >= 0) & m_head
        p_q = queries.data + ((ahead // TOPK).to(tl.int64) * queries.s_token)[:, None] + o_head
        b_q = tl.load(p_q, mask=m_next[:, None] & m_d[None, :], other=b_q if HOLD else 0.0)
        ahead = tl.load(unit_entries + tl.minimum((i + 2) // STEPS, n_units - 1) * TOKENS + o_t)
        if MASKED:
            reader = tl.load(unit_entries + i // STEPS * TOKENS + o_t)
            last_key = tl.minimum(position + reader // TOPK, k_len - 1) - block * BLOCK
            s = tl.where(o_key[None, :] <= tl.minimum(last_key, BLOCK - 1)[:, None], s, -float("inf"))
        # 4. The softmax goes on. In a new unit it starts anew: what was gathered counts for nothing.
        p, m_i, l_i, shrink = online_step(s, tl.where(step == 0, LEAST, m_i), l_i, scale, scale, None)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * shrink[:, None])
        # 5. The partials of a unit that ends here are stored.
        if step == STEPS - 1:
            writer = tl.load(unit_entries + i // STEPS * TOKENS + o_t)
            o_row = (writer + writer // TOPK * ((num_kv_heads - 1) * TOPK)).to(tl.int64) * GROUP
            m_row = (writer >= 0) & m_head
            b_o = (acc * (1.0 / tl.maximum(l_i, 1e-30))[:, None]).to(partials.rows.dtype.element_ty)
            tl.store(partials.rows + (o_row * DIM)[:, None] + o_within, b_o, mask=m_row[:, None] & m_d[None, :])
            tl.store(partials.lse + o_row + head, m_i * scale + tl.log2(l_i), mask=m_row)
        # 6. The fields of the next step's unit are loaded.
        p_unit = units + tl.minimum((i + 1) // STEPS, n_units - 1) * UNIT_FIELDS
        row = tl.load(p_unit)
        if MASKED:
            seen, block, i_b = tl.load(p_unit + 1), tl.load(p_unit + 2), tl.load(p_unit + 3)
            k_len, position = tl.load(p_unit + 4), tl.load(p_unit + 5)


@triton.jit(do_not_specialize=_LENGTHS)
def attend_few(
    queries,  # QueryRows
    keys,  # KeyRows
    values,
    table,  # PageTable
    k_tma,  # descriptors of the same keys and values, used for fully visible blocks; or None
    v_tma,
    partials,  # Partials, rows [total_q, kv_heads, TOPK, group, dim]
    few,  # FewLists
    scale,  # the softmax scale times log2(e), not negative
    unit_bound,
    num_kv_heads,
    num_pages,
    TILE: tl.constexpr,  # RowTile
    CUT: tl.constexpr,  # KeyCut
    TOPK: tl.constexpr,
    NEGATIVE: tl.constexpr,  # whether the softmax scale is negative
    STAGES: tl.constexpr,
    HOLD: tl.constexpr,
):
    """Attends to all units and writes their partials. The grid is (shares of the units, KV heads * parts of the group)."""
    # 1. The program finds its share of the units.
    i_h, i_part = tl.program_id(1) // TILE.parts, tl.program_id(1) % TILE.parts
    i_p, n_p = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    n_front, n_back = tl.load(few.num_units + i_h * COUNT_FIELDS), tl.load(few.num_units + i_h * COUNT_FIELDS + 1)
    i_front, i_back = (i_p * n_front // n_p).to(tl.int32), (i_p * n_back // n_p).to(tl.int32)
    n_front, n_back = ((i_p + 1) * n_front // n_p).to(tl.int32) - i_front, ((i_p + 1) * n_back // n_p).to(tl.int32) - i_back

    # 2. It finds what it reads and writes of its head.
    head = i_part * TILE.heads + tl.arange(0, TILE.tokens * TILE.heads) % TILE.heads
    q = queries.data + i_h * TILE.group * queries.s_head
    queries = QueryRows(q, queries.s_token, queries.s_head, queries.s_dim, None, 0)
    k_head = HeadRows(keys, keys.data + i_h.to(tl.int64) * keys.s_head, 0)
    v_head = HeadRows(values, values.data + i_h.to(tl.int64) * values.s_head, 0)
    lse = partials.lse + i_h.to(tl.int64) * TOPK * TILE.group
    partials = Partials(partials.rows + i_h.to(tl.int64) * TOPK * TILE.group * TILE.dim, lse)

    # 3. It attends to units whose queries see the whole block, then to the others.
    first = i_h.to(tl.int64) * unit_bound + i_front
    _walk(
        queries, k_head, v_head, k_tma, v_tma, table, partials,
        few.units + first * UNIT_FIELDS, few.unit_entries + first * TILE.tokens, n_front,
        scale, head, i_h, num_kv_heads, num_pages, TILE, CUT, TOPK, NEGATIVE, not CUT.by_row, STAGES, HOLD,
    )  # fmt: skip
    first = (i_h + 1).to(tl.int64) * unit_bound - i_back - n_back
    _walk(
        queries, k_head, v_head, None, None, table, partials,
        few.units + first * UNIT_FIELDS, few.unit_entries + first * TILE.tokens, n_back,
        scale, head, i_h, num_kv_heads, num_pages, TILE, CUT, TOPK, NEGATIVE, True, 1, HOLD,
    )  # fmt: skip


def launch_few(call: PrefillCall, few: FewLists) -> None:
    """Launches attention of the tiles that do not stay together: it cuts units, writes partials and merges them."""
    keys, plan, config = call.keys, call.plan, call.config
    num_units = most_units(plan.total_q * plan.topk, plan.num_buckets, config.union_tokens)
    batch = call.bounds.cu_q.numel() - 1
    launch_kernel(
        few_units,
        (keys.heads, ceil_div(plan.num_buckets, config.few_buckets)),
        call.bounds,
        keys.k.table,
        few,
        keys.heads,
        batch,
        (batch - 1).bit_length(),
        plan.num_buckets,
        plan.limits.room,
        num_units,
        keys.k.num_pages,
        TOKENS=config.union_tokens,
        BLOCK=plan.block_size,
        PAGE_SIZE=keys.page_size if keys.by_row else 0,
        STEP=SCAN_STEP,
        BUCKETS=config.few_buckets,
        AT_ONCE=UNITS_AT_ONCE,
        num_warps=4,
    )
    partials = partials_of(call, plan.total_q)
    shares = ceil_div(config.few_programs * facts(call.result.lse.device).num_sms, keys.heads * plan.parts)
    launch_kernel(
        attend_few,
        (min(shares, num_units), keys.heads * plan.parts),
        call.queries,
        *keys.operands,
        *call.tma,
        partials,
        few,
        call.scale,
        num_units,
        keys.heads,
        keys.k.num_pages,
        TILE=call.row_tile(config.union_tokens),
        CUT=KeyCut(plan.block_size, config.union_keys, keys.page_size, keys.steps_by_row(config, plan.block_size)),
        TOPK=plan.topk,
        NEGATIVE=call.negative,
        STAGES=config.union_stages,
        HOLD=config.few_hold,
        num_warps=config.union_warps,
        num_stages=config.union_stages,
    )
    shares = config.union_tokens // config.combine_tokens
    combine(call, partials, few.slots, 0, plan.num_tiles, shares, 2 * config.combine_warps)
