# SPDX-License-Identifier: MIT
"""Turns a selection around, from the key blocks of each query to the queries of each key block: `build_k2q_csr`, its builder
object, its form for checks, and two functions for dense batches.

`build_k2q_csr` runs on the device of its inputs as PyTorch operations. On a GPU nothing is read on the host, sizes follow from
shapes and arguments, and the result does not depend on timing, so that building can be captured in a CUDA graph and repeats
bit for bit. It costs one stable sort of ``topk * total_q`` int32 keys a KV head and a few passes over as many elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fmha_sm100.csr_attention import SparseAttentionSchedule
from fmha_sm100.k2q_rows import NOTHING, Rows, by_heads, remember, sort_heads
from fmha_sm100.operands import checked_starts, flags, longest
from openmsa.runtime import checks, dispatch, value_checks

MAX_PACKED_QUERY = 1 << 24
"""The field `qsplit_indices` of a schedule has 24 bits for the number of a query."""


@dispatch.operator("fmha_sm100::build_k2q_csr")
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
    """Lists the queries that read each key block, in compressed rows (CSR).

    q2k_indices:    int32 ``[num_kv_heads, total_q, topk]``, block ids counted from the start of the query's sequence, in any
                    order; -1 and every id that names no block is skipped wherever it stands.
    cu_seqlens_q, cu_seqlens_k:  int32 or int64 ``[batch + 1]``.
    total_k:        keys of the batch; 0 where the caller does not know it (a paged cache). Required, as in the public package.
    max_seqlen_k, max_seqlen_q:  the longest sequences or bounds on them; both required with `return_schedule`.
    total_rows:     the blocks of all sequences. None stands on a CPU for exactly that; on a GPU, where the lengths are not
                    read, for a number that is exact for one sequence or when all have max_seqlen_k keys, and else a bound (rows
                    behind the last hold nothing).

    Returns k2q_row_ptr int32 ``[num_kv_heads, total_rows + 1]`` and k2q_q_indices int32 ``[num_kv_heads, total_q * topk]``:
    the queries, counted from the start of their sequence, that read each row's block, ascending; -1 behind the last. Row order
    is level by level (`k2q_rows`). With `return_schedule` also a `SparseAttentionSchedule`, made when it is first read.

    Names, order, shapes, row order, values and the two or three results are those of the public function. Beyond it, this one
    runs on any device and takes topk from 1 to 64, blocks of 16 to 256 keys, strided `q2k_indices` and -1 anywhere. The order
    of items and, with it, every bit of the result is fixed. Wrong arguments raise ValueError or TypeError naming argument,
    rule and value.
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
    """Returns how many rows the result has, found on the host."""
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
    """Builds what `build_k2q_csr` returns from checked arguments."""
    q2k = q2k if rows.batch else q2k[:, :0]
    sequence, query = rows.of_tokens(q2k.shape[1])
    row = rows.of_blocks(sequence, q2k)  # [heads, total_q, topk], the row of each entry
    row_ptr, q_indices = by_heads(lambda part: _compressed(part, query, rows.batch == 1, num_rows), row)
    blocks = row if rows.batch == 1 else torch.where(row == NOTHING, row, q2k)
    (ascending,) = by_heads(lambda part: (part.sort(dim=2).values,), blocks)
    remember(row_ptr, q_indices, ascending, block_size)
    if not schedule:
        return row_ptr, q_indices
    return row_ptr, q_indices, SparseAttentionSchedule(row, row_ptr.diff().flatten(), rows, group, block_size)


