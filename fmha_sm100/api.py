# SPDX-License-Identifier: MIT
"""`fmha_sm100` computes attention and max scores of a planned batch; `sparse_topk_select` selects blocks by max scores."""

from __future__ import annotations

from openmsa.runtime import torch_version  # isort: skip # noqa: F401 - it says in a sentence where PyTorch is missing or old
import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from fmha_sm100 import call_checks
from fmha_sm100.call import Call, checked_half, halves
from fmha_sm100.operands import FP8, QUERIES, Scale, check_out, check_results, flags, place, valid_tiles
from fmha_sm100.plan import _fmha_sm100_plan, fmha_sm100_plan
from fmha_sm100.plan_rows import Plan, offsets, on_device
from fmha_sm100.sparse_fmha_adapter import sparse_fmha, sparse_fmha_plan
from openmsa import E4M3, select_blocks_from_scores
from openmsa.runtime import checks, dispatch
from openmsa.types import wide_dtype

__all__ = [
    "_fmha_sm100",
    "_fmha_sm100_plan",
    "fmha_sm100",
    "fmha_sm100_plan",
    "sparse_fmha",
    "sparse_fmha_plan",
    "sparse_topk_select",
]

Results = tuple[Tensor | None, ...]
LAYOUTS = {"HKT": (0, 2, 1), "THK": (1, 0, 2)}
"""For each layout, this says where heads, queries and tiles stand among the dimensions of a max-score tensor."""


