# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This file says where rows of keys and of queries and their scales lie, packed or in pages, in any format, how keys are cut
into tiles, how kernels load both, and how they take the best product of each block in a tile.

`KeyView` is what the host knows of keys or values, `KeyRows` in it is what kernels take, and `Form` the constant that says how
to read it. Codes may be read several at a time: FP4 in fours (in twos where strides forbid it), int8 in twos. They are not put
back in order: every `split`-th element of a key makes a tile of its own, and `openmsa.primitives.query_parts.query_parts` cuts
queries likewise.

A stored number is code * scale of its group, key or page * factor of its head or tensor. Scales of groups of elements (FP4) are
multiplied into the elements, which is exact in bf16 and, for NVFP4, in fp16; where rows are few, scoring multiplies them into
the products of each group. Scales of keys multiply products, those of pages the maxima of blocks, or products where tiles cross
pages. Factors of tensors and heads multiply scores in the end, together with the queries' own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.kv_cache import E4M3, CertifiedKeys, PagedIndexKeys, Stored
from openmsa.kv_cache.stored import in_items
from openmsa.primitives import operands
from openmsa.primitives.operands import PLAIN, KeyRows, Output, PageTable, QueryRows
from openmsa.primitives.scales import UNSCALED, Scales
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import next_power_of_two

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float8_e4m3fn: tl.float8e4nv}
FLAT, PAGE, PAGES = 0, 1, 2  # contiguous sequences; pages that hold whole tiles; pages that tiles may cross
_FORMATS = {"e4m3": operands.E4M3, "int8": operands.INT8, "nvfp4": operands.NVFP4, "mxfp4": operands.MXFP4}


class Form(NamedTuple):
    """A form says how rows are stored; it is a constant of the kernels that read them.

    format:    `operands.PLAIN`, E4M3, INT8, NVFP4 or MXFP4.
    factor:    whose `KeyRows.factor` is: `operands.WHOLE_FACTOR` of the tensor or of each head, PAGE_FACTOR of each page (and
               head), NO_FACTOR where there is none.
    swizzled:  whether the scales of groups lie in the 128x4 layout.
    split:     elements that an item of `KeyRows.data` holds.
    native:    whether the GPU converts e4m3, which it does from sm_90 on; elsewhere e4m3 codes are read as bytes.
    """

    format: int
    factor: int
    swizzled: bool
    split: int
    native: bool


class KeyView(NamedTuple):
    """A view is keys or values, packed or in pages, plain or in a format, as kernels read them."""

    rows: KeyRows  # data: [num_pages, heads, rows of a page, items]; packed rows are the only page
    form: Form
    table: PageTable
    dim: int
    heads: int
    num_pages: int
    page_size: int  # 0 of packed rows
    capacity: int  # keys that a sequence can have

    @classmethod
    def of(cls, keys: Tensor | Stored, page_table: Tensor | None, native: bool, items: bool = True, words: int = 8) -> KeyView:
        """Makes the view of these keys.

        keys:      ``[num_pages, heads, page_size, dim]``; with no page table packed ``[total, heads, dim]``. Of `CertifiedKeys`
                   the exact ones.
        native:    see `Form`.
        items:     whether codes of int8, NVFP4 and MXFP4 are read two bytes at a time where they can be.
        words:     how many scales of groups are read at a time where they can be: 1 (as bytes), 4 (int32), or 8 (int64, or
                   int32, of a power of two of groups).
        """
        keys = keys.exact if isinstance(keys, CertifiedKeys) else keys
        dim = keys.shape[-1]
        if isinstance(keys, Tensor):
            data, stored, scales = keys, operands.PLAIN, UNSCALED
        else:
            data, stored, scales = keys.data, _FORMATS[keys.format], Scales.of(keys, words)
        if stored == operands.E4M3:
            data = data if native else data.view(torch.uint8)
        elif stored != operands.PLAIN and items:
            data = in_items(data, torch.int16, dim >= (32 if stored == operands.INT8 else 64))
        split = data.itemsize * (1 if stored == operands.INT8 else 2) if stored >= operands.INT8 else 1
        form = Form(stored, scales.factor_form, scales.swizzled, split, native)
        if page_table is None:
            pool, table = pool_of(data), NO_TABLE
        else:
            pool, table = data, PageTable(page_table, *page_table.stride())
        num_pages, heads, size, _ = pool.shape
        rows = key_rows(pool, scales.operands)
        if page_table is None:
            return cls(rows, form, table, dim, heads, num_pages, 0, size)
        return cls(rows, form, table, dim, heads, num_pages, size, page_table.shape[1] * size)


NO_TABLE = PageTable(None)


def pool_of(rows: Tensor) -> Tensor:
    """Views packed rows ``[total, heads, columns]`` as the only page of a pool ``[1, heads, total, columns]``."""
    return rows.unsqueeze(0).transpose(1, 2)


