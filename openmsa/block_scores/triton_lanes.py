# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""NVFP4 keys of 128 elements are scored for up to four rows by one warp a program; its threads exchange nothing until a block
ends.

Keys are copied to shared memory CHUNK at a time, one or more ahead: loads into registers the compiler moves next to their use.
From there four neighbouring lanes take a key, 32 elements each and the two scales of these. They convert them in registers,
into float16 times 2**-14, scales included, which is exact, and that is the left operand of the matrix instruction: the order of
a sum is free, so lanes keep their elements, and the queries are put in the order that results, once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from openmsa.block_scores.triton_route import RUNTIME_LENGTHS, rows_of, store_maxima, store_unseen, store_visible, tiles_of
from openmsa.kv_cache.triton_numbers import swizzled_word
from openmsa.primitives import operands
from openmsa.primitives.codes import ASM, e2m1_parts, e4m3_bytes
from openmsa.primitives.operands import KeyRows
from openmsa.primitives.query_parts import float16_rows, spread_rows, unspread
from openmsa.primitives.rows import PAGES, Form, KeyTiles, Tile, exists, load_rows, page_number, row_in_page, tile_start
from openmsa.primitives.scoring import query_numbers, row_factors, sequence_bounds

STEP = tl.constexpr(32)
"""A warp multiplies so many keys at a time."""
# This makes four words of float16 of eight e2m1 codes of a word and two equal float16 factors, the lowest nibbles first.
SCALED = tl.constexpr("""{ .reg .b32 a, b, c, sign; mov.b32 sign, 0x80808080;
shl.b32 a, $4, 4; shl.b32 b, $4, 1; lop3.b32 a, a, b, sign, 0xE4; and.b32 c, a, 0x8E008E00; mul.rn.f16x2 $2, c, $5;
shl.b32 a, a, 8; and.b32 c, a, 0x8E008E00; mul.rn.f16x2 $0, c, $5;
shr.b32 b, $4, 3; lop3.b32 a, $4, b, sign, 0xE4; and.b32 c, a, 0x8E008E00; mul.rn.f16x2 $3, c, $5;
shl.b32 a, a, 8; and.b32 c, a, 0x8E008E00; mul.rn.f16x2 $1, c, $5; }""")
E4M3_PAIR = tl.constexpr("{ .reg .b32 a; cvt.rn.f16x2.e4m3x2 a, $2; mov.b32 {$0, $1}, a; }")


def reads_lanes(keys: KeyTiles, tile: Tile) -> bool:
    """Says whether the kernel can read keys: NVFP4 of 128 elements, whole tiles of one block or a part
    of one, scales in words, offsets in a tile of 32 bits."""
    rows, form = keys.view.rows, keys.view.form
    if form.format != operands.NVFP4 or keys.view.dim != 128 or form.split != 4 or keys.paging.mode == PAGES:
        return False
    if (tile.tile, tile.keys, tile.sub) != (128, 128, 1) or rows.scales is None or rows.scales.itemsize < 4:
        return False
    return rows.data.numel() > 0 and tile.tile * max(rows.s_row, rows.s_scales_row * words_a_stride(rows, form)) < 2**31


def in_words(rows: KeyRows, form: Form) -> KeyRows:
    """Returns rows whose scales of groups, in words of four or eight, are taken as words of four, int32."""
    assert rows.scales is not None
    words = words_a_stride(rows, form)
    return KeyRows(
        rows.data,
        rows.s_page,
        rows.s_head,
        rows.s_row,
        rows.s_dim,
        rows.scales.view(torch.int32),
        rows.s_scales_page * words,
        rows.s_scales_head * words,
        rows.s_scales_row * words,
        rows.s_scales_group,
        rows.factor,
        s_factor_page=rows.s_factor_page,
        s_factor_head=rows.s_factor_head,
    )


def words_a_stride(rows: KeyRows, form: Form) -> int:
    """Says by what strides of scales are multiplied to count words of four; in the 128x4 layout they count rows, and stay."""
    assert rows.scales is not None
    return 1 if form.swizzled else rows.scales.itemsize // 4


@triton.jit
def scale_pairs(b_g, NATIVE: tl.constexpr):
    """Gives codes of two e4m3 scales each, int16 [keys, 4], as float16 [keys, 4, 2]."""
    if ASM and NATIVE:
        FP16: tl.constexpr = (tl.float16, tl.float16)
        low, high = tl.inline_asm_elementwise(E4M3_PAIR, "=h,=h,h", [b_g], dtype=FP16, is_pure=True, pack=1)
        return tl.join(low, high)
    else:
        return tl.join(e4m3_bytes(b_g), e4m3_bytes(b_g >> 8)).to(tl.float16)


