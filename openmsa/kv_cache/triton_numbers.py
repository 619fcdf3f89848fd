# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Kernels of every stage make numbers of stored bytes, and back, exactly on every architecture, interpreter included.

All of it is integer arithmetic on bit patterns; nothing here needs the conversion instructions of newer GPUs, and kernels that
can use them may: the results are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

FORMAT_IDS = {"plain": 0, "e4m3": 1, "int8": 2, "nvfp4": 3, "mxfp4": 4}
"""Kernels know each format by its number here."""
PLAIN = tl.constexpr(0)
E4M3 = tl.constexpr(1)
INT8 = tl.constexpr(2)
NVFP4 = tl.constexpr(3)
MXFP4 = tl.constexpr(4)
LEAST_SUM = 32
"""A product sums at least so many elements where an operand is unpacked in registers, two elements a byte (``tl.join``). Of
such an operand Triton 3.6 gives each of the four threads that share a row eight neighbouring elements; of a row of 16 it then
multiplies half of the elements twice and the other half never."""


@triton.jit
def e2m1(codes):
    """Makes float16 of E2M1 codes (integers; bits from the fifth on are ignored)."""
    codes = codes.to(tl.uint16)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)  # the exponent's bias is 14 too small
    return bits.to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def e2m1_pair(packed):
    """Gives both elements of each byte, the low nibble first: two float16 tensors that ``tl.join`` and reshape put in order."""
    return e2m1(packed), e2m1(packed >> 4)


@triton.jit
def e4m3(codes):
    """Makes float16 of E4M3 codes (uint8); 0x7F and 0xFF are NaN."""
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)  # the exponent's bias is 8 too small
    bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits).to(tl.uint16)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def e8m0(codes):
    """Makes float32 of E8M0 codes (uint8): 2**(code - 127), also 2**-127; 255 is NaN."""
    wide = codes.to(tl.uint32)
    bits = tl.where(wide == 0, 0x400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def swizzled_byte(i_row, i_group, GROUPS: tl.constexpr):
    """Says where the scale of a row's group lies in the 128x4 layout of `openmsa.kv_cache.nvfp4`, in bytes."""
    i_tile = i_row // 128 * ((GROUPS + 3) // 4) + i_group // 4
    return i_tile * 512 + i_row % 32 * 16 + i_row % 128 // 32 * 4 + i_group % 4


@triton.jit
def swizzled_word(i_row, i_word, WORDS: tl.constexpr):
    """Says where the scales of four neighbouring groups of a row lie in the 128x4 layout, in words of four, WORDS a row."""
    return (i_row // 128 * WORDS + i_word) * 128 + i_row % 32 * 4 + i_row % 128 // 32


@triton.jit
def magnitude_bits(x):
    """Makes int32 of float32 that has the order of magnitudes, NaN above 0x7F800000."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def e2m1_code(x):
    """Makes uint8 E2M1 codes of float32, to nearest, ties to the even code, saturating; zero keeps its sign; NaN has none."""
    magnitude = tl.abs(x)
    code = (x.to(tl.int32, bitcast=True) >> 28) & 8
    code += (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    return (code + (magnitude > 5.0).to(tl.int32)).to(tl.uint8)


@triton.jit
def e4m3_code(x):
    """Makes uint8 E4M3 codes of float32, to nearest, ties to even, saturating at 448; NaN becomes 0x7F."""
    bits = magnitude_bits(x)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = tl.minimum(tl.abs(x), 1.0) * 512.0 + 8388608.0  # rounds to whole multiples of 2**-9
    code = tl.where(bits < 0x3C800000, small.to(tl.int32, bitcast=True) & 0xFF, normal)
    code = tl.where(bits >= 0x43E00000, 0x7E, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(bits > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def round_even(x):
    """Rounds float32 below 2**22 to the nearest whole number, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rounded_up(x):
    """Returns the bits, int32, of the nearest bfloat16 that is not smaller than float32 from 0 to infinity."""
    return (x.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
