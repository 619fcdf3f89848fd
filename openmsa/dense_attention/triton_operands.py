# SPDX-License-Identifier: MIT
"""Queries, keys and values as the dense kernel takes them: pools of codes, scales and their strides, TMA descriptors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, uint8
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.kv_cache import E4M3, NVFP4, Stored
from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.runtime.integers import next_power_of_two

NO_SCALE, HEAD_SCALE, PAGE_SCALE, GROUPS, SWIZZLED, GROUP_WORDS, SWIZZLED_WORDS = range(7)


@dataclass(frozen=True)
class Operand:
    """pool:     ``[num_pages, heads, page_size, columns]``; packed rows are one page.
    format:   as in `openmsa.kv_cache.triton_numbers`.
    scales:   the form of `scale`, one of the constants above; `whole` is the scale of all groups.
    strides:  of the scales, from page to page, head, key and group: elements, words, or rows of scales when swizzled.
    """

    pool: Tensor
    format: int = 0
    scales: int = NO_SCALE
    scale: Tensor | None = None
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    whole: Tensor | None = None

    @property
    def descriptor_fits(self) -> bool:
        """Whether TMA can fetch its tiles."""
        pool = self.pool
        units = [stride * pool.element_size() % 16 for stride in pool.stride()[:3]]
        aligned = not any(units) and not pool.data_ptr() % 16 and next_power_of_two(pool.shape[3]) * pool.element_size() >= 16
        return aligned and pool.stride(3) == 1 and pool.numel() > 0 and min(pool.stride()) > 0

    def descriptor(self, keys: int) -> TensorDescriptor:
        """Of tiles [1, 1, keys, columns padded to a power of two]."""
        pool = self.pool
        return TensorDescriptor(pool, list(pool.shape), list(pool.stride()), [1, 1, keys, next_power_of_two(pool.shape[3])])


def operand(rows: Tensor | Stored, native: bool) -> Operand:
    """Packed ``[total, heads, dim]`` or a pool. native: whether the GPU knows E4M3; otherwise its bytes are passed."""
    if isinstance(rows, E4M3):
        page, head = rows.scale_strides
        form = NO_SCALE if rows.scale is None else PAGE_SCALE if rows.scale.dim() == 2 else HEAD_SCALE
        return Operand(_pool(codes(rows.data, native)), FORMAT_IDS["e4m3"], form, rows.scale, (page, head, 0, 0))
    if isinstance(rows, NVFP4):
        return _four_bits(rows, native)
    return Operand(_pool(rows))


def _four_bits(rows: NVFP4, native: bool) -> Operand:
    """Groups of scales are read four at a time where a tile's row holds four and they lie so."""
    scale, data = codes(rows.scale, native), _pool(rows.data)
    words, number = rows.shape[-1] > 32 and scale.data_ptr() % 4 == 0, FORMAT_IDS["nvfp4"]
    if rows.layout == "linear":
        strides = _pool(scale).stride()
        if words and rows.groups % 4 == 0 and strides[3] == 1 and not any(stride % 4 for stride in strides[:3]):
            in_words = (strides[0] // 4, strides[1] // 4, strides[2] // 4, 1)
            return Operand(data, number, GROUP_WORDS, scale, in_words, rows.global_scale)
        return Operand(data, number, GROUPS, scale, strides, rows.global_scale)
    heads, size = rows.shape[1], rows.shape[2]
    strides = (heads * size, size, 1, 0) if rows.dim() == 4 else (0, 1, heads, 0)
    return Operand(data, number, SWIZZLED_WORDS if words else SWIZZLED, scale, strides, rows.global_scale)


def codes(data: Tensor, native: bool) -> Tensor:
    """E4M3 data, as bytes unless `native`."""
    return data if native else data.view(uint8)


def _pool(rows: Tensor) -> Tensor:
    """Packed rows [total, heads, columns] as one page [1, heads, total, columns]; a pool as it is."""
    return rows.transpose(0, 1)[None] if rows.dim() == 3 else rows
