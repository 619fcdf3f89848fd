# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""`select_blocks(certified=True)` on the GPU, for decode and a few queries a sequence, is four kernels.

Int8 keys give a lower and an upper bound of every key's score (rounding of all the arithmetic included), and so of every
block's, which is its best key's. A key whose upper bound is below the best lower one of 32 keys of its block does not matter;
the others, some six of a block as a rule, are kept as bits. Of a row that has k places to give, a block stays open whose upper
bound reaches the k-th best lower one. Of open blocks the keys kept are read exactly, by the arithmetic of the scoring kernel,
and the usual top-k ends it, so the bits of the scores that decide are those of the uncertified selection: every key that has
the best score of its block is among those kept, whatever else is. Where `certifies` says no (many rows, which share the reading
of exact keys; very long ones) the exact selection is what runs, every visible block counted as rescored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.block_scores.triton_route import Lengths, score_rows
from openmsa.block_topk import triton_select
from openmsa.block_topk.triton_bounds import Words, candidate_words, launch_bounds
from openmsa.block_topk.triton_ids import bit_of, free_range, popcount
from openmsa.block_topk.triton_topk import (
    EARLY_ROWS,
    as_words,
    best_of,
    goal_reached,
    row_constants,
    selection_constants,
    write_forced,
    write_ids,
)
from openmsa.inputs import exact_keys
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys
from openmsa.primitives.rows import PAGES, KeyTiles, Tile, exists, page_number, query_rows, tile_start
from openmsa.primitives.scoring import sequence_bounds
from openmsa.runtime.devices import Device, facts, has_pdl
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two
from openmsa.types import Layout

MAX_ROWS = 16
"""Bounds come first only where a sequence has at most so many (query, head) rows for a key head: more share the reading of
exact keys, which then costs less than the bounds."""
MAX_BLOCKS = 8192
"""A row has at most so many blocks, since one program holds both bounds of each in registers."""


def certifies(rows: int, num_blocks: int, free: int, all_rows: int, walks: int, block_size: int) -> bool:
    """Says whether bounds come first. rows: the most that a sequence has for a key head. free: places that are not forced.
    all_rows: queries times heads. walks: sequences times key heads."""
    held = 16 * all_rows * score_rows(num_blocks) + walks * _candidate_bytes(rows, num_blocks, block_size)
    return rows <= MAX_ROWS and 0 < free < num_blocks <= MAX_BLOCKS and held <= triton_select.WORKSPACE


def _candidate_bytes(rows: int, num_blocks: int, block_size: int) -> int:
    """Returns the bytes of the candidates of a sequence and key head."""
    tile = Tile.of(block_size)
    return Words.of(rows, tile).bytes(tile, num_blocks)


@dataclass(frozen=True)
class Workspace:
    """Kernels of a selection hand these on, of one selection at a time; a smaller one takes the front of each tensor."""

    bounds: Tensor  # float32 [2 * total_q * heads * score_rows(num_blocks)]: lower and upper ones
    candidates: Tensor  # int8 [batch * key heads * bytes]: `Words`
    open_blocks: Tensor  # int32 [total_q * heads * num_blocks]: of each row, in ascending order
    scores: Tensor  # float32, as many: scores of the open blocks
    visible: Tensor  # int32 [total_q]
    rescored: Tensor  # int32 [total_q * heads]: how many blocks of a row are open

    @classmethod
    def allocate(
        cls, total_q: int, heads: int, rows: int, walks: int, num_blocks: int, block_size: int, device: torch.device
    ) -> Workspace:
        """Makes room for selections up to this size. rows: the most that a sequence has for a key head. walks: sequences times
        key heads."""
        all_rows = total_q * heads
        bounds = torch.empty(2 * all_rows * score_rows(num_blocks), dtype=torch.float32, device=device)
        candidates = torch.empty(walks * _candidate_bytes(rows, num_blocks, block_size), dtype=torch.int8, device=device)
        ids, scores = (torch.empty(all_rows * num_blocks, dtype=t, device=device) for t in (torch.int32, torch.float32))
        counts = (torch.empty(n, dtype=torch.int32, device=device) for n in (total_q, all_rows))
        return cls(bounds, candidates, ids, scores, *counts)

    def bounds_of(self, total_q: int, heads: int, num_blocks: int) -> Tensor:
        """Returns lower and upper bounds of one selection, ``[2, heads, total_q, num_blocks]``."""
        width = score_rows(num_blocks)
        held = self.bounds[: 2 * total_q * heads * width].view(2, total_q, heads, width)
        return held[..., :num_blocks].transpose(1, 2)


