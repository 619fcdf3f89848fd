# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Kernels that select blocks share this: scores as integers of the same order, bits of words that flag blocks, and which blocks
are forced."""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.primitives.codes import ASM

_NONE = tl.constexpr(0x7FFFFFFF)  # larger than any block id


@triton.jit
def ordered(bits):
    """Turns the bits of a float32 (not NaN) into an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def popcount(x):
    """Counts the set bits of an int32."""
    if ASM:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        x = x.to(tl.uint32, bitcast=True)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        count = ((x * 0x01010101) >> 24).to(tl.int32, bitcast=True)
    return count


@triton.jit
def bit_of(power):
    """Says which bit is set of an int32 that has one."""
    return (power.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # exact


@triton.jit
def next_id(words, COLS: tl.constexpr):
    """Gives the lowest id whose flag is set (`_NONE` when there is none), and the words without it."""
    lowest = words & -words
    ids = tl.where(words != 0, bit_of(lowest) * COLS + tl.arange(0, COLS), _NONE)
    first = tl.min(ids, 0)
    return first, tl.where(ids == first, words ^ lowest, words)


@triton.jit
def free_range(seen, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """Gives the first block that is not forced, of a row that sees `seen`, and the first of those that are forced behind it."""
    n_init = tl.minimum(seen, INIT)
    return n_init, tl.maximum(seen - LOCAL, n_init)
