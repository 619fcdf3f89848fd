# SPDX-License-Identifier: MIT
"""The pages of an NVFP4 cache as vLLM lays them out."""

from __future__ import annotations

import torch
from torch import Tensor


def nvfp4_head_slot_views(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The codes and scales in the slots of a cache uint8 ``[num_pages, 2 * num_kv_heads, page_size, dim // 2 + dim // 16]``.

    k, v: the slots ``cache[:, 0::2]`` and ``cache[:, 1::2]``, each ``[num_pages, num_kv_heads, page_size, dim // 2 + dim //
    16]``: a head's codes of all tokens of the page, then its scales. Returns views, in this order: K's codes ``[num_pages,
    num_kv_heads, page_size, dim // 2]``, K's scales ``[..., dim // 16]``, V's codes, V's scales.

    The same as the public function for pages of 128 and dim 128. Better: other page sizes and dims; any strides of pages and
    heads (a slot itself must be contiguous); no demand on how K and V slots lie to each other.
    """
    for name, slots in (("k", k), ("v", v)):
        if not isinstance(slots, Tensor) or slots.dtype != torch.uint8:
            raise TypeError(f"{name} must be uint8 slots, got {getattr(slots, 'dtype', type(slots).__name__)}")
        if slots.dim() != 4 or slots.shape[3] % 9 or not slots.shape[3]:
            raise ValueError(
                f"{name} must have shape [num_pages, num_kv_heads, page_size, 9 * dim // 16], got {tuple(slots.shape)}"
            )
        if slots.shape != k.shape:
            raise ValueError(f"{name} must have the shape of k {tuple(k.shape)}, got {tuple(slots.shape)}")
        if slots.stride(3) != 1 or slots.stride(2) != slots.shape[3]:
            raise ValueError(f"{name} must have contiguous slots (strides {slots.shape[3]}, 1), got {slots.stride()[2:]}")
    return (*_split(k), *_split(v))


def _split(slots: Tensor) -> tuple[Tensor, Tensor]:
    pages, heads, size, width = slots.shape
    scales = width // 9
    codes = slots.as_strided((pages, heads, size, 8 * scales), (*slots.stride()[:2], 8 * scales, 1))
    start = slots.storage_offset() + size * 8 * scales
    return codes, slots.as_strided((pages, heads, size, scales), (*slots.stride()[:2], scales, 1), start)
