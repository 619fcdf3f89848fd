# SPDX-License-Identifier: MIT
"""A checked call of `fmha_sm100` is one of three things: scores alone, dense attention, or attention over selected blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmha_sm100 import plan_rows
from fmha_sm100.operands import Rows, place, scaled, write_out
from fmha_sm100.plan_rows import Plan
from openmsa import E4M3, PagedIndexKeys, PagedKV
from openmsa.block_scores import STAGE as SCORING
from openmsa.dense_attention import STAGE as DENSE
from openmsa.dense_attention import check_dense
from openmsa.inputs import check_scoring
from openmsa.runtime import checks
from openmsa.sparse_attention import STAGE as SPARSE
from openmsa.sparse_attention.call import check_sparse
from openmsa.types import Sequences, out_dtype, wide_dtype

INT32 = 2**31


@dataclass(frozen=True)
class Call:
    """This holds the checked arguments of one call, with the plan's tensors on the device of the queries."""

    q: Tensor | E4M3  # [total_q, num_qo_heads, head_dim]
    k: Rows  # [total_kv, num_kv_heads, head_dim], or a pool [num_pages, num_kv_heads, page_size, head_dim]
    v: Rows  # the shape of k
    plan: Plan
    offset: Tensor  # int32 [rows], the position of each row's first query
    kv_indices: Tensor | None  # int32, the page table; None: the keys are packed
    blocks: Tensor | None  # int32 [total_q, heads, topk]; None: every visible key is read
    softmax_scale: float
    out_scale: float | Tensor
    out: Tensor | None  # the caller's buffer for the output; None: a new one
    lse: Tensor | None  # the caller's buffer for the lse; None: a new one
    max_score: Tensor | None  # float32 [num_qo_heads, total_q, max_k_tiles], a view of the buffer; None: not asked for
    given_score: Tensor | None  # the caller's buffer of the max scores, None: a new one
    wants_out: bool
    wants_lse: bool

    @property
    def page_size(self) -> int:
        """Returns the keys of a page of the pools."""
        return self.k.shape[2]

    def keys(self, max_keys: int | None) -> tuple[Rows | PagedKV, Rows | None, Sequences]:
        """Returns keys, values and lengths as the stages take them. max_keys is a bound on the keys of a request, or None."""
        bounds = [n for n in (max_keys, self.plan["max_kv_len"]) if n is not None]
        if self.kv_indices is None:
            total = self.k.shape[0]
            return self.k, self.v, plan_rows.packed(self.plan, self.offset, total, min([total, *bounds]))
        pages = -(-min(bounds) // self.page_size) if bounds else None
        table = plan_rows.page_table(self.plan, self.kv_indices, self.page_size, pages)
        return PagedKV(self.k, self.v, table, self.plan["kv_segment_lens"]), None, plan_rows.paged(self.plan, self.offset)

    def results(self) -> tuple[Tensor | None, ...]:
        """Computes what the call asks for. Returns out, max_score and, where it is asked for, lse; None what is not."""
        if self.q.numel() == 0 or self.k.numel() == 0:
            out, lse = nothing(self)
        elif self.blocks is not None:
            out, lse = attend_blocks(self, self.blocks)
        elif self.wants_out or self.wants_lse:
            out, lse = attend_densely(self)
        else:
            score(self)
            out = lse = None
        max_score = None
        if self.max_score is not None:  # a new one is [num_qo_heads, max_k_tiles, total_q]
            max_score = self.max_score.transpose(1, 2) if self.given_score is None else self.given_score
        return (out, max_score, lse) if self.wants_lse else (out, max_score)


def score(call: Call) -> None:
    """Lets the kernels write the max scores of the tiles that each query sees into the caller's buffer."""
    assert call.max_score is not None
    block_size = call.plan["block_size"]
    k, _, seqs = call.keys(call.max_score.shape[2] * block_size)
    keys = PagedIndexKeys(k.k, k.page_table, k.seq_lens) if isinstance(k, PagedKV) else k
    scoring = check_scoring(call.q, keys, seqs, block_size, check=False)
    SCORING.run("auto", scoring.writing(call.max_score[..., : scoring.seqs.num_blocks(block_size)]))


def attend_densely(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Returns out and lse over all visible keys, and writes the max scores where they are asked for."""
    scaled_v, factor = scaled(call.v, call.out_scale)
    k, v, seqs = replace(call, v=scaled_v).keys(None)
    dense = check_dense(
        *(call.q, k, v, seqs),
        causal=True,
        softmax_scale=call.softmax_scale,
        block_size=call.plan["block_size"],
        return_out=call.wants_out,
        return_lse=call.wants_lse,
        return_max_score=call.max_score is not None,
        check=False,
    )
    read, max_score = (call.q, k, v), call.max_score
    if max_score is not None:
        max_score = max_score[..., : dense.seqs.num_blocks(call.plan["block_size"])]
    out = place(call.out, *read, call.lse, max_score)
    results = DENSE.run("auto", dense.writing(out, place(call.lse, *read, max_score), max_score))
    found = list(results) if isinstance(results, tuple) else [results]
    out = write_out(call.out, found[0], factor) if call.wants_out else None
    return out, write_out(call.lse, found[call.wants_out]) if call.wants_lse else None


def attend_blocks(call: Call, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns out and lse over the selected blocks, int32 ``[total_q, heads, topk]``.

    The kernels read one selection for all query heads of a KV head. Where each query head has a selection of its own, the
    first members of all groups attend in one launch, the second members in the next, and so on.
    """
    v, factor = scaled(call.v, call.out_scale)
    call = replace(call, v=v)
    kv_heads = call.k.shape[1]
    group = call.q.shape[1] // kv_heads
    if blocks.shape[1] in (1, kv_heads) or blocks.stride(1) == 0:
        results = _attend(call, blocks if blocks.shape[1] in (1, kv_heads) else blocks[:, :kv_heads])
    else:
        parts = []
        for member in range(group):
            own = slice(member, None, group)  # this member of every group
            q = E4M3(call.q.data[:, own], call.q.scale) if isinstance(call.q, E4M3) else call.q[:, own]
            parts.append(_attend(replace(call, q=q, out=None, lse=None), blocks[:, own]))
        results = tuple(torch.stack(x, 2).flatten(1, 2) for x in zip(*parts, strict=True))  # [total_q, kv_heads * group, ...]
    return write_out(call.out, results[0], factor), write_out(call.lse, results[1]) if call.wants_lse else None


def _attend(call: Call, blocks: Tensor) -> tuple[Tensor, ...]:
    """Returns out and, where it is wanted, lse, with a selection ``[total_q, num_kv_heads or 1, topk]``."""
    block_size = call.plan["block_size"] if call.kv_indices is None else call.page_size
    if reads_one_long_sequence(call):
        assert call.kv_indices is not None
        flat = call.kv_indices
        blocks, keys, position = plan_rows.one_long_sequence(call.plan, call.offset, blocks, flat.numel(), block_size)
        k: Any = PagedKV(call.k, call.v, flat.expand(keys.numel(), -1), keys)
        v, seqs = None, plan_rows.paged(call.plan, position)
    else:
        k, v, seqs = call.keys(None)
    sparse = check_sparse(call.q, k, v, blocks, seqs, block_size, call.softmax_scale, call.wants_lse, check=False)
    read = (call.q, k, v, blocks)
    result = SPARSE.run("auto", sparse.writing(place(call.out, *read, call.lse), place(call.lse, *read)))
    return result if isinstance(result, tuple) else (result,)


def reads_one_long_sequence(call: Call) -> bool:
    """Says whether to read a flat page table as it is: on a GPU, where a table of rows x pages would cost memory and time."""
    if call.kv_indices is None or call.q.device.type == "cpu" or call.plan["max_qo_len"] != 1:
        return False
    one_a_row = call.plan["kv_segment_lens"].numel() == call.q.shape[0]
    return one_a_row and call.kv_indices.dim() == 1 and 0 < call.kv_indices.numel() * call.page_size < INT32


def nothing(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Returns zeros for out and -inf for lse, the results of a call without queries or without keys."""
    out, lse = call.out, call.lse
    if call.wants_out:
        out = torch.empty(call.q.shape, dtype=out_dtype(call.q), device=call.q.device) if out is None else out
        out.zero_()
    if call.wants_lse:
        lse = torch.empty(call.q.shape[:2], dtype=wide_dtype(call.q), device=call.q.device) if lse is None else lse
        lse.fill_(-torch.inf)
    return out, lse


def halves(
    plans: tuple[Plan, Plan], batch: int, q: Tensor, kv_indices: Any, blocks: Any, override: Any, places: list[Tensor | None]
) -> list[dict[str, Any]]:
    """Returns what differs between the launches of the two plans of a mixed batch, as arguments of `fmha_sm100`.

    The second plan numbers packed keys and pages from its own first request on: where the first plan's end is read on the
    device, when the launch runs. places: out, lse and max_score ``[num_qo_heads, max_k_tiles, total_q]``, or None.
    """
    first, second = plans
    count, rows = first["total_q"], first["kv_segment_lens"].numel()
    checks.size("q", q, 0, count + second["total_q"], "the queries of the plan")
    if isinstance(blocks, Tensor):
        checks.size("kv_block_indexes", blocks, 0, q.shape[0], "a row for each query")
    shifted = {
        name: x + ends[-1:]
        for name in ("kv_segment_offsets", "kv_page_indptr")
        if isinstance(x := second.get(name), Tensor) and isinstance(ends := first.get(name), Tensor)
    }
    found = []
    given: list[dict[str, Any]] = [{**first}, {**second, **shifted}]
    for n, (plan, own) in enumerate(zip(given, (slice(0, count), slice(count, None)), strict=True)):

        def part(x: Any, n: int = n) -> Any:
            """Returns this half's part of a tensor with an entry a request or a row; anything else as it is."""
            if not isinstance(x, Tensor) or not x.dim():
                return x
            at = first["batch_size"] if x.shape[0] == batch else rows
            return x[at:] if n else x[:at]

        out, lse, score = places
        found.append(
            {
                "q": q[own],
                "plan_info": plan,
                "kv_indices": part(kv_indices) if isinstance(kv_indices, Tensor) and kv_indices.dim() == 2 else kv_indices,
                "kv_block_indexes": blocks[own] if isinstance(blocks, Tensor) else blocks,
                "q_offset_override": part(override),
                "out": None if out is None else out[own],
                "lse": None if lse is None else lse[own],
                "max_score": None if score is None else score[:, : max(plan["max_k_tiles"], 0), own],
            }
        )
    return found


def checked_half(checked: Callable[..., Call], n: int, arguments: dict[str, Any]) -> Call:
    """Returns the checked call of the n-th plan of a mixed batch; an error says which plan counts the places that it names."""
    try:
        return checked(**arguments)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{error} (in plan_info[{3 + n}], which counts from its own first request on)") from None
