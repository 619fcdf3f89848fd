# SPDX-License-Identifier: MIT
"""Checks a call of `fmha_sm100`: its operands, how they fit the plan, and on request the values in its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha_sm100.call import Call
from fmha_sm100.nvfp4_kv import nvfp4_head_slot_views, nvfp4_operand
from fmha_sm100.operands import FP8, Operands, Scale, check_operands, stored
from fmha_sm100.plan_rows import Plan, first_pages
from openmsa.kv_cache.rows import check_values as check_finite
from openmsa.runtime import checks, value_checks

PLAN_KEYS = frozenset(Plan.__annotations__)
"""A dict with these entries counts as a plan."""

NUMBERS = (
    *("max_k_tiles", "max_qo_len", "total_q", "batch_size", "orig_num_qo_heads", "num_kv_heads", "page_size", "kv_block_num"),
    "block_size",
)
"""These entries are ints."""


def check_plan_info(plan: Any, source: str = "_fmha_sm100_plan") -> None:
    """Checks that a plan is a dict with the entries that a launch reads."""
    if not isinstance(plan, dict):
        raise TypeError(f"plan_info must be what {source} returned, got {type(plan).__name__}")
    if not plan.keys() >= PLAN_KEYS:
        missing = ", ".join(sorted(PLAN_KEYS - plan.keys()))
        raise ValueError(f"plan_info must be what {source} returned, got a dict without {missing}")


def operands(q: Tensor, k: Tensor, v: Tensor, q_scale: Scale, k_scale: Scale, v_scale: Scale) -> Operands:
    """Checks shapes and dtypes and returns q, k and v in their formats; uint8 pools are the slots of vLLM's NVFP4 cache."""
    paged = isinstance(k, Tensor) and k.dim() == 4
    if not paged or k.dtype != torch.uint8:
        check_operands(q, k, v, "head_dim", paged, (*checks.FLOATS, FP8))
        if FP8 not in (q.dtype, k.dtype):
            checks.alike("k", k, "q", q)
        return Operands.of(q, k, v, q_scale, k_scale, v_scale)
    k_codes, k_scales, v_codes, v_scales = nvfp4_head_slot_views(k, v)
    check_operands(q, k_codes, v_codes, "head_dim // 2", True, (torch.uint8,))
    keys = nvfp4_operand("k", k_codes, k_scales, k_scale, "vllm")
    values = nvfp4_operand("v", v_codes, v_scales, v_scale, "vllm")
    query, factor = stored("q", q, q_scale)
    return Operands(query, keys, values, factor, 1.0)


def check_plan(
    q: Tensor,
    k: Tensor,
    plan: Plan,
    kv_indices: Tensor | None,
    blocks: Tensor | None,
    override: int | Tensor | None,
) -> None:
    """Checks that the tensors of a call have the sizes that its plan was made for."""
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
        tables = {plan["batch_size"], plan["kv_segment_lens"].numel()}
        if kv_indices.dim() != 1 and (kv_indices.dim() != 2 or kv_indices.shape[0] not in tables):
            raise ValueError(
                f"kv_indices must be flat or [{' or '.join(map(str, sorted(tables)))}, pages], got {tuple(kv_indices.shape)}"
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


def _check_entries(plan: Plan) -> None:
    """Checks the plan's own entries: callers may have put buffers of their own in place of its tensors."""
    entries: dict[str, Any] = plan  # type: ignore[assignment]
    if set(map(type, map(entries.__getitem__, NUMBERS))) != {int}:
        for name in NUMBERS:
            checks.integer(f"plan_info[{name!r}]", entries[name], -(2**31))
    rows = plan["batch_size"] if plan["row_index"] is None else plan["total_q"]
    names = ("qo_offset", "kv_segment_lens", "qo_segment_offsets", "kv_segment_offsets", "kv_page_indptr")
    for name in names if plan["page_size"] > 0 else names[:-1]:
        ends, x = name not in names[:2], entries[name]
        plain = type(x) is Tensor and x.dtype == torch.int32 and x.layout == torch.strided
        if plain and x.shape == (rows + ends,) and x.is_contiguous():
            continue  # Names are written out only for what is wrong, as this runs at every call.
        checks.tensor(f"plan_info[{name!r}]", x, "[rows + 1]" if ends else "[rows]", (torch.int32,))
        checks.size(f"plan_info[{name!r}]", x, 0, rows + ends, f"{rows} rows of the plan")
        if not x.is_contiguous():
            raise ValueError(f"plan_info[{name!r}] must be contiguous, got strides {x.stride()}")


def _check_blocks(q: Tensor, k: Tensor, plan: Plan, blocks: Tensor | None) -> None:
    """Checks the shape of a selection, int32 ``[total_q, heads, kv_block_num]``, which a sparse plan asks for."""
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
    q: Tensor, plan: Plan, blocks: Tensor | None, given: Tensor | None, output_maxscore: bool, output_o: bool
) -> Tensor | None:
    """Returns the buffer of the max scores, the caller's or a new one, as float32 ``[num_qo_heads, total_q, max_k_tiles]``;
    None where no scores are asked for."""
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