class Paging(NamedTuple):
    """Paging says where tiles of keys lie; it is a constant of the kernels that walk them.

    mode:       FLAT, PAGE or PAGES.
    page_size:  keys of a page; 1 of packed keys, since their number must not be a constant.
    """

    mode: int
    page_size: int


PACKED = Paging(FLAT, 1)


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


class KeyTiles(NamedTuple):
    """These are keys as the scoring kernels walk them. tma: a descriptor of tiles, or None where they are read by address."""

    view: KeyView
    paging: Paging
    tma: TensorDescriptor | None

    @classmethod
    def of(cls, index_k: Tensor | Stored | PagedIndexKeys, tile: Tile, device: Device) -> KeyTiles:
        """Takes packed keys, or pages of them."""
        if isinstance(index_k, PagedIndexKeys):
            return cls.of_pool(index_k.keys, index_k.page_table, tile, device)
        return cls.of_pool(index_k, None, tile, device)

    @classmethod
    def of_pool(
        cls,
        keys: Tensor | Stored,
        page_table: Tensor | None,
        tile: Tile,
        device: Device,
        items: bool = True,
        by_address: bool = False,
    ) -> KeyTiles:
        """Takes a pool or packed keys. keys, page_table, items: see `KeyView.of`. by_address: no descriptor is made."""
        view = KeyView.of(keys, page_table, device.arch >= 90, items)
        if page_table is None:
            paging = PACKED
        else:
            paging = Paging(PAGE if tile.whole and view.page_size % tile.span == 0 else PAGES, view.page_size)
        tma = None
        if device.has_tma and paging.mode != PAGES and not by_address:
            tma = tma_tiles(view.rows.data, tile.tile, padded(view.dim, view.form.format) // view.form.split)
        return cls(view, paging, tma)

    @property
    def heads(self) -> int:
        """Returns the number of heads of keys."""
        return self.view.heads


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


def padded(dim: int, format: int) -> int:
    """Returns the elements to which a row of a tile is padded: a power of two that the matrix unit and loads can take."""
    return max(next_power_of_two(dim), 16 if format == PLAIN else 32)


def key_rows(data: Tensor, scales: tuple[Any, ...] = ()) -> KeyRows:
    """Bundles a pool ``[pages, heads, rows, columns]``, or packed rows ``[total, heads, columns]``, for kernels. scales: the
    fields from `KeyRows.scales` on."""
    if data.dim() == 4:
        s_page, s_head, s_row, s_dim = data.stride()
    else:
        s_page, (s_row, s_head, s_dim) = 0, data.stride()
    return KeyRows(data, s_page, s_head, s_row, s_dim, *scales)


def output_rows(rows: Tensor, lse: Tensor | None) -> Output:
    """Bundles the results of attention ``[total_q, heads, dim]`` and ``[total_q, heads]`` for kernels, which write them."""
    s_token, s_head, s_dim = rows.stride()
    s_lse_token, s_lse_head = (0, 0) if lse is None else lse.stride()
    return Output(rows, s_token, s_head, s_dim, lse, s_lse_token, s_lse_head)


def query_rows(index_q: Tensor | Stored, native: bool) -> QueryRows:
    """Bundles queries ``[total_q, heads, dim]`` for kernels. native: whether the GPU knows e4m3; else its codes are bytes."""
    if isinstance(index_q, E4M3):
        data = index_q.data if native else index_q.data.view(torch.uint8)
        s_token, s_head, s_dim = data.stride()
        return QueryRows(data, s_token, s_head, s_dim, index_q.scale, index_q.scale_strides[1])
    assert isinstance(index_q, Tensor)
    s_token, s_head, s_dim = index_q.stride()
    return QueryRows(index_q, s_token, s_head, s_dim)


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
def load_rows(q, i_row, q_len, i_h, s_token, s_head, s_dim, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Loads index queries of rows i_row (query i_row // GROUP, head i_h + i_row % GROUP), [rows, DIM_PAD], zero past q_len."""
    o_d = tl.arange(0, DIM_PAD)
    p_q = q + (i_row // GROUP).to(tl.int64) * s_token + (i_h + i_row % GROUP) * s_head
    m_q = (i_row // GROUP < q_len)[:, None] & (o_d < DIM)[None, :]
    return tl.load(p_q[:, None] + (o_d * s_dim)[None, :], mask=m_q, other=0.0)


@triton.jit
def times(b_q, b_k, s, SWAP: tl.constexpr):
    """Gives products of rows and keys [rows, keys], or with SWAP [keys, rows]; added to s unless that is None."""
    if SWAP:
        return tl.dot(b_k, b_q.T, s)
    else:
        return tl.dot(b_q, b_k.T, s)


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
