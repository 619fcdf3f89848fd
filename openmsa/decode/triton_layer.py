# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""One launch runs a decode layer of a small batch: scoring, selection, attention and merge.

Three kinds of programs take their work in the order of their tickets (see `openmsa.primitives.waiting`). A scoring program
scores a share of one sequence's blocks, for one index key head and all its rows. An attention program serves one token, KV head
and split: while the scores are made it loads its queries, then it selects for itself (every program of a row finds the same
blocks) and reads its tiles of them. A merge program serves one token and query head, or half of its columns. Latency bounds the
layer: a second launch costs more than what is computed, and so does a flag behind a fence.

`openmsa.decode.memory` decides once a plan whether a layer is one launch, and cuts it into programs; `launch` launches it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.block_topk.triton_ids import LANES, chosen_ids, load_words, no_words, score_of, select
from openmsa.block_topk.triton_topk import best_of, write_forced, write_ids
from openmsa.decode.sizes import Sizes
from openmsa.kv_cache import E4M3, PagedIndexKeys, PagedKV
from openmsa.primitives.operands import KeyRows, PageTable, QueryRows
from openmsa.primitives.results import finish
from openmsa.primitives.rows import (
    Tile,
    block_maxima,
    key_rows,
    load_rows,
    output_rows,
    query_rows,
    tile_start,
    tma_tiles,
)
from openmsa.primitives.waiting import absent, any_of, arrived, draw, look, put, put_pairs
from openmsa.runtime import devices
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two
from openmsa.sparse_attention import triton_decode
from openmsa.sparse_attention.triton_decode_walk import Shape, fetch_ahead, first_keys, walk

EVERY, SCORE, ATTEND, MERGE = (tl.constexpr(i) for i in range(4))  # These are the kinds of programs in a launch.
FETCH_BYTES = 12 << 20
"""Index keys of at most so many bytes are fetched while the kernel in front still runs."""


class Step(NamedTuple):
    """Holds the checked arguments of one layer of a decode step, and where its results go."""

    q: Tensor | E4M3
    kv: PagedKV
    index_q: Tensor | E4M3
    index_keys: PagedIndexKeys
    softmax_scale: float
    blocks: Tensor
    out: Tensor
    lse: Tensor


class IndexBranch(NamedTuple):
    """Holds the operands of scoring: index queries, the pool of index keys, their page table and lengths int32 [batch]."""

    q: QueryRows
    k: KeyRows
    table: PageTable
    seq_lens: Tensor


class MainBranch(NamedTuple):
    """Holds the operands of attention: queries, the pools of keys and values, their page table and lengths int32 [batch]."""

    q: QueryRows
    k: KeyRows
    v: KeyRows
    table: PageTable
    seq_lens: Tensor


class Words(NamedTuple):
    """Holds what the programs of one launch hand each other, in words; `counter` numbers the launches from 1 on.

    scores:   int64 [tokens, index heads, num_blocks].
    part:     int64 [tokens, q heads, splits, head_dim].
    lse:      int64 [tokens, q heads, splits].
    counter:  int64 [1].
    """

    scores: Tensor
    part: Tensor
    lse: Tensor
    counter: Tensor

    @classmethod
    def allocate(cls, scores: int, splits: int, head_dim: int, device: torch.device) -> Words:
        """Allocates the words. scores: tokens x index heads x blocks of the largest launch. splits: the most tokens x query
        heads x splits of a launch."""
        counts = (scores, splits * head_dim, splits)
        first, part, lse = (torch.zeros(n, dtype=torch.int64, device=device) for n in counts)
        return cls(first, part, lse, torch.full((1,), 1 << 20, dtype=torch.int64, device=device))


