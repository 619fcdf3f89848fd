# SPDX-License-Identifier: MIT
# ruff: noqa: RET505, SIM300 (kernels return from branches on constants)
"""Index keys as they are stored, turned into factors of a product: conversions inside the kernels, every one exact.

FORMAT: 0 plain, 1 e4m3, 2 int8, 3 NVFP4, 4 MXFP4. Scales of groups of elements (FP4) are multiplied into the elements, which
stays exact in bf16 and, for NVFP4, in fp16; where rows are few, into the products of each group. SCALE says where all
others go: 0 there are none; 1 one a tile (a page), multiplied with the maxima of its blocks; 2 one a key, multiplied with the
products. Scales of a tensor or a head come in at the end, with those of the queries. Where e4m3 is not native (before sm_89) it
is loaded as bytes.

Several codes a load: FP4, four (two where strides forbid it) and int8, two. They are not put back in order: every SPLIT-th
element of a key makes a tile of its own, and so it is with queries (`query_parts`). For a few rows, FP4 queries are spread
further: one row for each group of elements, zero outside of it, so that the product gives the sums of the groups of bare e2m1
numbers, and no element of a key is ever multiplied by a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.index_branch.triton_codes import ASM, E4M3_WORD, E8M0_WORD, e4m3_bytes, e8m0_bytes
from openmsa.index_branch.triton_tiles import exists, page_number, place
from openmsa.runtime.integers import next_power_of_two

PLAIN, E4M3, INT8, NVFP4, MXFP4 = 0, 1, 2, 3, 4
NO_SCALE, TILE_SCALE, KEY_SCALE = 0, 1, 2


def padded(dim: int, format: int) -> int:
    """Elements of a tile's row: a power of two, and what the matrix unit and loads take at least."""
    return max(next_power_of_two(dim), 16 if format == PLAIN else 32)


@triton.jit
def load_group_scales(
    scales,
    page_row,
    i_h,
    i_k,
    k_start,
    k_len,
    num_pages,
    s_page,
    s_head,
    s_token,
    s_group,
    MODE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Codes of the scales of each key's groups, uint8 [TILE, GROUPS padded to a power of two], or int32 of four groups each.
    scales: bytes, int32 or, of eight groups, int64, in which strides are. SWIZZLED (128x4, no int64): strides count rows."""
    i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, MODE, PAGE_SIZE, TILE, BOUNDED)
    o_s = o_row.to(tl.int64) * s_token + i_h.to(tl.int64) * s_head
    if MODE != 0:
        o_s += i_page.to(tl.int64) * s_page
    o_s = o_s[:, None]
    if scales.dtype.element_ty == tl.int64:
        o_w = tl.arange(0, GROUPS // 8)[None, :]
        pairs = tl.load(scales + o_s + o_w * s_group, mask=m_k[:, None], other=0)
        return tl.join(pairs.to(tl.int32), (pairs >> 32).to(tl.int32)).reshape(TILE, GROUPS // 4)
    elif scales.dtype.element_ty == tl.int32:
        WORDS: tl.constexpr = GROUPS // 4
        o_w = tl.arange(0, WORDS)[None, :]
        if SWIZZLED:
            p_w = scales + (o_s // 128 * WORDS + o_w) * 128 + o_s % 32 * 4 + o_s % 128 // 32
        else:
            p_w = scales + o_s + o_w * s_group
        return tl.load(p_w, mask=m_k[:, None] & (o_w < WORDS), other=0)
    else:
        GROUPS_PAD: tl.constexpr = triton.next_power_of_2(GROUPS)
        o_g = tl.arange(0, GROUPS_PAD)[None, :]
        if SWIZZLED:
            i_tile = o_s // 128 * ((GROUPS + 3) // 4) + o_g // 4
            p_s = scales + i_tile * 512 + o_s % 32 * 16 + o_s % 128 // 32 * 4 + o_g % 4
        else:
            p_s = scales + o_s + o_g * s_group
        return tl.load(p_s, mask=m_k[:, None] & (o_g < GROUPS), other=0)


@triton.jit
def load_scales(
    scales, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token,
    MODE: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """float32 scales: of a tile (SCALE 1, one number) or of each key (SCALE 2, [TILE]). BOUNDED: some key may not exist."""
    if SCALE == 0:
        return 1.0
    elif SCALE == 1:
        i_page = tl.load(page_row + page_number(i_k, PAGE_SIZE))
        p_s = scales + i_page.to(tl.int64) * s_page + i_h * s_head
        return tl.load(p_s, mask=exists(i_page, num_pages), other=0.0)
    else:
        b_s = load_of_keys(
            scales, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token, MODE, PAGE_SIZE, TILE, BOUNDED
        )
        return key_scales(b_s)


@triton.jit
def load_of_keys(
    numbers, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token,
    MODE: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """What each key has one of, [TILE], as it is stored; 0 of keys that do not exist."""
    i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, MODE, PAGE_SIZE, TILE, BOUNDED)
    p_n = numbers + o_row.to(tl.int64) * s_token + i_h.to(tl.int64) * s_head
    if MODE != 0:
        p_n += i_page.to(tl.int64) * s_page
    return tl.load(p_n, mask=m_k, other=0)


@triton.jit
def key_scales(b_s):
    """float32 scales of numbers or of words (`Int8.words`)."""
    return (b_s << 16).to(tl.float32, bitcast=True) if b_s.dtype == tl.int32 else b_s.to(tl.float32)


@triton.jit
def key_errors(b_s):
    """float32 errors of words."""
    return (b_s & -65536).to(tl.float32, bitcast=True)


@triton.jit
def group_numbers(b_g, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Codes of the scales of groups, bytes or words, as float32 [TILE, groups]. NATIVE: from sm_90 on, which converts e4m3."""
    if b_g.dtype == tl.int32 and NATIVE and ASM:
        CODE: tl.constexpr = E4M3_WORD if FORMAT == 3 else E8M0_WORD
        FP32: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
        x = tl.inline_asm_elementwise(CODE, "=f,=f,=f,=f,r", [b_g], dtype=FP32, is_pure=True, pack=1)
        return tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])).reshape(b_g.shape[0], 4 * b_g.shape[1])
    if b_g.dtype == tl.int32:
        b_g = ((b_g[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 0xFF).reshape(b_g.shape[0], 4 * b_g.shape[1])
        b_g = b_g.to(tl.uint8)
    if FORMAT == 3 and NATIVE:
        return b_g.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif FORMAT == 3:
        return e4m3_bytes(b_g)
    else:
        return e8m0_bytes(b_g)


@triton.jit
def fp4_unit(b_k, b_g, FORMAT: tl.constexpr, PRODUCT: tl.constexpr, NATIVE: tl.constexpr):
    """For items [TILE, width] and codes of group scales [TILE, groups]: two factors, exact in PRODUCT, that make bare e2m1
    numbers of `e2m1_parts` those of the keys, a number and [TILE, width]."""
    TILE: tl.constexpr = b_k.shape[0]
    WIDTH: tl.constexpr = b_k.shape[1]
    unit = tl.full([], 8.507059173023462e37 if PRODUCT == tl.bfloat16 else 16384.0, tl.float32).to(PRODUCT)
    b_s = group_numbers(b_g, FORMAT, NATIVE).to(PRODUCT)
    GROUPS: tl.constexpr = b_s.shape[1]
    return unit, tl.broadcast_to(b_s[:, :, None], [TILE, GROUPS, WIDTH // GROUPS]).reshape(TILE, WIDTH)
