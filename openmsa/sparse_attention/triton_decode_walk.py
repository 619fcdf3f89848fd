# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""A program of decode attention walks its share of the selected keys here, where they are plain; and here stands which keys
the walks can read, and how rows are padded.

The selected blocks of a token are one list of topk * block keys, cut into tiles. Where tiles lie inside one block and one page,
a program looks up the ids of all its tiles at once and a tile is a run of neighbouring rows; otherwise each key has its own.

The constexprs SHAPE and CUT are a `Shape` and a `Config` of `openmsa.sparse_attention.triton_decode`. BM and BN are rows and
keys of a tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.runtime.launch import ceil_div, next_power_of_two


class Shape(NamedTuple):
    """Holds the sizes that the kernel is compiled for, its constexpr SHAPE. group: query heads of a KV head; block: keys of a
    block; page: keys of a page, 0 for packed keys."""

    group: int
    dim: int
    dim_pad: int
    topk: int
    block: int
    page: int


def refuse(q: Tensor | Stored, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, block_size: int) -> str | None:
    """Says why the walks over plain and over stored keys cannot read these formats or strides; returns None where they can."""
    pools = [rows for rows in ((k.k, k.v) if isinstance(k, PagedKV) else (k, v)) if rows is not None]
    for rows in pools:
        data = rows.data if isinstance(rows, Stored) else rows
        if 128 * data.stride(-2 if data.dim() == 4 else 0) + data.shape[-1] * data.stride(-1) >= 2**31:  # 128: keys of a tile
            return f"offsets inside its tiles are 32 bits wide, got strides {tuple(data.stride())}"
    if not isinstance(pools[0], Stored):
        return "it reads queries stored as e4m3 beside keys stored as e4m3 or nvfp4 only" if isinstance(q, Stored) else None
    run = math.gcd(block_size, k.page_size) if isinstance(k, PagedKV) else block_size
    if run & -run < 32:
        return f"it reads stored keys 32 in a row or more, got blocks of {block_size} and runs of {run & -run}"
    for rows in pools:
        *outer, innermost = rows.data.stride()
        even = innermost == 1 and all(stride % 2 == 0 for stride in outer) and rows.data.storage_offset() % 2 == 0
        if isinstance(rows, Stored) and not (even and rows.shape[-1] % 4 == 0):
            return f"it reads {rows.format} rows of contiguous bytes at even addresses, got strides {rows.data.stride()}"
    return None


def row_tiles(group: int, head_dim: int) -> tuple[int, int]:
    """Returns the rows of a program, heads of one group padded for the matrix unit, and the programs of a group."""
    rows = min(max(16, next_power_of_two(group)), 64 if head_dim <= 128 else 32)
    return rows, ceil_div(group, rows)


def padded_dim(head_dim: int, form: int) -> int:
    """Returns the padded elements of a row, the field `dim_pad` of `Shape`: a matrix instruction takes 16 words or more."""
    return max(next_power_of_two(head_dim), {0: 16, 1: 32, 3: 64}[form])


