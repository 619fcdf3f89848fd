# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Bounds of scores say which keys can have the best score of their block: one bit for each key and row.

A key with the best exact score has an upper bound that is not below it, nor so below any lower bound of its block. All such
keys are found, ties and zeros of either sign too, and others with them. The bits lie as the threads of a product hold them, so
that writing costs a comparison a bit and one store a tile; they are sorted out where they are read, for few blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from openmsa.block_scores.triton_route import RUNTIME_LENGTHS, Lengths, rows_of, store_maxima, store_visible, tiles_of
from openmsa.kv_cache import Int8
from openmsa.primitives import operands
from openmsa.primitives.codes import key_errors, key_scales, load_of_keys
from openmsa.primitives.operands import Scores
from openmsa.primitives.query_parts import power_of_two
from openmsa.primitives.rows import KeyTiles, Tile, load_keys, load_rows, padded, query_rows, tile_start
from openmsa.primitives.scales import key_strides
from openmsa.primitives.scoring import sequence_bounds
from openmsa.primitives.walks import Config, Kind, splits, walk
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two


@dataclass(frozen=True)
class Words:
    """`possible_maxima` lies in memory like this: each sequence and key head and each tile has `number` words of `dtype`, with
    a bit for each of `rows`, those of a product with keys: at least the sequence's, at most 16."""

    rows: int
    number: int
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: int, tile: Tile) -> Words:
        """Chooses the words. rows: the most a sequence has for a key head."""
        held = max(4, next_power_of_two(rows))
        return cls(held, min(2 * tile.tile, 128), torch.int16 if held > 8 else torch.int8)

    def bytes(self, tile: Tile, num_blocks: int) -> int:
        """Returns the bytes of the words of a sequence and key head."""
        return tile.count(num_blocks) * self.number * self.dtype.itemsize


@triton.jit
def fixed_point(b_q):
    """Expresses rows of 16-bit queries [rows, width] as integers times a unit. Returns int8 [2 * rows, width], the high and the
    low part of each row, with zeros behind them up to the 16 rows that Hopper's matrix unit is used for, and float32 [rows]:
    the unit, and bounds of the norms of the row and of what the integers lack. A row with NaN, infinity or elements from 2**111
    on becomes zeros and has an infinite norm."""
    x = b_q.to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    usable = largest < 2.0**111
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127, -100)
    exponent = tl.where(usable, exponent, 0)
    x = tl.where(usable[:, None], x, 0.0) * power_of_two(13 - exponent)[:, None]  # exact; at most 2**14 - 8 in magnitude
    n = tl.floor(x + 0.5)
    unit = power_of_two(exponent - 13)
    MARGIN: tl.constexpr = 1 + 1e-4  # covers float32 sums and roots; 4e-37 below covers lost subnormal squares
    norm = tl.sqrt(tl.sum(x * x, 1)) * unit * MARGIN + 4e-37
    rest = tl.sqrt(tl.sum((x - n) * (x - n), 1)) * unit * MARGIN + (norm * 2.0**-64 + 4e-37)
    whole = n.to(tl.int32)
    parts = tl.join((whole >> 7).to(tl.int8), (whole & 127).to(tl.int8)).permute(0, 2, 1)
    parts = parts.reshape(2 * x.shape[0], x.shape[1])
    if parts.shape[0] < 16:
        parts = tl.join(parts, tl.zeros_like(parts)).permute(2, 0, 1).reshape(2 * parts.shape[0], x.shape[1])
    return parts, unit, tl.where(usable, norm, float("inf")), rest