class Scoring(NamedTuple):
    """Says what scoring programs are compiled for. rows: (token, head) rows of a program, padded. share: tiles of a program,
    padded. ahead: tiles that `fetch_share` fetches. strided: a program's tiles lie as far apart as there are programs, so that
    programs share what a sequence has, and not what there is room for."""

    heads: int
    key_heads: int
    dim: int
    dim_pad: int
    page: int
    tile: Tile
    rows: int
    share: int
    ahead: int
    strided: bool
    num_stages: int


class Attending(NamedTuple):
    """Says what attention and merge programs are compiled for. pages_pad: pages of a row of the page table, or of so many keys
    as `reps` is for. reps: scores of a row that a lane of each warp holds. far: scores of a row that a thread of the whole
    program holds where the row sees more than those, 0 where none does; threads: threads of a program. merge_parts: merge
    programs of a query head. Names in _pad are padded to powers of two."""

    heads: int
    index_heads: int
    shape: Shape
    cut: triton_decode.Config
    init_blocks: int
    local_blocks: int
    topk_pad: int
    pages_pad: int
    splits_pad: int
    reps: int
    far: int
    threads: int
    merge_parts: int


@triton.jit
def tile_of(i_split, u, splits, tiles, SCORING: tl.constexpr):
    """Returns the u-th tile of one of the `splits` scoring programs of a sequence and key head. Where they are strided, the
    halves of a block stay together."""
    PARTS: tl.constexpr = SCORING.tile.parts
    return (i_split + u // PARTS * splits) * PARTS + u % PARTS if SCORING.strided else i_split * tiles + u


@triton.jit
def pages_ahead(i, index, index_capacity, scoring, splits, tiles, SCORING: tl.constexpr):
    """Loads, for `fetch_share`, the pages of the first tiles of scoring program i as the table has them now; -1 stands for
    none."""
    TILE: tl.constexpr = SCORING.tile
    AHEAD: tl.constexpr = SCORING.ahead
    table, i_s = index.table, i // splits // SCORING.key_heads
    end = index_capacity
    if SCORING.strided:  # Lengths may yet change, which costs a useless fetch, or none.
        end = tl.minimum(end, tl.load(index.seq_lens + i_s, mask=i < scoring, other=0, cache_modifier=".cg"))
    pages = ()
    for u in tl.static_range(AHEAD):
        i_k = tile_start(tile_of(i % splits, u, splits, tiles, SCORING), TILE)
        p_page = table.ids + i_s.to(tl.int64) * table.s_sequence + i_k // SCORING.page
        exists = (i < scoring) & (u < tiles) & (i_k < end)
        pages = pages + (tl.load(p_page, mask=exists, other=-1, cache_modifier=".cg"),)  # The L1 cache would keep them.
    return pages


@triton.jit
def fetch_share(i, pages, keys, index_pages, splits, tiles, SCORING: tl.constexpr):
    """Brings the index keys of a scoring program closer while the kernel in front still runs. No result depends
    on what it reads, which may yet change: a fetch by a page that changes is useless, but stays inside the pool."""
    TILE: tl.constexpr = SCORING.tile
    AHEAD: tl.constexpr = SCORING.ahead
    LINES: tl.constexpr = (SCORING.dim * keys.data.dtype.element_ty.primitive_bitwidth // 8 + 127) // 128
    i_h = i // splits % SCORING.key_heads
    o_n = tl.arange(0, TILE.tile)
    for u in tl.static_range(AHEAD):
        i_k, i_page = tile_start(tile_of(i % splits, u, splits, tiles, SCORING), TILE), pages[u]
        exists = (i_page >= 0) & (i_page < index_pages)
        p_k = keys.data + i_page.to(tl.int64) * keys.s_page + i_h.to(tl.int64) * keys.s_head
        for line in tl.static_range(LINES):
            p_line = p_k + (i_k % SCORING.page + o_n).to(tl.int64) * keys.s_row + line * (SCORING.dim // LINES)
            fetch_ahead(p_line, tl.full([TILE.tile], 1, tl.int1) & exists)


@triton.jit
def score_share(
    i, index, tma, words, tag, queries, num_blocks, index_pages, index_capacity, splits, tiles,
    SCORING: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Puts the words of the blocks of `tiles` tiles, at most SCORING.share. Pages hold whole tiles. tma is a descriptor of
    tiles of index keys, or None."""
    TILE: tl.constexpr = SCORING.tile
    GROUP: tl.constexpr = SCORING.heads // SCORING.key_heads
    q, keys, table = index.q, index.k, index.table
    # 1. The program finds its sequence, key head and tiles, and loads the pages of all its tiles and its rows.
    i_split, i_s, i_h = i % splits, i // splits // SCORING.key_heads, i // splits % SCORING.key_heads
    o_u = tl.arange(0, SCORING.share)
    b_start = tile_start(tile_of(i_split, o_u, splits, tiles, SCORING), TILE)
    p_page = table.ids + i_s.to(tl.int64) * table.s_sequence + b_start // SCORING.page
    b_page = tl.load(p_page, mask=(b_start < index_capacity) & (o_u < tiles), other=-1)  # Pages need no length.
    length = tl.load(index.seq_lens + i_s)
    o_r = tl.arange(0, SCORING.rows)
    m_row = o_r < queries * GROUP
    p_q = q.data + (i_s * queries).to(tl.int64) * q.s_token
    b_q = load_rows(p_q, o_r, queries, i_h * GROUP, q.s_token, q.s_head, q.s_dim, GROUP, SCORING.dim, SCORING.dim_pad)
    n_k = tl.minimum(length, index_capacity)
    i_last = tl.minimum(length - queries + o_r // GROUP, n_k - 1)  # the last key that each row sees
    last = tl.cdiv(tl.maximum(n_k, 0), TILE.block * TILE.sub)
    if SCORING.strided:
        last = tl.minimum(tiles, tl.cdiv(tl.maximum(last - i_split, 0), splits) * TILE.parts)
    else:
        last = tl.minimum(tiles, last * TILE.parts - i_split * tiles)
    p_w = words.scores
    p_w += ((i_s * queries + o_r // GROUP).to(tl.int64) * SCORING.heads + i_h * GROUP + o_r % GROUP) * num_blocks
    best = tl.full([SCORING.rows], float("-inf"), tl.float32)  # the maximum over the parts of a block so far
    o_d = tl.arange(0, SCORING.dim_pad)
    # 2. It walks the tiles and puts the maxima of their blocks.
    for u in tl.range(0, last, num_stages=SCORING.num_stages):
        i_t = tile_of(i_split, u, splits, tiles, SCORING)
        i_k = tile_start(i_t, TILE)
        i_page = tl.sum(tl.where(o_u == u, b_page, 0), 0)
        if tma is not None:  # A page outside the pool reads as zeros.
            b_k = tma.load([i_page, i_h, i_k % SCORING.page, 0]).reshape(TILE.tile, SCORING.dim_pad)
        else:
            o_n = i_k % SCORING.page + tl.arange(0, TILE.tile)
            m_k = (i_k + tl.arange(0, TILE.tile) < n_k) & (i_page >= 0) & (i_page < index_pages)
            p_k = keys.data + i_page.to(tl.int64) * keys.s_page + i_h.to(tl.int64) * keys.s_head
            p_k += o_n.to(tl.int64) * keys.s_row
            m_kd = m_k[:, None] & (o_d < SCORING.dim)[None, :]
            b_k = tl.load(p_k[:, None] + (o_d * keys.s_dim)[None, :], mask=m_kd, other=0)
        m = block_maxima(tl.dot(b_k, b_q.T), i_k, i_last, TILE.tile, TILE.keys, TILE.sub, True, True)
        if TILE.parts == 2:
            m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
            best = m
        m = tl.where(m > float("-inf"), m, float("-inf"))
        if TILE.sub > 1:
            o_b = i_t * TILE.sub + tl.arange(0, TILE.sub)
            put(p_w[:, None] + o_b[None, :], m, tag, m_row[:, None] & (o_b < num_blocks)[None, :], WAIT)
        elif TILE.parts == 1:
            put(p_w + i_t, m, tag, m_row, WAIT)
        else:
            put(p_w + i_t // 2, m, tag, m_row & (i_t % 2 == 1), WAIT)


@triton.jit
def choose(p_w, tag, low, high, num_blocks, n_blocks, ATTENDING: tl.constexpr, WAIT: tl.constexpr):
    """Waits for the words of a row, and selects from them in each warp; returns what `select` does."""
    REPS: tl.constexpr = ATTENDING.reps
    b_words, missing = no_words(REPS), True
    while missing:
        b_words, missing = load_words(p_w, tag, low, high, num_blocks, REPS, WAIT)
    return select(b_words, n_blocks, REPS, ATTENDING.shape.topk, ATTENDING.init_blocks, ATTENDING.local_blocks)


@triton.jit
def write_choice(p_w, p_ids, tag, low, high, num_blocks, n_blocks, ATTENDING: tl.constexpr, WAIT: tl.constexpr):
    """Waits for the words of a row that sees more blocks than `choose` holds, and writes the selection; the threads of the
    program hold the row together."""
    SHAPE: tl.constexpr = ATTENDING.shape
    FAR: tl.constexpr = ATTENDING.far
    COLS: tl.constexpr = ATTENDING.threads
    FREE: tl.constexpr = SHAPE.topk - ATTENDING.init_blocks - ATTENDING.local_blocks
    n_free = 0
    if FREE > 0:
        o_b = tl.arange(0, FAR)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        m_b = (o_b >= low) & (o_b < high)
        b_words = look(p_w + tl.minimum(o_b, num_blocks - 1), WAIT)
        if WAIT:
            while any_of(absent(b_words, tag, m_b)):
                b_words = look(p_w + tl.minimum(o_b, num_blocks - 1), WAIT)
        flags, n_free = best_of(score_of(b_words, m_b), FAR, COLS, FREE)
        write_ids(p_ids + low, flags, COLS)
    write_forced(p_ids, n_blocks, low, high, n_free, SHAPE.topk, ATTENDING.topk_pad)


@triton.jit
def attend_share(
    i, main, index_lens, words, tag, blocks, out, scale, queries, num_blocks, num_pages, capacity, index_capacity, tiles,
    ATTENDING: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Puts the partial words of one split, or stores the output itself where there is one split."""
    SHAPE: tl.constexpr = ATTENDING.shape
    CUT: tl.constexpr = ATTENDING.cut
    REPS: tl.constexpr = ATTENDING.reps
    FAR: tl.constexpr = ATTENDING.far
    INIT: tl.constexpr = ATTENDING.init_blocks
    LOCAL: tl.constexpr = ATTENDING.local_blocks
    HEADS: tl.constexpr = ATTENDING.heads
    INDEX_HEADS: tl.constexpr = ATTENDING.index_heads
    G: tl.constexpr = SHAPE.group
    D: tl.constexpr = SHAPE.dim
    ROW_TILES: tl.constexpr = (G + CUT.rows - 1) // CUT.rows
    PER: tl.constexpr = SHAPE.block // CUT.keys
    q, table = main.q, main.table
    # 1. The program finds its token, heads and split, loads its queries, and finds how many keys they see.
    i_s, i_p = i % CUT.splits, i // CUT.splits
    i_t, i_h = i_p // (HEADS * ROW_TILES), i_p // ROW_TILES % HEADS
    i_b = i_t // queries
    o_r = (i_p % ROW_TILES) * CUT.rows + tl.arange(0, CUT.rows)  # heads in the group
    m_r = o_r < G
    o_d = tl.arange(0, SHAPE.dim_pad)
    p_q = q.data + i_t.to(tl.int64) * q.s_token + (i_h * G + o_r[:, None]) * q.s_head + o_d[None, :] * q.s_dim
    b_q = tl.load(p_q, mask=m_r[:, None] & (o_d[None, :] < D), other=0.0)  # [BM, DIM_PAD]
    # Both caches hold as many keys. Where they do not, the fewer count, so that no program waits for words that none writes.
    length = tl.minimum(tl.load(main.seq_lens + i_b), tl.minimum(tl.load(index_lens + i_b), index_capacity))
    n_k = tl.minimum(tl.minimum(length, capacity), length - queries + i_t % queries + 1)  # The query sees so many keys.
    n_blocks = tl.maximum(n_k + SHAPE.block - 1, 0) // SHAPE.block

    # 2. It loads the sequence's row of the page table: the pages of selected blocks then come from the L1 cache, and a bound of
    # its ids serves as well as num_pages.
    i_row = i_t * INDEX_HEADS + (i_h if INDEX_HEADS > 1 else 0)
    p_w = words.scores + i_row.to(tl.int64) * num_blocks
    low, high = tl.minimum(n_blocks, INIT), tl.maximum(n_blocks - LOCAL, tl.minimum(n_blocks, INIT))
    p_table = table.ids + i_b.to(tl.int64) * table.s_sequence
    o_p = tl.arange(0, ATTENDING.pages_pad)
    b_table = tl.load(p_table + o_p * table.s_page, mask=o_p * SHAPE.page < capacity, other=-1)
    end_page = tl.max(tl.where(b_table < num_pages, b_table, -1), 0) + 1
    if FAR > 0:
        end_page = tl.where(n_k <= ATTENDING.pages_pad * SHAPE.page, end_page, num_pages)
    b_q = arrived(b_q, WAIT)

    # 3. It waits for scores, first for one word a lane, about the last to come: programs that load all words again and again
    # crowd the L2 cache.
    if WAIT and REPS > 1:
        o_b = tl.maximum(high - LANES, low) + tl.arange(0, LANES)
        missing = True
        while missing:
            missing = any_of(absent(look(p_w + tl.minimum(o_b, num_blocks - 1), WAIT), tag, o_b < high))
    # 4. It selects, and attends to this split's tiles of the selected blocks.
    b_u = i_s * CUT.tiles + tl.arange(0, CUT.tiles)
    p_ids = blocks + i_row.to(tl.int64) * SHAPE.topk
    o_k = tl.arange(0, ATTENDING.topk_pad)
    if FAR == 0:
        b_rows = choose(p_w, tag, low, high, num_blocks, n_blocks, ATTENDING, WAIT)
        b_id = tl.where(b_u < SHAPE.topk * PER, chosen_ids(b_rows, b_u // PER, REPS), -1)
    else:
        b_ids = o_k
        if n_blocks <= REPS * LANES:
            b_ids = chosen_ids(choose(p_w, tag, low, high, num_blocks, n_blocks, ATTENDING, WAIT), o_k, REPS)
        else:  # Every program of the row writes the same ids, and reads what it has written itself.
            write_choice(p_w, p_ids, tag, low, high, num_blocks, n_blocks, ATTENDING, WAIT)
            tl.debug_barrier()
            b_ids = tl.load(p_ids + o_k, mask=o_k < SHAPE.topk, other=-1)
        b_id = tl.gather(b_ids, tl.minimum(b_u // PER, ATTENDING.topk_pad - 1), 0)
        b_id = tl.where(b_u < SHAPE.topk * PER, b_id, -1)
    b_first, b_page = first_keys(b_u, b_id, p_table, table.s_page, n_k, n_blocks, end_page, SHAPE, CUT)
    b_acc, b_m, b_z = walk(
        b_q, main.k, main.v, i_h, b_first, b_page, blocks, 1, p_table, table.s_page, i_s, tiles, 0, n_k, n_blocks, num_pages,
        scale, SHAPE, CUT,
    )  # fmt: skip

    # 5. It stores the output, or puts the words of a partial.
    if CUT.splits == 1:
        finish(out, None, i_t.to(tl.int64), i_h * G + o_r, b_acc, b_m, b_z, 0, 0, 1, 1, m_r, D, False)
    else:
        o_p = ((i_t * HEADS + i_h) * G + o_r) * CUT.splits + i_s
        b_part = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
        o_c = tl.arange(0, SHAPE.dim_pad // 2) * 2  # D is even
        p_part = words.part + o_p[:, None].to(tl.int64) * D + o_c[None, :]
        b_even, b_odd = tl.split(b_part.reshape(CUT.rows, SHAPE.dim_pad // 2, 2))
        put_pairs(p_part, b_even, b_odd, tag, m_r[:, None] & (o_c < D)[None, :], WAIT)
        put(words.lse + o_p, b_m + tl.log2(b_z), tag, m_r, WAIT)

    # 6. One program of a row stores the selection, and last, because nothing waits for it.
    if (i_s == 0) & (i_h < INDEX_HEADS) & (i_p % ROW_TILES == 0):
        if FAR == 0:
            b_ids = chosen_ids(b_rows, o_k, REPS)
        tl.store(p_ids + o_k, b_ids, mask=o_k < SHAPE.topk)


@triton.jit
def merge_share(i, words, tag, out, ATTENDING: tl.constexpr, WAIT: tl.constexpr):
    """Merges one of ATTENDING.merge_parts parts of the output of a token and query head."""
    SHAPE: tl.constexpr = ATTENDING.shape
    SPLITS: tl.constexpr = ATTENDING.cut.splits
    PARTS: tl.constexpr = ATTENDING.merge_parts
    WIDTH: tl.constexpr = SHAPE.dim_pad // PARTS
    HEADS: tl.constexpr = ATTENDING.heads * SHAPE.group
    D: tl.constexpr = SHAPE.dim
    i_part, i = i % PARTS, i // PARTS
    o_s, o_d = tl.arange(0, ATTENDING.splits_pad), i_part * WIDTH + tl.arange(0, WIDTH)
    m_s = o_s < SPLITS
    m_sd = m_s[:, None] & (o_d < D)[None, :]
    p_lse = words.lse + i * SPLITS + tl.minimum(o_s, SPLITS - 1)
    p_part = words.part + i.to(tl.int64) * (SPLITS * D) + (o_s[:, None] * D + o_d[None, :])
    b_heads = look(p_lse, WAIT)
    if WAIT:
        while any_of(absent(b_heads, tag, m_s)):
            b_heads = look(p_lse, WAIT)
    b_words = tl.load(p_part, mask=m_sd, other=0, volatile=True)  # [SPLITS_PAD, WIDTH]
    b_lse = score_of(b_heads, m_s)  # What needs no partials is computed while they are on their way.
    b_m = tl.max(b_lse, 0)
    b_w = tl.exp2(b_lse - tl.where(b_m == float("-inf"), 0.0, b_m))
    b_z = tl.sum(b_w, 0)
    if WAIT:
        while any_of(absent(b_words, tag, m_sd)):
            b_words = tl.load(p_part, mask=m_sd, other=0, volatile=True)
    b_part = tl.where(m_sd, b_words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    b_out = (tl.sum(b_part * b_w[:, None], 0) / tl.where(b_z == 0, 1.0, b_z)).to(out.rows.dtype.element_ty)
    i_t, i_h = (i // HEADS).to(tl.int64), i % HEADS
    tl.store(out.rows + i_t * out.s_token + i_h * out.s_head + o_d * out.s_dim, b_out, mask=o_d < D)
    p_lse = out.lse + i_t * out.s_lse_token + i_h * out.s_lse_head
    tl.store(p_lse, (b_m + tl.log2(b_z)) * 0.6931471805599453, mask=i_part == 0)


RUNTIME_NUMBERS = [
    "queries", "num_blocks", "index_pages", "index_capacity", "num_pages", "capacity", "score_splits", "score_tiles", "tiles",
    "scoring", "attending", "programs",
]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def layer_kernel(
    index, tma, main, words, blocks, out, scale,
    queries, num_blocks, index_pages, index_capacity, num_pages, capacity, score_splits, score_tiles, tiles,
    scoring, attending, programs,
    SCORING: tl.constexpr, ATTENDING: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """Runs a decode layer. The grid is (programs): `scoring` programs, then `attending` ones, then those that merge.

    index is `IndexBranch`, main is `MainBranch`, words is `Words`, out is `Output`; tma is a descriptor of tiles of index keys,
    or None where they are read by address; blocks int32 [tokens, index heads, topk] receives the selection. queries counts the
    new tokens of a sequence, num_blocks the blocks of the longest one; score_tiles are the tiles of a scoring program,
    score_splits the scoring programs of a sequence and key head, tiles the tiles of an attention program. KIND is EVERY, or the
    one kind of programs that this launch has, which then waits for nothing. FETCH says whether programs call `fetch_share`
    before they wait for the kernel in front."""
    WAIT: tl.constexpr = KIND == 0
    # Nested tuples are built anew, because Triton 3.6 forgets the constants in nested parameters at the first branch.
    index = IndexBranch(index.q, index.k, index.table, index.seq_lens)
    main = MainBranch(main.q, main.k, main.v, main.table, main.seq_lens)
    if WAIT:
        if FETCH:  # The place in the grid is known before the ticket, and every share has a program to fetch it.
            ahead = tl.program_id(0)
            pages = pages_ahead(ahead, index, index_capacity, scoring, score_splits, score_tiles, SCORING)
        i, tag = draw(words.counter, programs)
        if PDL:  # Tickets are drawn before the next launch may start, and nothing is read before the last one has ended.
            gdc_launch_dependents()
            if FETCH and ahead < scoring:
                fetch_share(ahead, pages, index.k, index_pages, score_splits, score_tiles, SCORING)
            gdc_wait()
    else:
        i, tag = tl.program_id(0) + (scoring if KIND > 1 else 0) + (attending if KIND > 2 else 0), tl.full([], 1, tl.int32)
    if i < scoring:
        score_share(
            i, index, tma, words, tag, queries, num_blocks, index_pages, index_capacity, score_splits, score_tiles,
            SCORING, WAIT,
        )  # fmt: skip
    elif i < scoring + attending:
        attend_share(
            i - scoring, main, index.seq_lens, words, tag, blocks, out, scale, queries, num_blocks, num_pages, capacity,
            index_capacity, tiles, ATTENDING, WAIT,
        )  # fmt: skip
    else:
        merge_share(i - scoring - attending, words, tag, out, ATTENDING, WAIT)


class Config(NamedTuple):
    """Says how one launch is cut into programs.

    attend:       how attention is cut.
    score_tiles:  key tiles of a scoring program.
    rows:         (token, head) rows of a scoring program, padded.
    reps:         scores of a row that a lane of an attention program holds.
    strided:      scoring programs take tiles in strides, and `reps` is for the first rows of blocks alone.
    merging:      programs that merge splits, `merge_parts` for an output.
    """

    attend: triton_decode.Config
    score_tiles: int
    score_splits: int
    score_stages: int
    rows: int
    reps: int
    scoring: int
    attending: int
    merging: int
    merge_parts: int
    strided: bool = False

    @property
    def programs(self) -> int:
        """Returns the number of programs of all kinds."""
        return self.scoring + self.attending + self.merging


def launch(config: Config, sizes: Sizes, words: Words, step: Step, pdl: bool = False, kind: int = EVERY.value) -> None:
    """Launches one layer of plain tensors. pdl: whether it may start before the kernel in front has ended, and waits for its
    end inside. kind: EVERY, or programs of one kind alone, for an interpreter that runs one program after the other."""
    q, kv, index_q, index_keys, softmax_scale, blocks, out, lse = step
    attend, pool, table = config.attend, index_keys.keys, index_keys.page_table
    programs = (config.programs, config.scoring, config.attending, config.merging)[kind]
    if programs == 0:
        return
    assert isinstance(q, Tensor)
    assert isinstance(index_q, Tensor)
    assert isinstance(pool, Tensor)
    assert isinstance(kv.k, Tensor)
    assert isinstance(kv.v, Tensor)
    (batch, pages), page_size = table.shape, sizes.page_size
    scoring, attending = constants(config, sizes)
    tma = tma_tiles(pool, scoring.tile.tile, scoring.dim_pad) if devices.facts(pool.device).has_tma else None
    ahead = min(scoring.ahead * config.score_splits // scoring.tile.parts * scoring.tile.sub, sizes.num_blocks)
    read = batch * sizes.index_key_heads * ahead * sizes.block_size * sizes.index_dim * pool.element_size()
    launch_kernel(
        layer_kernel,
        (programs,),
        IndexBranch(
            query_rows(index_q, True),
            key_rows(pool),
            PageTable(table, *table.stride()),
            index_keys.seq_lens,
        ),
        tma,
        MainBranch(
            query_rows(q, True),
            key_rows(kv.k),
            key_rows(kv.v),
            PageTable(kv.page_table, *kv.page_table.stride()),
            kv.seq_lens,
        ),
        words,
        blocks,
        output_rows(out, lse),
        softmax_scale,
        *(sizes.new_tokens, sizes.num_blocks, pool.shape[0], pages * page_size),
        *(kv.k.shape[0], kv.page_table.shape[1] * page_size),
        *(config.score_splits, config.score_tiles, attend.tiles, config.scoring, config.attending, config.programs),
        SCORING=scoring,
        ATTENDING=attending,
        KIND=kind,
        PDL=pdl,
        FETCH=pdl and tma is not None and read <= FETCH_BYTES,
        num_warps=attend.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )


@functools.lru_cache(256)
def constants(config: Config, sizes: Sizes) -> tuple[Scoring, Attending]:
    """Returns the constants that the kernel is compiled for."""
    attend, group, tile = config.attend, sizes.num_q_heads // sizes.num_kv_heads, Tile.of(sizes.block_size)
    near = min(config.reps * LANES.value, sizes.num_blocks)
    threads = 32 * attend.num_warps
    scoring = Scoring(
        heads=sizes.index_heads,
        key_heads=sizes.index_key_heads,
        dim=sizes.index_dim,
        dim_pad=next_power_of_two(sizes.index_dim),
        page=sizes.page_size,
        tile=tile,
        rows=config.rows,
        share=next_power_of_two(config.score_tiles),
        ahead=2 * tile.parts if config.strided else next_power_of_two(config.score_tiles),
        strided=config.strided,
        num_stages=config.score_stages,
    )
    dim_pad = next_power_of_two(sizes.head_dim)
    attending = Attending(
        heads=sizes.num_kv_heads,
        index_heads=sizes.index_heads,
        shape=Shape(group, sizes.head_dim, dim_pad, sizes.topk, sizes.block_size, sizes.page_size),
        cut=attend,
        init_blocks=sizes.init_blocks,
        local_blocks=sizes.local_blocks,
        topk_pad=next_power_of_two(sizes.topk),
        pages_pad=next_power_of_two(ceil_div(near * sizes.block_size, sizes.page_size)),
        splits_pad=next_power_of_two(attend.splits),
        reps=config.reps,
        far=max(next_power_of_two(sizes.num_blocks) // threads, 1) if config.strided else 0,
        threads=threads,
        merge_parts=config.merge_parts,
    )
    return scoring, attending