@triton.jit
def first_keys(b_u, b_id, p_table, s_page, n_k, n_blocks, num_pages, SHAPE: tl.constexpr, CUT: tl.constexpr):
    """Returns the first key and the page of tiles b_u of the list of selected keys, whose blocks are b_id; a tile to skip
    starts past n_k. p_table is the sequence's row of the page table, with its ids s_page apart."""
    PER: tl.constexpr = SHAPE.block // CUT.keys
    m_u = (b_id >= 0) & (b_id < n_blocks)
    b_first = tl.where(m_u, b_id, 0) * SHAPE.block + (b_u % PER) * CUT.keys
    b_page = b_first
    if SHAPE.page:
        b_page = tl.load(p_table + (b_first // SHAPE.page) * s_page, mask=m_u & (b_first < n_k), other=-1)
        m_u = (b_page >= 0) & (b_page < num_pages)
    return tl.where(m_u, b_first, n_k), b_page


@triton.jit
def pick(x, i):
    """Returns element i of a vector in one exchange inside a warp. i counts modulo the vector's length, because the loads ahead
    of a loop may ask for more. The only element of a vector is looked for as well: what does not depend on i would leave the
    loop, and its loads with it."""
    if x.shape[0] == 1:
        at = tl.arange(0, 1) == i
        element = tl.sum(tl.where(at, x, 0), 0)
    else:
        element = tl.sum(tl.gather(x, tl.full([1], i, tl.int32) % x.shape[0], 0), 0)
    return element


@triton.jit
def walk(
    b_q, k, v, i_h, b_first, b_page, p_ids, s_slot, p_table, s_page, i_s, tiles, i_k0, n_k, n_blocks, num_pages, scale,
    SHAPE: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Attends rows b_q [BM, DIM_PAD] to the keys of KV head i_h in a program's tiles: returns sums [BM, DIM_PAD], the greatest
    logit (base 2) and the sum of weights [BM]. b_first and b_page are `first_keys` of the tiles; where CUT.lookup says that
    every key looks up its own block and page, p_ids and p_table point at the token's blocks and the sequence's pages."""
    BM: tl.constexpr = CUT.rows
    BN: tl.constexpr = CUT.keys
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    PAGE: tl.constexpr = SHAPE.page
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DIM_PAD)
    p_k0, p_v0 = k.data + i_h.to(tl.int64) * k.s_head, v.data + i_h.to(tl.int64) * v.s_head
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DIM_PAD], tl.float32)
    # `tiles` is CUT.tiles, unknown to the compiler: a loop of one tile is kept, and its keys and values arrive together.
    for u in tl.range(0, tiles, num_stages=CUT.num_stages):
        p_k, p_v = p_k0, p_v0  # These point at the tile; offsets in it are 32 bits wide, so that an address is one addition.
        if CUT.lookup:
            o_c = (i_s * CUT.tiles + u) * BN + o_n  # places in the list of selected keys
            b_key_id = tl.load(p_ids + (o_c // SHAPE.block) * s_slot, mask=o_c < SHAPE.topk * SHAPE.block, other=-1)
            m_n = (b_key_id >= 0) & (b_key_id < n_blocks)
            o_key = tl.where(m_n, b_key_id, 0) * SHAPE.block + o_c % SHAPE.block
            m_n &= o_key < n_k
            if PAGE:
                b_key_page = tl.load(p_table + (o_key // PAGE) * s_page, mask=m_n, other=-1)
                m_n &= (b_key_page >= 0) & (b_key_page < num_pages)
                b_key_page = tl.where(m_n, b_key_page, 0).to(tl.int64)
                o_k = b_key_page * k.s_page + (o_key % PAGE) * k.s_row
                o_v = b_key_page * v.s_page + (o_key % PAGE) * v.s_row
            else:
                o_k = (i_k0 + o_key).to(tl.int64) * k.s_row
                o_v = (i_k0 + o_key).to(tl.int64) * v.s_row
        else:
            i_first = pick(b_first, u)
            m_n = o_n < n_k - i_first
            if PAGE:
                i_page = pick(b_page, u).to(tl.int64)
                i_row = (i_first % PAGE).to(tl.int64)
                p_k += i_page * k.s_page + i_row * k.s_row
                p_v += i_page * v.s_page + i_row * v.s_row
            else:
                i_row = (i_k0 + i_first).to(tl.int64)
                p_k += i_row * k.s_row
                p_v += i_row * v.s_row
            o_k, o_v = o_n * k.s_row, o_n * v.s_row
        m_nd = m_n[:, None] & (o_d[None, :] < SHAPE.dim)
        b_k = tl.load(p_k + (o_k[:, None] + o_d[None, :] * k.s_dim), mask=m_nd, other=0.0)  # [BN, DIM_PAD]
        b_v = tl.load(p_v + (o_v[:, None] + o_d[None, :] * v.s_dim), mask=m_nd, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k)) * (scale * 1.4426950408889634)  # [BM, BN], base 2
        b_s = tl.where(m_n[None, :], b_s, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_old = tl.exp2(b_m - b_safe)
        b_z = b_z * b_old + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_old[:, None])
        b_m = b_m_new
    return b_acc, b_m, b_z


@triton.jit
def fetch_ahead(p, mask):
    """Asks for the lines of memory at these addresses, so that they come from the L2 cache later; it reads nothing."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0;}",
        "=r,l,r",
        [p, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_pages(page_row, s_page, num_pages):
    """Calls `fetch_ahead` for the first entries of a row of a page table, which lie s_page apart; with s_page 1 that is every
    line of 128 bytes."""
    o_line = tl.arange(0, 128) * 32
    for i in range(0, num_pages, 4096):
        fetch_ahead(page_row + (i + o_line) * s_page, i + o_line < num_pages)