@triton.jit(do_not_specialize=["num_blocks", "s_side", "s_h", "s_t"])
def settle_kernel(
    bounds, visible, open_blocks, rescored, s_side, s_h, s_t, num_blocks,
    HEADS: tl.constexpr, FREE: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, REPS: tl.constexpr, COLS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finds open blocks, whose upper bound reaches the FREE-th best lower one, in a grid of (total_q * heads). EARLY: whole
    rows are read, without waiting to know how many blocks they see."""
    i_row = tl.program_id(0)
    i_t, i_h = i_row // HEADS, i_row % HEADS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = tl.minimum(tl.load(visible + i_t), num_blocks)
    n_init, i_local = free_range(seen, INIT, LOCAL)
    o_b = tl.arange(0, REPS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    m_free = (o_b >= n_init) & (o_b < i_local)
    m_load = o_b < num_blocks if EARLY else m_free
    p_b = bounds + i_t.to(tl.int64) * s_t + i_h.to(tl.int64) * s_h + o_b
    low = tl.where(m_free, tl.load(p_b, mask=m_load, other=0.0), float("-inf"))
    high = tl.where(m_free, tl.load(p_b + tl.cast(s_side, tl.int64), mask=m_load, other=0.0), float("-inf"))
    bar, count, _ = goal_reached(low, REPS, COLS, FREE)
    if count < FREE:
        bar = float("-inf")
    words = as_words(tl.where((high >= bar) & (high > float("-inf")), 1.0, 0.0), REPS, COLS)
    tl.store(rescored + i_row, tl.sum(popcount(words), 0))
    write_ids(open_blocks + i_row.to(tl.int64) * num_blocks, words, COLS)


LENGTHS = ["num_blocks", "num_pages", "capacity", "max_keys"]
SLOTS = tl.constexpr(64)
"""`rescore_kernel` holds so many words of 16 keys, and scores one key of each at a time."""


@triton.jit(do_not_specialize=LENGTHS)
def rescore_kernel(
    q, keys, table, bounds, open_blocks, rescored, candidates, scores, num_blocks, num_pages, capacity, max_keys,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGING: tl.constexpr,
    CUT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores open blocks in a grid of (rows of a sequence and key head, batch * key heads, shares): the shares of a row take
    turns at its open blocks, as many at a time as have `SLOTS` words of keys."""
    TILE: tl.constexpr = CUT.tile
    SUB: tl.constexpr = CUT.sub
    PARTS: tl.constexpr = CUT.parts
    WORDS: tl.constexpr = TILE * PARTS // (16 * SUB)  # words of a block
    UNITS: tl.constexpr = SLOTS // WORDS
    i_r, i_share, shares = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    i_s, i_kh = tl.program_id(1) // KEY_HEADS, tl.program_id(1) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(bounds, i_s, capacity, max_keys)
    if i_r >= q_len * GROUP:
        return
    i_t, i_h = q_start + i_r // GROUP, i_kh * GROUP + i_r % GROUP
    i_row = (i_t * (KEY_HEADS * GROUP) + i_h).to(tl.int64)
    i_last = tl.minimum(offset + i_r // GROUP, k_len - 1)  # last key that the row sees
    o_d = tl.arange(0, DIM_PAD)
    m_d = o_d < DIM
    b_q = tl.load(q.data + i_t.to(tl.int64) * q.s_token + i_h * q.s_head + o_d * q.s_dim, mask=m_d, other=0.0)
    b_q = tl.broadcast_to(b_q[:, None], [DIM_PAD, 16])  # as many columns as a matrix instruction takes
    page_row = table.ids
    if PAGING.mode != 0:
        page_row += i_s.to(tl.int64) * table.s_sequence
    p_k = keys.data + i_kh.to(tl.int64) * keys.s_head
    WARPS: tl.constexpr = min(TILE // 16, 4)
    candidates += tl.program_id(1).to(tl.int64) * (tl.cdiv(num_blocks, SUB) * (PARTS * WARPS * 32)) + i_r % 4
    o_w = tl.arange(0, WORDS)[None, :]
    rank = i_share * UNITS + tl.arange(0, UNITS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ids = tl.load(open_blocks + i_row * num_blocks + rank, mask=rank < num_blocks, other=0)  # read beside their number
    count = tl.load(rescored + i_row)
    for _ in range(i_share * UNITS, count, shares * UNITS):
        m_b = rank < count
        i_b = tl.where(m_b, ids, 0)
        i_16 = (i_b % SUB * WORDS)[:, None] + o_w % (TILE // 16)  # words in a tile
        i_tile = (i_b // SUB * PARTS)[:, None] + o_w // (TILE // 16)
        words = candidate_words(candidates, i_tile, i_16, m_b, i_r // 4, TILE).reshape(SLOTS)
        i_16 = (tile_start(i_tile, CUT) + i_16 * 16).reshape(SLOTS)
        if PAGING.mode == 1:  # a tile lies in one page
            i_page = tl.load(page_row + page_number(i_16, PAGING.page_size), mask=i_16 < k_len, other=-1)
        words &= (1 << tl.minimum(tl.maximum(i_last + 1 - i_16, 0), 16)) - 1  # keys that the row sees
        best = tl.full([SLOTS, 16], float("-inf"), tl.float32)
        for _j in tl.range(tl.max(popcount(words), 0), num_stages=STAGES):
            lowest = words & -words
            m_k = words != 0
            i_k = i_16 + tl.where(m_k, bit_of(lowest), 0)
            m_load = m_k
            if PAGING.mode == 0:
                o_k = (k_start + i_k).to(tl.int64) * keys.s_row
            else:
                if PAGING.mode == 2:
                    i_page = tl.load(page_row + page_number(i_k, PAGING.page_size), mask=m_k, other=-1)
                m_load = m_k & exists(i_page, num_pages)  # keys that are nowhere are zeros
                o_k = i_page.to(tl.int64) * keys.s_page + (i_k % PAGING.page_size).to(tl.int64) * keys.s_row
            b_k = tl.load(p_k + o_k[:, None] + (o_d * keys.s_dim)[None, :], mask=m_load[:, None] & m_d[None, :], other=0.0)
            best = tl.maximum(best, tl.where(m_k[:, None], tl.dot(b_k, b_q), float("-inf")))
            words = words ^ lowest
        tl.store(scores + i_row * num_blocks + rank, tl.max(best.reshape(UNITS, WORDS * 16), 1), mask=m_b)
        rank += shares * UNITS
        ids = tl.load(open_blocks + i_row * num_blocks + rank, mask=rank < count, other=0)


FEW = tl.constexpr(2)
"""A thread holds so many open blocks as a rule; where they are more, it holds the whole row."""


@triton.jit
def write_chosen(
    p_ids, p_scores, count, p_out, num_blocks, FREE: tl.constexpr, REPS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes the FREE best of a row's `count` open blocks, at most REPS * COLS; returns how many they are."""
    rank = tl.arange(0, REPS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    ids = tl.load(p_ids + rank, mask=rank < num_blocks, other=0)  # without waiting for `count`
    x = tl.load(p_scores + rank, mask=rank < num_blocks, other=0.0)
    words, n_free = best_of(tl.where(rank < count, x, float("-inf")), REPS, COLS, FREE)
    chosen = ((words[None, :] >> tl.arange(0, REPS)[:, None]) & 1).reshape(REPS * COLS)
    tl.store(p_out + tl.cumsum(chosen, 0) - 1, ids.reshape(REPS * COLS), mask=chosen != 0)
    return n_free


@triton.jit(do_not_specialize=["num_blocks"])
def choose_kernel(
    open_blocks, scores, rescored, visible, out, num_blocks,
    HEADS: tl.constexpr, TOPK: tl.constexpr, TOPK_PAD: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    REPS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Selects among open blocks alone, as a rule fewer than `FEW` times columns, in a grid of (total_q * heads)."""
    FREE: tl.constexpr = TOPK - INIT - LOCAL
    i_row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = tl.minimum(tl.load(visible + i_row // HEADS), num_blocks)
    count = tl.load(rescored + i_row)
    n_init, i_local = free_range(seen, INIT, LOCAL)
    p_ids, p_scores = open_blocks + i_row.to(tl.int64) * num_blocks, scores + i_row.to(tl.int64) * num_blocks
    p_out = out + i_row.to(tl.int64) * TOPK
    if count <= FEW * COLS:
        n_free = write_chosen(p_ids, p_scores, count, p_out + n_init, num_blocks, FREE, FEW, COLS)
    else:
        n_free = write_chosen(p_ids, p_scores, count, p_out + n_init, num_blocks, FREE, REPS, COLS)
    write_forced(p_out, seen, n_init, i_local, n_free, TOPK, TOPK_PAD)


@dataclass(frozen=True)
class RescoreConfig:
    """The rescoring kernel runs with these numbers. num_stages: stages of the walk over keys of a program's words. resident:
    programs that one multiprocessor holds at a time."""

    num_stages: int
    resident: int

    def shares(self, rows: int, num_blocks: int, tile: Tile, device: Device) -> int:
        """Says how many programs serve each row: a quarter more than are resident, as those without a block end at once."""
        turns = ceil_div(tile.count(num_blocks) * tile.tile, 16 * SLOTS.value)
        return min(max(self.resident * device.num_sms * 5 // (4 * rows), 1), turns)


def rescore_config(device: Device, dim: int, indirect: bool) -> RescoreConfig:
    """Chooses for keys of so many elements. indirect: the page of each key is looked up, one stage ahead."""
    width = 2 * next_power_of_two(dim)
    for resident, buffers in ((4, 3), (3, 3), (2, 3), (2, 2), (1, 2), (1, 1)):
        if resident * ((buffers * SLOTS.value + 16) * width + 2048) <= device.shared_bytes:
            break
    asynchronous = device.arch in (90, 100)  # the product reads the buffers itself, so it holds one
    return RescoreConfig(max(buffers - asynchronous, 1) * (1 + indirect) + 1, resident)


def refuse(
    index_q: Any, index_k: Any, seqs: Layout, block_size: int, topk: int, init_blocks: int, local_blocks: int
) -> str | None:
    """Says why these kernels cannot select, or None."""
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
    blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `openmsa.block_topk.select_blocks`. Returns the blocks, and int32 ``[total_q, heads]``: how many were rescored."""
    total_q, heads, _ = index_q.shape
    pool = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    assert isinstance(pool, CertifiedKeys)
    key_heads, num_blocks = pool.shape[1], seqs.num_blocks(block_size)
    rows, free = seqs.max_seqlen_q * heads // key_heads, topk - init_blocks - local_blocks
    walks = seqs.batch * key_heads
    if not certifies(rows, num_blocks, free, total_q * heads, walks, block_size) or total_q == 0:
        arguments = (seqs, block_size, topk, init_blocks, local_blocks, blocks)
        blocks = triton_select.select_blocks(index_q, exact_keys(index_k), *arguments)
        return blocks, seqs.visible_blocks(total_q, block_size)[:, None].expand(-1, heads)
    workspace = Workspace.allocate(total_q, heads, rows, walks, num_blocks, block_size, index_q.device)
    if blocks is None:
        blocks = torch.empty(total_q, heads, topk, dtype=torch.int32, device=index_q.device)
    page_table = index_k.page_table if isinstance(index_k, PagedIndexKeys) else None
    selection = Selection(index_q, pool, page_table, Lengths.of(seqs), block_size, workspace)
    selection.run(init_blocks, local_blocks, blocks)
    return blocks, workspace.rescored.view(total_q, heads)


@dataclass(frozen=True)
class Selection:
    """The four kernels take these; they allocate nothing and read lengths on the device. keys: a pool with a page table, or
    packed."""

    index_q: Tensor
    keys: CertifiedKeys
    page_table: Tensor | None
    lengths: Lengths
    block_size: int
    workspace: Workspace

    def run(self, init_blocks: int, local_blocks: int, out: Tensor) -> None:
        """Runs all four. out: int32 ``[total_q, heads, topk]``, contiguous."""
        self.bound()
        self.select(init_blocks, local_blocks, out)

    def bound(self, follows: bool = False) -> None:
        """Launches the first kernel. follows: see `launch_bounds`."""
        total_q, heads, _ = self.index_q.shape
        bounds, keys = self.workspace.bounds_of(total_q, heads, self._num_blocks), (self.keys.coarse, self.page_table)
        buffers = bounds, self.workspace.candidates, self.workspace.visible[:total_q]
        pdl = has_pdl(self.index_q.device)
        launch_bounds(self.index_q, *keys, self.lengths, self.block_size, *buffers, pdl=pdl, follows=follows)

    def select(self, init_blocks: int, local_blocks: int, out: Tensor) -> None:
        """Launches the other three, which take what `bound` left in the workspace. out: see `run`."""
        total_q, _, topk = out.shape
        held, pdl = self.workspace, has_pdl(self.index_q.device)
        self.score_open(topk, init_blocks, local_blocks)
        open_blocks, visible = (held.open_blocks, held.scores, held.rescored), held.visible[:total_q]
        choose(*open_blocks, visible, self._num_blocks, init_blocks, local_blocks, out, pdl)

    def score_open(self, topk: int, init_blocks: int, local_blocks: int) -> None:
        """Launches the second and the third kernel, which leave open blocks and their exact scores in the workspace."""
        (total_q, heads, _), num_blocks, held = self.index_q.shape, self._num_blocks, self.workspace
        bounds, visible, pdl = held.bounds_of(total_q, heads, num_blocks), held.visible[:total_q], has_pdl(self.index_q.device)
        free, ids, rescored = topk - init_blocks - local_blocks, held.open_blocks, held.rescored
        settle(bounds, visible, ids, rescored, free, init_blocks, local_blocks, pdl)
        keys = self.keys.exact, self.page_table, self.lengths, self.block_size, num_blocks
        rescore(self.index_q, *keys, ids, rescored, held.candidates, held.scores, pdl)

    @property
    def _num_blocks(self) -> int:
        return ceil_div(self.lengths.max_seqlen_k, self.block_size)


def settle(
    bounds: Tensor,
    visible: Tensor,
    open_blocks: Tensor,
    rescored: Tensor,
    free: int,
    init_blocks: int,
    local_blocks: int,
    pdl: bool,
) -> None:
    """Launches `settle_kernel`. bounds: ``[2, heads, total_q, num_blocks]``, last stride 1; the others as in `Workspace`."""
    _, heads, total_q, num_blocks = bounds.shape
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    launch_kernel(
        settle_kernel,
        (total_q * heads,),
        bounds,
        visible,
        open_blocks,
        rescored,
        *bounds.stride()[:3],
        num_blocks,
        HEADS=heads,
        FREE=free,
        INIT=init_blocks,
        LOCAL=local_blocks,
        EARLY=total_q * heads <= EARLY_ROWS,
        PDL=pdl,
        **row_constants(num_blocks),
        **options,
    )


def rescore(
    index_q: Tensor,
    exact: Tensor,
    page_table: Tensor | None,
    lengths: Lengths,
    block_size: int,
    num_blocks: int,
    open_blocks: Tensor,
    rescored: Tensor,
    candidates: Tensor,
    scores: Tensor,
    pdl: bool,
) -> None:
    """Launches `rescore_kernel`. exact: a pool with a page table, or packed keys. candidates: as `launch_bounds` leaves them;
    the others as in `Workspace`."""
    dim, device, tile = index_q.shape[2], facts(index_q.device), Tile.of(block_size)
    keys = KeyTiles.of_pool(exact, page_table, tile, device, by_address=True)
    view, key_heads = keys.view, keys.view.heads
    group, walks = index_q.shape[1] // key_heads, lengths.batch * key_heads
    rows = lengths.max_seqlen_q * group
    chosen = rescore_config(device, dim, keys.paging.mode == PAGES)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    numbers = (num_blocks, view.num_pages, view.capacity, lengths.max_seqlen_k)
    launch_kernel(
        rescore_kernel,
        (rows, walks, chosen.shares(rows * walks, num_blocks, tile, device)),
        query_rows(index_q, view.form.native),
        view.rows,
        view.table,
        lengths.bounds,
        open_blocks,
        rescored,
        candidates.view(Words.of(rows, tile).dtype),
        scores,
        *numbers,
        KEY_HEADS=key_heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=next_power_of_two(dim),
        PAGING=keys.paging,
        CUT=tile,
        STAGES=chosen.num_stages,
        PDL=pdl,
        num_warps=4,
        **options,
    )


def choose(
    open_blocks: Tensor,
    scores: Tensor,
    rescored: Tensor,
    visible: Tensor,
    num_blocks: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
    pdl: bool,
) -> None:
    """Launches `choose_kernel`. out: see `Selection.run`; the others: see `Workspace`."""
    total_q, heads, topk = out.shape
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    launch_kernel(
        choose_kernel,
        (total_q * heads,),
        open_blocks,
        scores,
        rescored,
        visible,
        out,
        num_blocks,
        PDL=pdl,
        **selection_constants(heads, topk, num_blocks, init_blocks, local_blocks),
        **options,
    )
