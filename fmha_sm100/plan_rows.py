# SPDX-License-Identifier: MIT
"""Turns the tensors of a plan into the lengths and page tables that the stages of `openmsa` take.

A row of a plan is one request or, in a sparse plan of short requests, one query token. Everything here runs as operations on
the device of the plan: a caller may overwrite the plan's tensors between launches, also between replays of a CUDA graph.
"""

from __future__ import annotations

from typing import TypedDict, cast

import torch
from torch import Tensor

from openmsa.runtime import checks, devices, named_devices, value_checks
from openmsa.types import Sequences


class Plan(TypedDict):
    """This types what a launch reads of the dict that `fmha_sm100.plan` makes; its other entries only callers read.

    All tensors are int32 and have one entry a row, or one more where they hold starts (``[rows + 1]``).
    """

    qo_segment_offsets: Tensor  # int32 [rows + 1], the first packed query of each row
    kv_segment_lens: Tensor  # int32 [rows], the keys of each row
    kv_segment_offsets: Tensor  # int32 [rows + 1], the first packed key of each row; pages do without it
    kv_page_indptr: Tensor | None  # int32 [rows + 1], where each row's pages start in the flat table; None: packed keys
    qo_offset: Tensor  # int32 [rows], the position of each row's first query in its sequence
    row_request: Tensor | None  # int32 [rows], the request of each row; None where rows are requests
    row_index: Tensor | None  # int32 [rows], the number of each row within its request; None where rows are requests
    max_k_tiles: int  # the tiles of a max-score buffer; -1: the plan has no max scores
    max_qo_len: int  # a bound on the queries of a row
    max_kv_len: int | None  # a bound on the keys of a row that the caller promised
    total_q: int
    batch_size: int  # requests
    orig_num_qo_heads: int
    num_kv_heads: int  # -1: not known
    page_size: int  # -1: the keys are packed
    kv_block_num: int  # the blocks that each query selects; -1: the plan is dense
    block_size: int  # the keys of a max-score tile


TENSORS = (
    *("qo_segment_offsets", "kv_segment_lens", "kv_segment_offsets", "kv_page_indptr", "qo_offset"),
    *("row_request", "row_index"),
)
"""The tensors of a `Plan` have these names."""


def uses_kernels(tensor: Tensor) -> bool:
    """Says whether the Triton kernels do the work on this tensor; PyTorch does it elsewhere."""
    return tensor.device.type == "cuda"


def on_device(plan: Plan, device: torch.device) -> Plan:
    """Returns the plan with its tensors on the device of the queries: the plan itself, or copies made for this launch."""
    if plan["kv_segment_lens"].device == device:
        return plan
    if devices.capturing(device):
        raise ValueError(
            f"plan_info must lie on {device} to be captured in a CUDA graph (plan with device=), "
            f"got {plan['kv_segment_lens'].device}"
        )
    entries = cast("dict[str, Tensor | None]", plan)
    moved = {name: None if (x := entries[name]) is None else x.to(device) for name in TENSORS}
    return cast(Plan, entries | moved)


def offsets(plan: Plan, override: int | Tensor | None) -> Tensor:
    """Returns int32 ``[rows]``, the position of each row's first query: the plan's `qo_offset`, or the override, which holds
    one number for all requests, one for each request or one for each row."""
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


