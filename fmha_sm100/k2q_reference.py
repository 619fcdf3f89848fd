# SPDX-License-Identifier: MIT
"""Selections of one dense batch turned around and back, and `build_k2q_csr` for checks."""

from __future__ import annotations

import torch
from torch import Tensor

from fmha_sm100.k2q import build_k2q_csr
from openmsa.runtime import checks


def build_k2q_csr_torch_reference(
    q2k_indices: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, kv_block_size: int
) -> tuple[Tensor, Tensor]:
    """`build_k2q_csr` with lengths read from the tensors: total_rows is exact on every device (a host sync on a GPU), and an id
    past the blocks of its sequence raises ValueError instead of being skipped."""
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
    """For a batch of equal lengths, which queries read each block.

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
    """Back again: int32 ``[batch, num_kv_heads, Sq, topK]``, ascending, -1 behind. k2q_counts says how many queries of each
    block count; of more than `topK` blocks of a query the first remain."""
    checks.tensor("k2q_indices", k2q_indices, "[batch, num_kv_heads, num_kv_blocks, q_len]", (torch.int32,))
    checks.tensor("k2q_counts", k2q_counts, "[batch, num_kv_heads, num_kv_blocks]", (torch.int32, torch.int64))
    checks.integer("Sq", Sq, 0)
    checks.integer("topK", topK, 1)
    queries = k2q_indices.long()
    place = torch.arange(queries.shape[3], device=queries.device)
    held = (queries >= 0) & (queries < Sq) & (place < k2q_counts[..., None])
    queries = torch.where(held, queries, Sq)
    reads = torch.zeros(*queries.shape[:3], Sq + 1, dtype=torch.bool, device=queries.device).scatter_(3, queries, True)
    return _packed(reads[..., :Sq].transpose(2, 3), topK)


def _packed(reads: Tensor, width: int) -> Tensor:
    """The numbers of the True entries of each last row, ascending, -1 behind: int32 ``[..., width]``."""
    size = reads.shape[-1]
    number = torch.arange(size, device=reads.device, dtype=torch.int32)
    ids = torch.where(reads, number, size).sort(dim=-1).values[..., :width]
    ids = torch.where(ids == size, -1, ids).to(torch.int32)
    return torch.nn.functional.pad(ids, (0, width - ids.shape[-1]), value=-1)
