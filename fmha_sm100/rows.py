# SPDX-License-Identifier: MIT
"""What a launch makes of a plan: lengths and page tables as `openmsa` takes them, by operations on the device alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.runtime import devices
from openmsa.types import Sequences

TENSORS = (
    *("qo_segment_offsets", "kv_segment_lens", "kv_segment_offsets", "kv_page_indptr", "qo_offset"),
    *("row_request", "row_index"),
)
"""What a launch reads of a plan."""


def uses_kernels(tensor: Tensor) -> bool:
    """Whether work on this tensor is done by the Triton kernels."""
    return tensor.device.type == "cuda"


def on_device(plan: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The plan with its tensors where the queries are: itself, or copies made for this launch."""
    first = plan["kv_segment_lens"]
    if first.device == device:
        return plan
    if devices.capturing(device):
        raise ValueError(
            f"plan_info must lie on {device} to be captured in a CUDA graph (plan with device=), got {first.device}"
        )
    return plan | {name: plan[name] if plan[name] is None else plan[name].to(device) for name in TENSORS}


def offsets(plan: dict[str, Any], override: int | Tensor | None) -> Tensor:
    """int32 ``[rows]``: the plan's `qo_offset`, or the override: one for all requests, for each request or for each row."""
    own = plan["qo_offset"]
    if override is None:
        return own
    if not isinstance(override, Tensor):
        base = torch.full_like(own, override)
    elif plan["row_request"] is None or override.numel() == own.numel() != plan["batch_size"]:
        return override.to(torch.int32).contiguous()
    else:
        base = override.to(torch.int32)[plan["row_request"]]
    return base if plan["row_index"] is None else base + plan["row_index"]


def packed(plan: dict[str, Any], offset: Tensor, total_k: int, max_k: int) -> Sequences:
    """Lengths over packed keys. Requests need not fill the rows up to the next one: between them stands a sequence without
    queries, which holds the rows that belong to nobody. Rows before the first request are counted on a CPU alone, where the
    stages ask for sequences from 0 on."""
    starts, lens, queries = plan["kv_segment_offsets"], plan["kv_segment_lens"], plan["qo_segment_offsets"]
    held = torch.stack((starts[:-1], starts[:-1] + lens), 1).flatten()  # [2 * batch]
    end = torch.full_like(held[:1], total_k)
    cu_q = torch.stack((queries[:-1], queries[1:]), 1).flatten()
    cu_q, cu_k = torch.cat((cu_q, queries[-1:])), torch.cat((held, end))
    offset = torch.stack((offset, torch.zeros_like(offset)), 1).flatten()
    on_cpu = starts.device.type == "cpu"
    if on_cpu and int(cu_k[0]):
        cu_q, cu_k, offset = (torch.nn.functional.pad(x, (1, 0)) for x in (cu_q, cu_k, offset))
    return Sequences(cu_q, cu_k, plan["max_qo_len"], None if on_cpu else max_k, offset)


def paged(plan: dict[str, Any], offset: Tensor) -> Sequences:
    """Lengths over a page table, which knows those of the keys."""
    return Sequences(plan["qo_segment_offsets"], max_seqlen_q=plan["max_qo_len"], q_offset=offset)


def page_table(plan: dict[str, Any], kv_indices: Tensor, page_size: int, max_pages: int | None) -> Tensor:
    """int32 ``[rows, pages]``: a two-dimensional table, with a row for each request or for each row of the plan, as it is;
    otherwise cut from the flat one at `kv_page_indptr`, wide enough for whatever the device may hold in `kv_segment_lens`.
    max_pages: a bound on the pages of a request, None: all there are. Past the end of the flat table stands -1."""
    first = plan["kv_page_indptr"][:-1]
    if kv_indices.dim() == 2:
        by_request = plan["row_request"] is not None and kv_indices.shape[0] == plan["batch_size"]
        if by_request:
            return kv_indices.index_select(0, plan["row_request"])
        return kv_indices if kv_indices.stride(1) == 1 else kv_indices.contiguous()
    flat = kv_indices
    width = flat.numel() if max_pages is None else min(flat.numel(), max_pages)
    if flat.device.type == "cpu" and first.numel():  # lengths may be read here
        width = min(width, -(-int(plan["kv_segment_lens"].max()) // page_size))
    if width < 1:
        return kv_indices.new_full((first.numel(), 1), -1)
    if uses_kernels(flat):
        from fmha_sm100 import triton_rows

        return triton_rows.cut(flat, first, width)
    at = first[:, None] + torch.arange(width, dtype=torch.int32, device=flat.device)  # [rows, width]
    known = (at >= 0) & (at < flat.numel())
    pages = flat.index_select(0, at.clamp(0, flat.numel() - 1).flatten()).view_as(at)
    return torch.where(known, pages, -1)


def one_long_sequence(
    plan: dict[str, Any], offset: Tensor, blocks: Tensor, num_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For plans with a row for each query token: the flat page table taken as that of one sequence, which every token reads at
    a shifted position. No table of rows x pages is made, however large the flat one is.

    blocks: int32 ``[rows, heads, topk]``, page numbers within the request. Returns them within the flat table, -1 where the
    token sees none of the page's keys; then int32 ``[rows]``, the keys of the flat table up to the token's last one (0: none),
    and the token's position in it.
    """
    first = plan["kv_page_indptr"][:-1]
    if uses_kernels(blocks):
        from fmha_sm100 import triton_rows

        return triton_rows.shift(blocks, first, plan["kv_segment_lens"], offset, num_pages, page_size)
    seen = torch.minimum(plan["kv_segment_lens"], offset + 1).clamp(min=0)  # [rows] keys that the token sees
    seen = torch.where((first >= 0) & (first < num_pages), seen, 0)
    last = seen[:, None, None]
    shifted = torch.where((blocks >= 0) & (blocks < (last + page_size - 1) // page_size), blocks + first[:, None, None], -1)
    keys = torch.where(seen > 0, first * page_size + seen, 0)
    return shifted, keys, keys - 1