@triton.jit
def scaled_codes(b_k, b_x):
    """Multiplies codes int16 [keys, 32] by float16 factors [keys, 32], in the form of `lane_keys`."""
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
    """Gives codes int16 [keys, 32] and scales int16 [keys, 4] as float16 numbers times 2**-14, [keys, 128], in the order of
    `lane_queries`."""
    KEYS: tl.constexpr = b_k.shape[0]
    return scaled_codes(b_k, tl.broadcast_to(scale_pairs(b_g, NATIVE)[:, :, :, None], [KEYS, 4, 2, 4]).reshape(KEYS, 32))


@triton.jit
def lane_queries(b_q):
    """Gives rows of queries [rows, 128] as float16 columns [128, 8], and what multiplies their scores in the end, but for 2**8,
    with which it may be infinite. Elements, numbered [lane, scale, item, high bit, low bit of the nibble in its item], are put
    as [low bit, high bit, scale, lane, item]."""
    ROWS: tl.constexpr = b_q.shape[0]
    b_q, b_up = float16_rows(b_q)
    b_q = b_q.reshape(ROWS, 4, 2, 4, 2, 2).permute(0, 5, 4, 2, 1, 3).reshape(ROWS, 128)
    return spread_rows(b_q, 8).T, b_up


@triton.jit
def lane_tile(keys, page_row, i_h, i_k, k_start, num_pages, PAGING: tl.constexpr, TILE: tl.constexpr):
    """Says where the tile that starts with key i_k lies: the address of its first key, where its scales start, in the strides'
    unit, and whether it exists."""
    zero = tl.full([], 0, tl.int64)
    i_page, there, o_row = zero, zero == 0, zero + k_start + i_k
    if PAGING.mode != 0:
        i_k = tl.full([], 0, tl.int32) + i_k
        i_page = tl.load(page_row + page_number(i_k, PAGING.page_size))
        there = exists(i_page, num_pages)
        i_page = tl.where(there, i_page, 0).to(tl.int64)
        o_row = zero + row_in_page(i_k, PAGING.page_size, TILE)
    p_k = keys.data + i_page * keys.s_page + o_row * keys.s_row + i_h.to(tl.int64) * keys.s_head
    o_g = i_page * keys.s_scales_page + o_row * keys.s_scales_row + i_h.to(tl.int64) * keys.s_scales_head
    return p_k, o_g, there


@triton.jit
def lane_loads(keys, p_k, o_g, i_n, m_k, SWIZZLED: tl.constexpr):
    """Loads codes int16 [STEP, 32] and scales, two an int16, [STEP, 4] of keys i_n and following of a tile, where m_k. Words
    with two pairs are read: asynchronous copies move four bytes and more."""
    scales, s_row = keys.scales, keys.s_scales_row
    o_n, o_p = tl.arange(0, STEP)[:, None], tl.arange(0, 2)[None, :]
    if SWIZZLED:
        o_row = o_g + i_n * s_row + o_n * s_row
        p_g = scales + swizzled_word(o_row, o_p, 2)
    else:
        p_g = (scales + (o_g + i_n * s_row)) + (o_n * s_row + o_p)
    p_k = (p_k + i_n * keys.s_row) + (o_n * keys.s_row + tl.arange(0, 32)[None, :] * keys.s_dim)
    b_k, b_g = tl.load(p_k, mask=m_k, other=0), tl.load(p_g, mask=m_k, other=0)
    b_g = tl.broadcast_to(b_g[:, :, None], [STEP, 2, 2]) >> (tl.arange(0, 2) * 16)[None, None, :]
    return b_k, b_g.to(tl.int16).reshape(STEP, 4)


