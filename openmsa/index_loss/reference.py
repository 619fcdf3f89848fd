# SPDX-License-Identifier: MIT
"""This module is the specification of `index_loss`, in plain PyTorch, which also differentiates it."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.index_loss import share
from openmsa.types import Layout, wide_dtype


def index_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    blocks: Tensor | None,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    index_scale: float,
    coefficient: float,
    lse: Tensor | None,
    return_loss: bool,
) -> Tensor:
    """Does what `openmsa.index_loss.index_loss` says, holding one sequence's full logit matrix."""
    dtype, factor = torch.promote_types(wide_dtype(q), wide_dtype(index_q)), share(index_q, coefficient)
    q, k, index_q, index_k = q.detach().to(dtype), k.detach().to(dtype), index_q.to(dtype), index_k.to(dtype)
    heads, total = index_q.shape[1], index_q.new_zeros(()) + index_q.sum() * 0 + index_k.sum() * 0
    for b in range(seqs.batch):
        q0, q1 = seqs.cu_seqlens_q[b : b + 2].tolist()
        k0, k1 = seqs.cu_seqlens_k[b : b + 2].tolist()
        position = seqs.first_positions()[b] + torch.arange(q1 - q0, device=q.device)
        visible = torch.arange(k1 - k0, device=q.device) <= position[:, None]  # [q_len, k_len]
        reads = visible[:, None].expand(-1, heads, -1)  # [q_len, heads, k_len]
        if blocks is not None:
            num_blocks = -(-(k1 - k0) // block_size)
            ids = blocks[q0:q1].expand(-1, heads, -1).long()
            ids = ids.masked_fill((ids < 0) | (ids >= num_blocks), num_blocks)  # Skipped ids go to one more block.
            selected = torch.zeros(q1 - q0, heads, num_blocks + 1, dtype=torch.bool, device=q.device)
            selected = selected.scatter(2, ids, True)[..., :num_blocks].repeat_interleave(block_size, dim=2)
            reads = reads & selected[..., : k1 - k0]
        some = reads.any(-1)  # [q_len, heads]
        reads = reads[some]  # [pairs, k_len]
        keys = k[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # [k_len, num_q_heads, dim]
        logits = torch.einsum("qhd,khd->qhk", q[q0:q1], keys) * softmax_scale
        logits = logits.unflatten(1, (heads, -1))[some].masked_fill(~reads[:, None], -torch.inf)  # [pairs, group, k_len]
        sums = logits.logsumexp(-1) if lse is None else lse[q0:q1].detach().to(dtype).unflatten(1, (heads, -1))[some]
        teacher = (logits - sums[..., None]).exp().mean(1)
        index_keys = index_k[k0:k1].repeat_interleave(heads // index_k.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->qhk", index_q[q0:q1], index_keys)[some] * index_scale
        student = scores.masked_fill(~reads, -torch.inf).log_softmax(-1).masked_fill(~reads, 0)
        total = total + (torch.xlogy(teacher, teacher) - teacher * student).sum()
    loss: Tensor = total * factor
    return loss if return_loss else loss - loss.detach()
