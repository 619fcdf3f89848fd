# SPDX-License-Identifier: MIT
"""Functions that take rows whether they are plain tensors or stored in a format stand here.

A plain tensor has the format "plain": elements as PyTorch stores them, little endian, element 0 of a row first, and no scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.kv_cache.stored import Stored
from openmsa.runtime import checks, value_checks

PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Plain pools have one of these dtypes; float64 serves checks against the truth."""
KEY_FORMATS = ("e4m3", "nvfp4")
"""Keys and values may be stored in these formats beside plain tensors."""
INDEX_FORMATS = ("e4m3", "int8", "nvfp4", "mxfp4", "certified")
"""Index keys may be stored in these formats."""
QUERY_FORMATS = ("e4m3",)
"""Queries and index queries may be stored in these formats."""


def format_of(value: Any) -> str:
    """Gives "plain" for a tensor, else the name of its format."""
    return getattr(value, "format", "plain")


def kind_of(value: Tensor | Stored) -> str:
    """Names what keys and values must share: the format, and the layout of its scales where it has several."""
    return f"{value.format} {getattr(value, 'layout', '')}".strip() if isinstance(value, Stored) else "plain"


def rows_of(value: Tensor | Stored, *index: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gives ``value[index]``: of a tensor as it is, of a format as numbers of `dtype`."""
    if isinstance(value, Stored):
        return value.rows(*index, dtype=dtype)
    return value[index] if index else value


def dequantized(value: Tensor | Stored, dtype: torch.dtype) -> Tensor:
    """Gives all rows as numbers of `dtype`."""
    return value.dequantize(dtype) if isinstance(value, Stored) else value.to(dtype)


def wide_dtype(q: Tensor | Stored) -> torch.dtype:
    """A stage computes in this dtype: float64 for float64 queries, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def out_dtype(q: Tensor | Stored) -> torch.dtype:
    """Attention returns this dtype: the queries' own, bfloat16 where they are stored in a format."""
    return torch.bfloat16 if isinstance(q, Stored) else q.dtype


def check_rows(
    name: str, value: Any, shape: str, formats: tuple[str, ...], dtypes: tuple[torch.dtype, ...] = checks.FLOATS
) -> None:
    """`value` must be a tensor of one of `dtypes`, or stored in one of `formats`, with the rank that `shape` shows."""
    if not isinstance(value, Stored):
        checks.tensor(name, value, shape, dtypes)
        return
    if value.format not in formats:
        raise TypeError(f"{name} must be a torch.Tensor or stored as {' or '.join(formats)}, got {value.format}")
    if value.dim() != shape.count(",") + 1:
        raise checks.wrong_rank(name, value, shape)


def check_alike(name: str, value: Tensor | Stored, other_name: str, other: Tensor | Stored) -> None:
    """Raises unless both are on one device; two plain tensors must share a dtype as well."""
    plain = isinstance(value, Tensor) and isinstance(other, Tensor)
    checks.alike(name, value, other_name, other, dtype=plain)


def check_values(name: str, value: Tensor | Stored) -> None:
    """Raises where a number is NaN, for which it reads the tensor."""
    value_checks.finite(name, value.dequantize() if isinstance(value, Stored) else value)
