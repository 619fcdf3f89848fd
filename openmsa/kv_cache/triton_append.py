# SPDX-License-Identifier: MIT
"""Rows rounded to a format and written into place, one launch a pool: what `append` runs on a GPU, and `quantize_into`.

Bit for bit what `write` of the format does in PyTorch. Never waits for the device, allocates nothing, can be captured in a CUDA
graph: pages, lengths and numbers of tokens are read when the kernels run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from openmsa.kv_cache.certified import CertifiedKeys
from openmsa.kv_cache.stored import Stored, format_of
from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.kv_cache.triton_write import advance_kernel, write_kernel
from openmsa.runtime.integers import ceil_div, next_power_of_two
from openmsa.runtime.launch import launch_kernel

GROUPS = {"nvfp4": 16, "mxfp4": 32}
ELEMENTS = 1024  # of a program; two warps
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: None}


def append(
    pools: Mapping[str, Tensor | Stored],
    new: dict[str, Tensor],
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor | None,
) -> None:
    """Writes each tensor of `new`, ``[total, heads, dim]``, into its pool behind each sequence's keys, then advances
    `seq_lens`.

    cu_seqlens: int32 ``[batch + 1]``, contiguous; None: the same number for each sequence. Tokens at or past its last entry,
    past the page table's capacity, or on a page outside the pool are not written; `seq_lens` stops at the capacity.
    """
    total, batch = next(iter(new.values())).shape[0], page_table.shape[0]
    if total == 0 or batch == 0:
        return
    each, page_size = total // batch, 0
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    for name, rows in new.items():
        page_size = pools[name].shape[2]
        place = {"page_table": page_table, "seq_lens": seq_lens, "cu_seqlens": cu_seqlens}
        place |= {"s_lens": seq_lens.stride(0), "s_table_b": page_table.stride(0), "s_table_p": page_table.stride(1)}
        place |= {"total": total, "batch": batch, "steps": batch.bit_length(), "each": each, "max_pages": page_table.shape[1]}
        _write(pools[name], rows.detach()[None].transpose(1, 2), place)
    capacity = page_table.shape[1] * page_size
    launch_kernel(
        advance_kernel,
        (ceil_div(batch, 256),),
        seq_lens,
        cu_seqlens,
        seq_lens.stride(0),
        batch,
        each,
        capacity,
        BLOCK=256,
        num_warps=2,
    )


def quantize_into(stored: Tensor | Stored, values: Tensor) -> None:
    """Writes all rows: values of the logical shape of `stored`, ``[total, heads, dim]`` or a pool."""
    if values.numel() == 0:
        return
    place: dict[str, Any] = dict.fromkeys(("page_table", "seq_lens", "cu_seqlens"))
    place |= dict.fromkeys(("s_lens", "s_table_b", "s_table_p", "batch", "steps", "each", "max_pages"), 0)
    place["total"] = values.shape[0] * (values.shape[2] if values.dim() == 4 else 1)
    _write(stored, values.detach() if values.dim() == 4 else values.detach().unsqueeze(2), place)


def _write(pool: Tensor | Stored, new: Tensor, place: dict[str, Any], round_to: Any = None) -> None:
    """new: ``[num_pages or 1, heads, rows, dim]``."""
    if isinstance(pool, CertifiedKeys):
        _write(pool.exact, new, place)
        _write(pool.coarse, new, place, DTYPES[pool.exact.dtype])
        return
    dim, heads = new.shape[3], new.shape[1]
    s_new = (new.stride(0), new.stride(2), new.stride(1), new.stride(3))
    pages = pool.shape[0]
    page_size = pool.shape[2] if pool.dim() == 4 else 1
    rows = max(1, ELEMENTS // next_power_of_two(dim))
    runtime = dict(zip(("s_new_p", "s_new_t", "s_new_h", "s_new_d"), s_new, strict=True)) | tensors_of(pool) | place
    runtime |= {"new": new, "heads": heads, "num_pages": pages, "page_size": page_size}
    launch_kernel(
        write_kernel,
        (ceil_div(place["total"] * heads, rows),),
        *(runtime[name] for name in write_kernel.arg_names if name in runtime),
        ROUND=round_to,
        ROWS=rows,
        **constexprs_of(format_of(pool), getattr(pool, "layout", "linear"), dim),
        num_warps=2,
    )


def constexprs_of(stored: str, layout: str, dim: int) -> dict[str, Any]:
    """The constexprs that a format decides."""
    swizzled = stored == "nvfp4" and layout == "128x4"
    padded = next_power_of_two(dim)
    return {"FORMAT": FORMAT_IDS[stored], "SWIZZLED": swizzled, "DIM": dim, "PADDED": padded, "GROUP": GROUPS.get(stored, 1)}


def tensors_of(pool: Tensor | Stored) -> dict[str, Any]:
    """The kernel's pointers into a pool, and their strides from page to page, head, row and element or group."""
    data = pool.data if isinstance(pool, Stored) else pool
    parts = {name: getattr(pool, name, None) for name in ("scale", "error", "global_scale")} if isinstance(pool, Stored) else {}
    scale, error = parts.get("scale"), parts.get("error")
    kind = format_of(pool)
    if kind == "e4m3":
        data, s_scale = data.view(torch.uint8), (*pool.scale_strides, 0, 0)
    elif kind == "plain" or getattr(pool, "layout", "") == "128x4":
        s_scale = (0, 0, 0, 0)
    else:
        s_scale = (*_strides(scale), 0) if kind == "int8" else (*_strides(scale[..., 0]), scale.stride(-1))
    if kind == "nvfp4":
        scale = scale.view(torch.uint8)
    if kind == "int8":
        scale, error = scale.view(torch.int16), error.view(torch.int16)
    s_error = _strides(error) if error is not None else (0, 0, 0)
    strides = {"s_data": (*_strides(data[..., 0]), data.stride(-1)), "s_scale": s_scale, "s_error": s_error}
    dims = {"s_data": "phtd", "s_scale": "phtg", "s_error": "pht"}
    named = {f"{name}_{d}": stride for name in dims for d, stride in zip(dims[name], strides[name], strict=True)}
    return {"data": data, "scale": scale, "error": error, "global_scale": parts.get("global_scale")} | named


def _strides(rows: Tensor) -> tuple[int, int, int]:
    """Of ``[num_pages, heads, page_size]``, or of packed rows as pages of one."""
    return (*rows.stride(), 0)[:3]
