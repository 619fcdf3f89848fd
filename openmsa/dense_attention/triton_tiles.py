# SPDX-License-Identifier: MIT
# ruff: noqa: RET505 (the compiler drops a branch only where an else stands)
"""Tiles of keys and values as the products take them: bytes in flight, conversions in registers, every one exact.

A stored operand becomes float16: E4M3 codes are float16 numbers, and so is an E2M1 code times its E4M3 scale (at most six
significant bits from 2**-10 to 2688). Scales of a tensor, a head or a page are not multiplied into the elements: the walk
applies them to products. Where E4M3 is not native (before sm_89) the host passes its bytes as uint8.

An operand is the tuple (pool of its head, TMA descriptor or None, scales, strides of page, key and element, strides of the
scales: page, head, key, group). SCALES: 0 none; 1 one for the head, applied outside the walk; 2 one a page; 3 groups, linear;
4 groups, 128x4: the strides then count rows of scales instead of bytes; 5 and 6 the same in words of four groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.kv_cache.triton_numbers import e4m3

GROUP_UNIT = tl.constexpr(256.0)  # what groups are multiplied with at the end: their elements are kept 2**8 times smaller
WHOLE = tl.constexpr(32768.0)  # weights at most 1 are kept so much larger in float16, so that small ones stay normal numbers
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_UNPACK = tl.constexpr("""{
.reg .b32 a, b, e, s;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 e, a, 9;  and.b32 e, e, 0x0E000E00;  shl.b32 s, a, 12;  and.b32 s, s, 0x80008000;  or.b32 $0, e, s;
shl.b32 e, b, 9;  and.b32 e, e, 0x0E000E00;  shl.b32 s, b, 12;  and.b32 s, s, 0x80008000;  or.b32 $1, e, s;
shl.b32 e, a, 5;  and.b32 e, e, 0x0E000E00;  shl.b32 s, a, 8;  and.b32 s, s, 0x80008000;  or.b32 $2, e, s;
shl.b32 e, b, 5;  and.b32 e, e, 0x0E000E00;  shl.b32 s, b, 8;  and.b32 s, s, 0x80008000;  or.b32 $3, e, s;
}""")


@triton.jit
def e4m3_half(codes):
    """float16 of E4M3 numbers or of their bytes."""
    if codes.dtype == tl.uint8:
        return e4m3(codes)
    else:
        return codes.to(tl.float16)


@triton.jit
def rows_at(i_page, i_row, o_n, stride_p, stride_n, ONE: tl.constexpr):
    """Offsets of the keys of a tile: from row i_row of one page, or each key in a page and row of its own."""
    if ONE:
        return i_page.to(tl.int64) * stride_p + i_row.to(tl.int64) * stride_n + o_n * stride_n
    else:
        return i_page.to(tl.int64) * stride_p + i_row.to(tl.int64) * stride_n


@triton.jit
def load_groups(
    scale, i_page, i_row, o_n, m_n, i_h, strides,
    SCALES: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, ONE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scales of groups of 16 elements, float16 times 2**6, [BN, BD // 16]. Words of four are copied ahead like keys; bytes
    cannot be."""
    WORDS: tl.constexpr = SCALES >= 5
    PER: tl.constexpr = 64 if WORDS else 16  # elements that one load serves
    COUNT: tl.constexpr = (D + PER - 1) // PER
    TILES: tl.constexpr = (D + 63) // 64  # of four groups, in a row of the 128x4 layout
    o_g = tl.arange(0, BD // PER)
    o_r = rows_at(i_page, i_row, o_n, strides[0], strides[2], ONE) + i_h.to(tl.int64) * strides[1]
    if SCALES == 4:
        i_tile = (o_r // 128)[:, None] * TILES + (o_g // 4)[None, :]
        o_s = i_tile * 512 + (o_r % 32 * 16 + o_r % 128 // 32 * 4)[:, None] + (o_g % 4)[None, :]
    elif SCALES == 6:
        o_s = ((o_r // 128)[:, None] * TILES + o_g[None, :]) * 128 + (o_r % 32 * 4 + o_r % 128 // 32)[:, None]
    else:
        o_s = o_r[:, None] + o_g[None, :] * strides[3]
    p = scale + o_s
    if WORDS:
        p = scale.to(tl.pointer_type(tl.int32), bitcast=True) + o_s
    if MASKED:
        codes = tl.load(p, mask=m_n[:, None] & (o_g < COUNT)[None, :], other=0 if WORDS else 0.0)
    elif COUNT * PER == BD:
        codes = tl.load(p)
    else:
        codes = tl.load(p, mask=(o_g < COUNT)[None, :], other=0 if WORDS else 0.0)
    if WORDS:
        each = codes[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]
        return e4m3(each.to(tl.uint8).reshape(BN, BD // 16)) * 64.0
    else:
        return e4m3_half(codes) * 64.0


@triton.jit
def e2m1_halves(packed):
    """Both elements of each byte, float16 times 2**-14: sign and three bits go where they stand in a float16. The instructions
    do for four bytes what the expressions, which the interpreter takes, do for one."""
    if _INTERPRETED:
        codes = packed.to(tl.uint16)
        low = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True)
        high = (((codes & 0x80) << 8) | ((codes & 0x70) << 5)).to(tl.float16, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def e2m1_groups(packed, groups, BN: tl.constexpr, BD: tl.constexpr):
    """float16 [BN, BD] / GROUP_UNIT of E2M1 codes, two a byte, [BN, BD // 2], and the scales of their groups."""
    low, high = e2m1_halves(packed)
    each = tl.broadcast_to(groups[:, :, None], (BN, BD // 16, 8)).reshape(BN, BD // 2)
    return tl.join(low * each, high * each).reshape(BN, BD)


@triton.jit
def load_tile(
    operand, i_page, i_row, o_n, m_n, i_h,
    FORMAT: tl.constexpr, SCALES: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    ONE: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values, [BN, BD]: plain and E4M3 numbers as they are stored, FP4 as float16 / GROUP_UNIT."""
    FOUR: tl.constexpr = FORMAT == 3
    COLUMNS: tl.constexpr = D // 2 if FOUR else D
    WIDTH: tl.constexpr = BD // 2 if FOUR else BD
    o_c = tl.arange(0, WIDTH)
    if TMA:
        tile = operand[1].load([i_page, i_h, i_row, 0]).reshape(BN, WIDTH)
    else:
        p = operand[0] + rows_at(i_page, i_row, o_n, operand[3][0], operand[3][1], ONE)[:, None] + o_c[None, :] * operand[3][2]
        if MASKED:
            tile = tl.load(p, mask=m_n[:, None] & (o_c < COLUMNS)[None, :], other=0.0)
        elif COLUMNS == WIDTH:
            tile = tl.load(p)
        else:
            tile = tl.load(p, mask=(o_c < COLUMNS)[None, :], other=0.0)
    if FOUR:
        groups = load_groups(operand[2], i_page, i_row, o_n, m_n, i_h, operand[4], SCALES, D, BN, BD, ONE, MASKED)
        tile = e2m1_groups(tile, groups, BN, BD)
    return tile


@triton.jit
def page_scales(operand, i_page, i_h, m_n, m_first, ONE: tl.constexpr):
    """float32 scales of the pages of a tile's keys: one number where they lie in ONE page, else [BN]. 0 where no key exists."""
    p = operand[2] + i_page.to(tl.int64) * operand[4][0] + i_h * operand[4][1]
    if ONE:
        return tl.load(p, mask=m_first, other=0.0)
    else:
        return tl.load(p, mask=m_n, other=0.0)


@triton.jit
def half_rows(b_q):
    """float16 rows and the factor [BM] that gives them back: bfloat16 rows are multiplied with a power of two, so that their
    largest element lies from 2**14 to 2**15; an element is exact unless it is 2**-31 of the largest or less."""
    if b_q.dtype == tl.bfloat16:
        wide = b_q.to(tl.float32)
        magnitude = tl.abs(wide)
        top = tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1)
        exponent = tl.minimum(tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 15), 254)
        up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        return (wide * up[:, None]).to(tl.float16), down
    elif b_q.dtype == tl.float16:
        return b_q, tl.full([b_q.shape[0]], 1.0, tl.float32)
    else:
        return e4m3_half(b_q), tl.full([b_q.shape[0]], 1.0, tl.float32)
