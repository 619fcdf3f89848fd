# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Keys are cut into tiles here: which keys a tile has, where in their pages these lie, how a kernel reads them, by address or
by the copy engine, and the best product of each block in a tile."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.runtime.launch import next_power_of_two

FLAT, PAGE, PAGES = 0, 1, 2  # contiguous sequences; pages that hold whole tiles; pages that tiles may cross


class Tile(NamedTuple):
    """A tile says how keys are cut; it is a constant of the kernels that walk them.

    It is `tile` rows, a power of two up to 128, of which the first `keys` count. It holds `sub` whole blocks of `block` keys
    (of 16, 32, 64 and 128), or one block padded to a power of two, or one of the `parts` = 2 overlapping halves of a block of
    more than 128 keys, whose overlap changes no maximum."""

    block: int
    tile: int
    keys: int
    sub: int
    parts: int

    @classmethod
    @functools.cache
    def of(cls, block_size: int, single: bool = False) -> Tile:
        """Cuts keys into tiles for blocks of this size. single: never more than one block a tile."""
        if block_size > 128:
            return cls(block_size, 128, -(-block_size // 2), 1, 2)
        if 128 % block_size == 0 and not single:
            return cls(block_size, 128, 128, 128 // block_size, 1)
        return cls(block_size, next_power_of_two(block_size), block_size, 1, 1)

    @property
    def whole(self) -> bool:
        """Says whether all rows of a tile count: then tiles that start in a page of so many times `span` keys end in it too."""
        return self.keys == self.tile

    @property
    def span(self) -> int:
        """Counts the keys of the whole blocks that a tile belongs to."""
        return self.block * self.sub

    def count(self, num_blocks: int) -> int:
        """Says how many tiles cover so many blocks."""
        return -(-num_blocks // self.sub) * self.parts


class Paging(NamedTuple):
    """Paging says where tiles of keys lie; it is a constant of the kernels that walk them.

    mode:       FLAT, PAGE or PAGES.
    page_size:  keys of a page; 1 of packed keys, since their number must not be a constant.
    """

    mode: int
    page_size: int


PACKED = Paging(FLAT, 1)


def tma_tiles(pool: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """Makes a TMA descriptor of tiles ``[1, 1, rows, columns]`` of a pool ``[pages, heads, rows, columns]``, where columns of a
    tile are a power of two; None where the copy engine cannot read them."""
    strides = tma_strides(pool)
    return None if strides is None else TensorDescriptor(pool, list(pool.shape), strides, [1, 1, rows, columns])


def tma_strides(pool: Tensor) -> list[int] | None:
    """Returns the strides of a pool ``[pages, heads, rows, columns]`` as the copy engine takes them; None where it cannot read
    the pool.

    It can where columns are contiguous, 16 bytes to 256 elements, and the address and all other strides multiples of 16 bytes.
    The stride of a dimension of one is never used, so any will do."""
    size = pool.element_size()
    (pages, heads, length, width), (s_page, s_head, s_row, s_column) = pool.shape, pool.stride()
    if s_column != 1 or width * size < 16 or width > 256 or pages * heads * length == 0 or pool.data_ptr() % 16:
        return None
    s_page, s_head, s_row = 16 if pages == 1 else s_page, 16 if heads == 1 else s_head, 16 if length == 1 else s_row
    even = (s_page | s_head | s_row) * size % 16 == 0
    if not even or min(s_page, s_head, s_row) <= 0 or max(s_page, s_head, s_row) * size >= 2**40:
        return None
    return [s_page, s_head, s_row, 1]


@triton.jit
def tile_start(i_t, CUT: tl.constexpr):
    """Gives the first key of tile i_t."""
    return i_t * CUT.keys if CUT.parts == 1 else (i_t // CUT.parts) * CUT.block + (i_t % CUT.parts) * (CUT.block - CUT.keys)


@triton.jit
def page_number(i_k, PAGE_SIZE: tl.constexpr):
    """Gives the place of key i_k's page in its sequence's row of the page table. It is unsigned, so that one shift finds it
    where pages hold a power of two."""
    return i_k.to(tl.uint32) // PAGE_SIZE


@triton.jit
def row_in_page(i_k, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Gives the row of key i_k, the first of a tile, in a page that holds whole tiles."""
    return 0 if PAGE_SIZE == TILE else (i_k.to(tl.uint32) % PAGE_SIZE).to(tl.int32)


@triton.jit
def exists(i_page, num_pages):
    """Says whether a page id is that of a page."""
    return i_page.to(tl.uint32, bitcast=True) < num_pages.to(tl.uint32, bitcast=True)


@triton.jit
def place(page_row, i_k, k_start, k_len, num_pages, PAGING: tl.constexpr, TILE: tl.constexpr, BOUNDED: tl.constexpr = True):
    """Says where keys i_k to i_k + TILE lie: the page (one number, or one a key), the row in it [TILE], and which keys exist
    [TILE]. BOUNDED: some may lie past k_len."""
    o_k = i_k + tl.arange(0, TILE)
    m_k = o_k < k_len if BOUNDED or PAGING.mode == 2 else tl.full([TILE], True, tl.int1)
    if PAGING.mode == 0:
        i_page = 0
        o_row = k_start + o_k
    elif PAGING.mode == 1:
        i_page = tl.load(page_row + page_number(i_k, PAGING.page_size))
        m_k = m_k & exists(i_page, num_pages)
        o_row = row_in_page(i_k, PAGING.page_size, TILE) + tl.arange(0, TILE)
    else:
        i_page = tl.load(page_row + o_k // PAGING.page_size, mask=m_k, other=-1)
        m_k = m_k & exists(i_page, num_pages)
        o_row = o_k % PAGING.page_size
    return i_page, o_row, m_k


@triton.jit
def load_keys(
    keys, tma, page_row, i_h, i_k, k_start, k_len, num_pages,
    PAGING: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Loads keys i_k to i_k + TILE of a sequence as they are stored, [TILE, WIDTH_PAD], zero past WIDTH and in pages that do
    not exist. tma: a descriptor of tiles or None. BOUNDED: also zero past k_len; without it every key counted must exist."""
    if tma is not None:
        if PAGING.mode == 0:
            b_k = tma.load([0, i_h, k_start + i_k, 0])
        else:
            i_page = tl.load(page_row + page_number(i_k, PAGING.page_size))
            b_k = tma.load([i_page, i_h, row_in_page(i_k, PAGING.page_size, TILE), 0])
        b_k = b_k.reshape(TILE, WIDTH_PAD)
    else:
        o_d = tl.arange(0, WIDTH_PAD)
        i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, PAGING, TILE, BOUNDED)
        p_k = keys.data + o_row.to(tl.int64) * keys.s_row + i_h.to(tl.int64) * keys.s_head
        if PAGING.mode != 0:
            p_k += i_page.to(tl.int64) * keys.s_page
        p_k = p_k[:, None] + (o_d * keys.s_dim)[None, :]
        if BOUNDED or PAGING.mode != 0:
            b_k = tl.load(p_k, mask=m_k[:, None] & (o_d < WIDTH)[None, :], other=0.0)
        elif WIDTH < WIDTH_PAD:
            b_k = tl.load(p_k, mask=(o_d < WIDTH)[None, :], other=0.0)
        else:
            b_k = tl.load(p_k)
    return b_k


@triton.jit
def block_maxima(
    s, i_k, i_last,
    TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, SWAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes the best product of each row with each block of a tile, [rows, SUB] ([rows] when SUB is 1); NaN where all are NaN.
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
