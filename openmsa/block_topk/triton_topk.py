# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Top-k of given scores on the GPU is exact: one program serves a row, which it holds in registers.

The k-th largest score is found by bisection: count the scores at or above a threshold, halve the interval. The interval starts
between the smallest of more than k maxima, of parts of the row, and the largest of all. Halving is between values first, which
takes about six rounds on real scores, and between their bit patterns (ordered as integers) after that, so that any input ends
within 48 rounds. It stops when exactly k scores reach the threshold; where equal scores never let that happen, the lowest ids
among them fill up. A round leaves the scores that reach its threshold as the bits of a word a thread, which is what it counts.
Transposed, the words are a bitmap of the chosen blocks in order, and every thread writes the ids of its word. Nothing depends
on the order in which programs or threads run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.block_topk.triton_ids import bit_of, free_range, next_id, ordered, popcount
from openmsa.primitives.codes import ASM, padded
from openmsa.runtime.launch import launch_kernel, next_power_of_two

MAX_BLOCKS = 16384
EARLY_ROWS = 1024  # up to so many rows, the time of one row counts, not that of memory


def num_warps(num_blocks: int) -> int:
    """Returns the warps of a program. A thread holds up to 32 scores, the bits of a word: rounds of bisection inside one warp
    need no barrier, so warps are few."""
    return max(1, next_power_of_two(num_blocks) // 1024)


@triton.jit
def key_of(x):
    """Gives the key of a float32 (not NaN): an int32 of the same order."""
    return ordered(x.to(tl.int32, bitcast=True))


@triton.jit
def value_of(key):
    """Gives the float32 of a key."""
    return ordered(key).to(tl.float32, bitcast=True)


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
def at_least(x, threshold, REPS: tl.constexpr, COLS: tl.constexpr):
    """Says which of x [REPS, COLS] reach the threshold, as words, and how many. Written out, a comparison that gives one or
    zero is one instruction, and what comes of it is not turned back into selections between powers of two."""
    if ASM:
        ones = tl.inline_asm_elementwise(
            "set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [x, threshold], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        ones = tl.where(x >= threshold, 1.0, 0.0)
    words = as_words(ones, REPS, COLS)
    return words, tl.sum(popcount(words), 0)


@triton.jit
def bisect(x, low, high, count, words, REPS: tl.constexpr, COLS: tl.constexpr, GOAL: tl.constexpr):
    """Raises `low`, which `count` of x reach, at least GOAL, until exactly GOAL do or it is the largest that so many reach.
    Returns it, how many reach it, and, when they are GOAL, which, as words. high: the largest of x."""
    middle = low * 0.5 + high * 0.5
    rounds = 0
    while (count != GOAL) & (low < middle) & (middle < high) & (rounds < 16):
        flags, reached = at_least(x, middle, REPS, COLS)
        enough = reached >= GOAL
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count = tl.where(enough, reached, count)
        words = tl.where(enough, flags, words)
        middle = low * 0.5 + high * 0.5
        rounds += 1
    least, most = key_of(low), key_of(high) + 1
    while (count != GOAL) & (least + 1 < most):
        key = (least & most) + ((least ^ most) >> 1)
        flags, reached = at_least(x, value_of(key), REPS, COLS)
        enough = reached >= GOAL
        least = tl.where(enough, key, least)
        most = tl.where(enough, most, key)
        count = tl.where(enough, reached, count)
        words = tl.where(enough, flags, words)
    return value_of(least), count, words


@triton.jit
def goal_reached(x, REPS: tl.constexpr, COLS: tl.constexpr, GOAL: tl.constexpr):
    """Finds a threshold that at least GOAL of x [REPS, COLS] reach, how many do, and, unless they are more than GOAL, which, as
    words. They are more only when the GOAL-th largest has equals, and fewer when fewer are above -inf. NaN counts as -inf."""
    GROUPS: tl.constexpr = min(COLS, padded(GOAL + 1))
    CHAINS: tl.constexpr = min(REPS, 4)
    best = tl.max(tl.max(x.reshape(CHAINS, REPS // CHAINS, COLS), 1), 0)
    best = tl.max(best.reshape(GROUPS, COLS // GROUPS), 1, keep_dims=True)
    best = best.broadcast_to(GROUPS, COLS // GROUPS).reshape(COLS)  # over whole warps, minimum and maximum take one instruction
    best = key_of(tl.where(best > float("-inf"), best, float("-inf")))
    low, high = value_of(tl.min(best, 0)), value_of(tl.max(best, 0))
    count, words = GROUPS, tl.zeros([COLS], tl.int32)
    if (low == float("-inf")) | (GROUPS <= GOAL):
        low = tl.min(tl.min(tl.where(x > float("-inf"), x, float("inf")), 0), 0)
        words, count = at_least(x, low, REPS, COLS)
    if count > GOAL:
        low, count, words = bisect(x, low, high, count, words, REPS, COLS, GOAL)
    return low, count, words


@triton.jit
def best_of(x, REPS: tl.constexpr, COLS: tl.constexpr, GOAL: tl.constexpr):
    """Gives flags, as words, of the GOAL best of x [REPS, COLS] (fewer when fewer are above -inf; NaN counts as -inf), and
    their number. The id of x[r, c] is r * COLS + c; ties go to the lower id."""
    low, count, words = goal_reached(x, REPS, COLS, GOAL)
    if count > GOAL:
        words = as_words(tl.where(x > low, 1.0, 0.0), REPS, COLS)
        tied = as_words(tl.where(x == low, 1.0, 0.0), REPS, COLS)
        count = tl.sum(popcount(words), 0)
        while count < GOAL:
            _, rest = next_id(tied, COLS)
            words = words | (tied ^ rest)
            tied = rest
            count += 1
    return words, count


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


@triton.jit
def write_selection(
    p_row, p_out, s_b, seen, num_blocks,
    TOPK: tl.constexpr, TOPK_PAD: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, REPS: tl.constexpr, COLS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Writes the selection of a row that sees `seen` of its num_blocks blocks, whose scores lie s_b apart from p_row on."""
    FREE: tl.constexpr = TOPK - INIT - LOCAL
    n_init, i_local = free_range(seen, INIT, LOCAL)
    n_free = 0
    if FREE > 0:
        o_r, o_c = tl.arange(0, REPS)[:, None] * COLS, tl.arange(0, COLS)[None, :]
        p_s = p_row + (o_r + o_c).to(tl.int64) * s_b
        m_free = o_r < i_local - o_c  # this form is one comparison with a constant each
        if INIT > 0:
            m_free = m_free & (o_r >= n_init - o_c)
        if EARLY:
            x = tl.where(m_free, tl.load(p_s, mask=o_r < num_blocks - o_c, other=float("-inf")), float("-inf"))
        else:
            x = tl.load(p_s, mask=m_free, other=float("-inf"))
        words, n_free = best_of(x.to(tl.float32), REPS, COLS, FREE)
        write_ids(p_out + n_init, words, COLS)
    write_forced(p_out, seen, n_init, i_local, n_free, TOPK, TOPK_PAD)


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
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Selects blocks in a grid of (total_q * heads). Forced blocks have no score: the first ones lead the ids, the last ones
    close them. EARLY: the whole row is read, without waiting to know how many blocks it sees."""
    i_row = tl.program_id(0)
    i_t, i_h = i_row // HEADS, i_row % HEADS
    if PDL:
        # Wait first: the kernel behind this one, which starts when every program has come to the second line, may then read
        # what any kernel before this one wrote, and must wait (gdc_wait) only for the ids.
        gdc_wait()
        gdc_launch_dependents()
    seen = tl.minimum(tl.load(visible + i_t), num_blocks)
    p_out = out + i_row.to(tl.int64) * TOPK
    p_row = scores + i_t.to(tl.int64) * s_t + i_h.to(tl.int64) * s_h
    write_selection(p_row, p_out, s_b, seen, num_blocks, TOPK, TOPK_PAD, INIT, LOCAL, REPS, COLS, EARLY)


def refuse(scores: Tensor) -> str | None:
    """Says why these rows cannot be held, or None."""
    return None if scores.shape[2] <= MAX_BLOCKS else f"it needs at most {MAX_BLOCKS} blocks, got {scores.shape[2]}"


def select_from_scores(scores: Tensor, topk: int, visible_blocks: Tensor, init_blocks: int, local_blocks: int) -> Tensor:
    """See `openmsa.block_topk.select_blocks_from_scores`."""
    heads, total_q, _ = scores.shape
    out = torch.empty(total_q, heads, topk, dtype=torch.int32, device=scores.device)
    if out.numel():
        launch_topk(scores.detach(), visible_blocks, init_blocks, local_blocks, out)
    return out


def row_constants(num_blocks: int) -> dict[str, int]:
    """Returns the constexprs of a kernel whose programs hold a row of so many blocks each, and its number of warps."""
    warps = num_warps(num_blocks)
    return {"REPS": max(next_power_of_two(num_blocks) // (32 * warps), 1), "COLS": 32 * warps, "num_warps": warps}


def selection_constants(heads: int, topk: int, num_blocks: int, init_blocks: int, local_blocks: int) -> dict[str, int]:
    """Returns `row_constants` and the constexprs of a kernel that writes the selection of rows to ``[total_q, heads,
    topk]``."""
    chosen = {"HEADS": heads, "TOPK": topk, "TOPK_PAD": next_power_of_two(topk), "INIT": init_blocks, "LOCAL": local_blocks}
    return chosen | row_constants(num_blocks)


def launch_topk(
    scores: Tensor,
    visible: Tensor,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Launches `topk_kernel`. scores: ``[heads, total_q, num_blocks]``, any strides, at most `MAX_BLOCKS` blocks. out: int32
    ``[total_q, heads, topk]``, contiguous. pdl: this kernel waits for the one before it inside, so that the two launches
    overlap."""
    heads, total_q, num_blocks = scores.shape
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    launch_kernel(
        topk_kernel,
        (total_q * heads,),
        scores,
        visible,
        out,
        *scores.stride(),
        num_blocks,
        EARLY=total_q * heads <= EARLY_ROWS,
        PDL=pdl,
        **selection_constants(heads, out.shape[2], num_blocks, init_blocks, local_blocks),
        **options,
    )
