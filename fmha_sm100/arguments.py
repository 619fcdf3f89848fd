# SPDX-License-Identifier: MIT
"""The arguments of `fmha_sm100`: operands as `openmsa` takes them, and checks against the plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha_sm100.nvfp4 import nvfp4_operand
from fmha_sm100.nvfp4_kv import nvfp4_head_slot_views
from fmha_sm100.operands import FP8, Rows, Scale, check_operands, stored
from openmsa import E4M3
from openmsa.runtime import checks


def operand_rows(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Scale, k_scale: Scale, v_scale: Scale
) -> tuple[Tensor | E4M3, Rows, Rows, float, float]:
    """q, k and v with the scales that they hold themselves, then the factors that remain for the logits and the output."""
    paged = isinstance(k, Tensor) and k.dim() == 4
    if paged and k.dtype == torch.uint8:
        k_codes, k_scales, v_codes, v_scales = nvfp4_head_slot_views(k, v)
        check_operands(q, k_codes, v_codes, "head_dim // 2", True, (torch.uint8,))
        k_rows: Rows = nvfp4_operand("k", k_codes, k_scales, k_scale, "vllm")
        v_rows: Rows = nvfp4_operand("v", v_codes, v_scales, v_scale, "vllm")
        k_factor = v_factor = 1.0
    else:
        check_operands(q, k, v, "head_dim", paged, (*checks.FLOATS, FP8))
        if FP8 not in (q.dtype, k.dtype):
            checks.alike("k", k, "q", q)
        (k_rows, k_factor), (v_rows, v_factor) = stored("k", k, k_scale), stored("v", v, v_scale)
    q_rows, q_factor = stored("q", q, q_scale)
    return q_rows, k_rows, v_rows, q_factor * k_factor, v_factor


def check_plan(
    q: Tensor,
    k: Tensor,
    plan: dict[str, Any],
    kv_indices: Tensor | None,
    blocks: Tensor | None,
    override: int | Tensor | None,
) -> None:
    """The call must fit what was planned."""
    _check_entries(plan)
    checks.size("q", q, 0, plan["total_q"], "the queries of the plan")
    checks.size("q", q, 1, plan["orig_num_qo_heads"], "num_qo_heads of the plan")
    if plan["num_kv_heads"] != -1:
        checks.size("k", k, 1, plan["num_kv_heads"], "num_kv_heads of the plan")
    if (kv_indices is not None) != (k.dim() == 4):
        raise ValueError(f"kv_indices must be given with paged k and v and only then, got k of shape {tuple(k.shape)}")
    if kv_indices is not None:
        if not isinstance(kv_indices, Tensor) or kv_indices.dtype != torch.int32:
            raise TypeError(
                f"kv_indices must be an int32 tensor, got {getattr(kv_indices, 'dtype', type(kv_indices).__name__)}"
            )
        checks.alike("kv_indices", kv_indices, "q", q, dtype=False)
        tables = sorted({plan["batch_size"], plan["kv_segment_lens"].numel()})
        if kv_indices.dim() != 1 and (kv_indices.dim() != 2 or kv_indices.shape[0] not in tables):
            raise ValueError(
                f"kv_indices must be flat or [{' or '.join(map(str, tables))}, pages], got {tuple(kv_indices.shape)}"
            )
        if plan["page_size"] != k.shape[2]:
            raise ValueError(f"k.shape[2] must be the page_size of the plan ({plan['page_size']}), got {k.shape[2]}")
    elif plan["page_size"] != -1:
        raise ValueError(f"kv_indices must be given where the plan has a page_size ({plan['page_size']}), got None")
    _check_blocks(q, k, plan, blocks)
    if isinstance(override, Tensor):
        checks.tensor("q_offset_override", override, "[batch]", (torch.int32, torch.int64))
        checks.alike("q_offset_override", override, "q", q, dtype=False)
        if override.numel() not in (plan["batch_size"], plan["qo_offset"].numel()):
            raise ValueError(f"q_offset_override must have {plan['batch_size']} entries (batch), got {override.numel()}")
    elif override is not None:
        checks.integer("q_offset_override", override, -(2**31), 2**31 - 1)


def _check_entries(plan: dict[str, Any]) -> None:
    """Callers replace the plan's tensors by buffers of their own."""
    rows = plan["batch_size"] if plan["row_index"] is None else plan["total_q"]
    names = ("qo_offset", "kv_segment_lens", "qo_segment_offsets", "kv_segment_offsets", "kv_page_indptr")
    for name in names if plan["page_size"] > 0 else names[:-1]:
        ends = name not in names[:2]
        checks.tensor(f"plan_info[{name!r}]", plan[name], "[rows + 1]" if ends else "[rows]", (torch.int32,))
        checks.size(f"plan_info[{name!r}]", plan[name], 0, rows + ends, f"{rows} rows of the plan")
        if not plan[name].is_contiguous():
            raise ValueError(f"plan_info[{name!r}] must be contiguous, got strides {plan[name].stride()}")
    checks.integer("plan_info['max_k_tiles']", plan["max_k_tiles"], -(2**31))


