# SPDX-License-Identifier: MIT
"""Functions that read rows whether they are plain tensors or stored in a format stand here.

A plain tensor has the format "plain": elements as PyTorch stores them, little endian, element 0 of a row first, and no scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.kv_cache.stored import Stored
from openmsa.runtime import value_checks

PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Plain pools have one of these dtypes; float64 serves checks against the truth."""
KEY_FORMATS = ("e4m3", "nvfp4")
"""Keys and values may be stored in these formats beside plain tensors."""
INDEX_FORMATS = ("e4m3", "int8", "nvfp4", "mxfp4", "certified")
"""Index keys may be stored in these formats."""
QUERY_FORMATS = ("e4m3",)
"""Queries and index queries may be stored in these formats."""


def rows_of(value: Tensor | Stored, *index: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gives ``value[index]``: of a tensor as it is, of a format as numbers of `dtype`."""
    if isinstance(value, Stored):
        return value.rows(*index, dtype=dtype)
    return value[index] if index else value


def dequantized(value: Tensor | Stored, dtype: torch.dtype) -> Tensor:
    """Gives all rows as numbers of `dtype`."""
    return value.dequantize(dtype) if isinstance(value, Stored) else value.to(dtype)


def check_values(name: str, value: Tensor | Stored) -> None:
    """Raises where a number is NaN, for which it reads the tensor."""
    value_checks.finite(name, value.dequantize() if isinstance(value, Stored) else value)
