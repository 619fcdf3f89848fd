# SPDX-License-Identifier: MIT
"""Exact top-k of given scores on the GPU: one program a row, which it holds in registers.

The k-th largest score is found by bisection: count the scores at or above a threshold, halve the interval. The interval starts
between the smallest of 32 or more column maxima and the largest of all. Halving is between values first, which takes about six
rounds on real scores, and between their bit patterns (ordered as integers) after that, so that any input ends within 48 rounds.
It stops when exactly k scores reach the threshold; where equal scores never let that happen, the lowest ids among them fill up.
Each thread then knows its chosen scores as the bits of a word, and ids are drawn from the words in ascending order. Nothing
depends on the order in which programs or threads run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.runtime.variants import Variant

MAX_BLOCKS = 16384
_NONE = tl.constexpr(0x7FFFFFFF)  # larger than any block id


def num_warps(num_blocks: int) -> int:
    """A thread holds at most 32 scores, the bits of a word. Fewer a thread and more warps are slower even for few rows: rounds
    of bisection inside one warp need no barrier."""
    return max(1, triton.next_power_of_2(num_blocks) // 1024)


@triton.jit
def ordered(bits):
    """Bits of a float32 (not NaN) to an int32 of the same order, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def count_true(flags):
    """How many flags [rows, columns] are set."""
    return tl.sum(tl.sum(flags.to(tl.int32), 0), 0)


@triton.jit
def bisect(x, low, high, count, GOAL: tl.constexpr):
    """The largest threshold known to be reached by at least GOAL of x, and how many reach it: GOAL itself, or more when the
    GOAL-th largest has equals. low, high: keys (`ordered`) that at least GOAL reach and that fewer reach."""
    rounds = 0
    while (count != GOAL) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        if rounds < 16:
            half = ordered(low).to(tl.float32, bitcast=True) * 0.5 + ordered(high).to(tl.float32, bitcast=True) * 0.5
            middle = ordered(half.to(tl.int32, bitcast=True))
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        reached = count_true(x >= ordered(middle).to(tl.float32, bitcast=True))
        enough = reached >= GOAL
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count = tl.where(enough, reached, count)
        rounds += 1
    return ordered(low).to(tl.float32, bitcast=True), count


@triton.jit
def as_words(flags, REPS: tl.constexpr):
    """Flags [REPS, COLS] to the bits of int32 words [COLS]."""
    return tl.sum(flags.to(tl.int32) << tl.arange(0, REPS)[:, None], 0)


