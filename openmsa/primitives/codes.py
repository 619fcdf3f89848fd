# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
# ruff: noqa: RET505, SIM300 (kernels return from branches on constants)
"""Stored codes as factors of products inside kernels: every conversion is exact, and takes several codes at a time where an
instruction does.

`openmsa.kv_cache.triton_numbers` holds the same numbers in arithmetic that any GPU has; these are the forms that are fast.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from openmsa.runtime.integers import next_power_of_two

ASM = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Whether instructions are written out; the interpreter knows only the plain ones."""
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
# Four e4m3 codes of a word as float32, the lowest first.
E4M3_WORD = tl.constexpr("""{ .reg .b16 a, b; .reg .b32 c, d; mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 c, a; cvt.rn.f16x2.e4m3x2 d, b;
mov.b32 {a, b}, c; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; mov.b32 {a, b}, d; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }""")
# Four e8m0 codes of a word as float32, by way of two bf16 each: 2**-127 for 0, and infinity, times 0, makes NaN.
E8M0_WORD = tl.constexpr("""{ .reg .b32 a, b, least, zero; mov.b32 least, 0x00400040; mov.b32 zero, 0;
shl.b32 a, $4, 7; and.b32 a, a, 0x7F807F80; max.u16x2 a, a, least; fma.rn.bf16x2 a, a, zero, a;
shr.b32 b, $4, 1; and.b32 b, b, 0x7F807F80; max.u16x2 b, b, least; fma.rn.bf16x2 b, b, zero, b;
shl.b32 $0, a, 16; shl.b32 $1, b, 16; and.b32 $2, a, 0xFFFF0000; and.b32 $3, b, 0xFFFF0000; }""")
# 128 + the low seven bits, as a mantissa, less 128, or 256 of a negative code.
INT8_TO_BF16 = tl.constexpr("""{ .reg .b32 a, b, c, one, big; mov.b32 one, 0xBF80BF80; mov.b32 big, 0x43004300;
lop3.b32 a, $2, 0x007F007F, big, 0xEA; lop3.b32 b, $2, 0x00800080, big, 0xEA; fma.rn.bf16x2 $0, b, one, a; shr.b32 c, $2, 8;
lop3.b32 a, c, 0x007F007F, big, 0xEA; lop3.b32 b, c, 0x00800080, big, 0xEA; fma.rn.bf16x2 $1, b, one, a; }""")


@triton.jit
def e4m3_bytes(codes):
    """Numbers of e4m3 codes (uint8) in float32."""
    c = codes.to(tl.int32)
    numbers = (((c & 0x80) << 24) | ((c & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return tl.where((c & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def e8m0_bytes(codes):
    """Numbers of e8m0 codes (uint8) in float32: powers of two, and NaN for 255, which infinity times 0 makes."""
    numbers = tl.maximum(codes.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
    return tl.fma(numbers, 0.0, numbers)


@triton.jit
def e2m1_parts(codes, PRODUCT: tl.constexpr):
    """The e2m1 elements of each item, the lowest nibble first, four of int16 and two of uint8, as a tuple of PRODUCT times
    2**-126 (bf16) or 2**-14 (fp16)."""
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
    """The e2m1 number in the lowest four bits of int16."""
    UP: tl.constexpr = 6 if PRODUCT == tl.bfloat16 else 9
    return (((c & 8) << 12) | ((c & 7) << UP)).to(tl.int16).to(PRODUCT, bitcast=True)


@triton.jit
def int8_parts(codes, PRODUCT: tl.constexpr):
    """int8 numbers in PRODUCT, a tuple, the low byte of int16 first. A byte becomes the mantissa of a larger number, which
    avoids the slow conversion instruction."""
    if ASM and codes.dtype == tl.int16 and PRODUCT == tl.bfloat16:
        BF16: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [codes], dtype=BF16, is_pure=True, pack=2)
    elif codes.dtype == tl.int16:
        return int8(codes, PRODUCT), int8(codes >> 8, PRODUCT)
    else:
        return (int8(codes, PRODUCT),)


@triton.jit
def int8(codes, PRODUCT: tl.constexpr):
    """The int8 number in the lowest eight bits."""
    bits = (codes.to(tl.int32) & 0xFF) ^ 0x4B000080  # 2**23 + 128 + code
    return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(PRODUCT)


@triton.jit
def e4m3_numbers(b_x, PRODUCT: tl.constexpr):
    """Numbers of e4m3 codes, native or bytes, in PRODUCT. bf16 is reached by way of fp16 and float32, all exact, because the
    direct conversion is slow."""
    if b_x.dtype == tl.uint8:
        return e4m3_bytes(b_x).to(PRODUCT)
    elif PRODUCT == tl.bfloat16:
        return b_x.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    else:
        return b_x.to(PRODUCT)


PLAIN, E4M3, INT8, NVFP4, MXFP4 = 0, 1, 2, 3, 4


def padded(dim: int, format: int) -> int:
    """Elements to which a row of a tile is padded: a power of two, and what the matrix unit and loads take at least."""
    return max(next_power_of_two(dim), 16 if format == PLAIN else 32)


@triton.jit
def group_numbers(b_g, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Scales of groups, float32 [TILE, groups], from their codes, bytes or words. NATIVE: whether the GPU converts e4m3."""
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
    """Two factors, a number and [TILE, width], exact in PRODUCT, that make the bare e2m1 numbers of `e2m1_parts` those of the
    keys. b_k: items [TILE, width]; b_g: codes of the scales of groups [TILE, groups]."""
    TILE: tl.constexpr = b_k.shape[0]
    WIDTH: tl.constexpr = b_k.shape[1]
    unit = tl.full([], 8.507059173023462e37 if PRODUCT == tl.bfloat16 else 16384.0, tl.float32).to(PRODUCT)
    b_s = group_numbers(b_g, FORMAT, NATIVE).to(PRODUCT)
    GROUPS: tl.constexpr = b_s.shape[1]
    return unit, tl.broadcast_to(b_s[:, :, None], [TILE, GROUPS, WIDTH // GROUPS]).reshape(TILE, WIDTH)
