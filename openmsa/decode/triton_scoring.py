# SPDX-License-Identifier: MIT
# ruff: noqa: RUF005 (kernels know no unpacking)
"""The scoring programs of a decode layer in one launch (`openmsa.decode.triton_layer`)."""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.decode.triton_words import put
from openmsa.primitives.queries import load_rows
from openmsa.primitives.rows import tile_start
from openmsa.primitives.scoring import block_maxima
from openmsa.primitives.waiting import fetch_ahead


@triton.jit
def pages_ahead(
    i, index_table, index_capacity, scoring, splits, tiles, stride_itb,
    INDEX_KEY_HEADS: tl.constexpr, INDEX_PAGE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr,
    PARTS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Pages of the tiles of scoring program i as the table has them now, -1 where there is none, for `fetch_share`."""
    pages = ()
    for u in tl.static_range(SHARE):
        i_k = tile_start(i % splits * tiles + u, BLOCK, KEYS, SUB, PARTS)
        p_page = index_table + (i // splits // INDEX_KEY_HEADS).to(tl.int64) * stride_itb + i_k // INDEX_PAGE
        exists = (i < scoring) & (u < tiles) & (i_k < index_capacity)
        pages = pages + (tl.load(p_page, mask=exists, other=-1, cache_modifier=".cg"),)  # not into the L1, which would keep it
    return pages


@triton.jit
def fetch_share(
    i, pages, index_keys, index_pages, splits, tiles, stride_ip, stride_ih, stride_in,
    INDEX_KEY_HEADS: tl.constexpr, DIM: tl.constexpr, INDEX_PAGE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Brings the index keys of a scoring program closer while the kernel in front still runs. No value is used that may yet
    change: a page table that does costs a useless fetch inside the pool."""
    LINES: tl.constexpr = (DIM * index_keys.dtype.element_ty.primitive_bitwidth // 8 + 127) // 128
    i_h = i // splits % INDEX_KEY_HEADS
    o_n = tl.arange(0, TILE)
    for u in tl.static_range(SHARE):
        i_k, i_page = tile_start(i % splits * tiles + u, BLOCK, KEYS, SUB, PARTS), pages[u]
        exists = (i_page >= 0) & (i_page < index_pages)
        p_k = index_keys + i_page.to(tl.int64) * stride_ip + i_h.to(tl.int64) * stride_ih
        for line in tl.static_range(LINES):
            p_line = p_k + (i_k % INDEX_PAGE + o_n).to(tl.int64) * stride_in + line * (DIM // LINES)
            fetch_ahead(p_line, tl.full([TILE], 1, tl.int1) & exists)


@triton.jit
def score_share(
    i, index_q, index_keys, index_table, index_lens, words, tag, queries, num_blocks, index_pages, index_capacity, splits,
    tiles, stride_iqt, stride_iqh, stride_iqd, stride_ip, stride_ih, stride_in, stride_id, stride_itb,
    INDEX_HEADS: tl.constexpr, INDEX_KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    INDEX_PAGE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Words of the blocks of `tiles` tiles (at most SHARE), [tokens, index heads, num_blocks]. Pages hold whole tiles."""
    GROUP: tl.constexpr = INDEX_HEADS // INDEX_KEY_HEADS
    i_split, i_s, i_h = i % splits, i // splits // INDEX_KEY_HEADS, i // splits % INDEX_KEY_HEADS
    first = i_split * tiles
    o_u = tl.arange(0, SHARE)
    b_start = tile_start(first + o_u, BLOCK, KEYS, SUB, PARTS)
    p_page = index_table + i_s.to(tl.int64) * stride_itb + b_start // INDEX_PAGE
    b_page = tl.load(p_page, mask=(b_start < index_capacity) & (o_u < tiles), other=-1)  # needs no length
    length = tl.load(index_lens + i_s)
    o_r = tl.arange(0, ROWS)
    m_row = o_r < queries * GROUP
    q = index_q + (i_s * queries).to(tl.int64) * stride_iqt
    b_q = load_rows(q, o_r, queries, i_h * GROUP, stride_iqt, stride_iqh, stride_iqd, GROUP, DIM, DIM_PAD)
    n_k = tl.minimum(length, index_capacity)
    i_last = tl.minimum(length - queries + o_r // GROUP, n_k - 1)  # last key each row sees
    last = tl.minimum(tiles, tl.cdiv(tl.maximum(n_k, 0), BLOCK * SUB) * PARTS - first)
    p_w = words + ((i_s * queries + o_r // GROUP).to(tl.int64) * INDEX_HEADS + i_h * GROUP + o_r % GROUP) * num_blocks
    best = tl.full([ROWS], float("-inf"), tl.float32)  # of the parts of a block so far
    o_d = tl.arange(0, DIM_PAD)
    for u in tl.range(0, last, num_stages=STAGES):
        i_t = first + u
        i_k = tile_start(i_t, BLOCK, KEYS, SUB, PARTS)
        i_page = tl.sum(tl.where(o_u == u, b_page, 0), 0)
        if TMA:  # a page outside the pool reads as zeros
            b_k = index_keys.load([i_page, i_h, i_k % INDEX_PAGE, 0]).reshape(TILE, DIM_PAD)
        else:
            o_n = i_k % INDEX_PAGE + tl.arange(0, TILE)
            m_k = (i_k + tl.arange(0, TILE) < n_k) & (i_page >= 0) & (i_page < index_pages)
            p_k = index_keys + i_page.to(tl.int64) * stride_ip + i_h.to(tl.int64) * stride_ih + o_n.to(tl.int64) * stride_in
            b_k = tl.load(p_k[:, None] + (o_d * stride_id)[None, :], mask=m_k[:, None] & (o_d < DIM)[None, :], other=0)
        m = block_maxima(tl.dot(b_k, b_q.T), i_k, i_last, TILE, KEYS, SUB, True, True)
        if PARTS == 2:
            m = tl.where(i_t % 2 == 1, tl.maximum(best, m), m)
            best = m
        m = tl.where(m > float("-inf"), m, float("-inf"))
        if SUB > 1:
            o_b = i_t * SUB + tl.arange(0, SUB)
            put(p_w[:, None] + o_b[None, :], m, tag, m_row[:, None] & (o_b < num_blocks)[None, :], WAIT)
        elif PARTS == 1:
            put(p_w + i_t, m, tag, m_row, WAIT)
        else:
            put(p_w + i_t // 2, m, tag, m_row & (i_t % 2 == 1), WAIT)
