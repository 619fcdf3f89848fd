# SPDX-License-Identifier: MIT
# ruff: noqa: RET505 (kernels return from branches on constants)
"""Scores of NVFP4 keys of 128 elements for up to four rows: one warp a program, no exchange between threads until a block ends.

Keys are copied to shared memory CHUNK at a time, one or more ahead: loads into registers the compiler moves next to their use.
From there four neighbouring lanes take a key, 32 elements each and the two scales of these. They convert them in registers,
into float16 times 2**-14, scales included, which is exact, and that is the left operand of the matrix instruction: the order of
a sum is free, so lanes keep their elements, and the queries are put in the order that results, once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from openmsa.primitives.codes import ASM, e2m1_parts, e4m3_bytes
from openmsa.primitives.queries import float16_rows, load_rows, query_numbers, row_factors, spread_rows
from openmsa.primitives.rows import exists, page_number, row_in_page, tile_start
from openmsa.primitives.scoring import (
    RUNTIME_LENGTHS,
    rows_of,
    sequence_bounds,
    store_maxima,
    store_visible,
    tiles_of,
    unspread,
)

STEP = tl.constexpr(32)
"""Keys that a warp multiplies at a time."""
# Eight e2m1 codes of a word and two equal float16 factors as four words of float16, the lowest nibbles first.
SCALED = tl.constexpr("""{ .reg .b32 a, b, c, sign; mov.b32 sign, 0x80808080;
shl.b32 a, $4, 4; shl.b32 b, $4, 1; lop3.b32 a, a, b, sign, 0xE4; and.b32 c, a, 0x8E008E00; mul.rn.f16x2 $2, c, $5;
shl.b32 a, a, 8; and.b32 c, a, 0x8E008E00; mul.rn.f16x2 $0, c, $5;
shr.b32 b, $4, 3; lop3.b32 a, $4, b, sign, 0xE4; and.b32 c, a, 0x8E008E00; mul.rn.f16x2 $3, c, $5;
shl.b32 a, a, 8; and.b32 c, a, 0x8E008E00; mul.rn.f16x2 $1, c, $5; }""")
E4M3_PAIR = tl.constexpr("{ .reg .b32 a; cvt.rn.f16x2.e4m3x2 a, $2; mov.b32 {$0, $1}, a; }")


@triton.jit
def scale_pairs(b_g, NATIVE: tl.constexpr):
    """Codes of two e4m3 scales each, int16 [keys, 4], as float16 [keys, 4, 2]."""
    if ASM and NATIVE:
        FP16: tl.constexpr = (tl.float16, tl.float16)
        low, high = tl.inline_asm_elementwise(E4M3_PAIR, "=h,=h,h", [b_g], dtype=FP16, is_pure=True, pack=1)
        return tl.join(low, high)
    else:
        return tl.join(e4m3_bytes(b_g), e4m3_bytes(b_g >> 8)).to(tl.float16)


@triton.jit
def scaled_codes(b_k, b_x):
    """Codes int16 [keys, 32] times float16 factors [keys, 32] as `lane_keys`."""
    KEYS: tl.constexpr = b_k.shape[0]
    if ASM:
        FP16: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        parts = tl.inline_asm_elementwise(SCALED, "=r,=r,=r,=r,r,r", [b_k, b_x], dtype=FP16, is_pure=True, pack=2)
        x = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
    else:
        parts = e2m1_parts(b_k, tl.float16)
        x = tl.join(tl.join(parts[0] * b_x, parts[1] * b_x), tl.join(parts[2] * b_x, parts[3] * b_x))
    return x.reshape(KEYS, 4, 2, 4, 2, 2).permute(0, 4, 5, 2, 1, 3).reshape(KEYS, 128)


@triton.jit
def lane_keys(b_k, b_g, NATIVE: tl.constexpr):
    """Codes int16 [keys, 32] and scales int16 [keys, 4] as float16 numbers times 2**-14, [keys, 128], in the order of
    `lane_queries`."""
    KEYS: tl.constexpr = b_k.shape[0]
    return scaled_codes(b_k, tl.broadcast_to(scale_pairs(b_g, NATIVE)[:, :, :, None], [KEYS, 4, 2, 4]).reshape(KEYS, 32))


@triton.jit
def lane_queries(b_q):
    """Rows of queries [rows, 128] as float16 columns [128, 8], and what multiplies their scores in the end, but for 2**8, with
    which it may be infinite. Elements, numbered [lane, scale, item, high bit, low bit of the nibble in its item], are put as
    [low bit, high bit, scale, lane, item]."""
    ROWS: tl.constexpr = b_q.shape[0]
    b_q, b_up = float16_rows(b_q)
    b_q = b_q.reshape(ROWS, 4, 2, 4, 2, 2).permute(0, 5, 4, 2, 1, 3).reshape(ROWS, 128)
    return spread_rows(b_q, 8).T, b_up


@triton.jit
def lane_tile(
    keys, page_row, i_h, i_k, k_start, num_pages, s_page, s_head, s_token, s_gp, s_gh, s_gt,
    MODE: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of the tile that starts with key i_k: address of its first key, where its scales start, in the strides' unit, and whether
    it exists."""
    zero = tl.full([], 0, tl.int64)
    i_page, there, o_row = zero, zero == 0, zero + k_start + i_k
    if MODE != 0:
        i_k = tl.full([], 0, tl.int32) + i_k
        i_page = tl.load(page_row + page_number(i_k, PAGE_SIZE))
        there = exists(i_page, num_pages)
        i_page = tl.where(there, i_page, 0).to(tl.int64)
        o_row = zero + row_in_page(i_k, PAGE_SIZE, TILE)
    p_k = keys + i_page * s_page + o_row * s_token + i_h.to(tl.int64) * s_head
    return p_k, i_page * s_gp + o_row * s_gt + i_h.to(tl.int64) * s_gh, there


