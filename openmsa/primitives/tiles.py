# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Keys are cut into tiles here: which keys a tile has, how the copy engine reads it, the rows of queries that it is multiplied
with, and the best product of each block in it. Memory that is asked for while a kernel waits for the one in front comes from
the L2 cache when it is read."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.runtime.launch import next_power_of_two


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
def load_rows(q, i_row, q_len, i_h, s_token, s_head, s_dim, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Loads index queries of rows i_row (query i_row // GROUP, head i_h + i_row % GROUP), [rows, DIM_PAD], zero past q_len."""
    o_d = tl.arange(0, DIM_PAD)
    p_q = q + (i_row // GROUP).to(tl.int64) * s_token + (i_h + i_row % GROUP) * s_head
    m_q = (i_row // GROUP < q_len)[:, None] & (o_d < DIM)[None, :]
    return tl.load(p_q[:, None] + (o_d * s_dim)[None, :], mask=m_q, other=0.0)


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
