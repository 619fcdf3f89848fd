# SPDX-License-Identifier: MIT
"""This file says of rows of keys where they and their scales lie: packed, in pages, in a format.

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

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys, Stored
from openmsa.kv_cache.stored import in_items
from openmsa.primitives import operands
from openmsa.primitives.operands import PLAIN, KeyRows, PageTable
from openmsa.primitives.scales import UNSCALED, Scales
from openmsa.primitives.tiles import PACKED, PAGE, PAGES, Paging, Tile, tma_tiles
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import next_power_of_two

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float8_e4m3fn: tl.float8e4nv}
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
        s_page, s_head, s_row, s_dim = pool.stride()
        rows = KeyRows(pool, s_page, s_head, s_row, s_dim, *scales.operands)
        if page_table is None:
            return cls(rows, form, table, dim, heads, num_pages, 0, size)
        return cls(rows, form, table, dim, heads, num_pages, size, page_table.shape[1] * size)


NO_TABLE = PageTable(None)


def pool_of(rows: Tensor) -> Tensor:
    """Views packed rows ``[total, heads, columns]`` as the only page of a pool ``[1, heads, total, columns]``."""
    return rows.unsqueeze(0).transpose(1, 2)


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


def padded(dim: int, format: int) -> int:
    """Returns the elements to which a row of a tile is padded: a power of two that the matrix unit and loads can take."""
    return max(next_power_of_two(dim), 16 if format == PLAIN else 32)
