# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""Kernels that select blocks share this: scores as integers of the same order, bits of words that flag blocks, which blocks are
forced, and selection by one warp.

A warp that selects holds all scores of a row, so that no barrier is met, and every program that needs a selection makes it. It
follows the exact rule of `openmsa.block_topk.triton_topk`, by the same bisection, on REPS vectors of one score a lane: block
r * LANES + l is lane l of vector r. Ids come in ascending order, which places forced blocks at the ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.primitives.codes import ASM
from openmsa.primitives.waiting import absent, any_of, look

LANES = tl.constexpr(32)
"""A warp has so many threads."""
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


@triton.jit
def score_of(word, mask):
    """Returns the float32 values of words, and -inf outside the mask."""
    return tl.where(mask, word.to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def no_words(REPS: tl.constexpr):
    """Returns REPS words a lane that are 0, a tuple of [LANES] vectors."""
    words = ()
    for _ in tl.static_range(REPS):
        words = words + (tl.zeros([LANES], tl.int64),)
    return words


@triton.jit
def load_words(p_words, tag, low, high, num_blocks, REPS: tl.constexpr, WAIT: tl.constexpr):
    """Loads the words of a row, REPS x [LANES], and tells whether some of low <= b < high have not come. The loads have no
    condition, so that they are issued together; with conditions the compiler waits for each load before the next."""
    words = ()
    for r in tl.static_range(REPS):
        o_b = tl.minimum(r * LANES + tl.arange(0, LANES), num_blocks - 1)
        words = words + (look(p_words + o_b, WAIT),)
    missing = tl.zeros([LANES], tl.int32)
    for r in tl.static_range(REPS):
        o_b = r * LANES + tl.arange(0, LANES)
        missing |= absent(words[r], tag, (o_b >= low) & (o_b < high))
    return words, any_of(missing)


@triton.jit
def _flags(xs, threshold, REPS: tl.constexpr):
    """Returns [LANES] words whose bit r says whether vector r reaches the threshold."""
    words = (xs[0] >= threshold).to(tl.int32)
    for r in tl.static_range(1, REPS):
        words |= (xs[r] >= threshold).to(tl.int32) << r
    return words


@triton.jit
def _counts(xs, t1, t2, t3, REPS: tl.constexpr):
    """Counts how many scores reach each of three thresholds, ten bits each."""
    n = tl.zeros([LANES], tl.int32)
    for r in tl.static_range(REPS):
        n += tl.where(xs[r] >= t1, 1, 0) + tl.where(xs[r] >= t2, 1 << 10, 0) + tl.where(xs[r] >= t3, 1 << 20, 0)
    return tl.sum(n, 0)


@triton.jit
def _count(xs, threshold, REPS: tl.constexpr):
    """Counts how many scores reach one threshold."""
    n = tl.zeros([LANES], tl.int32)
    for r in tl.static_range(REPS):
        n += (xs[r] >= threshold).to(tl.int32)
    return tl.sum(n, 0)


@triton.jit
def _between(low, high, PART: tl.constexpr, rounds):
    """Returns a threshold low < t < high, PART quarters of the way: between the values first, then between the bits."""
    middle = low
    if rounds < 8:
        a, b = ordered(low).to(tl.float32, bitcast=True), ordered(high).to(tl.float32, bitcast=True)
        middle = ordered((a * (1.0 - 0.25 * PART) + b * (0.25 * PART)).to(tl.int32, bitcast=True))
    else:
        quarter = ((high >> 2) - (low >> 2)).to(tl.int32)
        middle = low + quarter * PART if PART < 3 else high - quarter
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _best(xs, REPS: tl.constexpr, GOAL: tl.constexpr):
    """Returns flags of the GOAL best of xs (fewer when fewer are above -inf); ties go to the lower id. xs: `ordered` int32."""
    NOTHING: tl.constexpr = -2139095041  # -inf
    columns = xs[0]
    for r in tl.static_range(1, REPS):
        columns = tl.maximum(columns, xs[r])
    low, high = tl.min(columns, 0), tl.max(columns, 0) + 1
    count = LANES + 0  # At least so many reach the smallest of all lanes' best scores.
    if (low <= NOTHING) | (GOAL >= LANES):
        lowest = tl.full([LANES], 0x7F800000, tl.int32)  # the lowest of those above -inf
        for r in tl.static_range(REPS):
            lowest = tl.minimum(lowest, tl.where(xs[r] > NOTHING, xs[r], 0x7F800000))
        low = tl.min(lowest, 0)
        count = _count(xs, low, REPS)
    rounds = 0
    while (count > GOAL) & (low + 1 < high):
        t1, t2, t3 = _between(low, high, 1, rounds), _between(low, high, 2, rounds), _between(low, high, 3, rounds)
        reached = _counts(xs, t1, t2, t3, REPS)
        n1, n2, n3 = reached & 1023, (reached >> 10) & 1023, reached >> 20
        high = tl.where(n1 < GOAL, t1, tl.where(n2 < GOAL, t2, tl.where(n3 < GOAL, t3, high)))
        low = tl.where(n3 >= GOAL, t3, tl.where(n2 >= GOAL, t2, tl.where(n1 >= GOAL, t1, low)))
        count = tl.where(n3 >= GOAL, n3, tl.where(n2 >= GOAL, n2, tl.where(n1 >= GOAL, n1, count)))
        rounds += 1
    words = _flags(xs, low, REPS)
    if count > GOAL:  # Of equals at the threshold, the lowest ids are kept.
        above = _flags(xs, low + 1, REPS)
        tied = words ^ above
        room = GOAL - _count(xs, low + 1, REPS)
        words = above
        while room > 0:
            _, rest = next_id(tied, LANES)
            words = words | (tied ^ rest)
            tied = rest
            room -= 1
    return words


@triton.jit
def select(words, seen, REPS: tl.constexpr, TOPK: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """Selects blocks from the words of a row that sees `seen` blocks: returns REPS int32 whose bit l is block r * LANES + l."""
    FREE: tl.constexpr = TOPK - INIT - LOCAL
    n_init, i_local = free_range(seen, INIT, LOCAL)
    o_l = tl.arange(0, LANES)
    flags = tl.zeros([LANES], tl.int32)
    if FREE > 0:
        xs = ()
        for r in tl.static_range(REPS):
            x = score_of(words[r], (r * LANES + o_l >= n_init) & (r * LANES + o_l < i_local))
            xs = xs + (ordered((x + 0.0).to(tl.int32, bitcast=True)),)  # Both zeros become one.
        flags = _best(xs, REPS, FREE)
    rows = ()
    for r in tl.static_range(REPS):
        o_b = r * LANES + o_l
        forced = ((o_b < n_init) | ((o_b >= i_local) & (o_b < seen))).to(tl.int32)
        rows = rows + (tl.sum((((flags >> r) & 1) | forced) << o_l, 0),)
    return rows


@triton.jit
def chosen_ids(rows, o_k, REPS: tl.constexpr):
    """Returns the o_k-th lowest id of those in `rows` (see `select`); -1 past the last."""
    mask = tl.zeros_like(o_k) + rows[0]
    first, place = tl.zeros_like(o_k), tl.zeros_like(o_k)  # number of ids before this row, and where it starts
    before = popcount(rows[0])
    for r in tl.static_range(1, REPS):
        later = o_k >= before
        mask = tl.where(later, rows[r], mask)
        first = tl.where(later, before, first)
        place = tl.where(later, r * LANES, place)
        before += popcount(rows[r])
    rank = o_k - first
    for s in tl.static_range(5):
        below = popcount(mask & ((1 << (16 >> s)) - 1))
        up = rank >= below
        mask = tl.where(up, mask >> (16 >> s), mask)
        place = tl.where(up, place + (16 >> s), place)
        rank = tl.where(up, rank - below, rank)
    return tl.where(o_k < before, place, -1)
