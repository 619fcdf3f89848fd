# SPDX-License-Identifier: MIT
"""`fmha_sm100_plan` describes a batch by its lengths, offsets and page positions, tensors that callers may overwrite.

A plan is the dict that `_fmha_sm100_plan` returns. Launches read its tensors on the device, when they run, and take no number
from the lengths seen while planning: sizes follow from shapes, from ``max_k_tiles`` and from the page table that the launch is
given.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from fmha_sm100.operands import flags
from fmha_sm100.plan_rows import device_of, placed, rows_of
from openmsa.runtime import checks, tracing, value_checks

TILE = 128
"""A max-score tile has so many keys in the public package."""

DECODE_QUERIES, SHORT_QUERIES = 32, 128
"""A sparse plan of at most so many queries a request has a row for each query token. From the first request with more on, or
in a dense plan with more than 128, a mixed batch is split in two."""

EVERYTHING = 1 << 30
"""From a query at this position every key is visible, which is what ``causal=False`` asks for."""

MODES = ("auto", "prefill", "decode")
"""`sparse_kernel_mode` is one of these."""


def fmha_sm100_plan(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    num_qo_heads: int,
    num_kv_heads: int = -1,
    *,
    qo_offset: int | Tensor | None = None,
    split_prefill_decode: bool = True,
    **options: Any,
) -> tuple[bool, int, int, dict[str, Any], dict[str, Any] | None]:
    """Describes a batch for `fmha_sm100`.

    qo_segment_lens, kv_segment_lens:  int32 or int64 ``[batch]``, queries and keys of each request; CPU tensors are the usual
                   form (on a GPU they are read once, which syncs).
    num_qo_heads, num_kv_heads:  heads of the launches; num_kv_heads -1 is not checked.
    qo_offset:     None, which stands for ``kv - qo``; an int; or ``[batch]``. Query i of a request sees key j iff ``i +
                   qo_offset >= j``.
    split_prefill_decode:  whether a mixed batch has two plans: one for the requests in front of the first one with more than 32
                   queries (dense: 128), one for that request and all behind it, in any order. False: one plan for all.
    options:       see `_fmha_sm100_plan`.

    Returns ``(mixed, split, batch, plan, second plan)``, to be passed to `fmha_sm100`: ``(False, 0, batch, plan, None)``, or of
    a mixed batch ``(True, requests of the first plan, batch, first plan, second plan)``. Plans are dicts of
    `_fmha_sm100_plan`; those of the second number queries, packed keys and pages from its own first request on.

    Names, order, defaults, the five-tuple, its dicts, their keys and shapes are those of the public function, and a sparse plan
    of short requests has one row for each query token, as its does. Beyond it, this one launches nothing, shares nothing
    between plans and takes requests in any order; ``causal=False`` is truly so whatever lengths are written later. Wrong
    arguments raise ValueError or TypeError.
    """
    tracing.refuse_to_trace("fmha_sm100_plan")
    if unknown := options.keys() - OPTIONS:
        raise TypeError(f"fmha_sm100_plan() got an unexpected keyword argument {min(unknown)!r}")
    flags(split_prefill_decode=split_prefill_decode)
    qo = _lengths("qo_segment_lens", qo_segment_lens, None)
    sparse = checks.integer("kv_block_num", options.get("kv_block_num", -1), -1) != -1
    longer = (qo > (DECODE_QUERIES if sparse else SHORT_QUERIES)).nonzero()
    split = int(longer[0]) if split_prefill_decode and longer.numel() else 0
    if not split:
        plan = _fmha_sm100_plan(qo_segment_lens, kv_segment_lens, num_qo_heads, num_kv_heads, qo_offset, **options)
        return False, 0, qo.numel(), plan, None
    offset = _offsets(qo_offset, qo, _lengths("kv_segment_lens", kv_segment_lens, qo.numel()), causal=True)
    first, second = (
        _fmha_sm100_plan(qo_segment_lens[own], kv_segment_lens[own], num_qo_heads, num_kv_heads, offset[own], **options)
        for own in (slice(0, split), slice(split, None))
    )
    return True, split, qo.numel(), first, second


def _fmha_sm100_plan(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    num_qo_heads: int,
    num_kv_heads: int = -1,
    qo_offset: int | Tensor | None = None,
    num_kv_splits: int = -1,
    page_size: int = -1,
    output_maxscore: bool = False,
    kv_block_num: int = -1,
    usable_SM_count: int = -1,
    causal: bool = True,
    sparse_kernel_mode: str = "auto",
    use_fp8_kvcache: bool = False,
    device: torch.device | str | int | None = None,
    stream: Any = None,
    *,
    block_size: int = TILE,
    max_kv_len: int | None = None,
    decode_backend: str = "auto",
    prefill_backend: str = "auto",
    kv_dtype: str | None = None,
    block_scale_shift: int = 3,
) -> dict[str, Any]:
    """Returns the plan itself, a dict.

    page_size:        keys of a page, 16 to 256; -1 where keys are packed.
    output_maxscore:  whether launches may return max scores.
    kv_block_num:     blocks that each query selects, 1 to 64; -1 for dense attention.
    causal:           False lets every query see all keys of its request.
    sparse_kernel_mode:  "decode" plans a row for each query token, "prefill" a row for each request, "auto" decides by the
                      longest request (32 queries).
    device:           where the plan's tensors lie. None takes the device of the lengths; for CPU lengths the current GPU if
                      this process uses one already, else the CPU. A launch runs where its queries lie, and a plan that lies
                      elsewhere is copied for it.
    block_size:       keys of a max-score tile (an addition); 128 as in the public package. Selections count pages: where pages
                      are smaller, score them with ``block_size=page_size``.
    max_kv_len:       a promise (an addition) that no request ever has more keys in launches of this plan, which makes their
                      scratch smaller. With None a request may fill the page table.
    num_kv_splits, usable_SM_count, use_fp8_kvcache, stream, decode_backend, prefill_backend, kv_dtype, block_scale_shift: taken
                      and not needed: kernels choose their splits and follow the types of the tensors.

    Its tensors, int32, ``rows`` being the requests or, in a sparse plan of short requests, the query tokens:
    ``qo_segment_lens`` and ``kv_segment_lens`` ``[rows]``, ``qo_segment_offsets`` and ``kv_segment_offsets`` ``[rows + 1]``,
    ``qo_offset`` ``[rows]``, and with pages ``kv_page_indptr`` ``[rows + 1]``, where each row's pages start in the flat page
    table. With pages ``kv_segment_offsets`` is not read. ``max_k_tiles`` is an int, -1 without max scores; a caller may change
    it. A sparse plan by requests ("MM-SA-Nv") also has what the public one has, for callers to read: ``cu_seqlens_q``,
    ``cu_seqlens_k`` (the offsets), ``seqused_k`` ``[rows]`` (the keys up to the last query), ``max_seqlen_q``,
    ``max_seqlen_k``, ``total_k``, ``total_rows`` (pages), ``batch``, ``blk_kv``, ``num_qo_heads``, ``qhead_per_kv`` and
    ``usable_SM_count``.
    """
    tracing.refuse_to_trace("fmha_sm100_plan")
    flags(output_maxscore=output_maxscore, causal=causal, use_fp8_kvcache=use_fp8_kvcache)
    for name, count in (("num_kv_splits", num_kv_splits), ("usable_SM_count", usable_SM_count)):
        checks.integer(name, count, -1)
    qo = _lengths("qo_segment_lens", qo_segment_lens, None)
    kv = _lengths("kv_segment_lens", kv_segment_lens, qo.numel())
    _check_numbers(num_qo_heads, num_kv_heads, page_size, kv_block_num, block_size, max_kv_len)
    if sparse_kernel_mode not in MODES:
        raise ValueError(f"sparse_kernel_mode must be one of {MODES}, got {sparse_kernel_mode!r}")
    longest_q, longest_kv = (int(x.max()) if x.numel() else 0 for x in (qo, kv))
    if max_kv_len is not None and longest_kv > max_kv_len:
        raise ValueError(f"kv_segment_lens must be at most max_kv_len ({max_kv_len}), got {longest_kv}")
    sparse = kv_block_num > 0
    prefill = sparse_kernel_mode == "prefill" or (sparse_kernel_mode == "auto" and longest_q > DECODE_QUERIES)
    by_token = sparse and page_size > 0 and not prefill
    offset = _offsets(qo_offset, qo, kv, causal)
    tensors = rows_of(qo, kv, offset, page_size, causal, by_token)
    tiles = -(-max(-(-longest_kv // block_size), 1) // TILE) * TILE if output_maxscore else -1
    by_request = sparse and prefill
    if by_request:
        tensors["seqused_k"] = (qo + offset if causal else kv).to(torch.int32)
    with torch.inference_mode(False):
        entries: dict[str, Any] = placed(tensors, device_of(device, qo_segment_lens, kv_segment_lens))
    if by_request:
        size = page_size if page_size > 0 else block_size
        entries |= {
            "cu_seqlens_q": entries["qo_segment_offsets"],
            "cu_seqlens_k": entries["kv_segment_offsets"],
            "max_seqlen_q": longest_q,
            "max_seqlen_k": longest_kv,
            "total_k": int(kv.sum()),
            "total_rows": int(((kv + size - 1) // size).sum()),
            "batch": qo.numel(),
            "blk_kv": size,
            "num_qo_heads": num_qo_heads,
            "qhead_per_kv": num_qo_heads // num_kv_heads if num_kv_heads > 0 else 1,
            "usable_SM_count": usable_SM_count,
        }
    return {
        **entries,
        "max_k_tiles": tiles,
        "max_qo_len": 1 if by_token else longest_q,
        "qo_len_uniform": by_token or bool((qo == longest_q).all()),
        "num_kv_splits": 1,
        "predicted_speedup": 1.0,
        "pack_factor": 1,
        "orig_num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "page_size": page_size,
        "kv_block_num": kv_block_num,
        "causal": causal,
        "block_size": block_size,
        "max_kv_len": max_kv_len,
        "total_q": int(qo.sum()),
        "batch_size": qo.numel(),
        "MM-SA-Nv": by_request,
        **dict.fromkeys(UNUSED),
    }


UNUSED = (
    *("packed_work_range", "packed_work_info", "kv_tile_begin_indices", "kv_tile_end_indices", "kv_split_indices"),
    *("workspace_o", "workspace_lse", "num_kv_splits_per_row", "cute_workspace_buffer"),
)
"""The public package keeps workspaces under these keys of a plan, or None where it needs none; here all are None."""


OPTIONS = inspect.signature(_fmha_sm100_plan).parameters.keys()


def _lengths(name: str, value: Any, batch: int | None) -> Tensor:
    """Checks lengths and returns them as int64 ``[batch]`` on the CPU."""
    checks.tensor(name, value, "[batch]", (torch.int32, torch.int64))
    if batch is not None:
        checks.size(name, value, 0, batch, "the batch of qo_segment_lens")
    lens = value.detach().to("cpu", torch.int64)
    value_checks.in_range(name, lens, 0, 2**31)
    return lens


def _check_numbers(
    num_qo_heads: int, num_kv_heads: int, page_size: int, kv_block_num: int, block_size: int, max_kv_len: int | None
) -> None:
    """Checks the heads and sizes that a plan is made for."""
    checks.integer("num_qo_heads", num_qo_heads, 1)
    for name, value in (("num_kv_heads", num_kv_heads), ("page_size", page_size), ("kv_block_num", kv_block_num)):
        checks.integer(name, value, -1)
    if num_kv_heads != -1:
        checks.integer("num_kv_heads", num_kv_heads, 1)
        checks.divides("num_kv_heads", num_kv_heads, "num_qo_heads", num_qo_heads)
    if page_size != -1:
        checks.integer("page_size", page_size, 16, 256)
    if kv_block_num != -1:
        checks.integer("kv_block_num", kv_block_num, 1, 64)
    checks.integer("block_size", block_size, 16, 256)
    if max_kv_len is not None:
        checks.integer("max_kv_len", max_kv_len, 0)


def _offsets(qo_offset: int | Tensor | None, qo: Tensor, kv: Tensor, causal: bool) -> Tensor:
    """Returns int64 ``[batch]``, the position of each request's first query."""
    if isinstance(qo_offset, Tensor):
        checks.tensor("qo_offset", qo_offset, "[batch]", (torch.int32, torch.int64))
        checks.size("qo_offset", qo_offset, 0, qo.numel(), "the batch of qo_segment_lens")
        offset = qo_offset.detach().to("cpu", torch.int64)
        value_checks.in_range("qo_offset", offset, -(2**31), 2**31)
    elif qo_offset is not None:
        checks.integer("qo_offset", qo_offset, -(2**31), 2**31 - 1)
        offset = torch.full_like(qo, qo_offset)
    else:
        offset = kv - qo
    return offset if causal else torch.full_like(qo, EVERYTHING)
