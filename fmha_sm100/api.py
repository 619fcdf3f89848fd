# SPDX-License-Identifier: MIT
"""`fmha_sm100`: dense attention, max scores and attention over selected blocks of a planned batch, over `openmsa`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha_sm100 import launch, values
from fmha_sm100.arguments import check_plan, operand_rows, score_buffer
from fmha_sm100.launch import Call
from fmha_sm100.operands import FP8, Scale, check_out, flags
from fmha_sm100.plan import _fmha_sm100_plan, fmha_sm100_plan
from fmha_sm100.rows import offsets, on_device
from fmha_sm100.topk import sparse_topk_select
from openmsa import E4M3
from openmsa.runtime import checks

__all__ = ["_fmha_sm100", "_fmha_sm100_plan", "fmha_sm100", "fmha_sm100_plan", "sparse_topk_select"]

Results = tuple[Tensor | None, Tensor | None] | tuple[Tensor | None, Tensor | None, Tensor | None]
PLAN_KEYS = (
    "qo_segment_offsets",
    "kv_segment_lens",
    "kv_segment_offsets",
    "qo_offset",
    "max_k_tiles",
    "max_qo_len",
    "row_index",
)


def fmha_sm100(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    plan_info: tuple[Any, ...],
    kv_indices: Tensor | None = None,
    kv_block_indexes: Tensor | None = None,
    q_offset_override: int | Tensor | None = None,
    out: Tensor | None = None,
    max_score: Tensor | None = None,
    **kwargs: Any,
) -> Results:
    """Attention and max scores of a batch planned by `fmha_sm100_plan`.

    q:                 ``[total_q, num_qo_heads, head_dim]``, bfloat16 or float8_e4m3fn, float16 too and on a CPU any float.
    k, v:              packed ``[total_kv, num_kv_heads, head_dim]``, or pools ``[num_pages, num_kv_heads, page_size,
                       head_dim]``; any strides: halves of one cache, permuted views. v may be None for scores alone. uint8:
                       the K and V slots of vLLM's NVFP4 cache (`fmha_sm100.nvfp4_kv`), k_scale and v_scale its global scales.
    plan_info:         of `fmha_sm100_plan`. Its tensors are read on the device when the launch runs.
    kv_indices:        int32, for pools: the page table, flat, request b (or row, see the plan) starting at
                       ``kv_page_indptr[b]``; or ``[batch or rows, max_pages]``.
    kv_block_indexes:  int32 ``[total_q, heads, kv_block_num]`` with num_kv_heads, num_qo_heads or 1 heads: pages within the
                       request (packed keys: blocks of the plan's block_size), in any order, distinct, -1 anywhere.
    q_offset_override: int, ``[batch]`` or ``[rows]``, instead of the plan's ``qo_offset``.
    out:               where to write, ``[total_q, num_qo_heads, head_dim]``, any strides.
    max_score:         where to write scores, float32 ``[num_qo_heads, max_k_tiles, total_q]`` or ``[total_q, num_qo_heads,
                       max_k_tiles]``, any strides. Only tiles that a query sees are written: fill it with -inf once.
    sm_scale:          None: ``head_dim ** -0.5``.
    q_scale, k_scale, v_scale, o_scale:  numbers, None: 1. The logits are ``q . k * sm_scale * q_scale * k_scale``, out is
                       multiplied by ``v_scale * o_scale``. With float8 keys k_scale and v_scale may be float32 tensors of one
                       element, read on the device (then without max scores).
    output_maxscore, output_o:  which results to compute.
    check_input_valid: also read the values (lengths, page and block ids, NaN in q) and raise ValueError naming a bad one; on
                       a CPU lengths and pages are always checked.
    return_lse, lse:   (ours) also return float32 ``[total_q, num_qo_heads]``, the natural logarithm of the softmax
                       denominator, in the given buffer or a new one.

    Returns ``(out or None, max_score or None)``, with `return_lse` or `lse` a third item. out has q's dtype, bfloat16 for
    float8 queries. max_score holds, for each tile of 128 keys (the plan's block_size), the largest raw dot product with a
    visible key, without any scale; -inf elsewhere in a new buffer. Without ``max_k_tiles`` in the plan, and with
    kv_block_indexes, it is None. A query with nothing to read gives 0 and lse -inf.

    The same as the public function: names, order, defaults, shapes, results. Better: any device; requests in any order; page
    sizes 16 to 256; head dims 16 to 256; every scale honoured on every path; `out` and `max_score` really used, in mixed
    batches too; LSE; no NaN rows; selections in any order, and really one a query head where they have num_qo_heads; launches
    can be captured in a CUDA graph, wait for nothing and share nothing. What cannot be computed raises instead of being
    dropped: ``output_o=False`` or `max_score` with a plan without max scores. Wrong arguments raise ValueError or TypeError.
    """
    if not isinstance(plan_info, tuple) or len(plan_info) != 5 or not isinstance(plan_info[3], dict) or plan_info[0]:
        raise TypeError(f"plan_info must be what fmha_sm100_plan returned, got {type(plan_info).__name__}")
    return _fmha_sm100(q, k, v, plan_info[3], kv_indices, kv_block_indexes, q_offset_override, out, max_score, **kwargs)


def _fmha_sm100(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    plan_info: dict[str, Any],
    kv_indices: Tensor | None = None,
    kv_block_indexes: Tensor | None = None,
    q_offset_override: int | Tensor | None = None,
    out: Tensor | None = None,
    max_score: Tensor | None = None,
    sm_scale: float | None = None,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    o_scale: float | None = None,
    output_maxscore: bool = True,
    output_o: bool = True,
    check_input_valid: bool = False,
    *,
    return_lse: bool = False,
    lse: Tensor | None = None,
) -> Results:
    """`fmha_sm100` for the dict of `_fmha_sm100_plan`."""
    if not isinstance(plan_info, dict) or any(key not in plan_info for key in PLAN_KEYS):
        raise TypeError(f"plan_info must be what _fmha_sm100_plan returned, got {type(plan_info).__name__}")
    flags(output_maxscore=output_maxscore, output_o=output_o, check_input_valid=check_input_valid, return_lse=return_lse)
    if v is None and not output_o and not return_lse and lse is None:
        v = k
    q_rows, k_rows, v_rows, factor, v_factor = operand_rows(q, k, v, q_scale, k_scale, v_scale)  # type: ignore[arg-type]
    check_plan(q, k, plan_info, kv_indices, kv_block_indexes, q_offset_override)
    scores = score_buffer(q, plan_info, kv_block_indexes, max_score, output_maxscore, output_o)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    if out is not None:
        check_out("out", out, tuple(q.shape), out_dtype, q.device)
    if lse is not None:
        check_out("lse", lse, tuple(q.shape[:2]), wide, q.device)
    if scores is not None and any(isinstance(x, E4M3) and x.scale is not None for x in (q_rows, k_rows)):
        raise ValueError("q_scale and k_scale must be numbers where max scores are asked for (those are raw), got a tensor")
    scale = q.shape[2] ** -0.5 if sm_scale is None else checks.scale("sm_scale", sm_scale)
    plan = on_device(plan_info, q.device)
    call = Call(
        q=q_rows,
        k=k_rows,
        v=v_rows,
        plan=plan,
        offset=offsets(plan, q_offset_override),
        kv_indices=kv_indices,
        blocks=kv_block_indexes,
        softmax_scale=scale * factor,
        out_scale=v_factor * (1.0 if o_scale is None else checks.scale("o_scale", o_scale)),
        out=out if output_o else None,
        lse=lse,
        max_score=scores,
        wants_out=output_o,
        wants_lse=return_lse or lse is not None,
    )
    if check_input_valid:
        values.check(call)
    elif q.device.type == "cpu":
        values.check_keys(call)
    found = _run(call, out_dtype)
    if scores is None:
        max_score = None
    elif max_score is None:
        max_score = scores.transpose(1, 2)  # [num_qo_heads, max_k_tiles, total_q]
    return (found[0], max_score, found[1]) if call.wants_lse else (found[0], max_score)


def _run(call: Call, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """out and lse."""
    if call.q.numel() == 0 or call.k.numel() == 0:
        return launch.nothing(call, dtype)
    if call.blocks is not None:
        return launch.attend_blocks(call)
    if call.wants_out or call.wants_lse:
        return launch.attend_densely(call)
    launch.score(call)
    return None, None
