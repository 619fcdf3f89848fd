# SPDX-License-Identifier: MIT
"""The three things `fmha_sm100` does with a checked call: scores alone, dense attention, attention over selected blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmha_sm100 import rows
from fmha_sm100.operands import Rows, scaled, write_out
from openmsa import E4M3, PagedIndexKeys, PagedKV, sparse_attention
from openmsa.block_scores import STAGE as SCORING
from openmsa.dense_attention import STAGE as DENSE
from openmsa.dense_attention import check_dense
from openmsa.inputs import check_scoring
from openmsa.types import Layout, Sequences

SCORES_AT_ONCE = 1 << 27  # scores of the queries that are taken at a time, so that scratch stays small beside the result
INT32 = 2**31


@dataclass(frozen=True)
class Call:
    """Checked arguments, the plan's tensors on the device of the queries."""

    q: Tensor | E4M3
    k: Rows
    v: Rows
    plan: dict[str, Any]
    offset: Tensor  # int32 [rows]
    kv_indices: Tensor | None
    blocks: Tensor | None
    softmax_scale: float
    out_scale: float
    out: Tensor | None
    lse: Tensor | None
    max_score: Tensor | None  # as a view [num_qo_heads, total_q, max_k_tiles]
    wants_out: bool
    wants_lse: bool

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    def keys(self, max_keys: int | None) -> tuple[Rows | PagedKV, Rows | None, Sequences]:
        """Keys, values and lengths as the stages take them. max_keys: a bound on the keys of a request."""
        bounds = [n for n in (max_keys, self.plan["max_kv_len"]) if n is not None]
        if self.kv_indices is None:
            total = self.k.shape[0]
            return self.k, self.v, rows.packed(self.plan, self.offset, total, min([total, *bounds]))
        pages = -(-min(bounds) // self.page_size) if bounds else None
        table = rows.page_table(self.plan, self.kv_indices, self.page_size, pages)
        return PagedKV(self.k, self.v, table, self.plan["kv_segment_lens"]), None, rows.paged(self.plan, self.offset)


def score(call: Call) -> None:
    """Writes the max scores of the tiles that each query sees, some queries at a time."""
    assert call.max_score is not None
    tiles, block_size = call.max_score.shape[2], call.plan["block_size"]
    if call.q.numel() == 0 or call.k.numel() == 0:
        return
    k, _, seqs = call.keys(tiles * block_size)
    keys = PagedIndexKeys(k.k, k.page_table, k.seq_lens) if isinstance(k, PagedKV) else k
    scoring = check_scoring(call.q, keys, seqs, block_size, False)
    layout, total_q = scoring.seqs, call.q.shape[0]
    step = max(1, SCORES_AT_ONCE // max(layout.num_blocks(block_size) * call.q.shape[1], 1))
    for start in range(0, total_q, step):
        own = slice(start, min(start + step, total_q))
        if step < total_q:
            scoring = scoring._replace(index_q=call.q[own], seqs=layout.query_chunk(own.start, own.stop))
        scores = SCORING.run("auto", scoring)
        write_scores(call, scores, layout, own)


def write_scores(call: Call, scores: Tensor, layout: Layout, own: slice) -> None:
    """scores: ``[num_qo_heads, queries, tiles]`` of the queries `own`: the tiles that each sees go into the result."""
    assert call.max_score is not None
    block_size, tiles = call.plan["block_size"], min(call.max_score.shape[2], scores.shape[2])
    scores = scores[..., :tiles]
    if rows.uses_kernels(scores):
        from fmha_sm100 import triton_rows

        lengths = (call.plan["qo_segment_offsets"], call.plan["kv_segment_lens"], call.offset)
        triton_rows.write(scores, call.max_score, own.start, *lengths, block_size)
        return
    target = call.max_score[:, own, :tiles]
    visible = layout.visible_blocks(call.q.shape[0], block_size)  # [total_q]
    target.copy_(torch.where(torch.arange(tiles, device=scores.device) < visible[own, None], scores, target))


def attend_densely(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """out and lse over all visible keys; the max scores are written where they are wanted."""
    scaled_v, factor = scaled(call.v, call.out_scale)
    k, v, seqs = replace(call, v=scaled_v).keys(None)
    wanted = (call.wants_out, call.wants_lse, call.max_score is not None)
    dense = check_dense(call.q, k, v, seqs, True, call.softmax_scale, call.plan["block_size"], *wanted, False)
    results = DENSE.run("auto", dense)
    found = list(results) if isinstance(results, tuple) else [results]
    if call.max_score is not None:
        write_scores(call, found.pop(), dense.seqs, slice(0, call.q.shape[0]))
    lse = write_out(call.lse, found.pop()) if call.wants_lse else None
    return (write_out(call.out, found[0], factor) if call.wants_out else None), lse


def attend_blocks(call: Call) -> tuple[Tensor, Tensor | None]:
    """out and lse over the selected blocks. A selection for each query head takes one launch a head of a group."""
    v, factor = scaled(call.v, call.out_scale)
    call = replace(call, v=v)
    assert call.blocks is not None
    blocks, kv_heads = call.blocks, call.k.shape[1]
    group = call.q.shape[1] // kv_heads
    if blocks.shape[1] in (1, kv_heads) or blocks.stride(1) == 0:
        blocks = blocks if blocks.shape[1] in (1, kv_heads) else blocks[:, :kv_heads]
        out, lse = _attend(replace(call, blocks=blocks))
    else:
        parts = []
        for member in range(group):
            own = slice(member, None, group)  # this member of every group
            q = E4M3(call.q.data[:, own], call.q.scale) if isinstance(call.q, E4M3) else call.q[:, own]
            parts.append(_attend(replace(call, q=q, blocks=blocks[:, own])))
        out, lse = (torch.stack(x, 2).flatten(1, 2) for x in zip(*parts, strict=True))  # [total_q, kv_heads * group, ...]
    return write_out(call.out, out, factor), write_out(call.lse, lse) if call.wants_lse else None


def _attend(call: Call) -> tuple[Tensor, Tensor]:
    assert call.blocks is not None
    blocks, block_size = call.blocks, call.plan["block_size"]
    if call.kv_indices is not None:
        block_size = call.page_size
    if reads_one_long_sequence(call):
        assert call.kv_indices is not None
        flat = call.kv_indices
        blocks, keys, position = rows.one_long_sequence(call.plan, call.offset, blocks, flat.numel(), block_size)
        k: Any = PagedKV(call.k, call.v, flat.expand(keys.numel(), -1), keys)
        v, seqs = None, rows.paged(call.plan, position)
    else:
        k, v, seqs = call.keys(None)
    options = {"block_size": block_size, "softmax_scale": call.softmax_scale, "return_lse": True}
    out, lse = sparse_attention(call.q, k, v, blocks, seqs, **options)
    return out, lse


def reads_one_long_sequence(call: Call) -> bool:
    """Whether to read a flat page table as it is: on a GPU, where a table of rows x pages would cost memory and time."""
    if call.kv_indices is None or call.q.device.type == "cpu" or call.plan["max_qo_len"] != 1:
        return False
    one_a_row = call.plan["kv_segment_lens"].numel() == call.q.shape[0]
    return one_a_row and call.kv_indices.dim() == 1 and 0 < call.kv_indices.numel() * call.page_size < INT32


def nothing(call: Call, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """What a call without queries or without keys returns: zeros and -inf."""
    out = lse = None
    if call.wants_out:
        out = torch.zeros(call.q.shape, dtype=dtype, device=call.q.device) if call.out is None else call.out.zero_()
    if call.wants_lse:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        lse = torch.empty(call.q.shape[:2], dtype=wide, device=call.q.device) if call.lse is None else call.lse
        lse.fill_(-torch.inf)
    return out, lse