def check_values(call: Call) -> None:
    """Reads the lengths, ids and queries of a call, which waits for a GPU, and raises ValueError naming the first argument with
    a bad value, its index, the rule and the value."""
    plan = call.plan
    lens, queries = plan["kv_segment_lens"].cpu(), plan["qo_segment_offsets"].cpu()
    if int(queries[0]) != 0 or bool((queries.diff() < 0).any()) or int(queries[-1]) != call.q.shape[0]:
        raise ValueError(f"qo_segment_offsets must rise from 0 to the rows of q ({call.q.shape[0]}), got {queries.tolist()}")
    check_finite("q", call.q)
    check_key_values(call)
    if call.blocks is not None:
        size = plan["block_size"] if call.kv_indices is None else call.page_size
        _check_block_ids(call.blocks.cpu(), lens, queries, size)
    if call.max_score is not None:
        most = call.max_score.shape[2] * plan["block_size"]
        value_checks.none(
            "kv_segment_lens", lens > most, lens, f"at most max_k_tiles * block_size ({most}) where max scores are asked for"
        )


def check_key_values(call: Call) -> None:
    """Reads where each request's keys lie and raises ValueError unless they lie inside k. It runs on every call on a CPU, so
    that no read leaves the keys."""
    lens = call.plan["kv_segment_lens"].cpu()
    value_checks.in_range("kv_segment_lens", lens, 0, 2**31 - 1)
    if call.kv_indices is None:
        _check_packed(call.plan["kv_segment_offsets"].cpu(), lens, call.k.shape[0])
    else:
        _check_pages(call, lens)


def _check_packed(starts: Tensor, lens: Tensor, total: int) -> None:
    """Checks that the keys of each request end before those of the next one and before the end of k."""
    ends = starts[:-1].long() + lens
    limits = torch.cat((starts[1:].long(), torch.tensor([total], device="cpu")))[: lens.numel()]
    limits[-1:] = total
    value_checks.none("kv_segment_offsets", starts[:-1] < 0, starts, "at least 0")
    if bool((ends > limits).any()):
        b = int((ends > limits).nonzero()[0])
        raise ValueError(f"kv_segment_lens[{b}] must end before the next request ({int(limits[b])}), got {int(ends[b])}")


def _check_pages(call: Call, lens: Tensor) -> None:
    """Checks that the page table has an existing page for each key of each request."""
    assert call.kv_indices is not None
    table, num_pages = call.kv_indices.cpu(), call.k.shape[0]
    counts = (lens.long() + call.page_size - 1) // call.page_size  # [rows], the pages of each row
    if table.dim() == 2:
        request = call.plan["row_request"]
        if request is not None and table.shape[0] == call.plan["batch_size"]:
            line = request.cpu().long()  # [rows], the line of the table for each row
        else:
            line = torch.arange(lens.numel(), device="cpu")
        first = line * table.shape[1]
        value_checks.none("kv_segment_lens", counts > table.shape[1], lens, f"at most what {table.shape[1]} pages hold")
    else:
        first = first_pages(call.plan).cpu().long()
        value_checks.none("kv_page_indptr", (first < 0) & (counts > 0), first, "at least 0")
    flat = table.reshape(-1)
    past = first + counts > flat.numel()
    if bool((past & (counts > 0)).any()):
        b = int((past & (counts > 0)).nonzero()[0])
        raise ValueError(
            f"kv_page_indptr[{b}] must leave {int(counts[b])} pages in kv_indices ({flat.numel()} entries), got {int(first[b])}"
        )
    used = torch.zeros(flat.numel(), dtype=torch.bool, device="cpu")
    for start, count in zip(first.tolist(), counts.tolist(), strict=True):
        used[start : start + count] = True
    value_checks.none("kv_indices", used & ((flat < 0) | (flat >= num_pages)), flat, f"a page from 0 to {num_pages - 1}")


def _check_block_ids(blocks: Tensor, lens: Tensor, queries: Tensor, size: int) -> None:
    """Checks that each query selects distinct blocks, of `size` keys, of its own request, or -1."""
    query = torch.arange(blocks.shape[0], dtype=torch.int32, device="cpu")
    row = torch.searchsorted(queries[1:].contiguous(), query, right=True)
    count = ((lens.long() + size - 1) // size)[row][:, None, None]  # [total_q, 1, 1]
    value_checks.none("kv_block_indexes", (blocks < -1) | (blocks >= count), blocks, "-1 or a block of the query's request")
    ordered = blocks.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        token, head, slot = twice.nonzero()[0].tolist()
        raise ValueError(
            f"kv_block_indexes[{token}, {head}] must hold distinct blocks, got {int(ordered[token, head, slot])} twice"
        )
