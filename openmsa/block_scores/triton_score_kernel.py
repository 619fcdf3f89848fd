# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Block scores are computed on the GPU by programs that hold one tile of (query, head) rows each and walk the keys.

The walk has no mask as long as every key is visible to every row of the tile; only the diagonal has one. Keys come through the
copy engine (TMA) where their strides allow it. A context may be cut into splits, so that few queries on a long prefix fill the
card: splits write different blocks of the same scores. With at most 64 rows a sequence (decode) the product is transposed:
keys on the tensor cores' long side, so that a tile is read from shared memory once and never passes through registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from openmsa.primitives.queries import query_factors, row_factors
from openmsa.primitives.scoring import (
    RUNTIME_LENGTHS,
    rows_of,
    score_tile,
    scored,
    sequence_bounds,
    store_maxima,
    store_unseen,
    store_visible,
    tiles_of,
)
from openmsa.primitives.tiles import tile_start


@triton.jit(do_not_specialize=RUNTIME_LENGTHS)
def score_kernel(
    q, keys, tma, table, bounds, scores, num_blocks, num_pages, capacity, max_keys, tiles_per_split,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, PAGING: tl.constexpr, CUT: tl.constexpr,
    PRODUCT: tl.constexpr, HOLD: tl.constexpr, FILL: tl.constexpr, COLLECT: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The grid is (splits, row tiles, batch * key heads); late rows, which see most keys, start first. HOLD: rows stay in
    registers. FILL: scores of blocks that a row does not see are -inf, not left. COLLECT: rows of scores are written eight
    blocks, a sector, at a time. PDL: let the kernel behind this one be launched while this one runs. EVEN: see below."""
    if PDL:
        gdc_launch_dependents()
    ROWS: tl.constexpr = PRODUCT.rows
    # 1. The program finds its rows, keys and tiles.
    i_split = tl.program_id(0)
    i_m = tl.num_programs(1) - 1 - tl.program_id(1)
    i_s, i_h = tl.program_id(2) // KEY_HEADS, tl.program_id(2) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(bounds, i_s, capacity, max_keys)
    if i_m * ROWS >= q_len * GROUP:
        return

    o_r, m_row, i_last, seen_by_all, seen_by_any = rows_of(i_m, q_len, k_len, offset, GROUP, ROWS)
    if scores.visible is not None:
        store_visible(scores.visible, q_start, o_r, m_row, i_last, i_split + i_h == 0, GROUP, CUT.block)
    if EVEN:  # The splits share the tiles that the rows see, EVEN at a time; nobody has the others, so that FILL must be False.
        even = tl.cdiv(tl.cdiv(seen_by_any, CUT.block * CUT.sub) * CUT.parts, tl.num_programs(0) * EVEN) * EVEN
        tiles_per_split = tl.minimum(tiles_per_split, tl.maximum(even, EVEN))
    first, last, i_full, i_end = tiles_of(i_split, tiles_per_split, num_blocks, seen_by_all, seen_by_any, CUT)
    page_row = table.ids
    if PAGING.mode != 0:
        page_row += i_s.to(tl.int64) * table.s_sequence
    s_block = tl.full([], 0, tl.int64) + scores.s_block
    i_token = (q_start + o_r // GROUP).to(tl.int64)
    o_s = (i_h * GROUP + o_r % GROUP).to(tl.int64) * scores.s_head + i_token * scores.s_token
    # 2. Rows of queries become factors.
    b_q = query_factors(q, q_start, q_len, o_r, i_h, GROUP, FORM, PRODUCT, HOLD)
    b_f = row_factors(q, keys, tl.where(m_row, o_r, 0), i_h, FORM, GROUP)
    if PRODUCT.grouped:
        b_q, b_up = b_q
        b_f = b_up if b_f is None else b_f * b_up

    # 3. Tiles that all rows see whole are scored without a mask over keys.
    if COLLECT:
        o_8 = tl.arange(0, 8)
        p_8 = scores.maxima + tl.multiple_of(o_s, 4)[:, None] + o_8[None, :]
        held = tl.full([ROWS, 8], float("-inf"), tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)  # maxima of the parts of a block so far
    for i_t in tl.range(first, i_full, num_stages=STAGES):
        i_k = tile_start(i_t, CUT)
        m = score_tile(
            b_q, keys, tma, page_row, i_h, i_k, i_last, k_start, k_len, num_pages, FORM, PAGING, CUT, PRODUCT, False, False
        )  # fmt: skip
        if COLLECT:
            held = tl.where(o_8[None, :] == i_t % 8, m[:, None], held)
            if i_t % 8 == 7:
                tl.store(p_8 + i_t // 8 * 8, scored(held, b_f), mask=m_row[:, None])
        else:
            if CUT.parts == 2:
                m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
                best = m
            store_maxima(scores.maxima + o_s, m, b_f, i_t, num_blocks, s_block, m_row, CUT.sub, CUT.parts)
    if COLLECT:  # the rest of the last eight is written
        o_held = i_full // 8 * 8 + o_8
        tl.store(
            p_8 + i_full // 8 * 8, scored(held, b_f), mask=m_row[:, None] & ((o_held >= first) & (o_held < i_full))[None, :]
        )
    # 4. Tiles on the diagonal and at the end of the keys are scored with a mask.
    for i_t in tl.range(tl.maximum(first, i_full), i_end, num_stages=1):
        i_k = tile_start(i_t, CUT)
        m = score_tile(
            b_q, keys, tma, page_row, i_h, i_k, i_last, k_start, k_len, num_pages, FORM, PAGING, CUT, PRODUCT, True, True
        )  # fmt: skip
        if CUT.parts == 2:
            m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
            best = m
        store_maxima(scores.maxima + o_s, m, b_f, i_t, num_blocks, s_block, m_row, CUT.sub, CUT.parts)
    # 5. Blocks that no row sees are filled.
    if FILL:
        store_unseen(scores.maxima + o_s, first, last, i_end, num_blocks, s_block, m_row, CUT)
