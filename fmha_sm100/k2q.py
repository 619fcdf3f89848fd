# SPDX-License-Identifier: MIT
"""A selection turned around, from query -> key blocks to key block -> queries: `build_k2q_csr` and its schedule.

Everything runs on the device of its inputs as PyTorch operations: nothing is read on the host of a GPU, sizes follow from
shapes and arguments, and the result does not depend on timing, so that building can be captured in a CUDA graph and repeats
bit for bit. The cost is one stable sort of ``topk * total_q`` int32 keys a KV head and a few passes over as many elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fmha_sm100.k2q_rows import NOTHING, Rows, checked_starts, longest
from fmha_sm100.k2q_schedule import SparseAttentionSchedule
from fmha_sm100.k2q_selection import remember
from fmha_sm100.k2q_sort import by_heads, sort_heads
from fmha_sm100.operands import flags
from openmsa.runtime import checks

MAX_PACKED_QUERY = 1 << 24  # `qsplit_indices` has 24 bits for the query


def build_k2q_csr(
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    kv_block_size: int,
    *,
    total_k: int | None = None,
    max_seqlen_k: int | None = None,
    max_seqlen_q: int | None = None,
    total_rows: int | None = None,
    qhead_per_kv: int = 1,
    return_schedule: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, SparseAttentionSchedule]:
    """The queries of every key block, in compressed rows.

    q2k_indices:    int32 ``[num_kv_heads, total_q, topk]``, block ids counted from the start of the query's sequence, in any
                    order; -1 and every id that names no block is skipped wherever it stands.
    cu_seqlens_q, cu_seqlens_k:  int32 or int64 ``[batch + 1]``.
    total_k:        keys of the batch; 0 where the caller does not know it (a paged cache). Required, as in the public package.
    max_seqlen_k, max_seqlen_q:  the longest sequences or bounds on them; both required with `return_schedule`.
    total_rows:     sum over the sequences of their blocks. None: on a CPU exactly that; on a GPU, where the lengths are not
                    read, exact for one sequence or when all have max_seqlen_k keys, else a bound (rows behind the last hold
                    nothing).

    Returns k2q_row_ptr int32 ``[num_kv_heads, total_rows + 1]`` and k2q_q_indices int32 ``[num_kv_heads, total_q * topk]``:
    the queries, counted from the start of their sequence, that read each row's block, ascending; -1 behind the last. Row order
    is level by level (`k2q_rows`). With `return_schedule` also a `SparseAttentionSchedule`,
    made when it is first read.

    The same as the public function: names, order, shapes, row order, values, two or three results. Better: runs on any
    device; topk from 1 to 64 and blocks of 16 to 256 keys; strided `q2k_indices`; -1 anywhere; the order of items and, with
    it, every bit of the result is fixed; wrong arguments raise ValueError or TypeError naming argument, rule and value.
    """
    checks.tensor("q2k_indices", q2k_indices, "[num_kv_heads, total_q, topk]", (torch.int32,))
    _, total_q, topk = q2k_indices.shape
    checks.integer("q2k_indices.shape[2] (topk)", topk, 1, 64)
    checks.integer("kv_block_size", kv_block_size, 16, 256)
    checks.integer("qhead_per_kv", qhead_per_kv, 1)
    flags(return_schedule=return_schedule)
    if total_k is None:
        raise ValueError("total_k must be the number of keys (0 where it is not known), got None")
    checks.integer("total_k", total_k, 0)
    if total_q * topk >= 2**31:
        raise ValueError(f"total_q * topk must be below 2**31, got {total_q} * {topk}")
    cu_q, cu_k = checked_starts(cu_seqlens_q, cu_seqlens_k, total_q, q2k_indices.device)
    if total_k and cu_k.device.type == "cpu" and total_k < int(cu_k[-1]):
        raise ValueError(f"total_k must be at least the keys of cu_seqlens_k ({int(cu_k[-1])}) or 0, got {total_k}")
    if return_schedule:
        for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if bound is None:
                raise ValueError(f"{name} must be given with return_schedule=True, got None")
    max_q, max_k = longest("max_seqlen_q", max_seqlen_q, cu_q), longest("max_seqlen_k", max_seqlen_k, cu_k)
    if return_schedule and min(total_q if max_q is None else max_q, total_q) > MAX_PACKED_QUERY:
        raise ValueError(f"max_seqlen_q must be at most {MAX_PACKED_QUERY} with return_schedule=True, got {max_q}")
    if max_k is None and not total_k:
        raise ValueError("max_seqlen_k must be given where total_k is 0, got None")
    rows = Rows.of(cu_q, cu_k, kv_block_size, -(-(total_k if max_k is None else max_k) // kv_block_size))
    num_rows = _num_rows(rows, total_rows, total_k, max_k, kv_block_size)
    with torch.inference_mode(False), torch.no_grad():
        return _build(q2k_indices, rows, num_rows, qhead_per_kv, kv_block_size, return_schedule)


def _num_rows(rows: Rows, total_rows: int | None, total_k: int, max_k: int | None, block_size: int) -> int:
    """How many rows the result has, found on the host."""
    if total_rows is not None:
        checks.integer("total_rows", total_rows, 0)
    if rows.blocks.device.type == "cpu":
        exact = int(rows.blocks.sum())
        if total_rows is not None and total_rows < exact:
            raise ValueError(f"total_rows must be at least the blocks of all sequences ({exact}), got {total_rows}")
        return exact if total_rows is None else total_rows
    if total_rows is not None:
        return total_rows
    bounds = [rows.batch * rows.levels] if max_k is not None else []
    if total_k:
        bounds.append((total_k + rows.batch * (block_size - 1)) // block_size)
    return min(bounds)


def _build(
    q2k: Tensor, rows: Rows, num_rows: int, group: int, block_size: int, schedule: bool
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, SparseAttentionSchedule]:
    q2k = q2k if rows.batch else q2k[:, :0]
    sequence, query = rows.of_tokens(q2k.shape[1])
    row = rows.of_blocks(sequence, q2k)  # of each entry, [heads, total_q, topk]
    row_ptr, q_indices = by_heads(lambda part: _compressed(part, query, rows.batch == 1, num_rows), row)
    blocks = row if rows.batch == 1 else torch.where(row == NOTHING, row, q2k)
    (ascending,) = by_heads(lambda part: (part.sort(dim=2).values,), blocks)
    remember(row_ptr, q_indices, ascending, block_size)
    if not schedule:
        return row_ptr, q_indices
    return row_ptr, q_indices, SparseAttentionSchedule(row, row_ptr.diff().flatten(), rows, group, block_size)


def _compressed(row: Tensor, query: Tensor, one_sequence: bool, num_rows: int) -> tuple[Tensor, Tensor]:
    """Row pointers and queries of some heads."""
    ordered, entry = sort_heads(row.flatten(1), num_rows)
    boundaries = torch.arange(num_rows + 1, device=row.device, dtype=ordered.dtype).expand(row.shape[0], -1).contiguous()
    row_ptr = torch.searchsorted(ordered, boundaries, out_int32=True)
    entry.floor_divide_(row.shape[2])  # its token
    return row_ptr, torch.where(ordered < num_rows, entry.int() if one_sequence else query[entry], -1)


class SparseK2qCsrBuilderSm100:
    """`build_k2q_csr` as an object without state, under the public name; it runs on any device."""

    def __call__(
        self,
        q2k_indices: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        total_k: int,
        blk_kv: int = 128,
        max_seqlen_k: int | None = None,
        max_seqlen_q: int | None = None,
        total_rows: int | None = None,
        qhead_per_kv: int = 1,
        return_schedule: bool = False,
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, SparseAttentionSchedule]:
        return build_k2q_csr(
            q2k_indices,
            cu_seqlens_q,
            cu_seqlens_k,
            blk_kv,
            total_k=total_k,
            max_seqlen_k=max_seqlen_k,
            max_seqlen_q=max_seqlen_q,
            total_rows=total_rows,
            qhead_per_kv=qhead_per_kv,
            return_schedule=return_schedule,
        )
