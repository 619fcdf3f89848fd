# SPDX-License-Identifier: MIT
"""This module is the specification of `sparse_attention`, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.results import delivered
from openmsa.kv_cache.rows import dequantized
from openmsa.runtime.kinds import computes
from openmsa.runtime.matmul import weighted_sum
from openmsa.types import Layout, out_dtype, wide_dtype


def sparse_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    blocks: Tensor,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    return_lse: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Does what `openmsa.sparse_attention.sparse_attention` says, holding one sequence's full logit matrix."""
    computes("attention")
    dtype, result, cu_k = wide_dtype(q), out_dtype(q), seqs.cu_seqlens_k
    if isinstance(k, PagedKV):
        k, v, cu_k = k.gather(seqs.k_lens(), dtype)
    assert v is not None
    q, k, v = (dequantized(x, dtype) for x in (q, k, v))
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    outs, lses = [q.new_zeros((0, heads, q.shape[2]))], [q.new_zeros((0, heads))]
    for b in range(seqs.batch):
        q0, q1 = seqs.cu_seqlens_q[b : b + 2].tolist()
        k0, k1 = cu_k[b : b + 2].tolist()
        num_blocks = -(-(k1 - k0) // block_size)
        ids = blocks[q0:q1].expand(-1, kv_heads, -1).long()  # [q_len, kv_heads, topk]
        ids = ids.masked_fill((ids < 0) | (ids >= num_blocks), num_blocks)  # Skipped ids go to one more block, dropped below.
        selected = torch.zeros(q1 - q0, kv_heads, num_blocks + 1, dtype=torch.bool, device=q.device)
        selected = selected.scatter(2, ids, True)[..., :num_blocks].repeat_interleave(block_size, dim=2)[..., : k1 - k0]
        position = seqs.first_positions()[b] + torch.arange(q1 - q0, device=q.device)
        causal = torch.arange(k1 - k0, device=q.device) <= position[:, None]  # [q_len, k_len]
        reads = (selected & causal[:, None]).repeat_interleave(group, dim=1)  # [q_len, heads, k_len]
        keys, values = (x[k0:k1].repeat_interleave(group, dim=1) for x in (k, v))  # [k_len, heads, dim]
        logits = torch.einsum("qhd,khd->qhk", q[q0:q1], keys) * softmax_scale
        logits = logits.masked_fill(~reads, -torch.inf)
        lses.append(logits.logsumexp(-1))  # [q_len, heads]
        weights = (logits - lses[-1].masked_fill(lses[-1] == -torch.inf, 0)[..., None]).exp()
        outs.append(weighted_sum(weights, values, reads))
    out = delivered(torch.cat(outs).to(result), out)
    return (out, delivered(torch.cat(lses), lse)) if return_lse else out
