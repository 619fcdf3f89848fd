# SPDX-License-Identifier: MIT
"""`sparse_attention` in plain PyTorch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV
from openmsa.types import Layout


def sparse_attention(
    q: Tensor,
    k: Tensor | PagedKV,
    v: Tensor | None,
    blocks: Tensor,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `openmsa.sparse_attention.sparse_attention`. Holds one sequence's full logit matrix."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if isinstance(k, PagedKV):
        k, v, cu_k = k.gather(seqs.k_lens())
    else:
        cu_k = seqs.cu_seqlens_k
    assert v is not None
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    outs, lses = [q.new_zeros((0, heads, q.shape[2]), dtype=dtype)], [q.new_zeros((0, heads), dtype=dtype)]
    for b in range(seqs.batch):
        q0, q1 = seqs.cu_seqlens_q[b : b + 2].tolist()
        k0, k1 = cu_k[b : b + 2].tolist()
        num_blocks = -(-(k1 - k0) // block_size)
        ids = blocks[q0:q1].expand(-1, kv_heads, -1).long()  # [q_len, kv_heads, topk]
        ids = ids.masked_fill((ids < 0) | (ids >= num_blocks), num_blocks)  # one more block, dropped below
        selected = torch.zeros(q1 - q0, kv_heads, num_blocks + 1, dtype=torch.bool, device=q.device)
        selected = selected.scatter(2, ids, True)[..., :num_blocks].repeat_interleave(block_size, dim=2)[..., : k1 - k0]
        position = seqs.q_offset[b] + torch.arange(q1 - q0, device=q.device)
        causal = torch.arange(k1 - k0, device=q.device) <= position[:, None]  # [q_len, k_len]
        reads = (selected & causal[:, None]).repeat_interleave(group, dim=1)  # [q_len, heads, k_len]
        keys, values = (x[k0:k1].to(dtype).repeat_interleave(group, dim=1) for x in (k, v))  # [k_len, heads, dim]
        logits = torch.einsum("qhd,khd->qhk", q[q0:q1].to(dtype), keys) * softmax_scale
        logits = logits.masked_fill(~reads, -torch.inf)
        lse = logits.logsumexp(-1)  # [q_len, heads]
        weights = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        outs.append(torch.einsum("qhk,khd->qhd", weights, values))
        lses.append(lse)
    out = torch.cat(outs).to(q.dtype)
    return (out, torch.cat(lses)) if return_lse else out
