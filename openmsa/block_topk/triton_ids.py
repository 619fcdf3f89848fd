# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Kernels that select blocks share this: scores as integers of the same order, flags of blocks as bits of words, which blocks
are forced, and ids from flags."""

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
def key_of(x):
    """Gives the key of a float32 (not NaN): an int32 of the same order."""
    return ordered(x.to(tl.int32, bitcast=True))


@triton.jit
def value_of(key):
    """Gives the float32 of a key."""
    return ordered(key).to(tl.float32, bitcast=True)


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
def as_words(ones, REPS: tl.constexpr, COLS: tl.constexpr):
    """Turns ones and zeros (float32) [REPS, COLS] into the bits of int32 words [COLS]. Adding powers of two, sixteen at a time
    so that a float holds them, takes the pipe that comparisons leave free."""
    HALF: tl.constexpr = min(REPS, 16)
    weights = (1 << tl.arange(0, HALF)).to(tl.float32)
    halves = tl.sum(ones.reshape(REPS // HALF, HALF, COLS) * weights[None, :, None], 1)
    halves = (halves + 8388608.0).to(tl.int32, bitcast=True) & 0xFFFF  # beside 2**23, whole numbers are the lowest bits
    return tl.sum(halves << (tl.arange(0, REPS // HALF) * 16)[:, None], 0)


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
def swap_bits(words, STEP: tl.constexpr, KEPT: tl.constexpr):
    """Lanes STEP apart of words [rows, 32] swap bits: the lower lane keeps those in KEPT and gives the others, STEP bits down,
    for those that the upper lane has in KEPT, STEP bits up."""
    lanes = tl.arange(0, 32)[None, :]
    upper = (lanes & STEP) != 0
    other = tl.gather(words, (lanes ^ STEP).broadcast_to(words.shape), 1)
    moved = tl.where(upper, other >> STEP, other << STEP)
    return moved ^ ((moved ^ words) & tl.where(upper, ~KEPT, KEPT))


@triton.jit
def as_bitmap(words, COLS: tl.constexpr):
    """Turns words [COLS] whose bit r stands for id r * COLS + c into words whose bit b stands for id 32 * c + b: the 32 x 32
    bits of each warp are transposed, halves first, then quarters and so on."""
    WARPS: tl.constexpr = COLS // 32
    words = words.reshape(WARPS, 32)
    words = swap_bits(words, 16, 0x0000FFFF)
    words = swap_bits(words, 8, 0x00FF00FF)
    words = swap_bits(words, 4, 0x0F0F0F0F)
    words = swap_bits(words, 2, 0x33333333)
    words = swap_bits(words, 1, 0x55555555)
    words = words.reshape(COLS)
    if WARPS > 1:
        o_c = tl.arange(0, COLS)
        words = tl.gather(words, o_c % WARPS * 32 + o_c // WARPS, 0)
    return words


@triton.jit
def free_range(seen, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """Gives the first block that is not forced, of a row that sees `seen`, and the first of those that are forced behind it."""
    n_init = tl.minimum(seen, INIT)
    return n_init, tl.maximum(seen - LOCAL, n_init)


@triton.jit
def write_ids(p_out, words, COLS: tl.constexpr):
    """Writes the ids whose bits are set in words [COLS], bit r of word c for id r * COLS + c, in ascending order."""
    words = as_bitmap(words, COLS)
    number = popcount(words)
    p_ids = p_out + (tl.cumsum(number, 0) - number)
    for _ in range(tl.max(number, 0)):
        lowest = words & -words
        tl.store(p_ids, 32 * tl.arange(0, COLS) + bit_of(lowest), mask=words != 0)
        words = words ^ lowest
        p_ids += 1


@triton.jit
def write_forced(p_out, seen, n_init, i_local, n_free, TOPK: tl.constexpr, TOPK_PAD: tl.constexpr):
    """Writes what stands around the n_free ids of a row that sees `seen` blocks: forced blocks below n_init and from i_local
    on, and -1 past the last."""
    o_k = tl.arange(0, TOPK_PAD)
    after = o_k - n_init - n_free
    ids = tl.where(o_k < n_init, o_k, tl.where(after < seen - i_local, i_local + after, -1))
    tl.store(p_out + o_k, ids, mask=(o_k < TOPK) & ((o_k < n_init) | (after >= 0)))
