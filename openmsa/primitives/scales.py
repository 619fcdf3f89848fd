# SPDX-License-Identifier: MIT
"""Scales that the formats of rows keep beside their codes are found here, as kernels take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmsa.kv_cache import E4M3, MXFP4, NVFP4, Int8, Stored
from openmsa.kv_cache.stored import in_items
from openmsa.primitives.operands import NO_FACTOR, PAGE_FACTOR, WHOLE_FACTOR


class Scales(NamedTuple):
    """A format keeps these beside its codes; as operands they are the fields of `KeyRows` from `scales` on."""

    operands: tuple[Any, ...]
    factor_form: int = NO_FACTOR
    swizzled: bool = False

    @classmethod
    def of(cls, keys: Stored, words: int) -> Scales:
        """Finds the scales of stored keys. words: see `KeyView.of`."""
        if isinstance(keys, E4M3):
            if keys.scale is None:
                return UNSCALED
            form = WHOLE_FACTOR if keys.scale.dim() < 2 else PAGE_FACTOR
            return cls((None, 0, 0, 0, 0, keys.scale, *keys.scale_strides), form)
        if isinstance(keys, Int8):
            beside = keys.words()
            scale = keys.scale if beside is None else beside
            return cls((scale, *key_strides(scale), 0, None, 0, 0))
        if isinstance(keys, NVFP4):
            octets = keys.scale.view(torch.uint8)
            linear = keys.layout == "linear"
            scale = in_items(octets, torch.int64, words >= 8 and linear and keys.groups in (8, 16))
            if scale is octets:
                fits = keys.groups in {1: (), 4: (4, 8, 12, 16)}.get(words, (4, 8, 16))
                padded = words == 4 and not linear and keys.groups > 2  # A row there has room for whole words.
                scale = in_items(octets, torch.int32, fits or padded)
            strides = _group_strides(scale) if linear else _row_numbers(keys.shape)
            form = NO_FACTOR if keys.global_scale is None else WHOLE_FACTOR
            return cls((scale, *strides, keys.global_scale, 0, 0), form, not linear)
        if isinstance(keys, MXFP4):
            scale = in_items(keys.scale, torch.int32, words >= 4 and keys.scale.shape[-1] in (4, 8))
            return cls((scale, *_group_strides(scale), None, 0, 0))
        return UNSCALED


UNSCALED = Scales((None, 0, 0, 0, 0, None, 0, 0))


def key_strides(numbers: Tensor) -> tuple[int, int, int]:
    """Gives strides of pages, heads and keys of numbers ``[pages, heads, page_size]`` or packed ``[total, heads]``."""
    strides = numbers.stride()
    return strides if len(strides) == 3 else (0, strides[1], strides[0])


def _group_strides(scale: Tensor) -> tuple[int, int, int, int]:
    """Gives `key_strides` of scales of groups, and their stride from group to group."""
    strides = scale.stride()
    return strides if len(strides) == 4 else (0, strides[1], strides[0], strides[2])


def _row_numbers(shape: torch.Size) -> tuple[int, int, int, int]:
    """Gives `_group_strides` where rows are counted in C order of the logical shape, as in the 128x4 layout."""
    return (shape[1] * shape[2], shape[2], 1, 0) if len(shape) == 4 else (0, 1, shape[1], 0)