def packed(plan: Plan, offset: Tensor, total_k: int, max_k: int) -> Sequences:
    """Returns the lengths over packed keys ``[total_k, num_kv_heads, head_dim]``.

    Requests need not fill the keys up to the next one. A sequence without queries stands behind each of them and holds the
    keys that belong to nobody; on a CPU, where the stages check that sequences start at key 0, another one stands in front.
    """
    starts, lens, queries = plan["kv_segment_offsets"], plan["kv_segment_lens"], plan["qo_segment_offsets"]
    held = torch.stack((starts[:-1], starts[:-1] + lens), 1).flatten()  # [2 * rows]
    end = torch.full_like(held[:1], total_k)
    cu_q = torch.stack((queries[:-1], queries[1:]), 1).flatten()
    cu_q, cu_k = torch.cat((cu_q, queries[-1:])), torch.cat((held, end))
    offset = torch.stack((offset, torch.zeros_like(offset)), 1).flatten()
    on_cpu = starts.device.type == "cpu"
    if on_cpu and int(cu_k[0]):
        cu_q, cu_k, offset = (torch.nn.functional.pad(x, (1, 0)) for x in (cu_q, cu_k, offset))
    return Sequences(cu_q, cu_k, plan["max_qo_len"], None if on_cpu else max_k, offset)


def paged(plan: Plan, offset: Tensor) -> Sequences:
    """Returns the lengths over a paged cache, whose own lengths say where each row's keys end."""
    return Sequences(plan["qo_segment_offsets"], max_seqlen_q=plan["max_qo_len"], q_offset=offset)


def page_table(plan: Plan, kv_indices: Tensor, page_size: int, max_pages: int | None) -> Tensor:
    """Returns int32 ``[rows, pages]``, the physical pages of each row.

    A two-dimensional `kv_indices` is that table, or has one line a request. A flat one is cut at `kv_page_indptr`, and the
    result is wide enough for whatever the device may hold in `kv_segment_lens`; -1 stands for entries past the flat table.
    max_pages is a bound on the pages of a request; None allows all there are.
    """
    if kv_indices.dim() == 2:
        request = plan["row_request"]
        if request is not None and kv_indices.shape[0] == plan["batch_size"]:
            return kv_indices.index_select(0, request)
        return kv_indices if kv_indices.stride(1) == 1 else kv_indices.contiguous()
    first, flat = first_pages(plan), kv_indices
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
    plan: Plan, offset: Tensor, blocks: Tensor, num_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lets every query token of a plan with one token a row read the flat page table as one long sequence, each at a position
    of its own, so that no table of rows x pages is made, however large the flat one is.

    blocks is int32 ``[rows, heads, topk]``, page numbers within the request. Returns three tensors: the same pages numbered
    within the flat table, -1 where the token sees none of the page's keys; int32 ``[rows]``, the keys of the flat table up to
    the token's last one (0: none); and int32 ``[rows]``, the token's position in the long sequence.
    """
    first = first_pages(plan)
    if uses_kernels(blocks):
        from fmha_sm100 import triton_rows

        return triton_rows.shift(blocks, first, plan["kv_segment_lens"], offset, num_pages, page_size)
    seen = torch.minimum(plan["kv_segment_lens"], offset + 1).clamp(min=0)  # [rows], the keys that the token sees
    seen = torch.where((first >= 0) & (first < num_pages), seen, 0)
    last = seen[:, None, None]
    shifted = torch.where((blocks >= 0) & (blocks < (last + page_size - 1) // page_size), blocks + first[:, None, None], -1)
    keys = torch.where(seen > 0, first * page_size + seen, 0)
    return shifted, keys, keys - 1


def first_pages(plan: Plan) -> Tensor:
    """Returns int32 ``[rows]``, where each row's pages start in the flat page table of a paged plan."""
    ends = plan["kv_page_indptr"]
    assert ends is not None
    return ends[:-1]


