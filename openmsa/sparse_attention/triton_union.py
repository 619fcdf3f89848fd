# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This kernel attends in union tiles: neighbouring queries read the union of their blocks, masked by membership, at once.

A key that another query of the tile reads and this one does not has weight exactly 0 here, but it is multiplied: rows of K
and V that some query of the tile reads must be finite. Rows that none reads are not loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.kv_cache.triton_numbers import NVFP4
from openmsa.primitives.query_parts import in_range
from openmsa.primitives.results import inverse_sums, store_result
from openmsa.primitives.softmax import nothing_read, online_step
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
    row_place,
)
from openmsa.sparse_attention.triton_lists import SIZE_FIELDS, PrefillCall, load_tile


@triton.jit
def _load_step(
    head, tma, page, at, m_key, i_h, num_kv_heads,
    FORM: tl.constexpr, TYPE: tl.constexpr, TILE: tl.constexpr, CUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Loads keys or values of a step as numbers [keys, dim_pad], through the copy engine where `tma` is given. With MASKED page
    and row are those of each key; without, those of the first key, behind which the others lie."""
    if tma is not None:
        b_x = converted(tl.reshape(tma.load([page, i_h, at, 0]), [CUT.keys, TILE.dim_pad]), TYPE)
    else:
        o_n = tl.arange(0, CUT.keys)
        if not MASKED and FORM.format == NVFP4:  # Its scales may lie by row number.
            at += o_n.to(tl.int64)
            page += at * 0
        elif not MASKED:
            first = head.data + page * head.rows.s_page + at * head.rows.s_row
            head = HeadRows(head.rows, first, head.scales)
            at, page = o_n.to(tl.int64), page * 0
        b_x, b_g = load_codes(
            head, page, at, m_key, i_h, num_kv_heads, FORM, TILE.dim, TILE.dim_pad, CUT.page_size, MASKED
        )  # fmt: skip
        b_x = numbers(b_x, b_g, FORM, TYPE)
    return b_x


@triton.jit
def _span(
    state,  # sums of weighted values, greatest logits, sums of weights
    b_q,
    scales,  # the scale of logits as one number twice, or one a row: [ROWS] and [ROWS, 1]
    seen,  # the token of each row, the last key that it sees, and the last one that any row sees
    keys,  # HeadRows
    values,
    k_tma,
    v_tma,
    entries,  # where ids, rows and bits of the union list lie
    begin,
    end,
    first_row,
    table_row,
    s_table_page,
    num_pages,
    i_h,
    num_kv_heads,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    PRODUCTS: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Returns the state after entries [begin, end) of a union list. MASKED: keys may lie past block, sequence or query."""
    BLOCK: tl.constexpr = CUT.block
    KEYS: tl.constexpr = CUT.keys
    STEPS: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    acc, m_i, l_i = state
    token, last_key, last_of_tile = seen
    p_ids, p_rows, p_bits = entries
    o_n = tl.arange(0, KEYS)
    # What a step needs of the list is loaded a step ahead.
    bits, block, row = 0, 0, 0
    if begin < end:
        bits = tl.load(p_bits + begin)
        block = tl.load(p_ids + begin)
        row = tl.load(p_rows + begin)
    for i in tl.range(begin * STEPS, end * STEPS, num_stages=STAGES):
        # 1. Keys and values of this step are found and loaded.
        o_key = i % STEPS * KEYS + o_n  # places in the block
        i_next = tl.minimum((i + 1) // STEPS, end - 1)
        m_key = o_key >= 0
        if k_tma is not None:
            at = row + i % STEPS * KEYS
            page = at // CUT.page_size if CUT.page_size > 0 else 0
            at = at % CUT.page_size if CUT.page_size > 0 else at
        elif MASKED:
            position = block * BLOCK + o_key
            m_key = (o_key < BLOCK) & (position <= last_of_tile)
            page, at = key_place(position, m_key, first_row, table_row, num_pages, s_table_page, CUT.page_size)
        else:
            page, at = row_place(row + i % STEPS * KEYS, CUT.page_size)
        b_k = _load_step(keys, k_tma, page, at, m_key, i_h, num_kv_heads, K_FORM, PRODUCTS.qk, TILE, CUT, MASKED)
        b_v = _load_step(values, v_tma, page, at, m_key, i_h, num_kv_heads, V_FORM, PRODUCTS.v, TILE, CUT, MASKED)
        # 2. Logits are multiplied; those of keys past block, sequence or query are -inf.
        s = tl.dot(b_q, tl.trans(b_k))  # [ROWS, KEYS]
        if K_FORM.factor == 2:
            p_factor = factor_at(keys.rows, i_h, tl.cast(page, tl.int64), True)
            s *= tl.load(p_factor, mask=m_key, other=1.0)[None, :] if MASKED else tl.load(p_factor)
        if MASKED:
            s = tl.where((o_key < BLOCK)[None, :] & (position[None, :] <= last_key[:, None]), s, -float("inf"))
        # 3. The softmax goes on in the rows whose query selected the block.
        m_member = ((bits >> token) & 1) != 0  # [ROWS]
        p, m_i, l_i, shrink = online_step(s, m_i, l_i, scales[0], scales[1], m_member)
        if V_FORM.factor == 2:
            p_factor = factor_at(values.rows, i_h, tl.cast(page, tl.int64), True)
            p *= tl.load(p_factor, mask=m_key, other=0.0)[None, :] if MASKED else tl.load(p_factor)
        acc = tl.dot(p.to(PRODUCTS.v), b_v, acc * shrink[:, None])
        # 4. The next step's entry is loaded.
        bits = tl.load(p_bits + i_next)
        if MASKED:
            block = tl.load(p_ids + i_next)
        else:
            row = tl.load(p_rows + i_next)
    return acc, m_i, l_i


@triton.jit(do_not_specialize=["num_pages", "capacity"])
def attend_union(
    queries,  # QueryRows
    keys,  # KeyRows
    values,
    table,  # PageTable
    k_tma,  # descriptors of the same keys and values, used for fully visible blocks; or None
    v_tma,
    result,  # Result
    cu_k,
    union,  # UnionLists
    scale,  # the softmax scale times log2(e), not negative
    num_kv_heads,
    num_pages,
    capacity,
    TILE: tl.constexpr,  # RowTile
    CUT: tl.constexpr,  # KeyCut
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    PRODUCTS: tl.constexpr,
    NEGATIVE: tl.constexpr,  # whether the softmax scale is negative
    STAGES: tl.constexpr,
):
    """Attends with the queries of a union tile. A program serves a tile, a KV head and a part of its group."""
    # 1. The program finds its tile, and returns unless it stays together.
    HEADS: tl.constexpr = TILE.heads
    ROWS: tl.constexpr = TILE.tokens * HEADS
    i_list = tl.program_id(0) // TILE.parts
    i_part = tl.program_id(0) % TILE.parts
    size = tl.load(union.sizes + i_list * SIZE_FIELDS)
    if size < 0:
        return
    i_h = i_list % num_kv_heads
    first, tokens, i_b, position = load_tile(union.tiles, i_list // num_kv_heads)
    if tokens <= 0:
        return
    k_begin = tl.load(cu_k + i_b)
    k_len = tl.load(cu_k + i_b + 1) - k_begin

    # 2. It loads the tile's queries as factors of products with keys.
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, TILE.dim_pad)
    token = o_r // HEADS
    head = i_part * HEADS + o_r % HEADS
    m_row = (token < tokens) & (head < TILE.group)
    m_q = m_row[:, None] & (o_d < TILE.dim)[None, :]
    row = (first + token).to(tl.int64)
    head += i_h * TILE.group
    p_q = queries.data + (row * queries.s_token + head * queries.s_head)[:, None] + o_d[None, :] * queries.s_dim
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    if K_FORM.factor == 1:
        scale = tl.maximum(scale * tl.load(factor_at(keys, i_h, 0, False)), SMALLEST_SCALE)
    # Each row has a scale: that of its queries, and what brings bfloat16 queries into float16's range, in which keys are exact.
    if queries.factor is not None:
        p_factor = queries.factor + head * queries.s_factor_head
        scale = tl.maximum(scale * tl.load(p_factor, mask=m_row, other=1.0), SMALLEST_SCALE)  # [ROWS]
    if PRODUCTS.in_range:
        b_q, scale = in_range(b_q, scale)
    b_q = converted(b_q, PRODUCTS.qk)
    if NEGATIVE:
        b_q = (-b_q.to(tl.float32)).to(PRODUCTS.qk)
    ROW_SCALE: tl.constexpr = (queries.factor is not None) or PRODUCTS.in_range
    scales = (scale, scale[:, None] if ROW_SCALE else scale)

    # 3. It walks blocks that all these queries see whole, then the others.
    seen = (token, tl.minimum(position + token, k_len - 1), tl.minimum(position + tokens - 1, k_len - 1))
    p_k, p_ks = head_start(keys, i_h, K_FORM)
    p_v, p_vs = head_start(values, i_h, V_FORM)
    k_head, v_head = HeadRows(keys, p_k, p_ks), HeadRows(values, p_v, p_vs)
    table_row = table.ids
    if CUT.page_size > 0:
        table_row += i_b * table.s_sequence
    state = nothing_read(ROWS, TILE.dim_pad)
    whole = 0
    o_list = i_list.to(tl.int64) * capacity
    entries = (union.ids + o_list, union.rows + o_list, union.bits + o_list)
    if CUT.by_row:
        whole = tl.load(union.sizes + i_list * SIZE_FIELDS + 1)
        state = _span(
            state, b_q, scales, seen, k_head, v_head, k_tma, v_tma, entries, 0, whole, k_begin, table_row, table.s_page,
            num_pages, i_h, num_kv_heads, TILE, CUT, K_FORM, V_FORM, PRODUCTS, False, STAGES,
        )  # fmt: skip
    acc, m_i, l_i = _span(
        state, b_q, scales, seen, k_head, v_head, None, None, entries, whole, size, k_begin, table_row, table.s_page,
        num_pages, i_h, num_kv_heads, TILE, CUT, K_FORM, V_FORM, PRODUCTS, True, 1,
    )  # fmt: skip

    # 4. It stores the result.
    inverse = inverse_sums(l_i)
    if V_FORM.factor == 1:
        inverse *= tl.load(factor_at(values, i_h, 0, False))
    o_row = row * num_kv_heads * TILE.group + head
    store_result(result, o_row, acc, inverse, m_i, l_i, scale, m_row, TILE.dim)


def launch_union(call: PrefillCall) -> None:
    """Launches attention of the tiles that stay together."""
    keys, plan, config = call.keys, call.plan, call.config
    launch_kernel(
        attend_union,
        (plan.num_tiles * keys.heads * plan.parts,),
        call.queries,
        *keys.operands,
        *call.tma,
        call.result,
        call.bounds.cu_k,
        call.lists.union,
        call.scale,
        keys.heads,
        keys.k.num_pages,
        plan.limits.capacity,
        TILE=call.row_tile(config.union_tokens),
        CUT=KeyCut(plan.block_size, config.union_keys, keys.page_size, keys.steps_by_row(config, plan.block_size)),
        **keys.forms,
        PRODUCTS=products(call.queries.data.dtype, keys.dtype, keys.k.form, keys.v.form, True),
        NEGATIVE=call.negative,
        STAGES=config.union_stages,
        num_warps=config.union_warps,
        num_stages=config.union_stages,
    )
