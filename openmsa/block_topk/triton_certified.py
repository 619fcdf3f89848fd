# SPDX-License-Identifier: MIT
"""`select_blocks(certified=True)` on the GPU, for decode and a few queries a sequence: four kernels.

Int8 keys give a lower and an upper bound of every key's score (rounding of all the arithmetic included), and so of every
block's, which is its best key's. A key whose upper bound is below the best lower one of 32 keys of its block does not matter;
the others, some six of a block as a rule, are kept as bits. Of a row that has k places to give, a block stays open whose upper
bound reaches the k-th best lower one. Of open blocks the keys kept are read exactly, by the arithmetic of the scoring kernel,
and the usual top-k ends it, so the bits of the scores that decide are those of the uncertified selection: every key that has
the best score of its block is among those kept, whatever else is. With more rows than one tile nearly every block is open to
some row: then the exact selection is the faster way and is what runs, every visible block counted as rescored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.block_scores import exact_keys
from openmsa.block_topk import triton_select
from openmsa.block_topk.triton_topk import (
    EARLY_ROWS,
    MAX_BLOCKS,
    as_words,
    bit_of,
    goal_reached,
    launch_topk,
    num_warps,
    popcount,
)
from openmsa.index_branch.triton_bounds import launch_bounds
from openmsa.index_branch.triton_candidates import Words, either, open_candidates
from openmsa.index_branch.triton_launch import score_rows
from openmsa.index_branch.triton_sources import KeySource
from openmsa.index_branch.triton_tiles import (
    FLAT,
    PAGE,
    PAGES,
    Lengths,
    Tile,
    exists,
    load_rows,
    page_number,
    sequence_bounds,
    tile_start,
)
from openmsa.index_branch.triton_variants import Operands
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys
from openmsa.runtime.devices import COMPILE_TARGETS, Device, facts
from openmsa.runtime.integers import ceil_div, next_power_of_two
from openmsa.runtime.launch import launch_kernel
from openmsa.runtime.variants import Variant
from openmsa.types import Layout

MAX_ROWS = 64
"""(query, head) rows a sequence has for a key head."""


def certifies(rows: int, num_blocks: int, free: int, all_rows: int, walks: int, block_size: int) -> bool:
    """Whether bounds come first. rows: the most that a sequence has for a key head. free: places that are not forced.
    all_rows: queries times heads. walks: sequences times key heads."""
    held = 8 * all_rows * score_rows(num_blocks) + walks * _candidate_bytes(rows, num_blocks, block_size)
    return rows <= MAX_ROWS and 0 < free < num_blocks <= MAX_BLOCKS and held <= triton_select.WORKSPACE


def _candidate_bytes(rows: int, num_blocks: int, block_size: int) -> int:
    """Of a sequence and key head."""
    tile = Tile.of(block_size)
    return Words.of(rows, tile).bytes(tile, num_blocks)


@dataclass(frozen=True)
class Workspace:
    """What the kernels of one selection at a time hand on; a smaller one takes the front of each tensor."""

    bounds: Tensor  # float32 [2 * total_q * heads * score_rows(num_blocks)]: lower and upper ones, then scores and upper ones
    candidates: Tensor  # int8 [batch * key heads * bytes]: `Words`
    open_words: Tensor  # int32 [total_q * heads * columns of settle_kernel]
    visible: Tensor  # int32 [total_q]
    rescored: Tensor  # int32 [total_q * heads]

    @classmethod
    def allocate(
        cls, total_q: int, heads: int, rows: int, walks: int, num_blocks: int, block_size: int, device: torch.device
    ) -> Workspace:
        """rows: the most that a sequence has for a key head. walks: sequences times key heads."""
        all_rows = total_q * heads
        bounds = torch.empty(2 * all_rows * score_rows(num_blocks), dtype=torch.float32, device=device)
        candidates = torch.empty(walks * _candidate_bytes(rows, num_blocks, block_size), dtype=torch.int8, device=device)
        counts = (all_rows * columns(num_blocks), total_q, all_rows)
        return cls(bounds, candidates, *(torch.empty(n, dtype=torch.int32, device=device) for n in counts))

    def bounds_of(self, total_q: int, heads: int, num_blocks: int) -> Tensor:
        """``[2, heads, total_q, num_blocks]``."""
        width = score_rows(num_blocks)
        held = self.bounds[: 2 * total_q * heads * width].view(2, total_q, heads, width)
        return held[..., :num_blocks].transpose(1, 2)

    def open_words_of(self, rows: int, num_blocks: int) -> Tensor:
        """``[rows, columns]``."""
        return self.open_words[: rows * columns(num_blocks)].view(rows, -1)


def columns(num_blocks: int) -> int:
    """Words of open blocks that a row has."""
    return 32 * num_warps(num_blocks)


@triton.jit(do_not_specialize=["num_blocks", "s_side", "s_h", "s_t"])
def settle_kernel(
    bounds, visible, open_words, rescored, s_side, s_h, s_t, num_blocks,
    HEADS: tl.constexpr, FREE: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, REPS: tl.constexpr, COLS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (total_q * heads). A block is open whose upper bound reaches the FREE-th best lower one. Writes -inf over the lower
    bounds of all. open_words: int32 [total_q * heads, COLS], bit r of word c for open block r * COLS + c. EARLY: whole rows are
    read, without waiting to know how many blocks they see."""
    i_row = tl.program_id(0)
    i_t, i_h = i_row // HEADS, i_row % HEADS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = tl.minimum(tl.load(visible + i_t), num_blocks)
    n_init = tl.minimum(seen, INIT)
    i_local = tl.maximum(seen - LOCAL, n_init)
    o_c = tl.arange(0, COLS)
    o_b = tl.arange(0, REPS)[:, None] * COLS + o_c[None, :]
    m_free = (o_b >= n_init) & (o_b < i_local)
    m_load = o_b < num_blocks if EARLY else m_free
    p_b = bounds + i_t.to(tl.int64) * s_t + i_h.to(tl.int64) * s_h + o_b
    low = tl.where(m_free, tl.load(p_b, mask=m_load, other=0.0), float("-inf"))
    high = tl.where(m_free, tl.load(p_b + tl.cast(s_side, tl.int64), mask=m_load, other=0.0), float("-inf"))
    bar, count, _ = goal_reached(low, REPS, COLS, FREE)
    if count < FREE:
        bar = float("-inf")
    words = as_words(tl.where((high >= bar) & (high > float("-inf")), 1.0, 0.0), REPS, COLS)
    tl.store(p_b, tl.full([REPS, COLS], float("-inf"), tl.float32), mask=o_b < num_blocks)
    tl.store(open_words + i_row.to(tl.int64) * COLS + o_c, words)
    tl.store(rescored + i_row, tl.sum(popcount(words), 0))


