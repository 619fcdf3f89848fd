# SPDX-License-Identifier: MIT
"""The formats by name."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.kv_cache import plain
from openmsa.kv_cache.certified import CertifiedKeys
from openmsa.kv_cache.e4m3 import E4M3
from openmsa.kv_cache.int8 import Int8
from openmsa.kv_cache.mxfp4 import MXFP4
from openmsa.kv_cache.nvfp4 import NVFP4
from openmsa.kv_cache.stored import Stored

FORMATS: dict[str, type[Stored]] = {f.format: f for f in (E4M3, Int8, NVFP4, MXFP4, CertifiedKeys)}


def allocate(
    format: str, allowed: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor | Stored:
    """Zeros of a logical shape, "plain" or in one of the `allowed` formats. dtype: of plain elements."""
    if format == "plain":
        if dtype not in plain.DTYPES:
            raise TypeError(f"dtype must be {' or '.join(map(str, plain.DTYPES))}, got {dtype}")
        return torch.zeros(shape, dtype=dtype, device=device)
    if format not in allowed:
        raise ValueError(f"format must be 'plain' or one of {allowed}, got {format!r}")
    if format == "certified":
        return CertifiedKeys.allocate(shape, device, dtype)
    return FORMATS[format].allocate(shape, device)