@dispatch.operator("fmha_sm100::fmha_sm100")
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
    """Computes attention and max scores of a batch that `fmha_sm100_plan` described.

    q:                 ``[total_q, num_qo_heads, head_dim]``, bfloat16 or float8_e4m3fn, float16 too and on a CPU any float.
    k, v:              packed ``[total_kv, num_kv_heads, head_dim]``, or pools ``[num_pages, num_kv_heads, page_size,
                       head_dim]``; any strides: halves of one cache, permuted views. v may be None for scores alone. uint8:
                       the K and V slots of vLLM's NVFP4 cache (`fmha_sm100.nvfp4_kv`), k_scale and v_scale its global scales.
    plan_info:         what `fmha_sm100_plan` returned. Its tensors are read on the device when the launch runs.
    kv_indices:        int32, for pools: the page table, flat, request b (or row, see the plan) starting at
                       ``kv_page_indptr[b]``; or ``[batch or rows, max_pages]``.
    kv_block_indexes:  int32 ``[total_q, heads, kv_block_num]`` with num_kv_heads, num_qo_heads or 1 heads: pages within the
                       request (packed keys: blocks of the plan's block_size), in any order, distinct, -1 anywhere.
    q_offset_override: int, ``[batch]`` or ``[rows]``, instead of the plan's ``qo_offset``.
    out:               where to write, ``[total_q, num_qo_heads, head_dim]``, any strides.
    max_score:         where to write scores, float32 ``[num_qo_heads, max_k_tiles, total_q]`` or ``[total_q, num_qo_heads,
                       max_k_tiles]``, any strides. Entries of tiles that a query does not see are left, or become -inf: fill
                       it with -inf once.
    sm_scale:          the softmax scale; None stands for ``head_dim ** -0.5``.
    q_scale, k_scale, v_scale, o_scale:  numbers; None stands for 1. The logits are ``q . k * sm_scale * q_scale * k_scale``,
                       and out is multiplied by ``v_scale * o_scale``. With float8 keys k_scale and v_scale may be float32
                       tensors of one element, read on the device (then without max scores).
    output_maxscore, output_o:  which results to compute.
    check_input_valid: whether to read the values too (lengths, page and block ids, NaN in q) and raise ValueError naming a
                       bad one; on a CPU lengths and pages are always checked.
    return_lse, lse:   (an addition) also return float32 ``[total_q, num_qo_heads]``, the natural logarithm of the softmax
                       denominator, in the given buffer or a new one.

    Returns ``(out or None, max_score or None)``, with `return_lse` or `lse` a third item. out has q's dtype, bfloat16 for
    float8 queries. max_score holds, for each tile of 128 keys (the plan's block_size), the largest raw dot product with a
    visible key, without any scale; -inf elsewhere in a new buffer. Without ``max_k_tiles`` in the plan, and with
    kv_block_indexes, it is None. A query with nothing to read gives 0 and lse -inf.

    Names, order, defaults, shapes and results are those of the public function. Beyond it, this one runs on any device and
    takes requests in any order, pages of 16 to 256 keys and head dims from 16 to 256. It honours every scale on every path,
    lets the kernels write into `out` (contiguous and apart from the inputs; others are copied to) and `max_score`, in mixed
    batches too, returns the lse, gives no NaN rows, and takes selections in any order, a separate one for each query head where
    they have num_qo_heads. Launches can be captured in a CUDA graph, wait for nothing and share nothing. What cannot be
    computed (``output_o=False`` or `max_score` with a plan without max scores) raises instead of being dropped. Wrong arguments
    raise ValueError or TypeError.
    """
    if unknown := kwargs.keys() - OPTIONS:
        raise TypeError(f"fmha_sm100() got an unexpected keyword argument {min(unknown)!r}")
    if not isinstance(plan_info, tuple) or len(plan_info) != 5 or not isinstance(plan_info[3], dict):
        raise TypeError(f"plan_info must be what fmha_sm100_plan returned, got {type(plan_info).__name__}")
    mixed, _, batch, first, second = plan_info
    if not mixed:
        return _fmha_sm100(q, k, v, first, kv_indices, kv_block_indexes, q_offset_override, out, max_score, **kwargs)
    for plan in (first, second):
        call_checks.check_plan_info(plan, "fmha_sm100_plan")
    wanted = {"output_maxscore": True, "output_o": True, "return_lse": False, "lse": None} | kwargs
    output_o, lse = wanted["output_o"], wanted["lse"]
    checks.tensor("q", q, "[total_q, num_qo_heads, head_dim]", QUERIES)
    whole = {**first, "max_k_tiles": max(first["max_k_tiles"], second["max_k_tiles"])}
    asked = wanted["output_maxscore"], output_o
    scores = call_checks.score_buffer(q, whole, kv_block_indexes, max_score, *asked)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    check_results(q, dtype, out, lse, max_score)
    if lse is None and wanted["return_lse"]:
        lse = torch.empty(q.shape[:2], dtype=wide_dtype(q), device=q.device)
    target = out  # The second half reads its operands when the first half's results are written.
    if output_o and place(out, q, k, v, kv_block_indexes) is None:
        target = torch.empty(q.shape, dtype=dtype, device=q.device)
    places = [target, lse, None if scores is None else scores.transpose(1, 2)]
    parts = halves((first, second), batch, q, kv_indices, kv_block_indexes, q_offset_override, places)
    shared = {"k": k, "v": v, **{name: x for name, x in kwargs.items() if name != "lse"}}
    calls = [checked_half(checked, n, {**part, **shared}) for n, part in enumerate(parts)]
    for call in calls:
        call.results()
    if out is not None and target is not None and out is not target:
        target = out.copy_(target)
    found = target if output_o else None, places[2] if max_score is None or scores is None else max_score
    return found if lse is None else (*found, lse)


def checked(
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
) -> Call:
    """Checks the arguments of `_fmha_sm100` and returns what is to be computed."""
    call_checks.check_plan_info(plan_info)
    flags(output_maxscore=output_maxscore, output_o=output_o, check_input_valid=check_input_valid, return_lse=return_lse)
    if v is None and not output_o and not return_lse and lse is None:
        v = k
    rows = call_checks.operands(q, k, v, q_scale, k_scale, v_scale)  # type: ignore[arg-type]
    plan: Plan = plan_info  # type: ignore[assignment]
    call_checks.check_plan(q, k, plan, kv_indices, kv_block_indexes, q_offset_override)
    scores = call_checks.score_buffer(q, plan, kv_block_indexes, max_score, output_maxscore, output_o)
    out_dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    check_results(q, out_dtype, out, lse, max_score)
    if scores is not None and any(isinstance(x, E4M3) and x.scale is not None for x in (rows.q, rows.k)):
        raise ValueError("q_scale and k_scale must be numbers where max scores are asked for (those are raw), got a tensor")
    scale = q.shape[2] ** -0.5 if sm_scale is None else checks.scale("sm_scale", sm_scale)
    plan = on_device(plan, q.device)
    call = Call(
        q=rows.q,
        k=rows.k,
        v=rows.v,
        plan=plan,
        offset=offsets(plan, q_offset_override),
        kv_indices=kv_indices,
        blocks=kv_block_indexes,
        softmax_scale=scale * rows.logit_factor,
        out_scale=rows.out_factor * (1.0 if o_scale is None else checks.scale("o_scale", o_scale)),
        out=out if output_o else None,
        lse=lse,
        max_score=scores,
        given_score=max_score,
        wants_out=output_o,
        wants_lse=return_lse or lse is not None,
    )
    if check_input_valid:
        call_checks.check_values(call)
    elif q.device.type == "cpu":
        call_checks.check_key_values(call)
    return call


