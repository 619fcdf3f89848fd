# SPDX-License-Identifier: MIT
"""A device that an argument names must be one of this machine."""

from __future__ import annotations

import torch


def usable(name: str, device: torch.device | str) -> torch.device:
    """Returns the device as PyTorch names it; a CUDA device must be one of this machine."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"{name} must be a CUDA device or a CPU, got {device}") from None
    if found.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name} must be a CUDA device or a CPU, got {device}")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"{name} must be 'cpu' where PyTorch finds no CUDA device, got {device}")
        if found.index is not None and found.index >= torch.cuda.device_count():
            raise ValueError(f"{name} must be one of {torch.cuda.device_count()} CUDA devices, counted from 0, got {device}")
    return found


def resolved(name: str, device: torch.device | str) -> torch.device:
    """Returns a CPU, or a CUDA device of this machine with its index, as tensors name their device."""
    found = usable(name, device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be a CUDA device or a CPU, got {device}")
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found
