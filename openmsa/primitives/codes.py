# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
# ruff: noqa: SIM300 (constants of a kernel stand on either side of a comparison)
"""Kernels make numbers of stored keys here: of codes, and of the scales that lie beside them.

Every conversion of codes is exact, and takes several codes at a time where an instruction does.
`openmsa.kv_cache.triton_numbers` holds the same numbers in arithmetic that any GPU has; these are the forms that are fast.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from openmsa.kv_cache.triton_numbers import swizzled_byte, swizzled_word
from openmsa.primitives.rows import exists, page_number, place
from openmsa.runtime.launch import next_power_of_two

padded = triton.constexpr_function(next_power_of_two) if hasattr(triton, "constexpr_function") else triton.next_power_of_2
"""`next_power_of_two` of a constant. Kernels cannot call what a program puts in place of Triton's own, as SGLang does."""

ASM = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""This says whether instructions are written out; the interpreter knows only the plain ones."""
# A word holds two halves of 16 bits; a line moves the sign of one e2m1 code of each half to bit 15 and its magnitude to where
# exponent and mantissa of a small number are: times 2**-126 as bf16, times 2**-14 as fp16. As bf16 both lie so far apart that
# one product shifts them.
E2M1_TO_BF16 = tl.constexpr("""{ .reg .b32 a, h; shr.b32 h, $4, 8;
and.b32 a, $4, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 $0, a, 0x81C081C0;
and.b32 a, $4, 0x00F000F0; mul.lo.u32 a, a, 0x0104; and.b32 $1, a, 0x81C081C0;
and.b32 a, h, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 $2, a, 0x81C081C0;
and.b32 a, h, 0x00F000F0; mul.lo.u32 a, a, 0x0104; and.b32 $3, a, 0x81C081C0; }""")
E2M1_TO_FP16 = tl.constexpr("""{ .reg .b32 a, b, sign; mov.b32 sign, 0x80808080;
shl.b32 a, $4, 4; shl.b32 b, $4, 1; lop3.b32 a, a, b, sign, 0xE4; and.b32 $2, a, 0x8E008E00;
shl.b32 a, a, 8; and.b32 $0, a, 0x8E008E00;
shr.b32 b, $4, 3; lop3.b32 a, $4, b, sign, 0xE4; and.b32 $3, a, 0x8E008E00;
shl.b32 a, a, 8; and.b32 $1, a, 0x8E008E00; }""")
# This makes float32 of the four e4m3 codes of a word, the lowest first.
E4M3_WORD = tl.constexpr("""{ .reg .b16 a, b; .reg .b32 c, d; mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 c, a; cvt.rn.f16x2.e4m3x2 d, b;
mov.b32 {a, b}, c; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; mov.b32 {a, b}, d; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }""")
# This makes float32 of the four e8m0 codes of a word, by way of two bf16 each: code 0 gives 2**-127, infinity times 0 NaN.
E8M0_WORD = tl.constexpr("""{ .reg .b32 a, b, least, zero; mov.b32 least, 0x00400040; mov.b32 zero, 0;
shl.b32 a, $4, 7; and.b32 a, a, 0x7F807F80; max.u16x2 a, a, least; fma.rn.bf16x2 a, a, zero, a;
shr.b32 b, $4, 1; and.b32 b, b, 0x7F807F80; max.u16x2 b, b, least; fma.rn.bf16x2 b, b, zero, b;
shl.b32 $0, a, 16; shl.b32 $1, b, 16; and.b32 $2, a, 0xFFFF0000; and.b32 $3, b, 0xFFFF0000; }""")
# This adds 128 to the low seven bits, as a mantissa, and subtracts 128, or 256 of a negative code.
INT8_TO_BF16 = tl.constexpr("""{ .reg .b32 a, b, c, one, big; mov.b32 one, 0xBF80BF80; mov.b32 big, 0x43004300;
lop3.b32 a, $2, 0x007F007F, big, 0xEA; lop3.b32 b, $2, 0x00800080, big, 0xEA; fma.rn.bf16x2 $0, b, one, a; shr.b32 c, $2, 8;
lop3.b32 a, c, 0x007F007F, big, 0xEA; lop3.b32 b, c, 0x00800080, big, 0xEA; fma.rn.bf16x2 $1, b, one, a; }""")


@triton.jit
def e4m3_bytes(codes):
    """Gives the numbers of e4m3 codes (uint8) in float32."""
    c = codes.to(tl.int32)
    numbers = (((c & 0x80) << 24) | ((c & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return tl.where((c & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def e8m0_bytes(codes):
    """Gives the numbers of e8m0 codes (uint8) in float32: powers of two, and NaN for 255, which infinity times 0 makes."""
    numbers = tl.maximum(codes.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
    return tl.fma(numbers, 0.0, numbers)


@triton.jit
def e2m1_parts(codes, PRODUCT: tl.constexpr):
    """Gives the e2m1 elements of each item, the lowest nibble first, four of int16 and two of uint8, as a tuple of PRODUCT
    times 2**-126 (bf16) or 2**-14 (fp16)."""
    if ASM and codes.dtype == tl.int16 and PRODUCT == tl.bfloat16:
        BF16: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(E2M1_TO_BF16, "=r,=r,=r,=r,r", [codes], dtype=BF16, is_pure=True, pack=2)
    elif ASM and codes.dtype == tl.int16:
        FP16: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        return tl.inline_asm_elementwise(E2M1_TO_FP16, "=r,=r,=r,=r,r", [codes], dtype=FP16, is_pure=True, pack=2)
    elif codes.dtype == tl.int16:
        first, second = e2m1(codes, PRODUCT), e2m1(codes >> 4, PRODUCT)
        return first, second, e2m1(codes >> 8, PRODUCT), e2m1(codes >> 12, PRODUCT)
    else:
        return e2m1(codes.to(tl.int16), PRODUCT), e2m1(codes.to(tl.int16) >> 4, PRODUCT)


@triton.jit
def e2m1(c, PRODUCT: tl.constexpr):
    """Gives the e2m1 number in the lowest four bits of int16."""
    UP: tl.constexpr = 6 if PRODUCT == tl.bfloat16 else 9
    return (((c & 8) << 12) | ((c & 7) << UP)).to(tl.int16).to(PRODUCT, bitcast=True)


@triton.jit
def int8_parts(codes, PRODUCT: tl.constexpr):
    """Gives int8 numbers in PRODUCT, a tuple, the low byte of int16 first. A byte becomes the mantissa of a larger number,
    which avoids the slow conversion instruction."""
    if ASM and codes.dtype == tl.int16 and PRODUCT == tl.bfloat16:
        BF16: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [codes], dtype=BF16, is_pure=True, pack=2)
    elif codes.dtype == tl.int16:
        return int8(codes, PRODUCT), int8(codes >> 8, PRODUCT)
    else:
        return (int8(codes, PRODUCT),)


@triton.jit
def int8(codes, PRODUCT: tl.constexpr):
    """Gives the int8 number in the lowest eight bits."""
    bits = (codes.to(tl.int32) & 0xFF) ^ 0x4B000080  # 2**23 + 128 + code
    return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(PRODUCT)


@triton.jit
def e4m3_numbers(b_x, PRODUCT: tl.constexpr):
    """Gives the numbers of e4m3 codes, native or bytes, in PRODUCT. bf16 is reached by way of fp16 and float32, all exact,
    because the direct conversion is slow."""
    if b_x.dtype == tl.uint8:
        return e4m3_bytes(b_x).to(PRODUCT)
    elif PRODUCT == tl.bfloat16:
        return b_x.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    else:
        return b_x.to(PRODUCT)


@triton.jit
def group_numbers(b_g, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Gives the scales of groups, float32 [TILE, groups], from codes, bytes or words. NATIVE: whether the GPU converts e4m3."""
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
    """Gives two factors, a number and [TILE, width], exact in PRODUCT, that make the bare e2m1 numbers of `e2m1_parts` those of
    the keys. b_k: items [TILE, width]; b_g: codes of the scales of groups [TILE, groups]."""
    TILE: tl.constexpr = b_k.shape[0]
    WIDTH: tl.constexpr = b_k.shape[1]
    unit = tl.full([], 8.507059173023462e37 if PRODUCT == tl.bfloat16 else 16384.0, tl.float32).to(PRODUCT)
    b_s = group_numbers(b_g, FORMAT, NATIVE).to(PRODUCT)
    GROUPS: tl.constexpr = b_s.shape[1]
    return unit, tl.broadcast_to(b_s[:, :, None], [TILE, GROUPS, WIDTH // GROUPS]).reshape(TILE, WIDTH)


@triton.jit
def load_scales(
    keys, page_row, i_h, i_k, k_start, k_len, num_pages,
    FORM: tl.constexpr, PAGING: tl.constexpr, TILE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Loads float32 scales beside those of groups, tensors and heads: those of each key [TILE]; one number of a tile that lies
    in one page; 1 where there are none. BOUNDED: some key may not exist."""
    if FORM.format == 2:
        return key_scales(
            load_of_keys(
                keys.scales, keys.s_scales_page, keys.s_scales_head, keys.s_scales_row,
                page_row, i_h, i_k, k_start, k_len, num_pages, PAGING, TILE, BOUNDED,
            )
        )  # fmt: skip
    elif FORM.factor != 2:
        return 1.0
    elif PAGING.mode == 1:
        i_page = tl.load(page_row + page_number(i_k, PAGING.page_size))
        p_s = keys.factor + i_page.to(tl.int64) * keys.s_factor_page + i_h * keys.s_factor_head
        return tl.load(p_s, mask=exists(i_page, num_pages), other=0.0)
    else:
        return load_of_keys(
            keys.factor, keys.s_factor_page, keys.s_factor_head, 0,
            page_row, i_h, i_k, k_start, k_len, num_pages, PAGING, TILE, BOUNDED,
        )  # fmt: skip


@triton.jit
def load_group_scales(
    keys, page_row, i_h, i_k, k_start, k_len, num_pages,
    PAGING: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, SWIZZLED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Loads codes of the scales of each key's groups, uint8 [TILE, GROUPS padded to a power of two], or int32 of four groups
    each. keys.scales: bytes, int32 or, of eight groups, int64, in which strides are. SWIZZLED (128x4, no int64): strides count
    rows."""
    scales = keys.scales
    i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, PAGING, TILE, BOUNDED)
    o_s = o_row.to(tl.int64) * keys.s_scales_row + i_h.to(tl.int64) * keys.s_scales_head
    if PAGING.mode != 0:
        o_s += i_page.to(tl.int64) * keys.s_scales_page
    o_s = o_s[:, None]
    if scales.dtype.element_ty == tl.int64:
        o_w = tl.arange(0, GROUPS // 8)[None, :]
        pairs = tl.load(scales + o_s + o_w * keys.s_scales_group, mask=m_k[:, None], other=0)
        return tl.join(pairs.to(tl.int32), (pairs >> 32).to(tl.int32)).reshape(TILE, GROUPS // 4)
    elif scales.dtype.element_ty == tl.int32:
        WORDS: tl.constexpr = GROUPS // 4
        o_w = tl.arange(0, WORDS)[None, :]
        p_w = scales + swizzled_word(o_s, o_w, WORDS) if SWIZZLED else scales + o_s + o_w * keys.s_scales_group
        return tl.load(p_w, mask=m_k[:, None] & (o_w < WORDS), other=0)
    else:
        GROUPS_PAD: tl.constexpr = padded(GROUPS)
        o_g = tl.arange(0, GROUPS_PAD)[None, :]
        p_s = scales + swizzled_byte(o_s, o_g, GROUPS) if SWIZZLED else scales + o_s + o_g * keys.s_scales_group
        return tl.load(p_s, mask=m_k[:, None] & (o_g < GROUPS), other=0)


@triton.jit
def load_of_keys(
    numbers, s_page, s_head, s_row, page_row, i_h, i_k, k_start, k_len, num_pages,
    PAGING: tl.constexpr, TILE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Loads what each key has one of, [TILE], as it is stored; 0 of keys that do not exist."""
    i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, PAGING, TILE, BOUNDED)
    p_n = numbers + o_row.to(tl.int64) * s_row + i_h.to(tl.int64) * s_head
    if PAGING.mode != 0:
        p_n += i_page.to(tl.int64) * s_page
    return tl.load(p_n, mask=m_k, other=0)


@triton.jit
def key_scales(b_s):
    """Gives scales in float32, from numbers or from words (`Int8.words`)."""
    return (b_s << 16).to(tl.float32, bitcast=True) if b_s.dtype == tl.int32 else b_s.to(tl.float32)


@triton.jit
def key_errors(b_s):
    """Gives errors in float32, from words (`Int8.words`)."""
    return (b_s & -65536).to(tl.float32, bitcast=True)
