# SPDX-License-Identifier: MIT
"""Where index keys and their scales lie, and how index queries are stored, as the scoring kernels take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.index_branch import triton_formats as formats
from openmsa.index_branch.triton_tiles import FLAT, PAGE, PAGES, Tile
from openmsa.kv_cache import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8, PagedIndexKeys, Stored
from openmsa.kv_cache.stored import in_items
from openmsa.runtime.devices import Device

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float8_e4m3fn: tl.float8e4nv}


class Scales(NamedTuple):
    """Scales beside the codes. `scale`: of pages or keys, or codes of groups; strides from page to page, head to head, key to
    key and group to group (128x4: counted in rows). `factor`: of the tensor or of each head, with its stride. Of int8 keys
    `scale` has words of scales and errors or, where these lie apart, the scales, `error` the errors, with their strides from
    page to page, head to head and key to key."""

    where: int = formats.NO_SCALE
    scale: Tensor | None = None
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    swizzled: bool = False
    factor: Tensor | None = None
    factor_stride: int = 0
    error: Tensor | None = None
    error_strides: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(cls, keys: Tensor | Stored, mode: int) -> Scales:
        """keys: a pool, or packed rows, which are taken as the only page."""
        if isinstance(keys, Tensor):
            return UNSCALED
        if isinstance(keys, E4M3) and keys.scale is not None:
            page, head = keys.scale_strides
            if keys.scale.dim() < 2:
                return cls(factor=keys.scale, factor_stride=head)
            where = formats.TILE_SCALE if mode == PAGE else formats.KEY_SCALE
            return cls(where, keys.scale, (page, head, 0, 0))
        if isinstance(keys, Int8):
            words = keys.words()
            if words is not None:
                return cls(formats.KEY_SCALE, words, (*_strides(words), 0))
            strides = (*_strides(keys.scale), 0)
            return cls(formats.KEY_SCALE, keys.scale, strides, error=keys.error, error_strides=_strides(keys.error))
        if isinstance(keys, NVFP4):
            codes = keys.scale.view(torch.uint8)
            scale = in_items(codes, torch.int64, keys.groups in (8, 16) and keys.layout == "linear")
            if scale is codes:
                scale = in_items(codes, torch.int32, keys.groups in (4, 8, 16))
            if keys.layout != "linear":
                return cls(scale=scale, strides=(*_row_numbers(keys.shape), 0), swizzled=True, factor=keys.global_scale)
            return cls(scale=scale, strides=(*_strides(scale[..., 0]), scale.stride(-1)), factor=keys.global_scale)
        if isinstance(keys, MXFP4):
            scale = in_items(keys.scale, torch.int32, keys.scale.shape[-1] in (4, 8))
            return cls(scale=scale, strides=(*_strides(scale[..., 0]), scale.stride(-1)))
        return UNSCALED

    def words(self) -> tuple[Tensor, tuple[int, int, int]]:
        """Codes of group scales that lie in words, four an int32, and their strides from page to page, head to head and key to
        key."""
        assert self.scale is not None
        an_item = 1 if self.swizzled else self.scale.itemsize // 4
        page, head, key, _ = self.strides
        return self.scale.view(torch.int32), (page * an_item, head * an_item, key * an_item)


UNSCALED = Scales()


def _strides(rows: Tensor) -> tuple[int, int, int]:
    """From page to page, head to head and key to key of ``[pages, heads, page_size]`` or packed ``[total, heads]``."""
    return rows.stride() if rows.dim() == 3 else (0, rows.stride(1), rows.stride(0))


def _row_numbers(shape: torch.Size) -> tuple[int, int, int]:
    """The same when rows are counted in C order of the logical shape."""
    return (shape[1] * shape[2], shape[2], 1) if len(shape) == 4 else (0, 1, shape[1])


class KeySource(NamedTuple):
    """Where a kernel reads keys. `keys` is a tensor or a TMA descriptor of it, `scales` what its codes are multiplied by."""

    keys: Any
    page_table: Tensor | None
    strides: tuple[int, int, int, int]
    table_stride: int
    heads: int
    num_pages: int
    capacity: int
    page_size: int
    mode: int
    tma: bool
    format: int
    dtype: torch.dtype
    scales: Scales
    native: bool  # whether the GPU converts e4m3
    lanes: bool = False  # whether `triton_lanes` can read them

    @classmethod
    def of(cls, index_k: Tensor | Stored | PagedIndexKeys, tile: Tile, device: Device, packed: bool = True) -> KeySource:
        if isinstance(index_k, PagedIndexKeys):
            return cls.of_pool(index_k.keys, index_k.page_table, tile, device, packed)
        return cls.of_pool(index_k, None, tile, device, packed)

    @classmethod
    def of_pool(
        cls, keys: Tensor | Stored, page_table: Tensor | None, tile: Tile, device: Device, packed: bool = True
    ) -> KeySource:
        """keys: ``[num_pages, heads, page_size, dim]``; with no page table packed ``[total, heads, dim]``, read as one page.
        packed: codes of less than 16 bits, e4m3 aside, are read several at a time where they can be."""
        keys = keys.exact if isinstance(keys, CertifiedKeys) else keys
        data = keys.data if isinstance(keys, Stored) else keys
        if data.dtype == torch.float8_e4m3fn and device.arch < 90:
            data = data.view(torch.uint8)
        elif packed and isinstance(keys, (Int8, NVFP4, MXFP4)):
            data = in_items(data, torch.int16, keys.shape[-1] >= (32 if isinstance(keys, Int8) else 64))
        pool = data.unsqueeze(0).transpose(1, 2) if page_table is None else data
        num_pages, heads, page_size, width = pool.shape
        mode = FLAT if page_table is None else PAGE if tile.whole and page_size % tile.span == 0 else PAGES
        tma = device.has_tma and mode != PAGES and _describable(pool)
        source: Any = pool
        stored = formats.PLAIN if isinstance(keys, Tensor) else _FORMATS[keys.format]
        if tma:
            dim = keys.shape[-1]  # in `width` items
            box = [1, 1, tile.tile, formats.padded(dim, stored) // (dim // width)]
            source = TensorDescriptor(pool, list(pool.shape), list(pool.stride()), box)
        where = (FLAT, 0, page_size, 1) if page_table is None else (mode, page_table.stride(0), 0, page_size)
        capacity = where[2] if page_table is None else page_table.shape[1] * page_size
        # Of packed keys page_size is 1: it is a compile key, so it must not be their number.
        scales = Scales.of(keys, mode)
        # NVFP4 of 128 elements, whole tiles of one block or a part, scales in words, offsets in a tile of 32 bits
        lanes = (stored, keys.shape[-1], width) == (formats.NVFP4, 128, 32) and pool.numel() > 0 and mode != PAGES
        lanes = lanes and tile.whole and (tile.tile, tile.sub) == (128, 1) and _in_words(scales.scale)
        lanes = lanes and tile.tile * max(pool.stride(2), scales.words()[1][2]) < 2**31
        return cls(
            source, page_table, pool.stride(), where[1], heads, num_pages, capacity, where[3], mode, tma, stored, data.dtype,
            scales, device.arch >= 90, lanes,
        )  # fmt: skip

    @property
    def pool(self) -> Tensor:
        """The keys without a descriptor."""
        return self.keys.base if self.tma else self.keys

    @property
    def split(self) -> int:
        """Elements an item of the keys holds."""
        return self.dtype.itemsize * {formats.INT8: 1, formats.NVFP4: 2, formats.MXFP4: 2}.get(self.format, 0) or 1

    def constexprs(self) -> dict[str, Any]:
        """As the kernels take them."""
        scales = self.scales
        return {
            "KEY_HEADS": self.heads,
            "MODE": self.mode,
            "TMA": self.tma,
            "PAGE_SIZE": self.page_size,
            "FORMAT": self.format,
            "SCALE": scales.where,
            "SWIZZLED": scales.swizzled,
            "NATIVE": self.native,
            "SPLIT": self.split,
        }


_FORMATS = {"e4m3": formats.E4M3, "int8": formats.INT8, "nvfp4": formats.NVFP4, "mxfp4": formats.MXFP4}


class QuerySource(NamedTuple):
    """Index queries as a kernel reads them, and of which type both factors of a product are."""

    rows: Tensor
    scale: Tensor | None
    scale_stride: int
    product: Any  # a Triton dtype

    @classmethod
    def of(cls, index_q: Tensor | Stored, source: KeySource, device: Device) -> QuerySource:
        """e4m3 times e4m3 on the matrix unit where it knows them; every other pair in 16 bits, in which both are exact."""
        scale, stride = None, 0
        if isinstance(index_q, E4M3):
            scale, stride = index_q.scale, index_q.scale_strides[1]
            rows = index_q.data
            if source.format == formats.E4M3:
                dtype = torch.float8_e4m3fn if device.arch >= 90 else torch.float16
            else:
                dtype = source.dtype if source.format == formats.PLAIN else torch.bfloat16
            rows = rows.view(torch.uint8) if device.arch < 90 else rows
            return cls(rows, scale, stride, TYPES[dtype])
        assert isinstance(index_q, Tensor)
        return cls(index_q, scale, stride, TYPES[index_q.dtype])


def _in_words(scale: Tensor | None) -> bool:
    """Whether scales of groups are read four or eight at a time."""
    return scale is not None and scale.dtype in (torch.int32, torch.int64)


def _describable(pool: Tensor) -> bool:
    """Whether the copy engine can read it: 16-byte strides in memory order, rows contiguous and not shorter than 16 bytes."""
    *outer, innermost = pool.stride()
    size = pool.element_size()
    if innermost != 1 or pool.shape[3] * size < 16 or pool.numel() == 0 or pool.data_ptr() % 16:
        return False
    return all(0 < stride * size < 2**40 and stride * size % 16 == 0 for stride in outer)
