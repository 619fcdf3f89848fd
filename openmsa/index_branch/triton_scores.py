# SPDX-License-Identifier: MIT
"""Block scores on the GPU: a program holds one tile of (query, head) rows and walks the keys.

The walk has no mask as long as every key is visible to every row of the tile; only the diagonal has one. Keys come through the
copy engine (TMA) where their strides allow it. A context may be cut into splits, so that few queries on a long prefix fill the
card: splits write different blocks of the same scores. With at most 64 rows a sequence (decode) the product is transposed:
keys on the tensor cores' long side, so that a tile is read from shared memory once and never passes through registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from openmsa.index_branch.triton_tiles import (
    hold_rows,
    load_keys,
    load_rows,
    sequence_bounds,
    tile_start,
)
from openmsa.runtime.devices import Device


@dataclass(frozen=True)
class Config:
    """rows: (query, head) rows a program; swap: keys times queries, not queries times keys; hold: rows in registers;
    num_stages: of the walk; resident: programs that one multiprocessor holds at a time."""

    rows: int
    swap: bool
    hold: bool
    num_warps: int
    num_stages: int
    resident: int


def config(device: Device, rows: int, dim: int, tile: int, indirect: bool, tma: bool) -> Config:
    """rows: the most a sequence has for a key head. indirect: keys in pages, whose ids are read one stage ahead.

    Many rows on Hopper: 128 rows of one warpgroup, held in registers, and two programs a multiprocessor, one multiplying while
    the other takes maxima. Shared memory then moves 94 bytes a clock of its 128; with 64 rows there (160) it was the limit."""
    swap = rows <= 64
    hold = device.arch == 90 and tma and not swap
    rows = max(16, triton.next_power_of_2(rows)) if swap else 128 if hold and dim <= 128 else 64
    return Config(rows, swap, hold, 4, *walk(device, 0 if hold else rows, dim, tile, indirect))


def walk(device: Device, rows: int, dim: int, tile: int, indirect: bool) -> tuple[int, int]:
    """Stages of the walk, and resident programs a multiprocessor, that fit its shared memory beside `rows` rows."""
    row_bytes = triton.next_power_of_2(dim) * 2
    for resident, buffers in ((2, 3), (2, 2), (1, 3), (1, 2), (1, 1)):
        if resident * ((rows + buffers * tile) * row_bytes + 1536) <= device.shared_bytes:
            break
    asynchronous = device.arch in (90, 100)  # the product reads the buffers itself, so it holds one
    ahead = max(buffers - asynchronous, 1)  # stages between a load and its use
    return ahead * (1 + indirect) + 1, resident


@functools.lru_cache(4096)
def splits(programs: int, tiles: int, slots: int, least: int) -> int:
    """Into how many parts the walk over `tiles` key tiles is cut, each keeping at least `least`: time is the number of rounds
    that `slots` places need, times a part's tiles and its start-up, worth two. The finest within 3 % of the best."""
    if not programs or programs >= 8 * slots:
        return 1
    most = max(1, min(tiles // least, 8 * slots // programs))
    cost = {n: -(-programs * n // slots) * (-(-tiles // n) + 2) for n in range(1, most + 1)}
    best = min(cost.values())
    return max(n for n, c in cost.items() if c <= 1.03 * best)


@triton.jit
def block_maxima(
    b_q, b_k, i_k, i_last,
    TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, SWAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Best product of each row with each block of a tile, [rows, SUB] ([rows] when SUB is 1); NaN where all are NaN.
    i_last: the last key that each row sees."""
    o_k = tl.arange(0, TILE)
    if SWAP:
        s = tl.dot(b_k, b_q.T)  # [TILE, rows]
        counts = (o_k < KEYS)[:, None]
        if MASKED:
            counts = counts & (i_k + o_k[:, None] <= i_last[None, :])
    else:
        s = tl.dot(b_q, b_k.T)  # [rows, TILE]
        counts = (o_k < KEYS)[None, :]
        if MASKED:
            counts = counts & (i_k + o_k[None, :] <= i_last[:, None])
    if MASKED or KEYS < TILE:
        s = tl.where(counts, s, float("-inf"))
    if SUB == 1:
        m = tl.max(s, 0 if SWAP else 1)
    elif SWAP:
        m = tl.max(tl.reshape(s, [SUB, TILE // SUB, s.shape[1]]), 1).T
    else:
        m = tl.max(tl.reshape(s, [s.shape[0], SUB, TILE // SUB]), 2)
    return m


@triton.jit
def store_maxima(p_s, m, i_t, num_blocks, s_sb, m_row, SUB: tl.constexpr, PARTS: tl.constexpr):
    """p_s: address of block 0 of each row; i_t: the key tile; s_sb: int64. Writes NaN as -inf."""
    m = tl.where(m > float("-inf"), m, float("-inf"))
    if SUB == 1:
        tl.store(p_s + (i_t // PARTS) * s_sb, m, mask=m_row)
    else:
        o_b = i_t * SUB + tl.arange(0, SUB)
        tl.store(p_s[:, None] + (o_b * s_sb)[None, :], m, mask=m_row[:, None] & (o_b < num_blocks)[None, :])


RUNTIME_LENGTHS = ["num_blocks", "num_pages", "capacity", "max_keys", "tiles_per_split"]


@triton.jit(do_not_specialize=RUNTIME_LENGTHS)
def score_kernel(
    q,
    keys,
    page_table,
    cu_q,
    cu_k,
    seq_lens,
    q_offset,
    scores,
    visible,
    s_qt,
    s_qh,
    s_qd,
    s_page,
    s_head,
    s_token,
    s_dim,
    s_table,
    s_sh,
    s_st,
    s_sb,
    num_blocks,
    num_pages,
    capacity,
    max_keys,
    tiles_per_split,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    SWAP: tl.constexpr,
    HOLD: tl.constexpr,
    MODE: tl.constexpr,
    TMA: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FILL: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (splits, row tiles, batch * key heads); late rows, which see most keys, start first.
    PDL: let the kernel behind this one be launched while this one runs."""
    if PDL:
        gdc_launch_dependents()
    i_split = tl.program_id(0)
    i_m = tl.num_programs(1) - 1 - tl.program_id(1)
    i_s, i_h = tl.program_id(2) // KEY_HEADS, tl.program_id(2) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(cu_q, cu_k, seq_lens, q_offset, i_s, capacity, max_keys)
    if i_m * ROWS >= q_len * GROUP:
        return

    o_r = i_m * ROWS + tl.arange(0, ROWS)
    m_row = o_r < q_len * GROUP
    i_last = tl.minimum(offset + o_r // GROUP, k_len - 1)  # [ROWS] last key each row sees
    seen_by_all = tl.maximum(tl.minimum(offset + i_m * ROWS // GROUP, k_len - 1) + 1, 0)
    last_token = tl.minimum((i_m * ROWS + ROWS - 1) // GROUP, q_len - 1)
    seen_by_any = tl.maximum(tl.minimum(offset + last_token, k_len - 1) + 1, 0)
    if visible is not None:
        p_v = visible + q_start + o_r // GROUP
        tl.store(p_v, tl.maximum(i_last + BLOCK, 0) // BLOCK, mask=m_row & (o_r % GROUP == 0) & (i_split + i_h == 0))

    first = i_split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(num_blocks, SUB) * PARTS)
    i_full = tl.minimum(seen_by_all // (BLOCK * SUB) * PARTS, last)
    i_end = tl.minimum(tl.cdiv(seen_by_any, BLOCK * SUB) * PARTS, last)
    page_row = page_table
    if MODE != 0:
        page_row += i_s.to(tl.int64) * s_table
    s_sb = tl.full([], 0, tl.int64) + s_sb
    i_token = (q_start + o_r // GROUP).to(tl.int64)
    p_s = scores + (i_h * GROUP + o_r % GROUP).to(tl.int64) * s_sh + i_token * s_st
    b_q = load_rows(q + q_start.to(tl.int64) * s_qt, o_r, q_len, i_h * GROUP, s_qt, s_qh, s_qd, GROUP, DIM, DIM_PAD)

    if HOLD:
        b_q = hold_rows(b_q, DIM_PAD)
    best = tl.full([ROWS], float("-inf"), tl.float32)  # of the parts of a block so far
    for i_t in tl.range(first, i_full, num_stages=STAGES):
        i_k = tile_start(i_t, BLOCK, KEYS, SUB, PARTS)
        b_k = load_keys(
            keys, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token, s_dim,
            MODE, TMA, PAGE_SIZE, TILE, DIM, DIM_PAD, KEYS < TILE,
        )  # fmt: skip
        m = block_maxima(b_q, b_k, i_k, i_last, TILE, KEYS, SUB, SWAP, False)
        if PARTS == 2:
            m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
            best = m
        store_maxima(p_s, m, i_t, num_blocks, s_sb, m_row, SUB, PARTS)
    for i_t in tl.range(tl.maximum(first, i_full), i_end, num_stages=1):
        i_k = tile_start(i_t, BLOCK, KEYS, SUB, PARTS)
        b_k = load_keys(
            keys, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token, s_dim,
            MODE, TMA, PAGE_SIZE, TILE, DIM, DIM_PAD, True,
        )  # fmt: skip
        m = block_maxima(b_q, b_k, i_k, i_last, TILE, KEYS, SUB, SWAP, True)
        if PARTS == 2:
            m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
            best = m
        store_maxima(p_s, m, i_t, num_blocks, s_sb, m_row, SUB, PARTS)
    if FILL:
        unseen = tl.full([ROWS, 16], float("-inf"), tl.float32)
        stop = tl.minimum(last // PARTS * SUB, num_blocks)
        for i_b in range(tl.maximum(first, i_end) // PARTS * SUB, stop, 16):
            o_b = i_b + tl.arange(0, 16)
            tl.store(p_s[:, None] + (o_b * s_sb)[None, :], unseen, mask=m_row[:, None] & (o_b < stop)[None, :])
