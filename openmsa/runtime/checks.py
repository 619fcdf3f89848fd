# SPDX-License-Identifier: MIT
"""Every check raises an error that names the argument, the rule and the value. None here reads a tensor (value_checks.py).

Rows are a tensor, or an object of a class that names the format in which it stores them (`openmsa.kv_cache.stored.Stored`).
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

MANY_HEADS = 64  # more key heads than that, and than keys, are rather tokens
FLOAT32_MAX = torch.finfo(torch.float32).max
PACKAGE = __name__.removesuffix("runtime.checks")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def format_of(value: Any) -> str:
    """Gives the format in which rows, or the pools of a cache, are stored: "plain" where that is a tensor."""
    return getattr(value, "format", "plain")


def stored_as(value: Any) -> str:
    """Names what keys and values must share: the format, and the layout of its scales where it has several."""
    return "plain" if isinstance(value, Tensor) else f"{value.format} {getattr(value, 'layout', '')}".strip()


def rows(name: str, value: Any, shape: str, formats: tuple[str, ...], dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """`value` must be stored in one of `formats` or a tensor of one of `dtypes`, with the rank that `shape` shows."""
    stored = getattr(type(value), "format", None)
    if not formats or not isinstance(stored, str):
        tensor(name, value, shape, dtypes)
        return
    if stored not in formats:
        raise TypeError(f"{name} must be a torch.Tensor or stored as {' or '.join(formats)}, got {stored}")
    if value.dim() != shape.count(",") + 1:
        raise wrong_rank(name, value, shape)


def tensor(name: str, value: Any, shape: str, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """`value` must be a tensor with the rank that `shape` shows, such as ``"[total_q, heads, dim]"``, and one of `dtypes`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {shape}, got {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor (torch.strided), got {'nested' if value.is_nested else value.layout}")
    rank = shape.count(",") + 1
    if value.dim() != rank:
        raise wrong_rank(name, value, shape)
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {value.dtype}")


def wrong_rank(name: str, value: Any, shape: str) -> ValueError:
    """Returns the error for a value whose number of dimensions is not that of `shape`."""
    rule = f"{name} must have shape {shape} ({shape.count(',') + 1} dimensions), got {tuple(value.shape)}"
    if value.dim() == 4 and shape.startswith("[total_"):
        rule += (
            "; [batch, heads, tokens, dim] is packed by .transpose(1, 2).flatten(0, 1), and seqs has the lengths of the batch"
        )
    return ValueError(rule)


def size(name: str, value: Any, dimension: int, expected: int, because: str) -> None:
    """`value.shape[dimension]` must be `expected`."""
    if not hasattr(value, "shape"):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if len(value.shape) <= dimension:
        raise ValueError(f"{name} must have more than {dimension} dimensions, got shape {tuple(value.shape)}")
    if value.shape[dimension] != expected:
        raise ValueError(
            f"{name}.shape[{dimension}] must be {expected} ({because}), "
            f"got {value.shape[dimension]} in shape {tuple(value.shape)}"
        )


def divides(name: str, value: int, other_name: str, other: int) -> None:
    """`value` heads must divide `other` heads, of which there is at least one."""
    if other < 1:
        raise ValueError(f"{other_name} must be at least 1, got {other}")
    if value < 1 or other % value:
        raise ValueError(f"{name} must divide {other_name} ({other}), got {value}")


def head_dim(name: str, value: int) -> None:
    """Head dims are multiples of 16 up to 256."""
    if not 16 <= value <= 256 or value % 16:
        raise ValueError(f"{name} must be a multiple of 16 from 16 to 256, got {value}")


def alike(name: str, value: Any, other_name: str, other: Any, dtype: bool = True) -> None:
    """Rows must share a device and, where both are tensors and `dtype` is True, a dtype."""
    if value.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name} ({other.device}), got {value.device}")
    if dtype and value.dtype != other.dtype and isinstance(value, Tensor) and isinstance(other, Tensor):
        raise TypeError(f"{name} must have the dtype of {other_name} ({other.dtype}), got {value.dtype}")


def heads_first(q_name: str, q: Any, k_name: str, k: Any) -> None:
    """Warns where `k` has more heads than tokens and than models have. It points at the line that called the package."""
    if k.shape[1] > max(k.shape[0], MANY_HEADS):
        level = 1
        while sys._getframe(level).f_globals.get("__name__", "").startswith(PACKAGE):
            level += 1
        warnings.warn(
            f"{q_name} {tuple(q.shape)} and {k_name} {tuple(k.shape)} are read as [tokens, heads, dim], which makes "
            f"{k.shape[1]} heads of {k.shape[0]} keys: where heads stand first, pass {q_name}.transpose(0, 1) and so on",
            stacklevel=level + 1,
        )


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` must be an int from `low` to `high` (no upper bound when None). An `IntEnum` is returned as a plain int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None or (high == 2**31 - 1 and value < low) else f"from {low} to {high}"
        raise ValueError(f"{name} must be {bounds}, got {value}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """`value` must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
    return value


def scale(name: str, value: Any) -> float:
    """`value` must be a finite number, and one of float32, in which most of what it is multiplied with is computed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be finite{' in float32' * (abs(value) < math.inf)}, got {value}")
    return float(value)


def no_gradient(name: str, value: Any, because: str) -> None:
    """Autograd must not be asked for a gradient of `value`, which has none."""
    if needs_grad(value):
        raise ValueError(f"{name} must not require a gradient, as {because}; pass {name}.detach()")


def needs_grad(*tensors: Any) -> bool:
    """Says whether autograd would have to record an operation on these values, tensors or caches, or to carry a tangent."""
    duals = torch.autograd.forward_ad  # Its level is -1 where there are no tangents.
    if duals._current_level >= 0 and any(isinstance(t, Tensor) and duals.unpack_dual(t).tangent is not None for t in tensors):
        return True
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
