# SPDX-License-Identifier: MIT
"""Turns arguments of the public functions into what `openmsa` takes: formats and scales, caches and lengths, and buffers."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmha_sm100 import operators as _operators  # noqa: F401 (registers them)
from openmsa import E4M3, NVFP4, PagedKV, Sequences
from openmsa.kv_cache.results import apart
from openmsa.runtime import checks, overlap, value_checks
from openmsa.runtime.kinds import tensors_in
from openmsa.types import starts, wide_dtype

FP8 = torch.float8_e4m3fn
QUERIES = (*checks.FLOATS, FP8)
PARTIALS = (torch.float32, torch.bfloat16, torch.float16, FP8)
PRODUCTS = (None, torch.bfloat16, torch.float16, FP8)

Scale = float | Tensor | None
Rows = Tensor | E4M3 | NVFP4


class Operands(NamedTuple):
    """This holds queries, keys and values in the formats of `openmsa`, with the factors that the formats do not hold."""

    q: Tensor | E4M3  # [total_q, num_q_heads, head_dim]
    k: Rows  # [total_k, num_kv_heads, head_dim], or a pool [num_pages, num_kv_heads, page_size, head_dim]
    v: Rows  # the shape of k
    logit_factor: float  # multiplies the products of q and k, on top of the softmax scale
    out_factor: float | Tensor  # multiplies the output

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, q_scale: Scale, k_scale: Scale, v_scale: Scale) -> Operands:
        """Makes operands of tensors in a float dtype or float8_e4m3fn; scales are as in `stored`."""
        query, q_factor = stored("q", q, q_scale)
        keys, k_factor = stored("k", k, k_scale)
        values, v_factor = stored("v", v, v_scale)
        return cls(query, keys, values, q_factor * k_factor, v_factor)

    def scaled(self, output_scale: Scale = None) -> Operands:
        """Moves what multiplies the output, `output_scale` included, into the scale of v where that has one."""
        if output_scale is None and isinstance(self.out_factor, float) and self.out_factor == 1:
            return self
        v, out_factor = scaled(self.v, times(self.out_factor, output_scale))
        return Operands(self.q, self.k, v, self.logit_factor, out_factor)


def check_operands(q: Tensor, k: Tensor, v: Tensor, dim: str, pages: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    """Checks the shapes and dtypes of the three. `dim` names the last dimension of k and v, "head_dim" or "head_dim // 2"."""
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


def times(factor: float | Tensor, scale: Scale) -> float | Tensor:
    """Returns `factor` times the output scale, of which None stands for 1."""
    if scale is None:
        return factor
    if not isinstance(scale, Tensor):
        return factor * checks.scale("output_scale", scale)
    return scale if isinstance(factor, float) and factor == 1 else scale * factor


def stored(name: str, x: Tensor, scale: Scale) -> tuple[Tensor | E4M3, float]:
    """Returns `x` in its format and the factor that remains to be applied to it.

    scale is a number, or, for float8_e4m3fn, float32 of one element, ``[heads]`` or a pool's ``[num_pages, heads or 1]``."""
    factor = 1.0 if scale is None or isinstance(scale, Tensor) else checks.scale(f"{name}_scale", scale)
    if x.dtype == FP8:
        return E4M3(x, scale if isinstance(scale, Tensor) else None), factor
    if isinstance(scale, Tensor):
        raise TypeError(f"{name}_scale must be a number or None where {name} is not float8_e4m3fn, got a tensor for {x.dtype}")
    return x, factor


def scaled(v: Rows, factor: float | Tensor) -> tuple[Rows, float | Tensor]:
    """Returns `v` with the factor in its scale where it has one, and the factor that remains for the output."""
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


class Lengths(NamedTuple):
    """This holds the checked lengths of a batch, and whether each query sees only the keys up to its own position."""

    cu_q: Tensor  # int32 [batch + 1]
    max_q: int | None  # a bound on the queries of a sequence
    max_k: int | None  # a bound on the keys of a sequence
    causal: bool

    def over_packed(self, k: Rows, v: Rows, cu_k: Tensor) -> tuple[Rows, Rows, Sequences]:
        """Returns keys and values ``[total_k, num_kv_heads, head_dim]``, of which there may be more than cu_k, int32 ``[batch +
        1]``, counts, and the lengths as the stages take them."""
        if cu_k.device.type == "cpu":
            total = int(cu_k[-1])
            if total > k.shape[0]:
                raise ValueError(f"cu_seqlens_k must not end past the keys of k ({k.shape[0]}), got {total}")
            k, v = _first(k, total), _first(v, total)
        return k, v, Sequences(self.cu_q, cu_k, self.max_q, self.max_k, None if self.causal else cu_k.diff())

    def over_pages(self, k: Rows, v: Rows, page_table: Tensor, seq_lens: Tensor) -> tuple[PagedKV, Sequences]:
        """Returns the cache of pools ``[num_pages, num_kv_heads, page_size, head_dim]``, their checked table ``[batch,
        max_pages]`` and the keys of each sequence, ``[batch]``, and the lengths as the stages take them."""
        checks.tensor("seqused_k", seq_lens, "[batch]", (torch.int32, torch.int64))
        checks.size("seqused_k", seq_lens, 0, self.cu_q.numel() - 1, "the batch of cu_seqlens_q")
        if seq_lens.device.type == "cpu":
            value_checks.in_range("seqused_k", seq_lens, 0, page_table.shape[1] * k.shape[2] + 1)
        seq_lens = seq_lens.to(torch.int32).contiguous()
        cache = PagedKV(k, v, page_table if page_table.stride(1) == 1 else page_table.contiguous(), seq_lens)
        return cache, Sequences(self.cu_q, None, self.max_q, self.max_k, None if self.causal else seq_lens)