def table_of_sequences(kv_indices: Tensor, cu_page_offsets: Tensor, cu_k: Tensor, width: int, pool: Tensor) -> Tensor:
    """Returns int32 ``[batch, width]``, the pages in `pool` of sequences whose pages start at cu_page_offsets in the flat table
    and whose keys start at cu_k, and -1 behind the last. On a CPU the values are checked."""
    checks.tensor("cu_page_offsets", cu_page_offsets, "[batch + 1]", (torch.int32, torch.int64))
    checks.size("cu_page_offsets", cu_page_offsets, 0, cu_k.numel(), "batch + 1, as cu_seqlens_q")
    pages = (cu_k.diff() + pool.shape[2] - 1) // pool.shape[2]
    if cu_k.device.type == "cpu":
        short = (cu_page_offsets.diff() < pages).nonzero()
        if short.numel():
            b = int(short[0])
            held = int(cu_page_offsets.diff()[b])
            raise ValueError(f"cu_page_offsets must give sequence {b} at least {int(pages[b])} pages for its keys, got {held}")
        if int(cu_page_offsets[-1]) > kv_indices.numel():
            raise ValueError(
                f"cu_page_offsets must not end past kv_indices ({kv_indices.numel()}), got {int(cu_page_offsets[-1])}"
            )
    logical = torch.arange(width, device=cu_k.device)
    at = cu_page_offsets[:-1, None] + logical
    named = (logical < pages[:, None]) & (at < kv_indices.numel())  # [batch, width]
    if not kv_indices.numel():
        return torch.full(named.shape, -1, dtype=torch.int32, device=cu_k.device)
    if cu_k.device.type == "cpu":
        read = torch.zeros_like(kv_indices).index_copy_(0, at[named], kv_indices[at[named]])
        value_checks.in_range("kv_indices", read, 0, pool.shape[0])
    return torch.where(named, kv_indices[torch.where(named, at, 0)], -1)


def rows_of(qo: Tensor, kv: Tensor, offset: Tensor, page_size: int, causal: bool, by_token: bool) -> dict[str, Tensor]:
    """Makes the tensors of a plan on the CPU. Where a row is one query token, they also say to which request each row belongs
    and which of its tokens it is."""
    first_page = _starts((kv + page_size - 1) // page_size) if page_size > 0 else None  # [batch + 1]
    tensors = {}
    if by_token and bool((qo != 1).any()):
        request = torch.arange(qo.numel(), device="cpu")
        request = request.repeat_interleave(qo)  # [total_q]
        index = torch.arange(request.numel(), device="cpu") - _starts(qo)[request]
        tensors = {"row_request": request, "row_index": index}
        qo, kv, offset = torch.ones_like(request), kv[request], offset[request] + (index if causal else 0)
        if first_page is not None:
            first_page = torch.cat((first_page[request], first_page[-1:]))
    tensors |= {"qo_segment_lens": qo, "kv_segment_lens": kv, "qo_offset": offset}
    tensors |= {"qo_segment_offsets": _starts(qo), "kv_segment_offsets": _starts(kv)}
    if first_page is not None:
        tensors["kv_page_indptr"] = first_page
    return {name: x.to(torch.int32) for name, x in tensors.items()}


def _starts(lens: Tensor) -> Tensor:
    """Returns where each of packed sequences of these lengths starts and where the last one ends, ``[batch + 1]``."""
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0))


def placed(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor | None]:
    """Copies the tensors to the device in one copy, each to an aligned place of one allocation that this plan owns."""
    sizes = [-(-x.numel() // 32) * 32 for x in tensors.values()]
    staged = torch.zeros(sum(sizes), dtype=torch.int32, device="cpu")
    for piece, x in zip(staged.split(sizes), tensors.values(), strict=True):
        piece[: x.numel()] = x
    pieces = staged.to(device).split(sizes)
    placed = {name: piece[: x.numel()] for piece, (name, x) in zip(pieces, tensors.items(), strict=True)}
    return dict.fromkeys(("kv_page_indptr", "row_request", "row_index")) | placed


def device_of(device: torch.device | str | int | None, *lengths: Tensor) -> torch.device:
    """Returns the device of a plan for the argument `device` and the lengths."""
    if device is not None:
        if isinstance(device, bool):
            raise TypeError("device must be a torch.device, its name, the number of a GPU or None, got a bool")
        return named_devices.usable("device", f"cuda:{device}" if isinstance(device, int) else device)
    for lens in lengths:
        if lens.device.type != "cpu":
            return lens.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
