# SPDX-License-Identifier: MIT
"""The unquantised format: float32, float16 or bfloat16 elements as PyTorch stores them, ``dim`` elements a row.

Byte layout: ``dim * itemsize`` bytes a key, little endian, no scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # float64 for checks against the truth


def quantize(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``[..., dim]`` as the pool stores them: rounded to nearest even."""
    return rows.to(dtype)


def dequantize(stored: Tensor) -> Tensor:
    """Stored rows as numbers: the identity."""
    return stored