@triton.jit
def row_words(open_words, i_r, i_h, q_start, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr):
    """Where the words of rows i_r of a sequence and key head start."""
    i_row = (q_start + i_r // GROUP).to(tl.int64) * (KEY_HEADS * GROUP) + i_h * GROUP + i_r % GROUP
    return open_words + i_row * COLS


@triton.jit
def open_units(
    open_words, i_h, q_start, n_rows, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Which units (tiles' worth of SUB blocks) are open to a row of a sequence's rows, in words [COLS / SUB], those of SUB
    neighbouring blocks together; and how many there are up to each word."""
    WIDTH: tl.constexpr = COLS // SUB
    words = tl.zeros([WIDTH], tl.int32)
    for i_r in range(0, n_rows, 16):
        o_r = i_r + tl.arange(0, 16)
        p_w = row_words(open_words, o_r, i_h, q_start, KEY_HEADS, GROUP, COLS)[:, None] + tl.arange(0, COLS)[None, :]
        b_w = tl.load(p_w, mask=(o_r < n_rows)[:, None], other=0)
        words |= tl.reduce(tl.reduce(b_w.reshape(16, WIDTH, SUB), 2, either), 0, either)
    return words, tl.cumsum(popcount(words), 0)


@triton.jit
def set_bit(words, n):
    """Which bit is the n-th (from 0) that is set of each word."""
    place = tl.zeros_like(words)
    for i in tl.static_range(5):
        half = 16 >> i
        below = popcount(words & ((1 << half) - 1))
        up = n >= below
        n -= tl.where(up, below, 0)
        words = tl.where(up, words >> half, words)
        place += tl.where(up, half, 0)
    return place


@triton.jit
def units_at(words, ends, rank):
    """Units of `open_units` by their ranks [number]; 0 where there are not so many."""
    WIDTH: tl.constexpr = words.shape[0]
    before = ends[None, :] <= rank[:, None]  # words that a rank lies behind
    i_w = tl.sum(before.to(tl.int32), 1)
    first = tl.max(tl.where(before, ends[None, :], 0), 1)
    word = tl.sum(tl.where(i_w[:, None] == tl.arange(0, WIDTH)[None, :], words[None, :], 0), 1)
    return tl.where(i_w < WIDTH, set_bit(word, rank - first) * WIDTH + i_w, 0)


@triton.jit
def open_flags(
    open_words, o_b, m_b, i_h, q_start, n_rows,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """1 for blocks o_b with m_b that are open to rows of a sequence, 0 for others: [blocks, ROWS]."""
    o_r = tl.arange(0, ROWS)
    p_w = row_words(open_words, o_r, i_h, q_start, KEY_HEADS, GROUP, COLS)[None, :] + (o_b % COLS)[:, None]
    return (tl.load(p_w, mask=m_b[:, None] & (o_r < n_rows)[None, :], other=0) >> (o_b // COLS)[:, None]) & 1


@triton.jit
def find_keys(page_row, i_k, m_k, k_start, num_pages, s_page, s_token, MODE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where keys i_k with m_k of a sequence lie behind the first key of their head, and which exist."""
    if MODE == 0:
        o_k = (k_start + i_k).to(tl.int64) * s_token
    else:
        i_page = tl.load(page_row + page_number(i_k, PAGE_SIZE), mask=m_k, other=-1)
        m_k = m_k & exists(i_page, num_pages)
        o_k = i_page.to(tl.int64) * s_page + (i_k % PAGE_SIZE).to(tl.int64) * s_token
    return o_k, m_k


LENGTHS = ["num_blocks", "num_pages", "capacity", "max_keys"]
SLOTS = tl.constexpr(64)
"""Words of 16 keys that `rescore_kernel` holds; of each it scores one key at a time."""


@triton.jit(do_not_specialize=LENGTHS)
def rescore_kernel(
    q, keys, page_table, cu_q, cu_k, seq_lens, q_offset, open_words, candidates, scores,
    s_qt, s_qh, s_qd, s_page, s_head, s_token, s_dim, s_table, s_sh, s_st, num_blocks, num_pages, capacity, max_keys,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BOUND_ROWS: tl.constexpr, ROW_TILES: tl.constexpr, COLS: tl.constexpr, MODE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (parts, batch * key heads): programs take turns at the units that are open to a row of a sequence, as many at a time
    as have `SLOTS` words of keys, and write the scores of their open blocks. BOUND_ROWS, ROW_TILES: `Words` of candidates."""
    WORDS: tl.constexpr = TILE // 16
    UNITS: tl.constexpr = SLOTS // (WORDS * PARTS)
    i_s, i_h = tl.program_id(1) // KEY_HEADS, tl.program_id(1) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(cu_q, cu_k, seq_lens, q_offset, i_s, capacity, max_keys)
    o_r = tl.arange(0, ROWS)
    i_last = tl.minimum(offset + o_r // GROUP, k_len - 1)  # [ROWS] last key each row sees
    page_row = page_table
    if MODE != 0:
        page_row += i_s.to(tl.int64) * s_table
    p_s = scores + (i_h * GROUP + o_r % GROUP).to(tl.int64) * s_sh + (q_start + o_r // GROUP).to(tl.int64) * s_st
    keys += i_h.to(tl.int64) * s_head
    o_d = tl.arange(0, DIM_PAD)
    m_d = o_d < DIM
    candidates += tl.program_id(1).to(tl.int64) * (tl.cdiv(num_blocks, SUB) * (PARTS * ROW_TILES * min(2 * TILE, 128)))
    b_q = load_rows(q + q_start.to(tl.int64) * s_qt, o_r, q_len, i_h * GROUP, s_qt, s_qh, s_qd, GROUP, DIM, DIM_PAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    unit_words, ends = open_units(open_words, i_h, q_start, q_len * GROUP, KEY_HEADS, GROUP, SUB, COLS)
    total = tl.max(ends, 0)
    for i_u in range(tl.program_id(0) * UNITS, total, tl.num_programs(0) * UNITS):
        rank = i_u + tl.arange(0, UNITS)
        i_unit = units_at(unit_words, ends, rank)
        o_b = (i_unit[:, None] * SUB + tl.arange(0, SUB)[None, :]).reshape(UNITS * SUB)
        m_b = tl.broadcast_to((rank < total)[:, None], [UNITS, SUB]).reshape(UNITS * SUB)
        flags = open_flags(open_words, o_b, m_b, i_h, q_start, q_len * GROUP, KEY_HEADS, GROUP, COLS, ROWS)
        i_t = i_unit[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
        of_units = tl.max(flags.reshape(UNITS, SUB * (ROWS // BOUND_ROWS // ROW_TILES), BOUND_ROWS * ROW_TILES), 1)
        words = open_candidates(candidates, i_t, of_units, ROW_TILES, TILE, PARTS).reshape(SLOTS)
        i_16 = tile_start(i_t, BLOCK, KEYS, SUB, PARTS)[:, :, None] + (tl.arange(0, WORDS) * 16)[None, None, :]
        i_16 = i_16.reshape(SLOTS)
        if MODE < 2:  # a tile lies in one page
            o_16, m_16 = find_keys(page_row, i_16, i_16 < k_len, k_start, num_pages, s_page, s_token, MODE, PAGE_SIZE)
        best = tl.full([SLOTS, ROWS], float("-inf"), tl.float32)
        for _ in tl.range(tl.max(popcount(words), 0), num_stages=STAGES):
            lowest = words & -words
            i_bit = bit_of(lowest)
            i_k = tl.where(words != 0, i_16 + i_bit, 0x7FFFFFFF)  # where there is none, one that no row sees
            if MODE < 2:
                o_k, m_k = o_16 + i_bit.to(tl.int64) * s_token, m_16 & (i_k < k_len)
            else:
                o_k, m_k = find_keys(page_row, i_k, i_k < k_len, k_start, num_pages, s_page, s_token, MODE, PAGE_SIZE)
            p_k = keys + o_k[:, None] + (o_d * s_dim)[None, :]
            s = tl.dot(tl.load(p_k, mask=m_k[:, None] & m_d[None, :], other=0.0), b_q.T)
            best = tl.maximum(best, tl.where(i_k[:, None] <= i_last[None, :], s, float("-inf")))
            words = words ^ lowest
        m = tl.max(best.reshape(UNITS * SUB, SLOTS // (UNITS * SUB), ROWS), 1)
        tl.store(p_s[None, :] + o_b[:, None], m, mask=flags != 0)


@dataclass(frozen=True)
class RescoreConfig:
    """num_stages: of the walk over keys of a program's words. resident: programs that one multiprocessor holds at a time."""

    num_stages: int
    resident: int


def rescore_config(device: Device, rows: int, dim: int, indirect: bool) -> RescoreConfig:
    """rows: of a product. indirect: the page of each key is looked up, one stage ahead."""
    width = 2 * next_power_of_two(dim)
    for resident, buffers in ((4, 3), (3, 3), (2, 3), (2, 2), (1, 2), (1, 1)):
        if resident * (buffers * SLOTS.value * width + rows * width + 2048) <= device.shared_bytes:
            break
    asynchronous = device.arch in (90, 100)  # the product reads the buffers itself, so it holds one
    return RescoreConfig(max(buffers - asynchronous, 1) * (1 + indirect) + 1, resident)


def refuse(
    index_q: Any, index_k: Any, seqs: Layout, block_size: int, topk: int, init_blocks: int, local_blocks: int
) -> str | None:
    """Why these kernels cannot select, or None."""
    exact = exact_keys(index_k)
    dtype = exact.dtype
    if dtype not in (torch.float16, torch.bfloat16) or dtype != index_q.dtype:
        return f"it needs float16 or bfloat16 exact keys of the queries' dtype, got {dtype} and {index_q.dtype}"
    return triton_select.refuse(seqs, block_size, topk, init_blocks, local_blocks)


def select_blocks(
    index_q: Tensor,
    index_k: CertifiedKeys | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
) -> tuple[Tensor, Tensor]:
    """See `openmsa.block_topk.select_blocks`. Returns the blocks, and int32 ``[total_q, heads]``: how many were rescored."""
    total_q, heads, _ = index_q.shape
    pool = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    assert isinstance(pool, CertifiedKeys)
    key_heads, num_blocks = pool.shape[1], seqs.num_blocks(block_size)
    rows, free = seqs.max_seqlen_q * heads // key_heads, topk - init_blocks - local_blocks
    walks = seqs.batch * key_heads
    if not certifies(rows, num_blocks, free, total_q * heads, walks, block_size) or total_q == 0:
        arguments = (seqs, block_size, topk, init_blocks, local_blocks)
        blocks = triton_select.select_blocks(index_q, exact_keys(index_k), *arguments)
        return blocks, seqs.visible_blocks(total_q, block_size)[:, None].expand(-1, heads)
    workspace = Workspace.allocate(total_q, heads, rows, walks, num_blocks, block_size, index_q.device)
    blocks = torch.empty(total_q, heads, topk, dtype=torch.int32, device=index_q.device)
    page_table = index_k.page_table if isinstance(index_k, PagedIndexKeys) else None
    launch_certified(index_q, pool, page_table, Lengths.of(seqs), block_size, init_blocks, local_blocks, workspace, blocks)
    return blocks, workspace.rescored.view(total_q, heads)


def launch_certified(
    index_q: Tensor,
    keys: CertifiedKeys,
    page_table: Tensor | None,
    lengths: Lengths,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    workspace: Workspace,
    out: Tensor,
) -> None:
    """The four kernels. keys: a pool with a page table, or packed. out: int32 ``[total_q, heads, topk]``, contiguous.
    Allocates nothing; reads lengths on the device."""
    total_q, heads, topk = out.shape
    num_blocks = ceil_div(lengths.max_seqlen_k, block_size)
    bounds, visible = workspace.bounds_of(total_q, heads, num_blocks), workspace.visible[:total_q]
    open_words, free = workspace.open_words_of(total_q * heads, num_blocks), topk - init_blocks - local_blocks
    pdl = index_q.device.type == "cuda" and facts(index_q.device).arch >= 90
    candidates = workspace.candidates
    launch_bounds(index_q, keys.coarse, page_table, lengths, block_size, bounds, candidates, visible, pdl=pdl)
    settle(bounds, visible, open_words, workspace.rescored, free, init_blocks, local_blocks, pdl)
    rescore(index_q, keys.exact, page_table, lengths, block_size, open_words, candidates, bounds[0], pdl)
    launch_topk(bounds[0], visible, init_blocks, local_blocks, out, pdl)


def settle(
    bounds: Tensor,
    visible: Tensor,
    open_words: Tensor,
    rescored: Tensor,
    free: int,
    init_blocks: int,
    local_blocks: int,
    pdl: bool,
) -> None:
    """Launches `settle_kernel`. bounds: ``[2, heads, total_q, num_blocks]``, last stride 1."""
    _, heads, total_q, num_blocks = bounds.shape
    warps = num_warps(num_blocks)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    launch_kernel(
        settle_kernel,
        (total_q * heads,),
        bounds,
        visible,
        open_words,
        rescored,
        *bounds.stride()[:3],
        num_blocks,
        HEADS=heads,
        FREE=free,
        INIT=init_blocks,
        LOCAL=local_blocks,
        REPS=max(next_power_of_two(num_blocks) // (32 * warps), 1),
        COLS=32 * warps,
        EARLY=total_q * heads <= EARLY_ROWS,
        PDL=pdl,
        num_warps=warps,
        **options,
    )


def rescore(
    index_q: Tensor,
    exact: Tensor,
    page_table: Tensor | None,
    lengths: Lengths,
    block_size: int,
    open_words: Tensor,
    candidates: Tensor,
    scores: Tensor,
    pdl: bool,
    chosen: RescoreConfig | None = None,
) -> None:
    """Launches `rescore_kernel`. exact: a pool with a page table, or packed keys. candidates: as `launch_bounds` leaves them.
    scores: ``[heads, total_q, num_blocks]``; those of open blocks are written."""
    _, heads, dim = index_q.shape
    device, tile = facts(index_q.device), Tile.of(block_size)
    source = KeySource.of_pool(exact, page_table, tile, device)
    group, num_blocks, walks = heads // source.heads, scores.shape[2], lengths.batch * source.heads
    rows = lengths.max_seqlen_q * group
    product_rows, words = max(16, next_power_of_two(rows)), Words.of(rows, tile)
    chosen = chosen or rescore_config(device, product_rows, dim, source.mode == PAGES)
    turns = ceil_div(tile.count(num_blocks) * tile.tile, 16 * SLOTS.value)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    launch_kernel(
        rescore_kernel,
        (min(max(chosen.resident * device.num_sms // walks, 1), turns), walks),
        index_q,
        source.pool,
        source.page_table,
        *lengths.tensors,
        open_words,
        candidates.view(words.dtype),
        scores,
        *index_q.stride(),
        *source.strides,
        source.table_stride,
        *scores.stride()[:2],
        num_blocks,
        source.num_pages,
        source.capacity,
        lengths.max_seqlen_k,
        KEY_HEADS=source.heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=next_power_of_two(dim),
        ROWS=product_rows,
        BOUND_ROWS=words.rows,
        ROW_TILES=words.row_tiles,
        COLS=open_words.shape[1],
        MODE=source.mode,
        PAGE_SIZE=source.page_size,
        STAGES=chosen.num_stages,
        PDL=pdl,
        num_warps=4,
        **tile.constexprs(),
        **options,
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """Rows from 64 to 8192 blocks; pages and packed keys, odd dims and blocks."""
    device = COMPILE_TARGETS[arch]
    settled = {"bounds": "*fp32"} | dict.fromkeys(("visible", "open_words", "rescored"), "*i32")
    settled |= dict.fromkeys(("s_side", "s_h", "s_t", "num_blocks"), "i32")
    for num_blocks, free, early in ((64, 7, True), (1024, 15, True), (8192, 15, False)):
        warps = num_warps(num_blocks)
        constants = {"HEADS": 4, "FREE": free, "INIT": 0, "LOCAL": 1, "REPS": num_blocks // warps // 32, "COLS": warps * 32}
        constants |= {"EARLY": early, "PDL": device.has_tma}
        yield Variant(f"settle {free} of {num_blocks}", settle_kernel, settled, constants, warps)
    for rows, dim, block_size, mode, columns in (
        (4, 128, 128, PAGE, 32),
        (64, 128, 128, FLAT, 512),
        (16, 64, 32, PAGES, 64),
        (8, 80, 256, PAGE, 32),
        (64, 256, 64, PAGE, 64),
        (4, 64, 20, PAGES, 32),
    ):
        tile = Tile.of(block_size)
        operands, words = Operands("bf16", "plain", dim, tile, mode, False), Words.of(rows, tile)
        types, constants = operands.arguments(device)
        types |= dict.fromkeys(("open_words", "seq_lens"), "*i32") | {"scores": "*fp32"}
        types |= {"candidates": words.type} | dict.fromkeys(("s_sh", "s_st", *LENGTHS), "i32")
        chosen = rescore_config(device, max(16, rows), dim, mode == PAGES)
        constants |= {"ROWS": max(16, rows), "BOUND_ROWS": words.rows, "ROW_TILES": words.row_tiles, "COLS": columns}
        constants |= {"STAGES": chosen.num_stages, "PDL": device.has_tma}
        constants |= operands.absent_lengths
        names = rescore_kernel.arg_names
        types = {n: t for n, t in types.items() if n in names and n not in constants}
        constants = {n: c for n, c in constants.items() if n in names}
        name = f"rescore {operands.name} x {rows}"
        yield Variant(name, rescore_kernel, types, constants, 4, chosen.num_stages, wgmma=True)