@triton.jit
def grouped_maxima(
    s, i_k, i_last, TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Takes maxima of the blocks of a tile, as `block_maxima` takes them of s [TILE, rows], and maxima [groups, rows] of groups
    of keys that one warp holds, for which it waits for no other. Group g has every `groups`-th 16 neighbours from the g-th on,
    all of one block."""
    WARPS: tl.constexpr = min(TILE // 16, 4)
    LOOPS: tl.constexpr = TILE // (16 * WARPS)
    ROWS: tl.constexpr = s.shape[1]
    if MASKED or KEYS < TILE:
        o_k = tl.arange(0, TILE)[:, None]
        s = tl.where((o_k < KEYS) & (i_k + o_k <= i_last[None, :]), s, float("-inf"))
    s = s.reshape(LOOPS, WARPS, 16, ROWS)
    if SUB == 1:
        best = tl.max(tl.max(s, 0), 1)
        m = tl.max(best, 0)
    else:
        best = tl.max(s, 2).reshape(LOOPS * WARPS, ROWS)
        m = tl.max(best.reshape(SUB, LOOPS * WARPS // SUB, ROWS), 1).T
    return m, best


@triton.jit
def possible_maxima(upper, least, KEYS: tl.constexpr):
    """Says which of a tile's keys can have their block's best score for a row: upper [keys, rows] is not below least [groups,
    rows], the best lower bound of their group, whose NaN bounds nothing. A group has every `groups`-th 16 neighbours. Words
    [keys / 16 up to 4, 8, 4] laid flat: bit 4 * c + 2 * j + i of word (w, l, r) is that of key 64 * j + 16 * w + 8 * i + l and
    row 4 * c + r: what one thread holds of the product."""
    TILE: tl.constexpr = upper.shape[0]
    ROWS: tl.constexpr = upper.shape[1]
    WARPS: tl.constexpr = min(TILE // 16, 4)
    LOOPS: tl.constexpr = TILE // (16 * WARPS)
    GROUPS: tl.constexpr = least.shape[0]
    least = tl.broadcast_to(least[None, :, None, :], [TILE // (16 * GROUPS), GROUPS, 16, ROWS]).reshape(TILE, ROWS)
    can = ~(upper < least)
    if KEYS < TILE:
        can = can & (tl.arange(0, TILE) < KEYS)[:, None]
    can = can.reshape(LOOPS, WARPS, 2, 8, ROWS // 4, 4)
    o_j = tl.arange(0, LOOPS)[:, None, None, None, None, None]
    o_i = tl.arange(0, 2)[None, None, :, None, None, None]
    o_c = tl.arange(0, ROWS // 4)[None, None, None, None, :, None]
    bits = tl.where(can, 1 << (4 * o_c + 2 * o_j + o_i), 0)
    return tl.sum(tl.sum(tl.sum(bits, 4), 2), 0).reshape(WARPS * 32)


@triton.jit
def candidate_words(candidates, i_tile, i_16, m_unit, i_four, TILE: tl.constexpr):
    """Loads which keys can have the best score of their block for a row (`possible_maxima`), as bits of words of 16 neighbours:
    words i_16 of tiles i_tile, [units, words], where m_unit [units]; 0 elsewhere. candidates: those of the first tile, from
    word row % 4 on; i_four: row // 4."""
    WARPS: tl.constexpr = min(TILE // 16, 4)
    o_l = tl.arange(0, 8)[None, None, :]
    o_w = i_tile.to(tl.int64) * (WARPS * 32) + i_16 % WARPS * 32
    held = tl.load(candidates + o_w[:, :, None] + o_l * 4, mask=m_unit[:, None, None], other=0).to(tl.int32)
    held = held >> (4 * i_four + i_16 // WARPS * 2)[:, :, None]
    return tl.sum(((held & 1) << o_l) | ((held >> 1 & 1) << (o_l + 8)), 2)


class KeyErrors(NamedTuple):
    """These are errors of int8 keys that lie apart from their scales, as kernels take them; None stands for words that hold
    both."""

    data: Tensor
    s_page: int
    s_head: int
    s_row: int


@triton.jit
def bound_tile(
    b_n, b_unit, b_norm, b_grain, keys, tma, errors, page_row, i_h, i_k, i_last, k_start, k_len, num_pages,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGING: tl.constexpr, CUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes maxima of the blocks of one tile (`grouped_maxima`) of lower (even rows of the result) and upper bounds (odd ones),
    and words of the keys that can have the best score (`possible_maxima`; also of rows that do not see them). b_norm, b_grain:
    what an error and a scale of a key count, the latter times 2**20: where sums could overflow, and infinities meet, these
    products do. MASKED: some key may not exist, some row does not see every key."""
    ROWS: tl.constexpr = b_unit.shape[0]
    TILE: tl.constexpr = CUT.tile
    CUT_OFF: tl.constexpr = MASKED or CUT.keys < TILE
    b_k = load_keys(
        keys, tma, page_row, i_h, i_k, k_start, k_len, num_pages, PAGING, TILE, DIM, DIM_PAD, CUT_OFF
    )  # fmt: skip
    b_s = load_of_keys(
        keys.scales, keys.s_scales_page, keys.s_scales_head, keys.s_scales_row,
        page_row, i_h, i_k, k_start, k_len, num_pages, PAGING, TILE, CUT_OFF,
    )  # fmt: skip
    if errors is None:
        b_e = key_errors(b_s)
    else:
        b_e = load_of_keys(
            errors.data, errors.s_page, errors.s_head, errors.s_row,
            page_row, i_h, i_k, k_start, k_len, num_pages, PAGING, TILE, CUT_OFF,
        ).to(tl.float32)  # fmt: skip
    b_s = key_scales(b_s)
    n = tl.dot(b_k, b_n.T, out_dtype=tl.int32)
    if n.shape[1] > 2 * ROWS:
        n, _ = tl.split(n.reshape(TILE, 2, 2 * ROWS).permute(0, 2, 1))
    high, low = tl.split(n.reshape(TILE, ROWS, 2))
    s = (high * 128 + low).to(tl.float32) * b_unit[None, :] * b_s[:, None]
    b_e *= (1 + 2 * DIM * 2.0**-22) * 1048576.0
    radius = b_norm[None, :] * b_e[:, None] + b_grain[None, :] * b_s[:, None]
    radius = radius * 2.0**-20 + DIM * 2.0**-124  # covers products and sums in the subnormal range, flushed or rounded
    upper = s + radius
    unbounded = tl.where(b_s == b_s, float("inf"), b_s)  # infinities met; a key of NaN has no score
    upper = tl.where(upper == upper, upper, unbounded[:, None])
    both = tl.join(s - radius, upper).reshape(TILE, 2 * ROWS)
    m, best = grouped_maxima(both, i_k, i_last, TILE, CUT.keys, CUT.sub, MASKED)
    least, _ = tl.split(best.reshape(best.shape[0], ROWS, 2))
    return m, possible_maxima(upper, least, CUT.keys)


@triton.jit(do_not_specialize=["s_side", *RUNTIME_LENGTHS])
def bounds_kernel(
    q, keys, tma, errors, table, bounds, scores, candidates, s_side, num_blocks, num_pages, capacity, max_keys, tiles_per_split,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGING: tl.constexpr,
    CUT: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Bounds the scores in a grid of (splits, batch * key heads). scores: where maxima of lower bounds go; those of upper
    bounds lie s_side after them. candidates: see `Words`. PDL: the kernel after this one may be launched while this one
    runs."""
    if PDL:
        gdc_launch_dependents()
    # 1. The program finds its rows, keys and tiles.
    i_split, i_s, i_h = tl.program_id(0), tl.program_id(1) // KEY_HEADS, tl.program_id(1) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(bounds, i_s, capacity, max_keys)
    if q_len <= 0:
        return
    o_r, m_row, i_last, seen_by_all, seen_by_any = rows_of(0, q_len, k_len, offset, GROUP, ROWS)
    store_visible(scores.visible, q_start, o_r, m_row, i_last, i_split + i_h == 0, GROUP, CUT.block)
    first, _, i_full, i_end = tiles_of(i_split, tiles_per_split, num_blocks, seen_by_all, seen_by_any, CUT)
    page_row = table.ids
    if PAGING.mode != 0:
        page_row += i_s.to(tl.int64) * table.s_sequence
    # 2. Rows of queries become integers, with what bounds the error of their products.
    p_q = q.data + q_start.to(tl.int64) * q.s_token
    b_q = load_rows(p_q, o_r, q_len, i_h * GROUP, q.s_token, q.s_head, q.s_dim, GROUP, DIM, DIM_PAD)
    b_n, b_unit, b_norm, b_rest = fixed_point(b_q)
    SUM: tl.constexpr = DIM * 2.0**-22  # rounding of a sum relative to its magnitudes; the matrix unit may truncate
    LARGEST: tl.constexpr = 127.0 * DIM**0.5  # norm of the codes
    b_grain = (b_norm * (SUM + 2.0**-21) + b_rest) * (LARGEST * 1048576.0)

    o_c = tl.arange(0, 2 * ROWS)  # columns: a lower and an upper bound of each row
    o_r = o_c // 2
    m_c = o_r < q_len * GROUP
    i_last = tl.minimum(offset + o_r // GROUP, k_len - 1)
    p_b = scores.maxima + (o_c % 2).to(tl.int64) * s_side + (i_h * GROUP + o_r % GROUP).to(tl.int64) * scores.s_head
    p_b += (q_start + o_r // GROUP).to(tl.int64) * scores.s_token
    s_block = tl.full([], 1, tl.int64)
    best = tl.full([2 * ROWS], float("-inf"), tl.float32)  # maxima of the parts of a block so far
    WORDS: tl.constexpr = min(2 * CUT.tile, 128)
    p_w = candidates + tl.program_id(1).to(tl.int64) * (tl.cdiv(num_blocks, CUT.sub) * CUT.parts * WORDS)
    p_w += tl.arange(0, WORDS)
    # 3. Tiles that all rows see whole come first, then those at the end of the keys, with a mask.
    for MASKED in tl.static_range(2):
        begin, end = (tl.maximum(first, i_full), i_end) if MASKED else (first, i_full)
        for i_t in tl.range(begin, end, num_stages=1 if MASKED else STAGES):
            i_k = tile_start(i_t, CUT)
            m, words = bound_tile(
                b_n, b_unit, b_norm, b_grain, keys, tma, errors, page_row, i_h, i_k, i_last, k_start, k_len, num_pages,
                DIM, DIM_PAD, PAGING, CUT, MASKED,
            )  # fmt: skip
            if CUT.parts == 2:
                m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
                best = m
            store_maxima(p_b, m, None, i_t, num_blocks, s_block, m_c, CUT.sub, CUT.parts)
            tl.store(p_w + i_t * WORDS, words.to(candidates.dtype.element_ty), eviction_policy="evict_last")


def bounds_config(device: Device, rows: int, dim: int, tile: Tile, indirect: bool, tma: bool) -> Config:
    """Chooses for so many rows, the most that a sequence has for a key head. indirect: whether keys lie in pages."""
    rows = Words.of(rows, tile).rows
    width = padded(dim, operands.INT8)
    kind = Kind(dim, tile.tile, width, width, False, 0, False, indirect, tma)
    stages, resident = walk(device, max(16, 2 * rows) * width, kind, swap=True)
    return Config(rows, True, False, 4, stages, resident)


def launch_bounds(
    index_q: Tensor,
    index_k: Int8,
    page_table: Tensor | None,
    lengths: Lengths,
    block_size: int,
    bounds: Tensor,
    candidates: Tensor,
    visible: Tensor,
    pdl: bool = False,
    follows: bool = False,
) -> None:
    """Writes bounds of the scores that the keys before quantisation have, computed by any of the scoring kernels or exactly.

    index_q:  float16 or bfloat16 ``[total_q, heads, dim]``.
    index_k:  a pool with a page table, or packed keys.
    bounds:   float32 ``[2, heads, total_q, num_blocks]``, last stride 1: maxima of lower and of upper bounds; -inf where the
              block has no score, +inf in the second where the arithmetic bounds nothing (there even if no key is seen);
              undefined for blocks that a query does not see.
    candidates:  int8 ``[batch * key heads * Words.bytes]`` or more: receives which keys can have the best score of their
              block; for a row also keys that it does not see. Undefined for tiles that no row sees.
    visible:  int32 ``[total_q]``: receives how many blocks each query sees.
    pdl:      the next launch waits for this one inside its kernel.
    follows:  with `pdl`: programs start where those of the launch in front, of this kernel and without `follows`, leave room.
              They never wait for it: the two must write to different memory, and the end of this one is not the end of
              that one."""
    device, tile = facts(index_q.device), Tile.of(block_size)
    keys = KeyTiles.of_pool(index_k, page_table, tile, device, items=False)
    view, key_heads, dim = keys.view, keys.view.heads, index_q.shape[2]
    apart = view.rows.scales is index_k.scale
    errors = KeyErrors(index_k.error, *key_strides(index_k.error)) if apart else None
    group = index_q.shape[1] // key_heads
    rows, walks = lengths.max_seqlen_q * group, lengths.batch * key_heads
    chosen = bounds_config(device, rows, dim, tile, page_table is not None, keys.tma is not None)
    num_blocks = bounds.shape[3]
    blocks = ceil_div(num_blocks, tile.sub)
    blocks_a_split = ceil_div(blocks, splits(walks, blocks, chosen.resident * device.num_sms, 1))
    s_side, s_head, s_token, _ = bounds.stride()
    numbers = (s_side, num_blocks, view.num_pages, view.capacity, lengths.max_seqlen_k, blocks_a_split * tile.parts)
    options: dict[str, Any] = {"launch_pdl": True} if pdl and follows else {}
    launch_kernel(
        bounds_kernel,
        (ceil_div(blocks, blocks_a_split), walks),
        query_rows(index_q, view.form.native),
        view.rows,
        keys.tma,
        errors,
        view.table,
        lengths.bounds,
        Scores(bounds, s_head, s_token, 1, visible),
        candidates.view(Words.of(rows, tile).dtype),
        *numbers,
        KEY_HEADS=key_heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=padded(dim, operands.INT8),
        PAGING=keys.paging,
        CUT=tile,
        ROWS=chosen.rows,
        STAGES=chosen.num_stages,
        PDL=pdl,
        num_warps=chosen.num_warps,
        **options,
    )
