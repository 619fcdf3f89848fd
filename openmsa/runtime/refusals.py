# SPDX-License-Identifier: MIT
"""Reasons why an implementation cannot serve a call, as sentences; None where it can."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from openmsa.runtime.checks import needs_grad


def unless_cpu_inference(*tensors: Any) -> str | None:
    """For implementations that read CPU memory and compute no gradients."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            return f"it needs CPU tensors, got {tensor.device}"
    if needs_grad(*tensors):
        return "it computes no gradients and an input requires one; call it under torch.no_grad()"
    return None


@functools.cache
def has_triton() -> bool:
    """Whether the triton package is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def unless_cuda_inference(*tensors: Any, dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)) -> str | None:
    """For Triton kernels without a backward. dtypes: of plain tensors; which formats a kernel reads `unless_reads` says."""
    if not has_triton():
        return "the triton package is not installed"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cuda":
            return f"it needs CUDA tensors, got {tensor.device}"
        if _capability(tensor.device) < (8, 0):
            return f"it needs compute capability 8.0 or newer, which {tensor.device} has not"
        if getattr(tensor, "format", "plain") == "plain" and tensor.dtype not in dtypes:
            return f"it needs {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, got {tensor.dtype}"
    if needs_grad(*tensors):
        return "it computes no gradients and an input requires one; call it under torch.no_grad()"
    return None


def unless_reads(reads: Mapping[str, tuple[str, ...]], **operands: Any) -> str | None:
    """For implementations that read some storage formats only. reads: for each operand the formats that its kernels take, the
    name of a tensor without one being "plain". An operand may be a tensor, a cache or None."""
    for name, operand in operands.items():
        stored = getattr(operand, "format", "plain")
        if stored not in reads[name]:
            return f"it reads {name} stored as {' or '.join(reads[name])}, got {stored}"
    return None


def on_gpu_by_name_only(tensor: Any) -> str | None:
    """For the references: on a GPU a slow path must never be taken unnoticed."""
    if tensor.device.type == "cpu":
        return None
    return "on a GPU the reference runs only when asked for by name: impl='reference'"
