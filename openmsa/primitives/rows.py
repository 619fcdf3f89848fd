# SPDX-License-Identifier: MIT
# ruff: noqa: RET505 (kernels return from branches on constants)
"""Rows of keys: where they and their scales lie (packed, in pages, in a format), how they are cut into tiles, and how a kernel
reads a tile.

A tile is TILE keys (a power of two up to 128) of which the first KEYS count. It holds SUB whole blocks (block sizes 16, 32, 64
and 128), one block padded to a power of two, or one of the PARTS = 2 overlapping halves of a block of more than 128 keys: a
maximum does not mind the overlap.

FORMAT is 0 for plain keys, 1 for e4m3, 2 for int8, 3 for NVFP4 and 4 for MXFP4. Scales of groups of elements (FP4) are
multiplied into the elements, which stays exact in bf16 and, for NVFP4, in fp16; where rows are few, into the products of each
group. SCALE says where all other scales go: 0 means that there are none; 1 that a tile has one (a page's), which multiplies the
maxima of its blocks; 2 that each key has one, which multiplies its products. The scale of a tensor or a head multiplies the
scores in the end, together with the queries' scale. Where the GPU does not know e4m3 (before sm_89), its codes are loaded as
bytes.

Codes are loaded several at a time: FP4 in fours (in twos where strides forbid it), int8 in twos. They are not put back in
order: every SPLIT-th element of a key makes a tile of its own, and `openmsa.primitives.queries.query_parts` cuts queries
likewise.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.kv_cache import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8, PagedIndexKeys, Stored
from openmsa.kv_cache.stored import in_items
from openmsa.primitives import codes
from openmsa.runtime.devices import Device
from openmsa.runtime.integers import next_power_of_two

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


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float8_e4m3fn: tl.float8e4nv}


class Scales(NamedTuple):
    """Scales beside the codes. `scale`: of pages or keys, or codes of groups; strides from page to page, head to head, key to
    key and group to group (128x4: counted in rows). `factor`: of the tensor or of each head, with its stride. Of int8 keys
    `scale` has words of scales and errors or, where these lie apart, the scales, `error` the errors, with their strides from
    page to page, head to head and key to key."""

    where: int = codes.NO_SCALE
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
            where = codes.TILE_SCALE if mode == PAGE else codes.KEY_SCALE
            return cls(where, keys.scale, (page, head, 0, 0))
        if isinstance(keys, Int8):
            words = keys.words()
            if words is not None:
                return cls(codes.KEY_SCALE, words, (*_strides(words), 0))
            strides = (*_strides(keys.scale), 0)
            return cls(codes.KEY_SCALE, keys.scale, strides, error=keys.error, error_strides=_strides(keys.error))
        if isinstance(keys, NVFP4):
            octets = keys.scale.view(torch.uint8)
            scale = in_items(octets, torch.int64, keys.groups in (8, 16) and keys.layout == "linear")
            if scale is octets:
                scale = in_items(octets, torch.int32, keys.groups in (4, 8, 16))
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
        stored = codes.PLAIN if isinstance(keys, Tensor) else _FORMATS[keys.format]
        if tma:
            dim = keys.shape[-1]  # in `width` items
            box = [1, 1, tile.tile, codes.padded(dim, stored) // (dim // width)]
            source = TensorDescriptor(pool, list(pool.shape), list(pool.stride()), box)
        where = (FLAT, 0, page_size, 1) if page_table is None else (mode, page_table.stride(0), 0, page_size)
        capacity = where[2] if page_table is None else page_table.shape[1] * page_size
        # Of packed keys page_size is 1: it is a compile key, so it must not be their number.
        scales = Scales.of(keys, mode)
        # NVFP4 of 128 elements, whole tiles of one block or a part, scales in words, offsets in a tile of 32 bits
        lanes = (stored, keys.shape[-1], width) == (codes.NVFP4, 128, 32) and pool.numel() > 0 and mode != PAGES
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
        return self.dtype.itemsize * {codes.INT8: 1, codes.NVFP4: 2, codes.MXFP4: 2}.get(self.format, 0) or 1

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


_FORMATS = {"e4m3": codes.E4M3, "int8": codes.INT8, "nvfp4": codes.NVFP4, "mxfp4": codes.MXFP4}


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
def load_group_scales(
    scales,
    page_row,
    i_h,
    i_k,
    k_start,
    k_len,
    num_pages,
    s_page,
    s_head,
    s_token,
    s_group,
    MODE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Codes of the scales of each key's groups, uint8 [TILE, GROUPS padded to a power of two], or int32 of four groups each.
    scales: bytes, int32 or, of eight groups, int64, in which strides are. SWIZZLED (128x4, no int64): strides count rows."""
    i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, MODE, PAGE_SIZE, TILE, BOUNDED)
    o_s = o_row.to(tl.int64) * s_token + i_h.to(tl.int64) * s_head
    if MODE != 0:
        o_s += i_page.to(tl.int64) * s_page
    o_s = o_s[:, None]
    if scales.dtype.element_ty == tl.int64:
        o_w = tl.arange(0, GROUPS // 8)[None, :]
        pairs = tl.load(scales + o_s + o_w * s_group, mask=m_k[:, None], other=0)
        return tl.join(pairs.to(tl.int32), (pairs >> 32).to(tl.int32)).reshape(TILE, GROUPS // 4)
    elif scales.dtype.element_ty == tl.int32:
        WORDS: tl.constexpr = GROUPS // 4
        o_w = tl.arange(0, WORDS)[None, :]
        if SWIZZLED:
            p_w = scales + (o_s // 128 * WORDS + o_w) * 128 + o_s % 32 * 4 + o_s % 128 // 32
        else:
            p_w = scales + o_s + o_w * s_group
        return tl.load(p_w, mask=m_k[:, None] & (o_w < WORDS), other=0)
    else:
        GROUPS_PAD: tl.constexpr = triton.next_power_of_2(GROUPS)
        o_g = tl.arange(0, GROUPS_PAD)[None, :]
        if SWIZZLED:
            i_tile = o_s // 128 * ((GROUPS + 3) // 4) + o_g // 4
            p_s = scales + i_tile * 512 + o_s % 32 * 16 + o_s % 128 // 32 * 4 + o_g % 4
        else:
            p_s = scales + o_s + o_g * s_group
        return tl.load(p_s, mask=m_k[:, None] & (o_g < GROUPS), other=0)


@triton.jit
def load_scales(
    scales, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token,
    MODE: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """float32 scales: of a tile (SCALE 1, one number) or of each key (SCALE 2, [TILE]). BOUNDED: some key may not exist."""
    if SCALE == 0:
        return 1.0
    elif SCALE == 1:
        i_page = tl.load(page_row + page_number(i_k, PAGE_SIZE))
        p_s = scales + i_page.to(tl.int64) * s_page + i_h * s_head
        return tl.load(p_s, mask=exists(i_page, num_pages), other=0.0)
    else:
        b_s = load_of_keys(
            scales, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token, MODE, PAGE_SIZE, TILE, BOUNDED
        )
        return key_scales(b_s)


@triton.jit
def load_of_keys(
    numbers, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token,
    MODE: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """What each key has one of, [TILE], as it is stored; 0 of keys that do not exist."""
    i_page, o_row, m_k = place(page_row, i_k, k_start, k_len, num_pages, MODE, PAGE_SIZE, TILE, BOUNDED)
    p_n = numbers + o_row.to(tl.int64) * s_token + i_h.to(tl.int64) * s_head
    if MODE != 0:
        p_n += i_page.to(tl.int64) * s_page
    return tl.load(p_n, mask=m_k, other=0)


@triton.jit
def key_scales(b_s):
    """float32 scales of numbers or of words (`Int8.words`)."""
    return (b_s << 16).to(tl.float32, bitcast=True) if b_s.dtype == tl.int32 else b_s.to(tl.float32)


@triton.jit
def key_errors(b_s):
    """float32 errors of words."""
    return (b_s & -65536).to(tl.float32, bitcast=True)
