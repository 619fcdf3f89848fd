# SPDX-License-Identifier: MIT
# ruff: noqa: RET505 (kernels return from branches on constants)
"""What the scoring kernels share: how keys are cut into tiles, which rows a program serves, and how bytes become tiles.

A tile is TILE keys (a power of two up to 128) of which the first KEYS count. It holds SUB whole blocks (block sizes 16, 32, 64
and 128), one block padded to a power of two, or one of the PARTS = 2 overlapping halves of a block of more than 128 keys: a
maximum does not mind the overlap. What a tile's bytes and scales stand for: `triton_formats`; where they lie: `triton_sources`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from openmsa.runtime.integers import next_power_of_two
from openmsa.types import Layout

FLAT, PAGE, PAGES = 0, 1, 2  # contiguous sequences; pages that hold whole tiles; pages that tiles may cross


@dataclass(frozen=True)
class Tile:
    """How keys are cut: `tile` rows are loaded, `keys` of them count; they hold `sub` blocks or one of `parts` of a block."""

    block: int
    tile: int
    keys: int
    sub: int
    parts: int

    @classmethod
    @functools.cache
    def of(cls, block_size: int, single: bool = False) -> Tile:
        """single: never more than one block a tile."""
        if block_size > 128:
            return cls(block_size, 128, -(-block_size // 2), 1, 2)
        if 128 % block_size == 0 and not single:
            return cls(block_size, 128, 128, 128 // block_size, 1)
        return cls(block_size, next_power_of_two(block_size), block_size, 1, 1)

    @property
    def whole(self) -> bool:
        """Whether all rows of a tile count: then tiles that start in a page of so many times `span` keys end in it too."""
        return self.keys == self.tile

    @property
    def span(self) -> int:
        """Keys of the whole blocks that a tile belongs to."""
        return self.block * self.sub

    def count(self, num_blocks: int) -> int:
        """Tiles that cover so many blocks."""
        return -(-num_blocks // self.sub) * self.parts

    def constexprs(self) -> dict[str, int]:
        """As the kernels take them."""
        return {"BLOCK": self.block, "TILE": self.tile, "KEYS": self.keys, "SUB": self.sub, "PARTS": self.parts}


@dataclass(frozen=True)
class Lengths:
    """Of the sequences of a batch: int32 tensors that kernels read when they run (`sequence_bounds`), and bounds of them."""

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
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """As kernels take them."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.seq_lens, self.q_offset


@triton.jit
def sequence_bounds(cu_q, cu_k, seq_lens, q_offset, i_s, capacity, max_keys):
    """Of sequence i_s: first query, number of queries, first key, number of keys, position of its first query."""
    q_start = tl.load(cu_q + i_s)
    q_len = tl.load(cu_q + i_s + 1) - q_start
    if cu_k is None:
        k_start = 0
        k_len = tl.load(seq_lens + i_s)
    else:
        k_start = tl.load(cu_k + i_s)
        k_len = tl.load(cu_k + i_s + 1) - k_start
    offset = k_len - q_len if q_offset is None else tl.load(q_offset + i_s)
    return q_start, q_len, k_start, tl.minimum(k_len, tl.minimum(capacity, max_keys)), offset


