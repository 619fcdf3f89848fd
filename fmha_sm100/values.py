# SPDX-License-Identifier: MIT
"""``check_input_valid=True``: reads the values of a call and names the first bad one. On a GPU this syncs; on a CPU the part
that keeps reads inside the keys is done on every call."""

from __future__ import annotations

import torch
from torch import Tensor

from fmha_sm100.launch import Call
from openmsa.kv_cache.stored import check_values
from openmsa.runtime import checks


def check(call: Call) -> None:
    """Raises ValueError naming the argument, the index, the rule and the value."""
    plan = call.plan
    lens, queries = plan["kv_segment_lens"].cpu(), plan["qo_segment_offsets"].cpu()
    if int(queries[0]) != 0 or bool((queries.diff() < 0).any()) or int(queries[-1]) != call.q.shape[0]:
        raise ValueError(f"qo_segment_offsets must rise from 0 to the rows of q ({call.q.shape[0]}), got {queries.tolist()}")
    check_values("q", call.q)
    check_keys(call)
    if call.blocks is not None:
        size = plan["block_size"] if call.kv_indices is None else call.page_size
        _check_blocks(call.blocks.cpu(), lens, queries, size)
    if call.max_score is not None:
        most = call.max_score.shape[2] * plan["block_size"]
        _none("kv_segment_lens", lens > most, lens, f"at most max_k_tiles * block_size ({most}) where max scores are asked for")


def check_keys(call: Call) -> None:
    """The part of `check` that says where each request's keys lie; on a CPU it runs on every call."""
    lens = call.plan["kv_segment_lens"].cpu()
    checks.in_range("kv_segment_lens", lens, 0, 2**31 - 1)
    if call.kv_indices is None:
        _check_packed(call.plan["kv_segment_offsets"].cpu(), lens, call.k.shape[0])
    else:
        _check_pages(call, lens)


def _none(name: str, bad: Tensor, values: Tensor, rule: str) -> None:
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        index = ", ".join(map(str, where))
        raise ValueError(f"{name}[{index}] must be {rule}, got {int(values[where])}")


def _check_packed(starts: Tensor, lens: Tensor, total: int) -> None:
    ends = starts[:-1].long() + lens
    limits = torch.cat((starts[1:].long(), torch.tensor([total])))[: lens.numel()]
    limits[-1:] = total
    _none("kv_segment_offsets", starts[:-1] < 0, starts, "at least 0")
    if bool((ends > limits).any()):
        b = int((ends > limits).nonzero()[0])
        raise ValueError(f"kv_segment_lens[{b}] must end before the next request ({int(limits[b])}), got {int(ends[b])}")


def _check_pages(call: Call, lens: Tensor) -> None:
    assert call.kv_indices is not None
    table, num_pages = call.kv_indices.cpu(), call.k.shape[0]
    counts = (lens.long() + call.page_size - 1) // call.page_size  # [rows]
    if table.dim() == 2:
        request = call.plan["row_request"]
        by_row = request is None or table.shape[0] != call.plan["batch_size"]
        first = (torch.arange(lens.numel()) if by_row else request.cpu().long()) * table.shape[1]
        _none("kv_segment_lens", counts > table.shape[1], lens, f"at most what {table.shape[1]} pages hold")
    else:
        first = call.plan["kv_page_indptr"].cpu()[:-1].long()
        _none("kv_page_indptr", (first < 0) & (counts > 0), first, "at least 0")
    flat = table.reshape(-1)
    past = first + counts > flat.numel()
    if bool((past & (counts > 0)).any()):
        b = int((past & (counts > 0)).nonzero()[0])
        raise ValueError(
            f"kv_page_indptr[{b}] must leave {int(counts[b])} pages in kv_indices ({flat.numel()} entries), got {int(first[b])}"
        )
    used = torch.zeros(flat.numel(), dtype=torch.bool)
    for start, count in zip(first.tolist(), counts.tolist(), strict=True):
        used[start : start + count] = True
    _none("kv_indices", used & ((flat < 0) | (flat >= num_pages)), flat, f"a page from 0 to {num_pages - 1}")


def _check_blocks(blocks: Tensor, lens: Tensor, queries: Tensor, size: int) -> None:
    row = torch.searchsorted(queries[1:].contiguous(), torch.arange(blocks.shape[0], dtype=torch.int32), right=True)
    count = ((lens.long() + size - 1) // size)[row][:, None, None]  # [total_q, 1, 1]
    _none("kv_block_indexes", (blocks < -1) | (blocks >= count), blocks, "-1 or a block of the query's request")
    ordered = blocks.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        token, head, slot = twice.nonzero()[0].tolist()
        raise ValueError(
            f"kv_block_indexes[{token}, {head}] must hold distinct blocks, got {int(ordered[token, head, slot])} twice"
        )