@triton.jit
def lane_loads(p_k, scales, o_g, i_n, m_k, s_token, s_dim, s_gt, SWIZZLED: tl.constexpr):
    """Codes int16 [STEP, 32] and scales, two an int16, [STEP, 4] of keys i_n and following of a tile, where m_k. Words with
    two pairs are read: asynchronous copies move four bytes and more."""
    o_n, o_p = tl.arange(0, STEP)[:, None], tl.arange(0, 2)[None, :]
    if SWIZZLED:
        o_row = o_g + i_n * s_gt + o_n * s_gt
        p_g = scales + ((o_row // 128 * 2 + o_p) * 128 + o_row % 32 * 4 + o_row % 128 // 32)
    else:
        p_g = (scales + (o_g + i_n * s_gt)) + (o_n * s_gt + o_p)
    p_k = (p_k + i_n * s_token) + (o_n * s_token + tl.arange(0, 32)[None, :] * s_dim)
    b_k, b_g = tl.load(p_k, mask=m_k, other=0), tl.load(p_g, mask=m_k, other=0)
    b_g = tl.broadcast_to(b_g[:, :, None], [STEP, 2, 2]) >> (tl.arange(0, 2) * 16)[None, None, :]
    return b_k, b_g.to(tl.int16).reshape(STEP, 4)


@triton.jit
def lane_products(b_k, b_g, b_q, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    """Products of STEP keys with rows, float32 [STEP, ROWS]."""
    return unspread(tl.dot(lane_keys(b_k, b_g, NATIVE), b_q), ROWS)


@triton.jit
def lane_maxima_masked(
    b_q, keys, scales, page_row, i_h, i_k, i_last, k_start, k_len, num_pages,
    s_page, s_head, s_token, s_dim, s_gp, s_gh, s_gt,
    MODE: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, SWIZZLED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Best product of each row with the keys of a tile that exist and that it sees, times 2**8, [rows]."""
    ROWS: tl.constexpr = i_last.shape[0]
    p_k, o_g, there = lane_tile(
        keys, page_row, i_h, i_k, k_start, num_pages, s_page, s_head, s_token, s_gp, s_gh, s_gt, MODE, PAGE_SIZE, TILE
    )
    best = tl.full([STEP, ROWS], float("-inf"), tl.float32)
    for i_n in tl.range(0, TILE, STEP, num_stages=1):
        o_k = i_k + i_n + tl.arange(0, STEP)
        b_k, b_g = lane_loads(p_k, scales, o_g, i_n, ((o_k < k_len) & there)[:, None], s_token, s_dim, s_gt, SWIZZLED)
        s = lane_products(b_k, b_g, b_q, ROWS, NATIVE)
        best = tl.maximum(best, tl.where(o_k[:, None] <= i_last[None, :], s, float("-inf")))
    return tl.max(best, 0) * 256.0


@triton.jit(do_not_specialize=RUNTIME_LENGTHS)
def lane_kernel(
    q, q_scale, keys, scales, k_factor, page_table, cu_q, cu_k, seq_lens, q_offset, scores, visible,
    s_qt, s_qh, s_qd, s_qs, s_page, s_head, s_token, s_dim, s_gp, s_gh, s_gt, s_kf, s_table, s_sh, s_st, s_sb,
    num_blocks, num_pages, capacity, max_keys, tiles_per_split,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    PARTS: tl.constexpr, SWIZZLED: tl.constexpr, NATIVE: tl.constexpr, PRODUCT: tl.constexpr, ROWS: tl.constexpr,
    MODE: tl.constexpr, PAGE_SIZE: tl.constexpr, FILL: tl.constexpr, PDL: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (splits, row tiles, batch * key heads), as of `score_kernel`. CHUNK: keys that are copied at a time."""
    if PDL:
        gdc_launch_dependents()
    i_split, i_m = tl.program_id(0), tl.program_id(1)
    i_s, i_h = tl.program_id(2) // KEY_HEADS, tl.program_id(2) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(cu_q, cu_k, seq_lens, q_offset, i_s, capacity, max_keys)
    if i_m * ROWS >= q_len * GROUP:
        return
    o_r, m_row, i_last, seen_by_all, seen_by_any = rows_of(i_m, q_len, k_len, offset, GROUP, ROWS)
    if visible is not None:
        store_visible(visible, q_start, o_r, m_row, i_last, i_split + i_h == 0, GROUP, BLOCK)
    first, last, i_full, i_end = tiles_of(i_split, tiles_per_split, num_blocks, seen_by_all, seen_by_any, BLOCK, 1, PARTS)
    page_row = page_table
    if MODE != 0:
        page_row += i_s.to(tl.int64) * s_table
    s_sb = tl.full([], 0, tl.int64) + s_sb
    o_s = (i_h * GROUP + o_r % GROUP).to(tl.int64) * s_sh + (q_start + o_r // GROUP).to(tl.int64) * s_st
    b_q = load_rows(q + q_start.to(tl.int64) * s_qt, o_r, q_len, i_h * GROUP, s_qt, s_qh, s_qd, GROUP, 128, 128)
    b_q, b_f = lane_queries(query_numbers(b_q, PRODUCT))
    if q_scale is not None or k_factor is not None:
        b_f *= row_factors(q_scale, k_factor, tl.where(m_row, o_r, 0), i_h, s_qs, s_kf, GROUP)

    best = tl.full([ROWS], float("-inf"), tl.float32)  # of the parts of a block so far
    CHUNKS: tl.constexpr = TILE // CHUNK
    b_m = tl.full([STEP, ROWS], float("-inf"), tl.float32)  # of the chunks of a tile so far
    for i in tl.range(first * CHUNKS, i_full * CHUNKS, num_stages=STAGES):
        i_t = i // CHUNKS
        p_k, o_g, there = lane_tile(
            keys, page_row, i_h, tile_start(i_t, BLOCK, KEYS, 1, PARTS), k_start, num_pages,
            s_page, s_head, s_token, s_gp, s_gh, s_gt, MODE, PAGE_SIZE, TILE,
        )  # fmt: skip
        for i_n in tl.static_range(0, CHUNK, STEP):
            i_n += i % CHUNKS * CHUNK
            b_k, b_g = lane_loads(p_k, scales, o_g, i_n, there, s_token, s_dim, s_gt, SWIZZLED)
            b_m = tl.maximum(b_m, lane_products(b_k, b_g, b_q, ROWS, NATIVE))
        if CHUNKS == 1 or i % CHUNKS == CHUNKS - 1:
            m = tl.max(b_m, 0) * 256.0
            if PARTS == 2:
                m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
                best = m
            store_maxima(scores + o_s, m, b_f, i_t, num_blocks, s_sb, m_row, 1, PARTS)
            b_m = tl.full([STEP, ROWS], float("-inf"), tl.float32)
    for i_t in tl.range(tl.maximum(first, i_full), i_end, num_stages=1):
        m = lane_maxima_masked(
            b_q, keys, scales, page_row, i_h, tile_start(i_t, BLOCK, KEYS, 1, PARTS), i_last, k_start, k_len, num_pages,
            s_page, s_head, s_token, s_dim, s_gp, s_gh, s_gt, MODE, PAGE_SIZE, TILE, SWIZZLED, NATIVE,
        )  # fmt: skip
        if PARTS == 2:
            m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
            best = m
        store_maxima(scores + o_s, m, b_f, i_t, num_blocks, s_sb, m_row, 1, PARTS)
    if FILL:
        unseen = tl.full([ROWS, 16], float("-inf"), tl.float32)
        stop = last // PARTS
        for i_b in range(tl.maximum(first, i_end) // PARTS, stop, 16):
            o_b = i_b + tl.arange(0, 16)
            m_s = m_row[:, None] & (o_b < stop)[None, :]
            tl.store(scores + o_s[:, None] + (o_b * s_sb)[None, :], unseen, mask=m_s)