@triton.jit
def next_id(words, COLS: tl.constexpr):
    """The lowest id whose flag is set (`_NONE` when there is none), and the words without it."""
    lowest = words & -words
    rep = (lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # exact: a power of two
    ids = tl.where(words != 0, rep * COLS + tl.arange(0, COLS), _NONE)
    first = tl.min(ids, 0)
    return first, tl.where(ids == first, words ^ lowest, words)


@triton.jit
def best_of(x, REPS: tl.constexpr, COLS: tl.constexpr, GOAL: tl.constexpr):
    """Flags, as words, of the GOAL best of x [REPS, COLS] (fewer when fewer are above -inf; NaN counts as -inf), and their
    number. The id of x[r, c] is r * COLS + c; ties go to the lower id."""
    columns = tl.max(x, 0)
    columns = tl.where(columns > float("-inf"), columns, float("-inf"))
    low, count = tl.min(columns, 0), COLS
    if (low == float("-inf")) | (COLS <= GOAL):
        low, count = tl.min(tl.min(tl.where(x > float("-inf"), x, float("inf")), 0), 0), count_true(x > float("-inf"))
    words = as_words(x > float("-inf"), REPS)
    if count > GOAL:
        high = ordered(tl.max(columns, 0).to(tl.int32, bitcast=True)) + 1
        low, count = bisect(x, ordered(low.to(tl.int32, bitcast=True)), high, count, GOAL)
        words = as_words(x >= low, REPS)
        if count > GOAL:
            tied = as_words(x == low, REPS)
            words = words ^ tied
            room = GOAL - count_true(x > low)
            while room > 0:
                _, rest = next_id(tied, COLS)
                words = words | (tied ^ rest)
                tied = rest
                room -= 1
        count = GOAL
    return words, count


@triton.jit(do_not_specialize=["num_blocks", "s_h", "s_t"])
def topk_kernel(
    scores,
    visible,
    out,
    s_h,
    s_t,
    s_b,
    num_blocks,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    REPS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (total_q * heads). Forced blocks are never read: the first ones lead the ids and the last ones close them."""
    FREE: tl.constexpr = TOPK - INIT - LOCAL
    i_row = tl.program_id(0)
    i_t, i_h = i_row // HEADS, i_row % HEADS
    if PDL:
        # Wait first: the kernel behind this one, which starts when every program has come to the second line, may then read
        # what any kernel before this one wrote, and must wait (gdc_wait) only for the ids.
        gdc_wait()
        gdc_launch_dependents()
    seen = tl.minimum(tl.load(visible + i_t), num_blocks)
    n_init = tl.minimum(seen, INIT)
    i_local = tl.maximum(seen - LOCAL, n_init)
    o_k = tl.arange(0, TOPK_PAD)
    ids = tl.full([TOPK_PAD], -1, tl.int32)
    n_free = 0
    if FREE > 0:
        o_b = tl.arange(0, REPS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        p_s = scores + i_t.to(tl.int64) * s_t + i_h.to(tl.int64) * s_h
        x = tl.load(p_s + o_b.to(tl.int64) * s_b, mask=(o_b >= n_init) & (o_b < i_local), other=float("-inf"))
        words, n_free = best_of(x.to(tl.float32), REPS, COLS, FREE)
        for j in range(FREE):
            first, words = next_id(words, COLS)
            ids = tl.where((o_k == INIT + j) & (first != _NONE), first, ids)
    after = o_k - n_init - n_free  # ids of forced blocks at the end
    ids = tl.where(o_k < n_init, o_k, tl.where((after >= 0) & (after < seen - i_local), i_local + after, ids))
    tl.store(out + i_row.to(tl.int64) * TOPK + o_k, ids, mask=o_k < TOPK)


def refuse(scores: Tensor) -> str | None:
    """Why these rows cannot be held, or None."""
    return None if scores.shape[2] <= MAX_BLOCKS else f"it needs at most {MAX_BLOCKS} blocks, got {scores.shape[2]}"


def select_from_scores(scores: Tensor, topk: int, visible_blocks: Tensor, init_blocks: int, local_blocks: int) -> Tensor:
    """See `openmsa.block_topk.select_blocks_from_scores`."""
    heads, total_q, _ = scores.shape
    out = torch.empty(total_q, heads, topk, dtype=torch.int32, device=scores.device)
    if out.numel():
        launch_topk(scores.detach(), visible_blocks, init_blocks, local_blocks, out)
    return out


def launch_topk(
    scores: Tensor,
    visible: Tensor,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
    pdl: bool = False,
    warps: int | None = None,
) -> None:
    """scores: ``[heads, total_q, num_blocks]``, any strides, at most `MAX_BLOCKS` blocks. out: int32 ``[total_q, heads,
    topk]``, contiguous. pdl: wait for the kernel before inside this one, so that the two launches overlap."""
    heads, total_q, num_blocks = scores.shape
    topk = out.shape[2]
    warps = warps or num_warps(num_blocks)
    columns = 32 * warps
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    topk_kernel[(total_q * heads,)](
        scores,
        visible,
        out,
        *scores.stride(),
        num_blocks,
        HEADS=heads,
        TOPK=topk,
        TOPK_PAD=triton.next_power_of_2(topk),
        INIT=init_blocks,
        LOCAL=local_blocks,
        REPS=max(triton.next_power_of_2(num_blocks) // columns, 1),
        COLS=columns,
        PDL=pdl,
        num_warps=warps,
        **options,
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """Rows from 64 to 16384 blocks."""
    arguments = dict.fromkeys(("s_h", "s_t", "num_blocks"), "i32") | {"scores": "*fp32", "visible": "*i32", "out": "*i32"}
    for num_blocks, rows, topk in ((64, 4, 8), (1024, 65536, 16), (1024, 4, 16), (8192, 32768, 16), (16384, 4, 64)):
        warps = num_warps(num_blocks)
        constexprs = {"s_b": 1, "HEADS": 4, "TOPK": topk, "TOPK_PAD": topk, "INIT": 0, "LOCAL": 1}
        constexprs |= {"REPS": num_blocks // warps // 32, "COLS": warps * 32, "PDL": rows == 4 and arch >= 90}
        yield Variant(f"topk {topk} of {num_blocks} x {rows}", topk_kernel, arguments, constexprs, warps)