def _first(rows: Rows, total: int) -> Rows:
    """Returns the first `total` packed rows, a view."""
    if rows.shape[0] == total:
        return rows
    if isinstance(rows, NVFP4):
        scale = rows.scale[:total] if rows.layout == "linear" else rows.scale
        return NVFP4(rows.data[:total], scale, rows.global_scale, rows.layout)
    return rows[:total]


def checked_starts(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns both as int32 ``[batch + 1]``. Their values are checked on a CPU; on a GPU they are not read."""
    readable = device.type == "cpu"
    cu_q = starts("cu_seqlens_q", cu_seqlens_q, device, total_q, "the number of queries" if readable else "")
    cu_k = starts("cu_seqlens_k", cu_seqlens_k, device, None, "the number of keys" if readable else "")
    if cu_q.numel() != cu_k.numel():
        raise ValueError(
            f"cu_seqlens_k must have as many entries as cu_seqlens_q (batch + 1 = {cu_q.numel()}), got {cu_k.numel()}"
        )
    return cu_q, cu_k


def length(name: str, value: Any) -> int:
    """Returns an int that is at least 0; integers of other libraries and tensors of one integer are taken too."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})") from None
    return checks.integer(name, value, 0)


def longest(name: str, bound: int | None, cu_seqlens: Tensor) -> int | None:
    """Returns `bound` as an int. On a CPU it must reach the longest sequence, whose length stands in for None."""
    if bound is not None:
        bound = length(name, bound)
    if cu_seqlens.device.type != "cpu":
        return bound
    most = int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0
    if bound is not None and bound < most:
        raise ValueError(f"{name} must be at least the longest sequence ({most}), got {bound}")
    return most if bound is None else bound


def given_longest(name: str, bound: int, cu_seqlens: Tensor) -> int:
    """Does what `longest` does where the bound is required."""
    found = length(name, bound) if bound is None else longest(name, bound, cu_seqlens)
    assert found is not None
    return found


def place(out: Tensor | None, *read: Any) -> Tensor | None:
    """Returns the caller's buffer where kernels that read the given operands can write their results into it: where it is
    contiguous and apart from them. Elsewhere they write to a new tensor, and `write_out` copies."""
    return out if out is not None and out.is_contiguous() and apart(out, list(tensors_in(*read))) else None


def write_out(out: Tensor | None, result: Tensor, factor: float | Tensor = 1.0) -> Tensor:
    """Returns `result` times `factor`, in the caller's buffer where there is one; `result` may be that buffer."""
    one = isinstance(factor, float) and factor == 1
    if out is None or out is result:
        if one:
            return result
        return result * factor if out is None and result.requires_grad else result.mul_(factor)
    return out.copy_(result) if one else torch.mul(result, factor, out=out)


def check_out(name: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Checks that the caller's buffer, with any strides, is like the tensor that the function would return."""
    if not isinstance(out, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(out).__name__}")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(out.shape)}")
    if out.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {out.dtype}")
    if out.device != device:
        raise ValueError(f"{name} must be on the device of q ({device}), got {out.device}")
    overlap.check_written(name, out)


def check_results(q: Tensor, dtype: torch.dtype, out: Any, lse: Any, max_score: Any = None) -> None:
    """Checks the caller's buffers for out, in this dtype, and lse (None: there is none), and that buffers are apart."""
    given = [("max_score", max_score)] if isinstance(max_score, Tensor) else []
    for name, x, shape, wanted in (("out", out, q.shape, dtype), ("lse", lse, q.shape[:2], wide_dtype(q))):
        if x is not None:
            check_out(name, x, tuple(shape), wanted, q.device)
            if clash := [other for other, y in given if not apart(x, [y])]:
                raise ValueError(f"{name} must share no memory with {clash[0]}, got two buffers that overlap")
            given.append((name, x))


def flags(**given: Any) -> None:
    """Checks that each value is a bool: Python's or NumPy's, 0 or 1."""
    for name, value in given.items():
        if type(value).__name__ not in ("bool", "bool_") and not (isinstance(value, int) and value in (0, 1)):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__} ({value!r})")


def chosen(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Checks that `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value}")


def valid_tiles(value: Any, total_q: int, tiles: int, device: torch.device) -> Tensor:
    """Returns int32 ``[total_q]``, how many leading tiles each query may select."""
    if isinstance(value, Tensor):
        checks.tensor("num_valid_pages", value, "[total_q]", (torch.int32, torch.int64))
        checks.size("num_valid_pages", value, 0, total_q, "one entry a query")
        if value.device != device:
            raise ValueError(f"num_valid_pages must be on the device of max_score ({device}), got {value.device}")
        return value.clamp(0, tiles).to(torch.int32)
    count = tiles if value is None else min(checks.integer("num_valid_pages", value, 0), tiles)
    return torch.full((total_q,), count, dtype=torch.int32, device=device)
