# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Two kernels exchange candidates and partial results through symmetric memory: each writes into the memory of every rank and
waits for what the others write into its own.

Values travel in words of 64 bits, beside the number of the launch (see `openmsa.primitives.waiting`): a rank that finds the
number has the value too, so that an exchange takes one way over the link, and no barrier. Launches alternate between two halves
of the memory: when a rank writes a half again, every other rank has written the other half since, which it does behind its last
read of this one. Programs take their rows in the order of tickets, so that ranks come to the same rows at the same time. A rank
that waits for longer than its limit stops with an error of the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from openmsa.block_topk.triton_ids import ordered
from openmsa.block_topk.triton_topk import EARLY_ROWS, best_of, row_constants, write_ids
from openmsa.parallel.exchange import Choice
from openmsa.primitives.waiting import absent, any_of, draw, look, put, put_word
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two

MOST_ENTRIES = 256
"""Candidates of a row, forced blocks among them, that one program compares each with each."""
ROWS = 4
"""Rows of partial results, each of a token and query head, that one program merges."""
FIRST_LAUNCH = 1 << 20
"""What counters of launches start from, see `draw`."""


class How(NamedTuple):
    """Says what kernels that choose among candidates are compiled for: index heads, the fields of a `Choice`, topk padded, this
    rank, how many there are, and how many sources a row has, forced blocks among them, padded."""

    heads: int
    topk: int
    topk_pad: int
    init: int
    local: int
    page_blocks: int
    rank: int
    ranks: int
    sources: int

    @classmethod
    def of(cls, heads: int, choice: Choice, reach: Reach) -> How:
        """Returns the constants of a layer."""
        topk_pad, sources = next_power_of_two(choice.topk), next_power_of_two(reach.ranks + 1)
        counts = (choice.init_blocks, choice.local_blocks, choice.page_blocks)
        return cls(heads, choice.topk, topk_pad, *counts, reach.rank, reach.ranks, sources)

    @property
    def warps(self) -> int:
        """Returns the warps of a program, whose threads make up to 32 comparisons at a time."""
        return min(max(self.sources * self.topk_pad**2 // 1024, 1), 16)


class Mailbox(NamedTuple):
    """Is memory that every rank can write.

    peers:    int64 ``[ranks]``, the address of each rank's words.
    words:    int64, this rank's words.
    counter:  int64 ``[1]``, which numbers the launches.
    """

    peers: Tensor
    words: Tensor
    counter: Tensor


@triton.jit
def _stop_if(late):
    """Ends the kernel with an error if `late` is not 0."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $1, 0; @p trap; mov.b32 $0, 0;}", "=r,r", [late], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _await(p_word, tag, mask, limit, WAIT: tl.constexpr):
    """Returns the int32 values of words when all that the mask asks for have come. limit: nanoseconds of patience. Addresses
    outside the mask are read too."""
    word = look(p_word, WAIT, "sys")
    if WAIT:
        start = globaltimer()
        while any_of(absent(word, tag, mask)):
            _stop_if((globaltimer() - start > limit).to(tl.int32))
            word = look(p_word, WAIT, "sys")
    return word.to(tl.int32)


@triton.jit
def _of_source(x, i, SOURCES: tl.constexpr, TOPK_PAD: tl.constexpr):
    """Takes the entries of source i, [TOPK_PAD], out of those of all."""
    is_source = (tl.arange(0, SOURCES) == i)[:, None]
    return tl.sum(tl.where(is_source, x.reshape(SOURCES, TOPK_PAD), 0), 0)


@triton.jit
def _offer(mail, i_row, half, tag, named, b_score, room, HOW: tl.constexpr, WAIT: tl.constexpr):
    """Sends the candidates of a row, named in the whole sequence, and their scores to every rank."""
    TOPK_PAD: tl.constexpr = HOW.topk_pad
    RANKS: tl.constexpr = HOW.ranks
    o_k = tl.arange(0, TOPK_PAD)
    to = ((half + HOW.rank) * room + i_row) * (2 * TOPK_PAD) + o_k
    for peer in tl.static_range(RANKS):
        p_peer = tl.load(mail.peers + peer).to(tl.pointer_type(tl.int64)) + to
        put(p_peer, b_score, tag, o_k < TOPK_PAD, WAIT, "sys")
        put(p_peer + TOPK_PAD, named, tag, o_k < TOPK_PAD, WAIT, "sys")


@triton.jit
def _offer_best(ids, scores, opened, mail, i_row, half, tag, s_head, s_token, room, HOW: tl.constexpr, WAIT: tl.constexpr):
    """Sends a row's candidates, whose ids the rank counts among its own blocks, to every rank. opened: the block at each place
    of a row of scores, where `ids` are such places; None: `ids` are the blocks."""
    o_k = tl.arange(0, HOW.topk_pad)
    b_id = tl.load(ids + i_row.to(tl.int64) * HOW.topk + o_k, mask=o_k < HOW.topk, other=-1)
    p_score = scores + (i_row % HOW.heads).to(tl.int64) * s_head + (i_row // HOW.heads).to(tl.int64) * s_token + b_id
    b_score = tl.load(p_score, mask=b_id >= 0, other=float("-inf")).to(tl.float32)
    if opened is not None:
        p_id = opened + (i_row % HOW.heads).to(tl.int64) * s_head + (i_row // HOW.heads).to(tl.int64) * s_token + b_id
        b_id = tl.load(p_id, mask=b_id >= 0, other=-1)
    named = (b_id // HOW.page_blocks * HOW.ranks + HOW.rank) * HOW.page_blocks + b_id % HOW.page_blocks
    _offer(mail, i_row, half, tag, tl.where(b_id < 0, -1, named), b_score, room, HOW, WAIT)


@triton.jit
def _choose(visible, blocks, mine, mail, i_row, half, tag, room, limit, HOW: tl.constexpr, WAIT: tl.constexpr):
    """Selects among the candidates of a row of all ranks, when they have come, and writes the selection."""
    TOPK: tl.constexpr = HOW.topk
    TOPK_PAD: tl.constexpr = HOW.topk_pad
    INIT: tl.constexpr = HOW.init
    LOCAL: tl.constexpr = HOW.local
    PAGE_BLOCKS: tl.constexpr = HOW.page_blocks
    RANK: tl.constexpr = HOW.rank
    RANKS: tl.constexpr = HOW.ranks
    SOURCES: tl.constexpr = HOW.sources
    # 1. Candidates of all ranks come; one more source stands for the forced blocks.
    o_k, o_e = tl.arange(0, TOPK_PAD), tl.arange(0, SOURCES * TOPK_PAD)
    source, slot = o_e // TOPK_PAD, o_e % TOPK_PAD
    given = source < RANKS
    p_word = mail.words + ((half + tl.where(given, source, RANK)) * room + i_row) * (2 * TOPK_PAD) + slot
    seen = tl.load(visible + i_row // HOW.heads)
    score = _await(p_word, tag, given, limit, WAIT).to(tl.float32, bitcast=True)
    named = _await(p_word + TOPK_PAD, tag, given, limit, WAIT)
    free = given & (named >= INIT) & (named < seen - LOCAL) & (score > float("-inf"))
    forced_id = tl.where(slot < INIT, slot, seen - LOCAL + slot - INIT)
    forced = (source == RANKS) & (slot < INIT + LOCAL) & (forced_id >= 0) & (forced_id < seen)
    forced = forced & ((slot < INIT) | (forced_id >= INIT))
    i_b = tl.where(given, named, forced_id)
    # 2. An entry is chosen if fewer than TOPK are better. Keys order entries by force, by score, and by id.
    key = ordered((tl.where(free, score, 0.0) + 0.0).to(tl.int32, bitcast=True))  # adding 0 makes -0 a 0
    key = tl.where(forced, 0x7FFFFFFF, key).to(tl.int64)
    key = tl.where(free | forced, (key << 32) | (0x7FFFFFFF - i_b).to(tl.int64), -0x7FFFFFFFFFFFFFFF)
    better = tl.zeros([SOURCES * TOPK_PAD], tl.int32)
    for i in range(SOURCES):
        better += tl.sum((_of_source(key, i, SOURCES, TOPK_PAD)[None, :] > key[:, None]).to(tl.int32), 1)
    chosen = (free | forced) & (better < TOPK)
    here = chosen & (i_b // PAGE_BLOCKS % RANKS == RANK)
    # 3. Ids are written in ascending order, those of this rank's blocks once more as it counts them.
    named, held = tl.where(chosen, i_b, 0x7FFFFFFF), tl.where(here, i_b, 0x7FFFFFFF)
    at, at_mine = tl.zeros([SOURCES * TOPK_PAD], tl.int32), tl.zeros([SOURCES * TOPK_PAD], tl.int32)
    for i in range(SOURCES):
        of_all, own = _of_source(named, i, SOURCES, TOPK_PAD), _of_source(held, i, SOURCES, TOPK_PAD)
        at += tl.sum((of_all[None, :] < i_b[:, None]).to(tl.int32), 1)
        at_mine += tl.sum((own[None, :] < i_b[:, None]).to(tl.int32), 1)
    i_own = i_b // PAGE_BLOCKS // RANKS * PAGE_BLOCKS + i_b % PAGE_BLOCKS
    p_blocks, p_mine = blocks + i_row.to(tl.int64) * TOPK, mine + i_row.to(tl.int64) * TOPK
    tl.store(p_blocks + at, i_b, mask=chosen)
    tl.store(p_blocks + o_k, -1, mask=(o_k < TOPK) & (o_k >= tl.sum(chosen.to(tl.int32), 0)))
    tl.store(p_mine + at_mine, i_own, mask=here)
    tl.store(p_mine + o_k, -1, mask=(o_k < TOPK) & (o_k >= tl.sum(here.to(tl.int32), 0)))


@triton.jit
def choose_kernel(
    scores, ids, visible, blocks, mine, mail, s_head, s_token, room, limit,
    HOW: tl.constexpr, PUT: tl.constexpr, GET: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Sends the candidates of a row to every rank, and selects among those of all ranks. The grid is (total_q * heads).

    HOW is a `How`. room: rows of a half of the memory, which holds ``[2, RANKS, room, 2, TOPK_PAD]`` words: scores, then ids.
    """
    i_row, tag = draw(mail.counter, tl.num_programs(0))
    half = (tag & 1).to(tl.int64) * HOW.ranks
    if PUT:
        _offer_best(ids, scores, None, mail, i_row, half, tag, s_head, s_token, room, HOW, WAIT)
    if GET:
        _choose(visible, blocks, mine, mail, i_row, half, tag, room, limit, HOW, WAIT)


@triton.jit(do_not_specialize=["s_head", "s_token", "room", "limit", "num_blocks"])
def select_kernel(
    scores, opened, held, ids, visible, blocks, mine, mail, s_head, s_token, room, limit, num_blocks,
    HOW: tl.constexpr, REPS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr, PUT: tl.constexpr, GET: tl.constexpr,
    WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Does what `openmsa.block_topk.triton_topk.topk_kernel` and then `choose_kernel` do, row by row, in one launch.

    held: int32 ``[total_q]``, how many of the rank's blocks each query sees. opened: None; or int32, laid out as scores, the
    ascending ids of the blocks that scores belong to, of which ``held [total_q * heads]`` then says how many there are in each
    row. ids: where candidates are written. EARLY: a whole row of scores is read, without waiting to know how many blocks it
    sees. PDL: the kernel starts while scores are written.
    """
    i_row, tag = draw(mail.counter, tl.num_programs(0))
    half = (tag & 1).to(tl.int64) * HOW.ranks
    TOPK: tl.constexpr = HOW.topk
    if PDL:
        # The wait comes first: attention starts when every program has called `gdc_launch_dependents`, may then read what
        # any kernel before this one wrote, and must wait only for the selection.
        gdc_wait()
        gdc_launch_dependents()
    if PUT:
        seen = tl.minimum(tl.load(held + (i_row // HOW.heads if opened is None else i_row)), num_blocks)
        o_r, o_c = tl.arange(0, REPS)[:, None] * COLS, tl.arange(0, COLS)[None, :]
        p_s = scores + (i_row // HOW.heads).to(tl.int64) * s_token + (i_row % HOW.heads).to(tl.int64) * s_head + (o_r + o_c)
        m_seen = o_r < seen - o_c
        if EARLY:
            x = tl.where(m_seen, tl.load(p_s, mask=o_r < num_blocks - o_c, other=float("-inf")), float("-inf"))
        else:
            x = tl.load(p_s, mask=m_seen, other=float("-inf"))
        words, n_best = best_of(x, REPS, COLS, TOPK)
        p_ids, o_k = ids + i_row.to(tl.int64) * TOPK, tl.arange(0, HOW.topk_pad)
        write_ids(p_ids, words, COLS)
        tl.store(p_ids + o_k, -1, mask=(o_k < TOPK) & (o_k >= n_best))
        tl.debug_barrier()  # Threads read the ids that others wrote.
        _offer_best(ids, scores, opened, mail, i_row, half, tag, s_head, s_token, room, HOW, WAIT)
    if GET:
        _choose(visible, blocks, mine, mail, i_row, half, tag, room, limit, HOW, WAIT)


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """Takes two 16-bit numbers of an int32 apart, as float32."""
    low = pairs.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _joined(low, high, dtype: tl.constexpr):
    """Puts two numbers, rounded to 16 bits, into an int32."""
    low = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _added(total, keep, x, weight):
    """Returns ``total * keep + x * weight`` of rows. It says which of the products is rounded: the compiler would choose for
    each rank's kernel anew, and ranks would hold different bits."""
    return tl.fma(x, tl.broadcast_to(weight[:, None], x.shape), total * keep[:, None])


@triton.jit
def merge_kernel(
    part, part_lse, out, lse, mail, rows, room, limit,
    DTYPE: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, PUT: tl.constexpr, GET: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Sends partial results of rows to every other rank, and merges those of all ranks in the order of ranks, so that every
    rank finds the same. The grid is (rows / ROWS).

    part, out:  int32 ``[rows, PAIRS]``, pairs of 16-bit numbers. part_lse, lse: float32 ``[rows]``, natural logarithms.
    room:       rows of a half of the memory, which holds ``[2, RANKS, room, PAIRS + 1]`` words: results, then lse.
    """
    i_p, tag = draw(mail.counter, tl.num_programs(0))
    half = (tag & 1).to(tl.int64) * RANKS
    o_r, o_d = i_p * ROWS + tl.arange(0, ROWS), tl.arange(0, PAIRS_PAD)
    m_r, o_first = o_r < rows, tl.where(o_r < rows, o_r, 0).to(tl.int64)
    m_rd = m_r[:, None] & (o_d < PAIRS)[None, :]
    o_word = o_first[:, None] * (PAIRS + 1) + tl.where(o_d < PAIRS, o_d, 0)[None, :]
    p_part = part + o_first[:, None] * PAIRS + o_d[None, :]
    b_part, b_lse = tl.load(p_part, mask=m_rd, other=0), tl.load(part_lse + o_first, mask=m_r, other=float("-inf"))
    # 1. The rank's own results go to the others.
    if PUT:
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                p_peer = tl.load(mail.peers + peer).to(tl.pointer_type(tl.int64)) + (half + RANK) * room * (PAIRS + 1)
                put(p_peer + o_word, b_part, tag, m_rd, WAIT, "sys")
                put(p_peer + o_first * (PAIRS + 1) + PAIRS, b_lse, tag, m_r, WAIT, "sys")
    # 2. All are merged in the order of ranks.
    if GET:
        m_i, l_i = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        low, high = tl.zeros([ROWS, PAIRS_PAD], tl.float32), tl.zeros([ROWS, PAIRS_PAD], tl.float32)
        for source in tl.static_range(RANKS):
            if source == RANK:
                b_x, b_l = b_part, b_lse
            else:
                p_word = mail.words + (half + source) * room * (PAIRS + 1)
                b_l = _await(p_word + o_first * (PAIRS + 1) + PAIRS, tag, m_r, limit, WAIT).to(tl.float32, bitcast=True)
                b_x = _await(p_word + o_word, tag, m_rd, limit, WAIT)
            m_new = tl.maximum(m_i, b_l)
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            keep, weight = tl.exp(m_i - safe), tl.exp(b_l - safe)
            x_low, x_high = _halves(b_x, DTYPE)
            low, high = _added(low, keep, x_low, weight), _added(high, keep, x_high, weight)
            l_i, m_i = l_i * keep + weight, m_new
        total = tl.where(l_i > 0, l_i, 1.0)
        p_out = out + o_first[:, None] * PAIRS + o_d[None, :]
        tl.store(p_out, _joined(low / total[:, None], high / total[:, None], DTYPE), mask=m_rd)
        tl.store(lse + o_first, m_i + tl.log(total), mask=m_r)


EMPTY = tl.constexpr(-1)
"""Half a word that holds this has not come: results and lse never have these bits, which are those of one of many NaN."""
NAN = tl.constexpr(0x7FFF7FFF)
"""Two 16-bit NaN, or one of float32, that stand for those of `EMPTY`."""


@triton.jit
def _given(half):
    """Returns 32 bits of results so that they are never `EMPTY`: only a NaN with those bits becomes another NaN."""
    return tl.where(half == EMPTY, NAN, half)


@triton.jit
def _word_of(low, high):
    """Puts two int32 into a word."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def _send(p_word, low, high, mask, WAIT: tl.constexpr):
    """Writes words of results into the memory of any rank."""
    put_word(p_word, _word_of(_given(low), _given(high)), mask, WAIT, "sys")


@triton.jit
def _receive(p_word, mask, limit, WAIT: tl.constexpr):
    """Returns the halves of words when all that the mask asks for have come, and empties these words for a later launch.
    limit: nanoseconds of patience. Addresses outside the mask are read too."""
    word = look(p_word, WAIT, "sys")
    if WAIT:
        start = globaltimer()
        while any_of(tl.where(mask & ((word.to(tl.int32) == EMPTY) | ((word >> 32).to(tl.int32) == EMPTY)), 1, 0)):
            _stop_if((globaltimer() - start > limit).to(tl.int32))
            word = look(p_word, WAIT, "sys")
    tl.store(p_word, tl.full(p_word.shape, -1, tl.int64), mask=mask)
    return word.to(tl.int32), (word >> 32).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "room", "limit"])
def blend_kernel(
    part, part_lse, out, lse, mail, rows, room, limit,
    DTYPE: tl.constexpr, QUADS: tl.constexpr, QUADS_PAD: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, PUT: tl.constexpr, GET: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Does what `merge_kernel` does with half of the bytes: words are results alone, four 16-bit numbers each, and a word has
    come when it is not empty. Who reads a word empties it, so a program is one warp, whose threads see a word at once. The half
    of the memory that a launch uses is written again by the launch after the next, which another rank begins only behind words
    of the next launch, and these leave a rank only when the launch that emptied the half has ended.

    part, out:  int64 ``[rows, QUADS]``, four 16-bit numbers each. part_lse, lse: float32 ``[rows]``, natural logarithms.
    room:       rows of a half of the memory, which holds ``[2, RANKS, room, QUADS]`` words, then ``[2, RANKS, room]`` of lse.
    """
    i_p, tag = draw(mail.counter, tl.num_programs(0))
    half, lses = (tag & 1).to(tl.int64) * RANKS, 2 * RANKS * tl.cast(room, tl.int64) * QUADS
    o_r, o_d = i_p * ROWS + tl.arange(0, ROWS), tl.arange(0, QUADS_PAD)
    m_r, o_first = o_r < rows, tl.where(o_r < rows, o_r, 0).to(tl.int64)
    m_rd = m_r[:, None] & (o_d < QUADS)[None, :]
    o_word = o_first[:, None] * QUADS + tl.where(o_d < QUADS, o_d, 0)[None, :]
    if PDL:
        gdc_wait()
    b_part, b_lse = tl.load(part + o_word, mask=m_rd, other=0), tl.load(part_lse + o_first, mask=m_r, other=float("-inf"))
    low, high = b_part.to(tl.int32), (b_part >> 32).to(tl.int32)
    # 1. The rank's own results go to the others.
    if PUT:
        bits = b_lse.to(tl.int32, bitcast=True)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                p_peer = tl.load(mail.peers + peer).to(tl.pointer_type(tl.int64))
                _send(p_peer + lses + (half + RANK) * room + o_first, bits, tl.zeros_like(bits), m_r, WAIT)
                _send(p_peer + (half + RANK) * room * QUADS + o_word, low, high, m_rd, WAIT)
    # 2. All are merged in the order of ranks.
    if GET:
        m_i, l_i = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        b_0, b_1 = tl.zeros([ROWS, QUADS_PAD], tl.float32), tl.zeros([ROWS, QUADS_PAD], tl.float32)
        b_2, b_3 = tl.zeros([ROWS, QUADS_PAD], tl.float32), tl.zeros([ROWS, QUADS_PAD], tl.float32)
        for source in tl.static_range(RANKS):
            if source == RANK:
                x_low, x_high, b_l = low, high, b_lse
            else:
                bits, _ = _receive(mail.words + lses + (half + source) * room + o_first, m_r, limit, WAIT)
                x_low, x_high = _receive(mail.words + (half + source) * room * QUADS + o_word, m_rd, limit, WAIT)
                b_l = bits.to(tl.float32, bitcast=True)
            m_new = tl.maximum(m_i, b_l)
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            keep, weight = tl.exp(m_i - safe), tl.exp(b_l - safe)
            x_0, x_1 = _halves(x_low, DTYPE)
            x_2, x_3 = _halves(x_high, DTYPE)
            b_0, b_1 = _added(b_0, keep, x_0, weight), _added(b_1, keep, x_1, weight)
            b_2, b_3 = _added(b_2, keep, x_2, weight), _added(b_3, keep, x_3, weight)
            l_i, m_i = l_i * keep + weight, m_new
        total = tl.where(l_i > 0, l_i, 1.0)
        whole = total[:, None]
        word = _word_of(_joined(b_0 / whole, b_1 / whole, DTYPE), _joined(b_2 / whole, b_3 / whole, DTYPE))
        tl.store(out + o_word, word, mask=m_rd)
        tl.store(lse + o_first, m_i + tl.log(total), mask=m_r)


class Reach(NamedTuple):
    """Says which rank this is, of how many, and how many nanoseconds it waits for another."""

    rank: int
    ranks: int
    limit: int


def refuse_choice(topk: int, ranks: int) -> str | None:
    """Says why candidates of so many ranks cannot be compared; None where they can."""
    entries = next_power_of_two(ranks + 1) * next_power_of_two(topk)
    if entries > MOST_ENTRIES:
        return f"(ranks + 1) * topk, each rounded up to a power of two, must be at most {MOST_ENTRIES}, got {entries}"
    return None


def choice_words(rows: int, topk: int, ranks: int) -> int:
    """Returns how many words `launch_choose` needs for so many rows of all tokens and index heads."""
    return 2 * ranks * rows * 2 * next_power_of_two(topk)


def launch_choose(
    scores: Tensor,
    ids: Tensor,
    visible: Tensor,
    blocks: Tensor,
    mine: Tensor,
    mail: Mailbox,
    room: int,
    choice: Choice,
    reach: Reach,
    put: bool = True,
    get: bool = True,
) -> None:
    """Does what `Collectives.choose` does; blocks and mine are written. put, get: a test without a GPU runs the halves of the
    kernel one after the other."""
    heads, total_q, _ = scores.shape
    how, operands = How.of(heads, choice, reach), (scores, ids, visible, blocks, mine, mail)
    numbers, constants = (
        (scores.stride(0), scores.stride(1), room, reach.limit),
        {"PUT": put, "GET": get, "WAIT": scores.is_cuda},
    )
    launch_kernel(choose_kernel, (total_q * heads,), *operands, *numbers, HOW=how, **constants, num_warps=how.warps)


def launch_select(
    scores: Tensor,
    held: Tensor,
    visible: Tensor,
    blocks: Tensor,
    mine: Tensor,
    mail: Mailbox,
    room: int,
    choice: Choice,
    reach: Reach,
    put: bool = True,
    get: bool = True,
    pdl: bool = False,
    opened: Tensor | None = None,
) -> None:
    """Takes the best blocks of scores ``[heads, total_q, blocks of the rank]``, last stride 1, of which each query sees `held`,
    and does what `launch_choose` does. pdl: the launch waits for the one in front inside its kernel. opened: as in
    `select_kernel`."""
    heads, total_q, num_blocks = scores.shape
    how, ids, row = How.of(heads, choice, reach), torch.empty_like(mine), row_constants(num_blocks)
    row["num_warps"] = max(row["num_warps"], how.warps)
    launch_kernel(
        select_kernel,
        (total_q * heads,),
        *(scores, opened, held, ids, visible, blocks, mine, mail),
        *(scores.stride(0), scores.stride(1), room, reach.limit, num_blocks),
        HOW=how,
        EARLY=total_q * heads <= EARLY_ROWS,
        PUT=put,
        GET=get,
        WAIT=scores.is_cuda,
        PDL=pdl,
        **row,
        **({"launch_pdl": True} if pdl else {}),
    )


def merge_words(rows: int, dim: int, ranks: int) -> int:
    """Returns how many words `launch_merge` needs for so many rows of all tokens and query heads."""
    return 2 * ranks * rows * (dim // 2 + 1)


def launch_merge(
    part: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    mail: Mailbox,
    room: int,
    reach: Reach,
    put: bool = True,
    get: bool = True,
) -> None:
    """Does what `Collectives.merge` does for contiguous tensors, part and out of one 16-bit dtype. put, get: as in
    `launch_choose`."""
    pairs, rows = part.shape[-1] // 2, part_lse.numel()
    constants = {
        "DTYPE": tl.bfloat16 if part.dtype == torch.bfloat16 else tl.float16,
        "PAIRS": pairs,
        "PAIRS_PAD": next_power_of_two(pairs),
        "ROWS": ROWS,
        "RANK": reach.rank,
        "RANKS": reach.ranks,
        "PUT": put,
        "GET": get,
        "WAIT": part.is_cuda,
    }
    operands = part.view(torch.int32), part_lse, out.view(torch.int32), lse, mail
    launch_kernel(merge_kernel, (ceil_div(rows, ROWS),), *operands, rows, room, reach.limit, **constants, num_warps=2)


def blend_words(rows: int, dim: int, ranks: int) -> int:
    """Returns how many words `launch_blend` needs for so many rows of all tokens and query heads; they start as -1."""
    return 2 * ranks * rows * (dim // 4 + 1)


def launch_blend(
    part: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    mail: Mailbox,
    room: int,
    reach: Reach,
    put: bool = True,
    get: bool = True,
    pdl: bool = False,
) -> None:
    """Does what `launch_merge` does with half of the bytes, by `blend_kernel`. pdl: as in `launch_select`."""
    quads, rows = part.shape[-1] // 4, part_lse.numel()
    constants = {
        "DTYPE": tl.bfloat16 if part.dtype == torch.bfloat16 else tl.float16,
        "QUADS": quads,
        "QUADS_PAD": next_power_of_two(quads),
        "ROWS": ROWS,
        "RANK": reach.rank,
        "RANKS": reach.ranks,
        "PUT": put,
        "GET": get,
        "WAIT": part.is_cuda,
        "PDL": pdl,
        "num_warps": 1,  # of several, one could empty a word for which another still waits
        **({"launch_pdl": True} if pdl else {}),
    }
    operands = part.view(torch.int64), part_lse, out.view(torch.int64), lse, mail
    launch_kernel(blend_kernel, (ceil_div(rows, ROWS),), *operands, rows, room, reach.limit, **constants)