def _compressed(row: Tensor, query: Tensor, one_sequence: bool, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns the row pointers ``[heads, num_rows + 1]`` and the queries ``[heads, total_q * topk]`` of some heads.

    row: int32 ``[heads, total_q, topk]``, of each entry. query: int32 ``[total_q]``, the number of each token within its
    sequence."""
    ordered, entry = sort_heads(row.flatten(1), num_rows)
    boundaries = torch.arange(num_rows + 1, device=row.device, dtype=ordered.dtype).expand(row.shape[0], -1).contiguous()
    row_ptr = torch.searchsorted(ordered, boundaries, out_int32=True)
    entry.floor_divide_(row.shape[2])  # entries become their tokens
    return row_ptr, torch.where(ordered < num_rows, entry.int() if one_sequence else query[entry], -1)


class SparseK2qCsrBuilderSm100:
    """Calls `build_k2q_csr`, as an object without state under the public name; it runs on any device."""

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


def build_k2q_csr_torch_reference(
    q2k_indices: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, kv_block_size: int
) -> tuple[Tensor, Tensor]:
    """Does what `build_k2q_csr` does with lengths that it reads from the tensors, for checks: total_rows is exact on every
    device (a host sync on a GPU), and an id past the blocks of its sequence raises ValueError instead of being skipped."""
    cu_q, cu_k = (x.cpu() if isinstance(x, Tensor) else x for x in (cu_seqlens_q, cu_seqlens_k))
    ids = q2k_indices.cpu() if isinstance(q2k_indices, Tensor) else q2k_indices
    result = build_k2q_csr(ids, cu_q, cu_k, kv_block_size, total_k=int(cu_k[-1]))
    blocks = (cu_k.diff() + kv_block_size - 1) // kv_block_size
    held = blocks.repeat_interleave(cu_q.diff())  # [total_q]
    bad = (ids >= held[None, :, None]).nonzero()
    if bad.numel():
        head, token, slot = bad[0].tolist()
        raise ValueError(
            f"q2k_indices must name one of the {int(held[token])} blocks of its sequence or be negative, "
            f"got {int(ids[head, token, slot])} at head {head}, query {token}"
        )
    row_ptr, q_indices = (x.to(q2k_indices.device) for x in result[:2])
    return row_ptr, q_indices


def q2k_to_k2q(q2k_indices: Tensor, num_kv_blocks: int) -> tuple[Tensor, Tensor]:
    """Lists which queries read each block, for a batch of sequences of equal lengths.

    q2k_indices: int32 ``[batch, num_kv_heads, q_len, topk]``, -1 where nothing is read. Returns int32 ``[batch, num_kv_heads,
    num_kv_blocks, q_len]``, ascending queries and -1 behind them, and their counts int32 ``[batch, num_kv_heads,
    num_kv_blocks]``. An id named twice by a query counts once.
    """
    checks.tensor("q2k_indices", q2k_indices, "[batch, num_kv_heads, q_len, topk]", (torch.int32,))
    checks.integer("num_kv_blocks", num_kv_blocks, 0)
    ids = q2k_indices.long()
    ids = torch.where((ids < 0) | (ids >= num_kv_blocks), num_kv_blocks, ids)
    reads = torch.zeros(*ids.shape[:3], num_kv_blocks + 1, dtype=torch.bool, device=ids.device).scatter_(3, ids, True)
    reads = reads[..., :num_kv_blocks].transpose(2, 3)  # [batch, heads, blocks, q_len]
    return _packed(reads, reads.shape[3]), reads.sum(3, dtype=torch.int32)


def k2q_to_q2k(k2q_indices: Tensor, k2q_counts: Tensor, Sq: int, topK: int) -> Tensor:
    """Lists which blocks each query reads, given what `q2k_to_k2q` returns: int32 ``[batch, num_kv_heads, Sq, topK]``,
    ascending, -1 behind. k2q_counts says how many queries of each block count; a query keeps the first `topK` of its blocks."""
    checks.tensor("k2q_indices", k2q_indices, "[batch, num_kv_heads, num_kv_blocks, q_len]", (torch.int32,))
    checks.tensor("k2q_counts", k2q_counts, "[batch, num_kv_heads, num_kv_blocks]", (torch.int32, torch.int64))
    checks.integer("Sq", Sq, 0)
    checks.integer("topK", topK, 1)
    checks.alike("k2q_counts", k2q_counts, "k2q_indices", k2q_indices, dtype=False)
    for d in range(3):
        checks.size("k2q_counts", k2q_counts, d, k2q_indices.shape[d], "that of k2q_indices")
    if k2q_counts.device.type == "cpu" and not torch.compiler.is_compiling():
        value_checks.in_range("k2q_counts", k2q_counts, 0, k2q_indices.shape[3] + 1)
    queries = k2q_indices.long()
    place = torch.arange(queries.shape[3], device=queries.device)
    held = (queries >= 0) & (queries < Sq) & (place < k2q_counts[..., None])
    queries = torch.where(held, queries, Sq)
    reads = torch.zeros(*queries.shape[:3], Sq + 1, dtype=torch.bool, device=queries.device).scatter_(3, queries, True)
    return _packed(reads[..., :Sq].transpose(2, 3), topK)


def _packed(reads: Tensor, width: int) -> Tensor:
    """Returns the places of the True entries along the last dimension, ascending and -1 behind: int32 ``[..., width]``."""
    size = reads.shape[-1]
    number = torch.arange(size, device=reads.device, dtype=torch.int32)
    ids = torch.where(reads, number, size).sort(dim=-1).values[..., :width]
    ids = torch.where(ids == size, -1, ids).to(torch.int32)
    return torch.nn.functional.pad(ids, (0, width - ids.shape[-1]), value=-1)