def _check_blocks(q: Tensor, k: Tensor, plan: dict[str, Any], blocks: Tensor | None) -> None:
    if blocks is None:
        if plan["kv_block_num"] != -1:
            raise ValueError(f"kv_block_indexes must be given: the plan has kv_block_num={plan['kv_block_num']}, got None")
        return
    checks.tensor("kv_block_indexes", blocks, "[total_q, num_kv_heads, kv_block_num]", (torch.int32,))
    checks.alike("kv_block_indexes", blocks, "q", q, dtype=False)
    checks.size("kv_block_indexes", blocks, 0, q.shape[0], "a row for each query")
    if blocks.shape[1] not in (1, k.shape[1], q.shape[1]):
        raise ValueError(
            f"kv_block_indexes.shape[1] must be num_kv_heads ({k.shape[1]}), num_qo_heads ({q.shape[1]}) or 1, "
            f"got {blocks.shape[1]}"
        )
    checks.integer("kv_block_indexes.shape[2]", blocks.shape[2], 1, 64)
    if plan["kv_block_num"] not in (-1, blocks.shape[2]):
        raise ValueError(
            f"kv_block_indexes.shape[2] must be kv_block_num of the plan ({plan['kv_block_num']}), got {blocks.shape[2]}"
        )


def score_buffer(
    q: Tensor, plan: dict[str, Any], blocks: Tensor | None, given: Tensor | None, output_maxscore: bool, output_o: bool
) -> Tensor | None:
    """The caller's buffer or a new one as ``[num_qo_heads, total_q, max_k_tiles]``; None where no scores are asked for."""
    if not (output_o or output_maxscore):
        raise ValueError("output_o or output_maxscore must be True, got False for both")
    heads, total_q, tiles = q.shape[1], q.shape[0], plan["max_k_tiles"]
    if blocks is not None and not output_o:
        raise ValueError("output_o must be True with kv_block_indexes, got False")
    possible = tiles > 0 and blocks is None
    if not possible and output_maxscore and (given is not None or not output_o):
        name = "output_o=False" if given is None else "max_score"
        raise ValueError(f"{name} needs a plan with output_maxscore=True and no kv_block_indexes, got max_k_tiles={tiles}")
    if not possible or not output_maxscore:
        return None
    if given is None:
        return torch.full((heads, tiles, total_q), -torch.inf, dtype=torch.float32, device=q.device).transpose(1, 2)
    checks.tensor("max_score", given, "[num_qo_heads, max_k_tiles, total_q]", (torch.float32,))
    checks.alike("max_score", given, "q", q, dtype=False)
    if tuple(given.shape) == (heads, tiles, total_q):
        return given.transpose(1, 2)
    if tuple(given.shape) == (total_q, heads, tiles):
        return given.transpose(0, 1)
    raise ValueError(
        f"max_score must have shape {(heads, tiles, total_q)} or {(total_q, heads, tiles)}, got {tuple(given.shape)}"
    )
