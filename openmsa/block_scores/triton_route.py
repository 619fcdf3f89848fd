# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This file chooses which of several kernels scores blocks on the GPU, and holds the kernel that serves any keys.

Each of its programs holds a tile of (query, head) rows and walks the keys. The walk has no mask as long as every key is visible
to every row of the tile; only the diagonal has one. Keys come through the copy engine (TMA) where their strides allow it. A
context may be cut into splits, so that few queries on a long prefix fill the card: splits write different blocks of the same
scores. With at most 64 rows a sequence (decode) the product is transposed: keys on the tensor cores' long side, so that a tile
is read from shared memory once and never passes through registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.block_scores.triton_config import config
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.primitives.operands import PAGE_FACTOR, Bounds, QueryRows, Scores
from openmsa.primitives.rows import KeyTiles, Tile, padded, query_rows, tile_start
from openmsa.primitives.scoring import Product, kind_of, product_type, query_factors, row_factors, score_tile, sequence_bounds
from openmsa.primitives.walks import Kind, splits
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.launch import ceil_div, launch_kernel, runs_hopper_kernels
from openmsa.types import Layout


def block_scores(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    scores: Tensor | None = None,
) -> Tensor:
    """See `openmsa.block_scores.block_scores`."""
    total_q, heads, _ = index_q.shape
    if scores is not None:
        if scores.numel():
            visible = torch.empty(total_q, dtype=torch.int32, device=index_q.device)
            launch_scores(index_q, index_k, seqs, block_size, scores, visible)
        return scores
    num_blocks = seqs.num_blocks(block_size)
    stored = torch.empty(heads, total_q, score_rows(num_blocks), dtype=torch.float32, device=index_q.device)
    scores = stored[..., :num_blocks]
    if scores.numel():
        launch_scores(index_q, index_k, seqs, block_size, scores, None)
    return scores


EVEN_SPLITS = True
"""Splits of a launch share the keys that rows see, and not those that page tables have room for (`docs/log/engine.md`)."""
SECTOR = 8
"""The scoring kernel writes so many scores at a time where it can."""


def score_rows(num_blocks: int) -> int:
    """Returns the length of a row of stored scores, an odd number of 32-byte sectors. Rows that lie a power of two apart would
    share few places of the cache, and each 4-byte write would go to memory on its own."""
    return ceil_div(num_blocks, SECTOR) * SECTOR | SECTOR


@dataclass(frozen=True)
class Lengths:
    """Sequences of a batch have these lengths: int32 tensors that kernels read when they run, and numbers that bound them."""

    cu_seqlens_q: Tensor  # [batch + 1]
    cu_seqlens_k: Tensor | None  # [batch + 1]; None: seq_lens
    seq_lens: Tensor | None  # [batch]
    q_offset: Tensor | None  # [batch], positions of first queries; None: the queries are the last of the keys
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, seqs: Layout) -> Lengths:
        return cls(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset, seqs.max_seqlen_q, seqs.max_seqlen_k)

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.numel() - 1

    @property
    def bounds(self) -> Bounds:
        """Bundles the tensors as kernels take them."""
        return Bounds(self.cu_seqlens_q, self.cu_seqlens_k, self.seq_lens, self.q_offset)


def launch_scores(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    scores: Tensor,
    visible: Tensor | None,
) -> None:
    """Writes block scores ``[index_heads, total_q, num_blocks]``, any strides. visible: int32 ``[total_q]`` receives how many
    blocks each query sees, and then the scores of blocks that it does not see are undefined; without it they are -inf."""
    device, tile, lengths = facts(index_q.device), Tile.of(block_size), Lengths.of(seqs)
    keys = KeyTiles.of(index_k, tile, device)
    if lengths.max_seqlen_q <= 16 and runs_hopper_kernels(index_q.device):
        from openmsa.block_scores import gluon_sm90_few

        longest = lengths.max_seqlen_q, lengths.max_seqlen_k
        if gluon_sm90_few.launch(index_q, keys, tile, lengths.bounds, longest, scores, visible, device):
            return
    launch(index_q, keys, tile, lengths, scores, visible, device)