@triton.jit
def rows_of(i_m, q_len, k_len, offset, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of (query, head) rows i_m * ROWS to (i_m + 1) * ROWS of a sequence, the first below q_len * GROUP: their numbers, which
    exist, and the last key that each sees, [ROWS] each; how many keys all of them see, and how many any of them."""
    o_r = i_m * ROWS + tl.arange(0, ROWS)
    i_last = tl.minimum(offset + o_r // GROUP, k_len - 1)
    seen_by_all = tl.maximum(tl.minimum(offset + i_m * ROWS // GROUP, k_len - 1) + 1, 0)
    last_token = tl.minimum((i_m * ROWS + ROWS - 1) // GROUP, q_len - 1)
    seen_by_any = tl.maximum(tl.minimum(offset + last_token, k_len - 1) + 1, 0)
    return o_r, o_r < q_len * GROUP, i_last, seen_by_all, seen_by_any


@triton.jit
def store_visible(visible, q_start, o_r, m_row, i_last, chosen, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """How many blocks each query of `rows_of` sees, by the one program that is chosen."""
    p_v = visible + q_start + o_r // GROUP
    tl.store(p_v, tl.maximum(i_last + BLOCK, 0) // BLOCK, mask=m_row & (o_r % GROUP == 0) & chosen)


@triton.jit
def tiles_of(
    i_split, tiles_per_split, num_blocks, seen_by_all, seen_by_any,
    BLOCK: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of a split: its first tile, the first one behind it, the first that not all rows see whole, and the first that none
    sees."""
    first = i_split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(num_blocks, SUB) * PARTS)
    i_full = tl.minimum(seen_by_all // (BLOCK * SUB) * PARTS, last)
    i_end = tl.minimum(tl.cdiv(seen_by_any, BLOCK * SUB) * PARTS, last)
    return first, last, i_full, i_end


@triton.jit
def tile_start(i_t, BLOCK: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr):
    """First key of tile i_t."""
    return i_t * KEYS if PARTS == 1 else (i_t // PARTS) * BLOCK + (i_t % PARTS) * (BLOCK - KEYS)


@triton.jit
def page_number(i_k, PAGE_SIZE: tl.constexpr):
    """Of the page of key i_k in its sequence's row of the table. Unsigned: one shift where pages hold a power of two."""
    return i_k.to(tl.uint32) // PAGE_SIZE


@triton.jit
def row_in_page(i_k, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Of the first key of a tile, i_k, in a page that holds whole tiles."""
    return 0 if PAGE_SIZE == TILE else (i_k.to(tl.uint32) % PAGE_SIZE).to(tl.int32)


@triton.jit
def exists(i_page, num_pages):
    """Whether a page id is that of a page."""
    return i_page.to(tl.uint32, bitcast=True) < num_pages.to(tl.uint32, bitcast=True)


@triton.jit
def place(
    page_row, i_k, k_start, k_len, num_pages, MODE: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
    BOUNDED: tl.constexpr = True,
):  # fmt: skip
    """Of keys i_k to i_k + TILE: the page (one number, or one a key), the row in it [TILE], and which exist [TILE]. BOUNDED:
    some may lie past k_len."""
    o_k = i_k + tl.arange(0, TILE)
    m_k = o_k < k_len if BOUNDED or MODE == 2 else tl.full([TILE], True, tl.int1)
    if MODE == 0:
        i_page = 0
        o_row = k_start + o_k
    elif MODE == 1:
        i_page = tl.load(page_row + page_number(i_k, PAGE_SIZE))
        m_k = m_k & exists(i_page, num_pages)
        o_row = row_in_page(i_k, PAGE_SIZE, TILE) + tl.arange(0, TILE)
    else:
        i_page = tl.load(page_row + o_k // PAGE_SIZE, mask=m_k, other=-1)
        m_k = m_k & exists(i_page, num_pages)
        o_row = o_k % PAGE_SIZE
    return i_page, o_row, m_k


@triton.jit
def load_keys(
    keys,
    page_row,
    i_h,
    i_k,
    k_start,
    k_len,
    num_pages,
    s_page,
    s_head,
    s_token,
    s_dim,
    MODE: tl.constexpr,
    TMA: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Keys i_k to i_k + TILE of a sequence as they are stored, [TILE, WIDTH_PAD], zero past WIDTH and in pages that do not
    exist. BOUNDED: also zero past k_len; without it every key counted must exist."""
    if TMA:
        if MODE == 0:
            b_k = keys.load([0, i_h, k_start + i_k, 0])
        else:
            i_page = tl.load(page_row + page_number(i_k, PAGE_SIZE))
            b_k = keys.load([i_page, i_h, row_in_page(i_k, PAGE_SIZE, TILE), 0])
        b_k = b_k.reshape(TILE, WIDTH_PAD)
    else:
        o_d = tl.arange(0, WIDTH_PAD)
        i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, MODE, PAGE_SIZE, TILE, BOUNDED)
        p_k = keys + o_row.to(tl.int64) * s_token + i_h.to(tl.int64) * s_head
        if MODE != 0:
            p_k += i_page.to(tl.int64) * s_page
        p_k = p_k[:, None] + (o_d * s_dim)[None, :]
        if BOUNDED or MODE != 0:
            b_k = tl.load(p_k, mask=m_k[:, None] & (o_d < WIDTH)[None, :], other=0.0)
        elif WIDTH < WIDTH_PAD:
            b_k = tl.load(p_k, mask=(o_d < WIDTH)[None, :], other=0.0)
        else:
            b_k = tl.load(p_k)
    return b_k


@triton.jit
def load_rows(q, i_row, q_len, i_h, s_token, s_head, s_dim, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Index queries of rows i_row (query i_row // GROUP, head i_h + i_row % GROUP), [rows, DIM_PAD], zero past q_len."""
    o_d = tl.arange(0, DIM_PAD)
    p_q = q + (i_row // GROUP).to(tl.int64) * s_token + (i_h + i_row % GROUP) * s_head
    m_q = (i_row // GROUP < q_len)[:, None] & (o_d < DIM)[None, :]
    return tl.load(p_q[:, None] + (o_d * s_dim)[None, :], mask=m_q, other=0.0)


@triton.jit
def hold_rows(b_q, DIM_PAD: tl.constexpr):
    """The same rows, in the layout of a product: Hopper's matrix unit then takes them from registers instead of reading them
    from shared memory again for every tile, whose bandwidth is what limits the walk. The product with the identity is exact
    where rows are finite (NaN spreads over its row, whose products are NaN anyway) and only serves to set the layout."""
    o_d = tl.arange(0, DIM_PAD)
    same = tl.dot(b_q, (o_d[:, None] == o_d[None, :]).to(tl.float32).to(b_q.dtype)).to(b_q.dtype)
    if b_q.dtype.primitive_bitwidth == 8:
        return same
    else:
        return tl.where(same == b_q, same, b_q)
