# SPDX-License-Identifier: MIT
"""The public functions are operators of `torch.library` in the graphs of `torch.compile` and `torch.export`.

Each function here has the parameters of the public function of the same name and returns its results as empty tensors, or the
buffers that the caller gave.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.operators import Operator
from openmsa.operators.results import empty

FP8 = torch.float8_e4m3fn


def _attention(q: Tensor, out: Tensor | None) -> Tensor:
    """Returns the buffer of the output, a new one where the caller gave none."""
    return empty(q, tuple(q.shape), torch.bfloat16 if q.dtype == FP8 else q.dtype) if out is None else out


def _lse(q: Tensor, lse: Tensor | None = None) -> Tensor:
    """Returns the buffer of the lse, a new one where the caller gave none."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty(q, tuple(q.shape[:2]), wide) if lse is None else lse


def run_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    plan_info: Any,
    kv_indices: Tensor | None = None,
    kv_block_indexes: Tensor | None = None,
    q_offset_override: Any = None,
    out: Tensor | None = None,
    max_score: Tensor | None = None,
    *,
    lse: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor | None, ...]:
    """Returns out, max scores and, where it is asked for, lse. plan_info: one plan, or what `fmha_sm100_plan` returned."""
    wants_out, wants_score, wants_lse = _wanted(plan_info, kv_block_indexes, lse, settings)
    found = _attention(q, out) if wants_out else None
    score = max_score
    if wants_score and max_score is None:
        score = empty(q, (q.shape[1], _tiles(plan_info), q.shape[0]), torch.float32)
    results = found, score if wants_score else None
    return (*results, _lse(q, lse)) if wants_lse else results


def _tiles(plan: Any) -> int:
    """Returns how many tiles the max scores have."""
    if isinstance(plan, dict):
        return plan["max_k_tiles"]
    return max(_tiles(x) for x in plan[3:] if x is not None)


def _wanted(plan: Any, blocks: Any, lse: Any, settings: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Says whether out, max scores and lse are results."""
    score = _tiles(plan) > 0 and blocks is None and settings.get("output_maxscore", True)
    return settings.get("output_o", True), score, settings.get("return_lse", False) or lse is not None


def _in_places(found: list[Tensor], arguments: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Returns out, max scores and lse, None for those of the first two that are not asked for."""
    plan, blocks, lse = arguments["plan_info"], arguments.get("kv_block_indexes"), arguments.get("lse")
    wants_out, wants_score, wants_lse = _wanted(plan, blocks, lse, arguments)
    results = found[0] if wants_out else None, found[1 if wants_out else 0] if wants_score else None
    return (*results, found[-1]) if wants_lse else results


def sparse_topk_select(
    max_score: Tensor,
    topk: int,
    num_valid_pages: Any = None,
    output: Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    max_score_layout: str = "HKT",
) -> Tensor:
    """Returns int32 ``[total_q, heads, topk]``."""
    total_q, heads = (2, 0) if max_score_layout == "HKT" else (0, 1)
    shape = max_score.shape[total_q], max_score.shape[heads], topk
    return empty(max_score, shape, torch.int32) if output is None else output


def sparse_atten_func(
    q: Tensor,
    *given: Any,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    return_temperature_lse: bool = False,
    **settings: Any,
) -> tuple[Tensor, ...]:
    """Returns out and, where they are asked for, lse and temperature lse."""
    return _attention(q, out), *(_lse(q) for wanted in (return_softmax_lse, return_temperature_lse) if wanted)


def sparse_decode_atten_func(
    q: Tensor,
    *given: Any,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_softmax_lse: bool = False,
    **settings: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns out and, where it is asked for, lse."""
    return (_attention(q, out), _lse(q, lse)) if return_softmax_lse else _attention(q, out)


def build_k2q_csr(
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    kv_block_size: int,
    *,
    total_k: int | None = None,
    max_seqlen_k: int | None = None,
    total_rows: int | None = None,
    return_schedule: bool = False,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Returns int32 ``[num_kv_heads, total_rows + 1]`` and ``[num_kv_heads, total_q * topk]``."""
    if return_schedule:
        raise NotImplementedError("return_schedule must be False in a traced graph, which holds tensors alone, got True")
    heads, total_q, topk = q2k_indices.shape
    entries = total_q * topk
    if total_rows is None and q2k_indices.device.type == "cpu":
        ends: Any = torch.library.get_ctx().new_dynamic_size(min=1)
    elif total_rows is None:
        batch = cu_seqlens_q.shape[0] - 1
        bounds = [batch * -(-max_seqlen_k // kv_block_size)] if max_seqlen_k is not None else []
        bounds += [(total_k + batch * (kv_block_size - 1)) // kv_block_size] if total_k else []
        ends = min(bounds) + 1
    else:
        ends = total_rows + 1
    return empty(q2k_indices, (heads, ends), torch.int32), empty(q2k_indices, (heads, entries), torch.int32)


def fp4_indexer_block_scores(q_fp4: Tensor, *given: Any, max_seqlen_k: int, **settings: Any) -> Tensor:
    """Returns float32 ``[num_q_heads, ceil(max_seqlen_k / 128), total_q]``."""
    return empty(q_fp4, (q_fp4.shape[1], -(-max_seqlen_k // 128), q_fp4.shape[0]), torch.float32)


API, SPARSE = "fmha_sm100.api", "fmha_sm100.sparse"
for _name in ("fmha_sm100", "run_plan"):
    Operator(f"fmha_sm100::{_name}", run_plan, writes=("out", "max_score", "lse"), restore=_in_places, home=API)
Operator("fmha_sm100::sparse_topk_select", sparse_topk_select, writes=("output",), gradients=False, home=API)
for _name in ("sparse_atten_func", "sparse_atten_nvfp4_kv_func"):
    Operator(f"fmha_sm100::{_name}", sparse_atten_func, writes=("out",), ignores=("schedule",), home=SPARSE)
Operator(
    "fmha_sm100::sparse_decode_atten_func",
    sparse_decode_atten_func,
    writes=("out", "lse"),
    ignores=("schedule", "O_partial", "LSE_partial"),
    home=SPARSE,
)
Operator("fmha_sm100::build_k2q_csr", build_k2q_csr, gradients=False, home=SPARSE)
Operator("fmha_sm100::fp4_indexer_block_scores", fp4_indexer_block_scores, gradients=False, home=SPARSE)