@triton.jit
def lane_products(b_k, b_g, b_q, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    """Gives products of STEP keys with rows, float32 [STEP, ROWS]."""
    return unspread(tl.dot(lane_keys(b_k, b_g, NATIVE), b_q), ROWS)


@triton.jit
def lane_maxima_masked(
    b_q, keys, page_row, i_h, i_k, i_last, k_start, k_len, num_pages,
    FORM: tl.constexpr, PAGING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Takes the best product of each row with the keys of a tile that exist and that it sees, times 2**8, [rows]."""
    ROWS: tl.constexpr = i_last.shape[0]
    p_k, o_g, there = lane_tile(keys, page_row, i_h, i_k, k_start, num_pages, PAGING, TILE)
    best = tl.full([STEP, ROWS], float("-inf"), tl.float32)
    for i_n in tl.range(0, TILE, STEP, num_stages=1):
        o_k = i_k + i_n + tl.arange(0, STEP)
        b_k, b_g = lane_loads(keys, p_k, o_g, i_n, ((o_k < k_len) & there)[:, None], FORM.swizzled)
        s = lane_products(b_k, b_g, b_q, ROWS, FORM.native)
        best = tl.maximum(best, tl.where(o_k[:, None] <= i_last[None, :], s, float("-inf")))
    return tl.max(best, 0) * 256.0


@triton.jit(do_not_specialize=RUNTIME_LENGTHS)
def lane_kernel(
    q, keys, table, bounds, scores, num_blocks, num_pages, capacity, max_keys, tiles_per_split,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, PAGING: tl.constexpr, CUT: tl.constexpr,
    PRODUCT: tl.constexpr, FILL: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores blocks in a grid of (splits, row tiles, batch * key heads). keys: with scales in words of four. FILL, PDL: see
    `score_kernel`. CHUNK: keys that are copied at a time."""
    if PDL:
        gdc_launch_dependents()
    ROWS: tl.constexpr = PRODUCT.rows
    # 1. The program finds its rows, keys and tiles.
    i_split, i_m = tl.program_id(0), tl.program_id(1)
    i_s, i_h = tl.program_id(2) // KEY_HEADS, tl.program_id(2) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(bounds, i_s, capacity, max_keys)
    if i_m * ROWS >= q_len * GROUP:
        return
    o_r, m_row, i_last, seen_by_all, seen_by_any = rows_of(i_m, q_len, k_len, offset, GROUP, ROWS)
    if scores.visible is not None:
        store_visible(scores.visible, q_start, o_r, m_row, i_last, i_split + i_h == 0, GROUP, CUT.block)
    first, last, i_full, i_end = tiles_of(i_split, tiles_per_split, num_blocks, seen_by_all, seen_by_any, CUT)
    page_row = table.ids
    if PAGING.mode != 0:
        page_row += i_s.to(tl.int64) * table.s_sequence
    s_block = tl.full([], 0, tl.int64) + scores.s_block
    o_s = (i_h * GROUP + o_r % GROUP).to(tl.int64) * scores.s_head + (q_start + o_r // GROUP).to(tl.int64) * scores.s_token
    # 2. Rows of queries become factors, in the order of `lane_keys`.
    p_q = q.data + q_start.to(tl.int64) * q.s_token
    b_q = load_rows(p_q, o_r, q_len, i_h * GROUP, q.s_token, q.s_head, q.s_dim, GROUP, 128, 128)
    b_q, b_f = lane_queries(query_numbers(b_q, PRODUCT.dtype))
    b_x = row_factors(q, keys, tl.where(m_row, o_r, 0), i_h, FORM, GROUP)
    if b_x is not None:
        b_f *= b_x

    # 3. Tiles that all rows see whole are scored a chunk at a time.
    best = tl.full([ROWS], float("-inf"), tl.float32)  # maxima of the parts of a block so far
    CHUNKS: tl.constexpr = CUT.tile // CHUNK
    b_m = tl.full([STEP, ROWS], float("-inf"), tl.float32)  # maxima of the chunks of a tile so far
    for i in tl.range(first * CHUNKS, i_full * CHUNKS, num_stages=STAGES):
        i_t = i // CHUNKS
        i_k = tile_start(i_t, CUT)
        p_k, o_g, there = lane_tile(keys, page_row, i_h, i_k, k_start, num_pages, PAGING, CUT.tile)
        for i_n in tl.static_range(0, CHUNK, STEP):
            i_n += i % CHUNKS * CHUNK
            b_k, b_g = lane_loads(keys, p_k, o_g, i_n, there, FORM.swizzled)
            b_m = tl.maximum(b_m, lane_products(b_k, b_g, b_q, ROWS, FORM.native))
        if CHUNKS == 1 or i % CHUNKS == CHUNKS - 1:
            m = tl.max(b_m, 0) * 256.0
            if CUT.parts == 2:
                m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
                best = m
            store_maxima(scores.maxima + o_s, m, b_f, i_t, num_blocks, s_block, m_row, 1, CUT.parts)
            b_m = tl.full([STEP, ROWS], float("-inf"), tl.float32)
    # 4. Tiles at the end of the keys are scored with a mask.
    for i_t in tl.range(tl.maximum(first, i_full), i_end, num_stages=1):
        i_k = tile_start(i_t, CUT)
        m = lane_maxima_masked(b_q, keys, page_row, i_h, i_k, i_last, k_start, k_len, num_pages, FORM, PAGING, CUT.tile)
        if CUT.parts == 2:
            m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
            best = m
        store_maxima(scores.maxima + o_s, m, b_f, i_t, num_blocks, s_block, m_row, 1, CUT.parts)
    # 5. Blocks that no row sees are filled.
    if FILL:
        store_unseen(scores.maxima + o_s, first, last, i_end, num_blocks, s_block, m_row, CUT)
