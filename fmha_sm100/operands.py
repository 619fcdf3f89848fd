# SPDX-License-Identifier: MIT
"""The arguments of the sparse functions as `openmsa` takes them: formats, scales, caches, lengths and output buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmsa import E4M3, NVFP4, PagedKV, Sequences
from openmsa.runtime import checks

FP8 = torch.float8_e4m3fn
QUERIES = (*checks.FLOATS, FP8)
PARTIALS = (torch.float32, torch.bfloat16, torch.float16, FP8)
PRODUCTS = (None, torch.bfloat16, torch.float16, FP8)

Scale = float | Tensor | None
Rows = Tensor | E4M3 | NVFP4


def check_operands(q: Tensor, k: Tensor, v: Tensor, dim: str, pages: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    """Shapes and dtypes of the three; k and v alike. dim: what their last dimension is."""
    checks.tensor("q", q, "[total_q, num_q_heads, head_dim]", QUERIES)
    shape = f"[num_pages, num_kv_heads, page_size, {dim}]" if pages else f"[total_k, num_kv_heads, {dim}]"
    for name, x in (("k", k), ("v", v)):
        checks.tensor(name, x, shape, dtypes)
        checks.alike(name, x, "q", q, dtype=False)
        checks.size(name, x, -1, q.shape[2] // (2 if "2" in dim else 1), f"{dim}, head_dim as in q")
    if k.shape != v.shape:
        raise ValueError(f"v must have the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.dtype != v.dtype:
        raise TypeError(f"v must have the dtype of k ({k.dtype}), got {v.dtype}")
    checks.divides("num_kv_heads", k.shape[1], "num_q_heads", q.shape[1])


def times(factor: float, scale: Scale) -> float | Tensor:
    """`factor` times `scale` (None: 1)."""
    if scale is None:
        return factor
    if not isinstance(scale, Tensor):
        return factor * checks.scale("output_scale", scale)
    return scale if factor == 1 else scale * factor


def stored(name: str, x: Tensor, scale: Scale) -> tuple[Tensor | E4M3, float]:
    """`x` as openmsa takes it, and the factor that remains to be applied to it.

    scale: a number; or, for e4m3, float32 of one element, ``[heads]`` or a pool's ``[num_pages, heads or 1]``."""
    factor = 1.0 if scale is None or isinstance(scale, Tensor) else checks.scale(f"{name}_scale", scale)
    if x.dtype == FP8:
        return E4M3(x, scale if isinstance(scale, Tensor) else None), factor
    if isinstance(scale, Tensor):
        raise TypeError(f"{name}_scale must be a number or None where {name} is not float8_e4m3fn, got a tensor for {x.dtype}")
    return x, factor


def scaled(v: Rows, factor: float | Tensor) -> tuple[Rows, float | Tensor]:
    """`v` with the factor in its scale where it has one, and what remains for the output."""
    if isinstance(factor, Tensor):
        if factor.numel() != 1 or factor.dtype != torch.float32:
            raise ValueError(f"output_scale must be one float32 number, got {factor.dtype} {tuple(factor.shape)}")
        if factor.device != v.device:
            raise ValueError(f"output_scale must be on the device of v ({v.device}), got {factor.device}")
        factor = factor.reshape(())
    elif factor == 1:
        return v, 1.0
    if isinstance(v, Tensor) or (isinstance(factor, float) and factor <= 0):
        return v, factor
    if not isinstance(factor, Tensor):
        factor = torch.full((), factor, dtype=torch.float32, device=v.device)
    if isinstance(v, E4M3):
        return E4M3(v.data, factor if v.scale is None else v.scale * factor), 1.0
    return NVFP4(v.data, v.scale, factor if v.global_scale is None else v.global_scale * factor, v.layout), 1.0


@dataclass(frozen=True)
class Keys:
    """Keys and values with the lengths of the batch."""

    k: Rows | PagedKV
    v: Rows | None
    seqs: Sequences


def flat(k: Rows, v: Rows, cu_q: Tensor, cu_k: Tensor, max_q: int | None, max_k: int | None, causal: bool) -> Keys:
    """Packed keys ``[total_k, num_kv_heads, head_dim]``. There may be more of them than cu_seqlens_k counts."""
    if cu_k.device.type == "cpu":
        total = int(cu_k[-1])
        if total > k.shape[0]:
            raise ValueError(f"cu_seqlens_k must not end past the keys of k ({k.shape[0]}), got {total}")
        k, v = first(k, total), first(v, total)
    offset = None if causal else cu_k.diff()
    return Keys(k, v, Sequences(cu_q, cu_k, max_q, max_k, offset))


def first(rows: Rows, total: int) -> Rows:
    """The first `total` packed rows, a view."""
    if rows.shape[0] == total:
        return rows
    if isinstance(rows, NVFP4):
        scale = rows.scale[:total] if rows.layout == "linear" else rows.scale
        return NVFP4(rows.data[:total], scale, rows.global_scale, rows.layout)
    return rows[:total]


def paged(
    k: Rows,
    v: Rows,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    max_q: int | None,
    max_k: int | None,
    causal: bool,
) -> Keys:
    """Pools ``[num_pages, num_kv_heads, page_size, head_dim]``."""
    checks.tensor("page_table", page_table, "[batch, max_pages]", (torch.int32,))
    checks.size("page_table", page_table, 0, cu_q.numel() - 1, "the batch of cu_seqlens_q")
    checks.tensor("seqused_k", seq_lens, "[batch]", (torch.int32, torch.int64))
    checks.size("seqused_k", seq_lens, 0, cu_q.numel() - 1, "the batch of cu_seqlens_q")
    if seq_lens.device.type == "cpu":
        checks.in_range("seqused_k", seq_lens, 0, page_table.shape[1] * k.shape[2] + 1)
    seq_lens = seq_lens.to(torch.int32).contiguous()
    offset = None if causal else seq_lens
    cache = PagedKV(k, v, page_table if page_table.stride(1) == 1 else page_table.contiguous(), seq_lens)
    return Keys(cache, None, Sequences(cu_q, None, max_q, max_k, offset))


def write_out(out: Tensor | None, result: Tensor, factor: float | Tensor = 1.0) -> Tensor:
    """`result` times `factor`, in the caller's buffer where there is one."""
    if out is None:
        if isinstance(factor, float) and factor == 1:
            return result
        return result * factor if result.requires_grad else result.mul_(factor)
    if isinstance(factor, float) and factor == 1:
        return out.copy_(result)
    return torch.mul(result, factor, out=out)


def check_out(name: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """A buffer of the caller must be what the function would return; any strides."""
    if not isinstance(out, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(out).__name__}")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(out.shape)}")
    if out.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {out.dtype}")
    if out.device != device:
        raise ValueError(f"{name} must be on the device of q ({device}), got {out.device}")


def flags(**given: Any) -> None:
    """Each must be a bool: Python's, NumPy's, 0 or 1."""
    for name, value in given.items():
        if type(value).__name__ not in ("bool", "bool_") and not (isinstance(value, int) and value in (0, 1)):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__} ({value!r})")


def chosen(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """`value` must be one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value}")
