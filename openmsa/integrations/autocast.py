# SPDX-License-Identifier: MIT
"""Attention inside autocast takes its inputs in autocast's dtype, as PyTorch's own does."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(of: Tensor) -> torch.dtype:
    """Returns the dtype in which attention takes a tensor: its own or, inside autocast, autocast's."""
    kind = of.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else of.dtype


def lowered(*tensors: Tensor) -> list[Tensor]:
    """Returns tensors as attention takes them. Position embedding leaves queries and keys in float32 where values are not."""
    return [x.to(autocast_dtype(x)) for x in tensors]