OPTIONS = inspect.signature(checked).parameters.keys()
checked.__qualname__ = "_fmha_sm100"  # Errors of Python about its arguments name what was called.


@dispatch.operator("fmha_sm100::run_plan")
@functools.wraps(checked, assigned=())  # its arguments are those of `checked`
def _fmha_sm100(*args: Any, **kwargs: Any) -> Results:
    """Does what `fmha_sm100` does, for the dict that `_fmha_sm100_plan` returns."""
    return checked(*args, **kwargs).results()


@dispatch.operator("fmha_sm100::sparse_topk_select")
def sparse_topk_select(
    max_score: Tensor,
    topk: int,
    num_valid_pages: int | Tensor | None = None,
    output: Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    max_score_layout: str = "HKT",
) -> Tensor:
    """Selects the `topk` tiles of the highest score for each query and head.

    max_score:        float32 ``[heads, max_k_tiles, total_q]`` ("HKT") or ``[total_q, heads, max_k_tiles]`` ("THK"); any
                      strides.
    topk:             1 to 64.
    num_valid_pages:  leading tiles that may be selected: an int for all queries, int32 or int64 ``[total_q]``, or None: all.
    output:           int32 ``[total_q, heads, topk]`` to write into, any strides.
    force_begin_blocks, force_end_blocks:  so many first and last of the valid tiles are always selected, within topk.

    Returns int32 ``[total_q, heads, topk]``, `output` if given: tile numbers, ascending, then -1. Equal scores: the lower
    number wins. A tile whose score is -inf or NaN is selected only where it is forced, so that no query of a mixed batch is
    given a tile that it cannot see.

    Names, order, defaults, shapes, the order of the result and forced tiles are those of the public function. Beyond it, this
    one takes topk from 1 to 64, both layouts with any strides and num_valid_pages for each query, decides ties, needs no
    workspace and runs on any device.
    """
    checks.tensor("max_score", max_score, "[heads, max_k_tiles, total_q]", (torch.float32,))
    checks.integer("topk", topk, 1, 64)
    if max_score_layout not in LAYOUTS:
        raise ValueError(f"max_score_layout must be 'HKT' or 'THK', got {max_score_layout!r}")
    scores = max_score.permute(LAYOUTS[max_score_layout])  # [heads, total_q, max_k_tiles]
    heads, total_q, tiles = scores.shape
    for name, count in (("force_begin_blocks", force_begin_blocks), ("force_end_blocks", force_end_blocks)):
        checks.integer(name, count, 0)
    if force_begin_blocks + force_end_blocks > topk:
        raise ValueError(
            f"force_begin_blocks + force_end_blocks must be at most topk ({topk}), "
            f"got {force_begin_blocks} + {force_end_blocks}"
        )
    if output is not None:
        check_out("output", output, (total_q, heads, topk), torch.int32, max_score.device)
    visible = valid_tiles(num_valid_pages, total_q, tiles, max_score.device)
    if tiles == 0:
        blocks = torch.full((total_q, heads, topk), -1, dtype=torch.int32, device=max_score.device)
    else:
        blocks = select_blocks_from_scores(
            scores,
            topk,
            init_blocks=force_begin_blocks,
            local_blocks=force_end_blocks,
            visible_blocks=visible,
        )
    return blocks if output is None else output.copy_(blocks)
