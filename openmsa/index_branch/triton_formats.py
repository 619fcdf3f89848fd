# SPDX-License-Identifier: MIT
# ruff: noqa: RET505, SIM300 (kernels return from branches on constants)
"""Index keys as they are stored, turned into factors of a product: conversions inside the kernels, every one exact.

FORMAT: 0 plain, 1 e4m3, 2 int8, 3 NVFP4, 4 MXFP4. Scales of groups of elements (FP4) are multiplied into the elements, which
stays exact in bf16 and, for NVFP4, in fp16; SCALE says where all others go: 0 there are none; 1 one a tile (a page), multiplied
with the maxima of its blocks; 2 one a key, multiplied with the products. Scales of a tensor or a head come in at the end, with
those of the queries. Where e4m3 is not native (before sm_89) it is loaded as bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.index_branch.triton_tiles import place

PLAIN, E4M3, INT8, NVFP4, MXFP4 = 0, 1, 2, 3, 4
NO_SCALE, TILE_SCALE, KEY_SCALE = 0, 1, 2


@triton.jit
def e4m3_bytes(codes):
    """e4m3 codes (uint8) as bf16."""
    c = codes.to(tl.int16)
    bits = ((c & 0x80) << 8) | ((c & 0x7F) << 4)
    numbers = bits.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32) * 1.329227995784916e36  # 2**120
    return tl.where((c & 0x7F) == 0x7F, float("nan"), numbers).to(tl.bfloat16)


@triton.jit
def e8m0_bytes(codes):
    """e8m0 codes (uint8) as bf16: powers of two, 255 NaN."""
    c = codes.to(tl.int16)
    bits = tl.where(c == 255, 0x7FC0, tl.where(c == 0, 0x40, c << 7)).to(tl.int16)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def e2m1_nibbles(codes):
    """e2m1 codes (uint8, low nibble) as bf16 times 2**-126."""
    c = codes.to(tl.int16)
    return (((c & 8) << 12) | ((c & 7) << 6)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def int8_numbers(codes, PRODUCT: tl.constexpr):
    """int8 as PRODUCT, without the slow conversion instruction: the byte becomes the mantissa of 2**23 + 128 + code."""
    bits = (codes.to(tl.int32) & 0xFF) ^ 0x4B000080
    return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(PRODUCT)


@triton.jit
def e4m3_numbers(b_x, PRODUCT: tl.constexpr):
    """e4m3, native or as bytes, as PRODUCT. To bf16 by way of fp16 and float32, all exact: the direct conversion is slow."""
    if b_x.dtype == tl.uint8:
        return e4m3_bytes(b_x).to(PRODUCT)
    elif PRODUCT == tl.bfloat16:
        return b_x.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    else:
        return b_x.to(PRODUCT)


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
):
    """Codes of the scales of each key's groups, uint8 [TILE, GROUPS padded to a power of two]. SWIZZLED (128x4): strides count
    rows instead of bytes."""
    GROUPS_PAD: tl.constexpr = triton.next_power_of_2(GROUPS)
    o_g = tl.arange(0, GROUPS_PAD)[None, :]
    i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, MODE, PAGE_SIZE, TILE)
    o_s = o_row.to(tl.int64) * s_token + i_h.to(tl.int64) * s_head
    if MODE != 0:
        o_s += i_page.to(tl.int64) * s_page
    o_s = o_s[:, None]
    if SWIZZLED:
        i_tile = (o_s // 128) * ((GROUPS + 3) // 4) + o_g // 4
        p_s = scales + i_tile * 512 + (o_s % 32) * 16 + (o_s % 128 // 32) * 4 + o_g % 4
    else:
        p_s = scales + o_s + o_g * s_group
    return tl.load(p_s, mask=m_k[:, None] & (o_g < GROUPS), other=0)


@triton.jit
def load_scales(
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
    MODE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """float32 scales: of a tile (SCALE 1, one number) or of each key (SCALE 2, [TILE])."""
    if SCALE == 0:
        return 1.0
    elif SCALE == 1:
        i_page = tl.load(page_row + i_k // PAGE_SIZE)
        exists = (i_page >= 0) & (i_page < num_pages)
        return tl.load(scales + i_page.to(tl.int64) * s_page + i_h * s_head, mask=exists, other=0.0)
    else:
        i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, MODE, PAGE_SIZE, TILE)
        p_s = scales + o_row.to(tl.int64) * s_token + i_h.to(tl.int64) * s_head
        if MODE != 0:
            p_s += i_page.to(tl.int64) * s_page
        return tl.load(p_s, mask=m_k, other=0.0)


@triton.jit
def fp4_numbers(b_k, b_g, FORMAT: tl.constexpr, PRODUCT: tl.constexpr):
    """Bytes [TILE, width] and codes of group scales [TILE, groups] to elements times scales [TILE, 2 * width]."""
    TILE: tl.constexpr = b_k.shape[0]
    WIDTH: tl.constexpr = 2 * b_k.shape[1]
    GROUPS: tl.constexpr = b_g.shape[1]
    b_x = tl.join(e2m1_nibbles(b_k & 15), e2m1_nibbles(b_k >> 4)).reshape(TILE, WIDTH)
    b_x = (b_x.to(tl.float32) * 8.507059173023462e37).to(tl.bfloat16)  # 2**126
    b_s = e4m3_bytes(b_g) if FORMAT == 3 else e8m0_bytes(b_g)
    b_s = tl.broadcast_to(b_s[:, :, None], [TILE, GROUPS, WIDTH // GROUPS]).reshape(TILE, WIDTH)
    return (b_x * b_s).to(PRODUCT)


@triton.jit
def key_numbers(b_k, b_g, FORMAT: tl.constexpr, PRODUCT: tl.constexpr):
    """A tile as `load_keys` gives it to factors of type PRODUCT. b_g: codes of group scales (FP4 only)."""
    if FORMAT == 0:
        return b_k
    elif FORMAT == 1:
        return e4m3_numbers(b_k, PRODUCT)
    elif FORMAT == 2:
        return int8_numbers(b_k, PRODUCT)
    else:
        return fp4_numbers(b_k, b_g, FORMAT, PRODUCT)


@triton.jit
def query_numbers(b_q, PRODUCT: tl.constexpr):
    """Rows of queries as factors of type PRODUCT; from fp16 to bf16 this rounds: see `query_rest`."""
    if b_q.dtype == tl.uint8:
        return e4m3_numbers(b_q, PRODUCT)
    else:
        return b_q.to(PRODUCT)


@triton.jit
def query_rest(b_q):
    """What rounding fp16 queries to bf16 left over, exact in bf16."""
    return (b_q.to(tl.float32) - b_q.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def row_factors(q_scale, k_factor, i_row, i_h, s_qs, s_kf, GROUP: tl.constexpr):
    """What scales of tensors and heads multiply each row of scores by: the queries' times the keys', either may be None."""
    b_f = tl.full(i_row.shape, 1.0, tl.float32)
    if q_scale is not None:
        b_f *= tl.load(q_scale + (i_h * GROUP + i_row % GROUP) * s_qs)
    if k_factor is not None:
        b_f *= tl.load(k_factor + i_h * s_kf)
    return b_f


@triton.jit
def row_norms(b_q, DIM: tl.constexpr):
    """At least the Euclidean norm of each row of queries."""
    x = b_q.to(tl.float32)
    return tl.sqrt(tl.sum(x * x, 1)) * (1 + 1e-4) + 1e-37


@triton.jit
def error_radius(b_e, b_s, DIM: tl.constexpr):
    """What, times the norm of a query, an int8 key's score may differ by from the score of the exact key, either as computed:
    its quantisation error, and the rounding of two sums of DIM products. b_e, b_s: error and scale of each key."""
    UNIT: tl.constexpr = DIM * 2.0**-22  # of a sum, relative to the sum of magnitudes; the matrix unit may truncate
    LARGEST: tl.constexpr = 127.0 * DIM**0.5  # norm of the codes
    return b_e * (1 + 2 * UNIT) + b_s * (2 * UNIT * LARGEST)
