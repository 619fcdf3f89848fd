# SPDX-License-Identifier: MIT
"""Scales of tensors, heads and pages, which a caller gives, are positive and finite."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from openmsa.kv_cache.stored import part
from openmsa.runtime import checks


def check_positive(name: str, value: Any) -> None:
    """`value` must be a positive and finite float32: a number, or a tensor, which is read only on a CPU."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or torch.compiler.is_compiling():
            return
        bad = ~(value > 0) | value.isinf()
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            raise ValueError(f"{name} must be positive and finite, got {value[where].item()} at {where}")
    elif _is_number(value) and not 2.0**-149 <= value <= checks.FLOAT32_MAX:
        raise ValueError(f"{name} must be positive and finite in float32, got {value}")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def scalar(name: str, value: Tensor | float, of: Tensor) -> Tensor:
    """Makes float32 ``[]`` on the device of `of` from a float or a float32 tensor of one element."""
    if _is_number(value):
        check_positive(name, value)
        return torch.tensor(float(value), dtype=torch.float32, device=of.device)
    tensor = part(name, value, of, (torch.float32,))
    if tensor.numel() != 1:
        raise ValueError(f"{name} must have one element, got shape {tuple(tensor.shape)}")
    return tensor.reshape(())