@triton.jit
def rows_of(i_m, q_len, k_len, offset, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Gives numbers of the (query, head) rows i_m * ROWS to (i_m + 1) * ROWS of a sequence, which of them exist (the first one
    does), and the last key that each sees, [ROWS] each; then how many keys all of them see, and how many any of them."""
    o_r = i_m * ROWS + tl.arange(0, ROWS)
    i_last = tl.minimum(offset + o_r // GROUP, k_len - 1)
    seen_by_all = tl.maximum(tl.minimum(offset + i_m * ROWS // GROUP, k_len - 1) + 1, 0)
    last_token = tl.minimum((i_m * ROWS + ROWS - 1) // GROUP, q_len - 1)
    seen_by_any = tl.maximum(tl.minimum(offset + last_token, k_len - 1) + 1, 0)
    return o_r, o_r < q_len * GROUP, i_last, seen_by_all, seen_by_any


@triton.jit
def store_visible(visible, q_start, o_r, m_row, i_last, chosen, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Writes how many blocks each query of `rows_of` sees, by the one program that is chosen."""
    p_v = visible + q_start + o_r // GROUP
    tl.store(p_v, tl.maximum(i_last + BLOCK, 0) // BLOCK, mask=m_row & (o_r % GROUP == 0) & chosen)


@triton.jit
def tiles_of(i_split, tiles_per_split, num_blocks, seen_by_all, seen_by_any, CUT: tl.constexpr):
    """Gives the first tile of a split, the first one behind it, the first that not all rows see whole, and the first that none
    sees."""
    first = i_split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(num_blocks, CUT.sub) * CUT.parts)
    i_full = tl.minimum(seen_by_all // (CUT.block * CUT.sub) * CUT.parts, last)
    i_end = tl.minimum(tl.cdiv(seen_by_any, CUT.block * CUT.sub) * CUT.parts, last)
    return first, last, i_full, i_end


@triton.jit
def scored(m, b_f):
    """Gives maxima [rows, blocks] as scores: times the factor of each row (None: 1), and NaN as -inf."""
    m = m if b_f is None else m * b_f[:, None]
    return tl.where(m > float("-inf"), m, float("-inf"))


@triton.jit
def store_maxima(p_s, m, b_f, i_t, num_blocks, s_sb, m_row, SUB: tl.constexpr, PARTS: tl.constexpr):
    """Writes the maxima of tile i_t as scores, NaN as -inf. p_s: address of block 0 of each row; b_f: factor of each row or
    None; s_sb: int64. The cache keeps what is written until its sector is full, however many keys stream through it."""
    if SUB == 1:
        m = m if b_f is None else m * b_f
        m = tl.where(m > float("-inf"), m, float("-inf"))
        tl.store(p_s + (i_t // PARTS) * s_sb, m, mask=m_row, eviction_policy="evict_last")
    else:
        o_b = i_t * SUB + tl.arange(0, SUB)
        tl.store(p_s[:, None] + (o_b * s_sb)[None, :], scored(m, b_f), mask=m_row[:, None] & (o_b < num_blocks)[None, :])


@triton.jit
def store_unseen(p_s, first, last, i_end, num_blocks, s_block, m_row, CUT: tl.constexpr):
    """Writes -inf as the scores of a split's blocks behind tile i_end. p_s: address of block 0 of each row."""
    unseen = tl.full([p_s.shape[0], 16], float("-inf"), tl.float32)
    stop = last // CUT.parts if CUT.sub == 1 else tl.minimum(last // CUT.parts * CUT.sub, num_blocks)
    for i_b in range(tl.maximum(first, i_end) // CUT.parts * CUT.sub, stop, 16):
        o_b = i_b + tl.arange(0, 16)
        tl.store(p_s[:, None] + (o_b * s_block)[None, :], unseen, mask=m_row[:, None] & (o_b < stop)[None, :])


RUNTIME_LENGTHS = ["num_blocks", "num_pages", "capacity", "max_keys", "tiles_per_split"]


@triton.jit(do_not_specialize=RUNTIME_LENGTHS)
def score_kernel(
    q, keys, tma, table, bounds, scores, num_blocks, num_pages, capacity, max_keys, tiles_per_split,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, PAGING: tl.constexpr, CUT: tl.constexpr,
    PRODUCT: tl.constexpr, HOLD: tl.constexpr, FILL: tl.constexpr, COLLECT: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Scores blocks in a grid of splits, row tiles and batch * key heads, in which SPLITS is the axis of splits: 0, or 1 where
    programs that run at a time are to read the same keys; late rows, which see most keys, start first. HOLD: rows stay in
    registers. FILL: scores of blocks that a row does not see are -inf, not left. COLLECT: rows of scores are written eight
    blocks, a sector, at a time. PDL: the next kernel may be launched while this one runs; 2: this one may start before the one
    in front has ended, and waits for it first, so that the next one finds what any before this one wrote. EVEN: see below."""
    if PDL == 2:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    ROWS: tl.constexpr = PRODUCT.rows
    # 1. The program finds its rows, keys and tiles.
    i_split = tl.program_id(SPLITS)
    i_m = tl.num_programs(1 - SPLITS) - 1 - tl.program_id(1 - SPLITS)
    i_s, i_h = tl.program_id(2) // KEY_HEADS, tl.program_id(2) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(bounds, i_s, capacity, max_keys)
    if i_m * ROWS >= q_len * GROUP:
        return

    o_r, m_row, i_last, seen_by_all, seen_by_any = rows_of(i_m, q_len, k_len, offset, GROUP, ROWS)
    if scores.visible is not None:
        store_visible(scores.visible, q_start, o_r, m_row, i_last, i_split + i_h == 0, GROUP, CUT.block)
    if EVEN:  # The splits share the tiles that the rows see, EVEN at a time; nobody has the others, so that FILL must be False.
        even = tl.cdiv(tl.cdiv(seen_by_any, CUT.block * CUT.sub) * CUT.parts, tl.num_programs(SPLITS) * EVEN) * EVEN
        tiles_per_split = tl.minimum(tiles_per_split, tl.maximum(even, EVEN))
    first, last, i_full, i_end = tiles_of(i_split, tiles_per_split, num_blocks, seen_by_all, seen_by_any, CUT)
    page_row = table.ids
    if PAGING.mode != 0:
        page_row += i_s.to(tl.int64) * table.s_sequence
    s_block = tl.full([], 0, tl.int64) + scores.s_block
    i_token = (q_start + o_r // GROUP).to(tl.int64)
    o_s = (i_h * GROUP + o_r % GROUP).to(tl.int64) * scores.s_head + i_token * scores.s_token
    # 2. Rows of queries become factors.
    b_q = query_factors(q, q_start, q_len, o_r, i_h, GROUP, FORM, PRODUCT, HOLD)
    b_f = row_factors(q, keys, tl.where(m_row, o_r, 0), i_h, FORM, GROUP)
    if PRODUCT.grouped:
        b_q, b_up = b_q
        b_f = b_up if b_f is None else b_f * b_up

    # 3. Tiles that all rows see whole are scored without a mask over keys.
    if COLLECT:
        o_8 = tl.arange(0, 8)
        p_8 = scores.maxima + tl.multiple_of(o_s, 4)[:, None] + o_8[None, :]
        held = tl.full([ROWS, 8], float("-inf"), tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)  # maxima of the parts of a block so far
    for i_t in tl.range(first, i_full, num_stages=STAGES):
        i_k = tile_start(i_t, CUT)
        m = score_tile(
            b_q, keys, tma, page_row, i_h, i_k, i_last, k_start, k_len, num_pages, FORM, PAGING, CUT, PRODUCT, False, False
        )  # fmt: skip
        if COLLECT:
            held = tl.where(o_8[None, :] == i_t % 8, m[:, None], held)
            if i_t % 8 == 7:
                tl.store(p_8 + i_t // 8 * 8, scored(held, b_f), mask=m_row[:, None])
        else:
            if CUT.parts == 2:
                m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
                best = m
            store_maxima(scores.maxima + o_s, m, b_f, i_t, num_blocks, s_block, m_row, CUT.sub, CUT.parts)
    if COLLECT:  # the rest of the last eight is written
        o_held = i_full // 8 * 8 + o_8
        tl.store(
            p_8 + i_full // 8 * 8, scored(held, b_f), mask=m_row[:, None] & ((o_held >= first) & (o_held < i_full))[None, :]
        )
    # 4. Tiles on the diagonal and at the end of the keys are scored with a mask.
    for i_t in tl.range(tl.maximum(first, i_full), i_end, num_stages=1):
        i_k = tile_start(i_t, CUT)
        m = score_tile(
            b_q, keys, tma, page_row, i_h, i_k, i_last, k_start, k_len, num_pages, FORM, PAGING, CUT, PRODUCT, True, True
        )  # fmt: skip
        if CUT.parts == 2:
            m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
            best = m
        store_maxima(scores.maxima + o_s, m, b_f, i_t, num_blocks, s_block, m_row, CUT.sub, CUT.parts)
    # 5. Blocks that no row sees are filled.
    if FILL:
        store_unseen(scores.maxima + o_s, first, last, i_end, num_blocks, s_block, m_row, CUT)


def launch(
    index_q: Tensor | Stored,
    keys: KeyTiles,
    tile: Tile,
    lengths: Lengths,
    scores: Tensor,
    visible: Tensor | None,
    device: Device,
    pdl: bool = False,
    behind: bool = False,
) -> None:
    """Does what `launch_scores` does. pdl: the next launch waits for this one inside its kernel. behind: with pdl, this launch
    may start before the kernel in front has ended, and waits inside; the kernels of `triton_lanes` never do."""
    view, heads = keys.view, keys.view.heads
    queries, product = query_rows(index_q, view.form.native), product_type(index_q, view)
    group = index_q.shape[1] // heads
    rows = lengths.max_seqlen_q * group
    kind = kind_of(keys, product, tile)
    if kind.groups:
        from openmsa.block_scores.triton_lanes import reads_lanes

        kind = kind._replace(lanes=reads_lanes(keys, tile))
    s_head, s_token, s_block = scores.stride()
    num_blocks, written = scores.shape[2], Scores(scores, s_head, s_token, s_block, visible)
    # Where it is even, eight scores of a row, from a multiple of eight, can be written 16 bytes at a time.
    even = s_block == 1 and s_head % 4 == s_token % 4 == 0 and scores.data_ptr() % 16 == 0
    tuned = _tuned(queries, keys, kind, tile, rows, group, even, device, pdl) if runs_hopper_kernels(index_q.device) else None
    if tuned is not None:
        tuned(queries, keys, product, lengths, written, num_blocks, device)
        return
    chosen = config(device, rows, kind)
    row_tiles = ceil_div(rows, chosen.rows)
    blocks = -(-num_blocks // tile.sub)
    programs = row_tiles * lengths.batch * heads
    collect = not chosen.swap and tile.sub == tile.parts == 1 and even
    step = SECTOR if collect else 1
    shares = EVEN_SPLITS and visible is not None and not chosen.lanes
    num_splits = splits(programs, blocks, chosen.resident * device.num_sms, 1 if rows <= 64 else 8, step)
    blocks_a_split = ceil_div(blocks, num_splits * step) * step
    grid = (-(-blocks // blocks_a_split), row_tiles, lengths.batch * heads)
    numbers = (num_blocks, view.num_pages, view.capacity, lengths.max_seqlen_k, blocks_a_split * tile.parts)
    constants: dict[str, Any] = {
        "KEY_HEADS": heads,
        "GROUP": group,
        "FORM": view.form,
        "PAGING": keys.paging,
        "CUT": tile,
        "PRODUCT": Product(product, view.dim, padded(view.dim, view.form.format), chosen.rows, chosen.swap, chosen.grouped),
        "FILL": visible is None,
        "STAGES": chosen.num_stages,
        "PDL": pdl,
        "num_warps": chosen.num_warps,
        "maxnreg": chosen.max_registers,
    }
    others = view.table, lengths.bounds, written, *numbers
    if chosen.lanes:
        from openmsa.block_scores.triton_lanes import in_words, lane_kernel

        launch_kernel(lane_kernel, grid, queries, in_words(view.rows, view.form), *others, CHUNK=chosen.lanes, **constants)
    else:
        far = row_tiles > 1 and lengths.max_seqlen_k * view.rows.data.shape[-1] * view.rows.data.itemsize > device.l2_bytes
        grid = (grid[1], grid[0], grid[2]) if far else grid
        constants |= {"HOLD": chosen.hold, "COLLECT": collect, "SPLITS": int(far)}
        constants |= {"EVEN": step * tile.parts if shares else 0} | ({"PDL": 2, "launch_pdl": True} if behind else {})
        launch_kernel(score_kernel, grid, queries, view.rows, keys.tma, *others, **constants)


def _tuned(
    queries: QueryRows, keys: KeyTiles, kind: Kind, tile: Tile, rows: int, group: int, even: bool, device: Device, pdl: bool
) -> Callable[..., None] | None:  # fmt: skip
    """Returns the function that launches one of Hopper's own kernels, or None where none of them serves. even: scores can be
    written in sectors."""
    if kind.lanes:
        from openmsa.block_scores import gluon_sm90_lanes

        if gluon_sm90_lanes.serves(device, keys, queries, tile, rows, kind.lanes):
            return partial(gluon_sm90_lanes.launch, pdl=pdl)
    if keys.view.form.factor == PAGE_FACTOR or queries.s_dim != 1 or not even or pdl:
        return None
    from openmsa.block_scores import gluon_sm90_scores

    return gluon_sm90_scores.launch if gluon_sm90_scores.serves(device, kind, tile, rows, group) else None
