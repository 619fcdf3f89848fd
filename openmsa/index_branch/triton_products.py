# SPDX-License-Identifier: MIT
# ruff: noqa: RET505 (kernels return from branches on constants)
"""Scores of one tile of keys of any format: loads, products, scales, and the maxima of its blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.index_branch.triton_codes import e2m1_parts, e4m3_numbers, int8_parts
from openmsa.index_branch.triton_formats import fp4_unit, group_numbers, load_group_scales, load_scales
from openmsa.index_branch.triton_tiles import load_keys


@triton.jit
def block_maxima(
    s, i_k, i_last,
    TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, SWAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Best product of each row with each block of a tile, [rows, SUB] ([rows] when SUB is 1); NaN where all are NaN.
    s: [rows, TILE], or with SWAP [TILE, rows]. i_last: the last key that each row sees."""
    o_k = tl.arange(0, TILE)
    if SWAP:
        counts = (o_k < KEYS)[:, None]
        if MASKED:
            counts = counts & (i_k + o_k[:, None] <= i_last[None, :])
    else:
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
def unspread(s, ROWS: tl.constexpr):
    """Products of keys with `spread_rows`, [keys, rows]: what a thread has of other columns is dropped."""
    s = tl.split(s.reshape(s.shape[0], s.shape[1] // 2, 2))[0]
    if s.shape[1] > ROWS:
        s = tl.split(s.reshape(s.shape[0], 2, s.shape[1] // 2).permute(0, 2, 1))[0]
    return s


@triton.jit
def times(b_q, b_k, s, SWAP: tl.constexpr):
    """Products of rows and keys [rows, keys], or with SWAP [keys, rows]; added to s unless that is None."""
    if SWAP:
        return tl.dot(b_k, b_q.T, s)
    else:
        return tl.dot(b_q, b_k.T, s)


@triton.jit
def side_by_side(parts):
    """Two or four tensors [rows, width] as one: parts in registers stay where they are, and one product is waited for, not one
    a part."""
    if len(parts) == 2:
        x = tl.join(parts[0], parts[1]).permute(0, 2, 1)
    else:
        x = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3])).permute(0, 3, 2, 1)
    return x.reshape(x.shape[0], len(parts) * x.shape[-1])


@triton.jit
def score_tile(
    b_q, keys, scales, page_row, i_h, i_k, i_last, k_start, k_len, num_pages,
    s_page, s_head, s_token, s_dim, s_gp, s_gh, s_gt, s_gg,
    MODE: tl.constexpr, TMA: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, SWIZZLED: tl.constexpr,
    NATIVE: tl.constexpr, PRODUCT: tl.constexpr, GROUPED: tl.constexpr, SWAP: tl.constexpr, BOUNDED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Maxima of the blocks of one tile (`block_maxima`), scales of pages, keys and groups included.
    BOUNDED: some key may not exist; MASKED: some row does not see every key."""
    PACK: tl.constexpr = DIM_PAD // b_q[0].shape[1] if FORMAT >= 2 else 1  # elements an item of the keys holds
    ROWS: tl.constexpr = i_last.shape[0]
    CUT: tl.constexpr = BOUNDED or KEYS < TILE  # some key of the tile may not exist
    b_k = load_keys(
        keys, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token, s_dim,
        MODE, TMA, PAGE_SIZE, TILE, DIM // PACK, DIM_PAD // PACK, CUT,
    )  # fmt: skip
    b_g = None
    if FORMAT >= 3:
        b_g = load_group_scales(
            scales, page_row, i_h, i_k, k_start, k_len, num_pages, s_gp, s_gh, s_gt, s_gg,
            MODE, PAGE_SIZE, TILE, DIM // (16 if FORMAT == 3 else 32), SWIZZLED, CUT,
        )  # fmt: skip
    b_s = load_scales(
        scales, page_row, i_h, i_k, k_start, k_len, num_pages, s_gp, s_gh, s_gt, MODE, PAGE_SIZE, TILE, SCALE, CUT
    )  # fmt: skip
    if FORMAT == 0:
        s = times(b_q, b_k, None, SWAP)
    elif FORMAT == 1:
        s = times(b_q, e4m3_numbers(b_k, PRODUCT), None, SWAP)
    elif FORMAT == 2:
        s = None
        parts = int8_parts(b_k, PRODUCT)
        if SWAP and len(parts) == 2:
            s = times(side_by_side(b_q), side_by_side(parts), None, True)
        else:
            for i in tl.static_range(len(parts)):
                s = times(b_q[i], parts[i], s, SWAP)
    elif GROUPED:  # `grouped_parts`
        parts = e2m1_parts(b_k, tl.float16)
        s = times(side_by_side(b_q), side_by_side(parts), None, True)
        b_x = group_numbers(b_g, FORMAT, NATIVE)
        GROUPS: tl.constexpr = b_x.shape[1]
        PAIR: tl.constexpr = 2 if GROUPS > 1 else 1
        s = s.reshape(TILE, GROUPS // PAIR, ROWS, PAIR).permute(0, 2, 1, 3).reshape(TILE, ROWS, GROUPS)
        s = tl.sum(s * b_x[:, None, :], 2)
    else:
        parts = e2m1_parts(b_k, PRODUCT)
        unit, b_x = fp4_unit(b_k, b_g, FORMAT, PRODUCT, NATIVE)
        s = None
        for i in tl.static_range(len(parts)):
            s = times(b_q[i], parts[i] * unit * b_x, s, SWAP)
    if SWAP and s.shape[1] > ROWS:
        s = unspread(s, ROWS)
    if SCALE == 2:
        s = s * (b_s[:, None] if SWAP else b_s[None, :])
    m = block_maxima(s, i_k, i_last, TILE, KEYS, SUB, SWAP, MASKED)
    if SCALE == 1:
        m = m * b_s
    if GROUPED:
        m *= 256.0  # see `raised`
    return m
