# SPDX-License-Identifier: MIT
"""This module is the specification of `dense_attention`, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.dense_attention.call import chosen_results
from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.results import delivered
from openmsa.kv_cache.rows import dequantized
from openmsa.runtime.kinds import computes
from openmsa.runtime.matmul import weighted_sum
from openmsa.types import Layout, out_dtype, wide_dtype


def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    return_out: bool,
    return_lse: bool,
    return_max_score: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_score: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Does what `openmsa.dense_attention.dense_attention` says, holding one sequence's full logit matrix."""
    computes("attention")
    dtype, result, cu_k = wide_dtype(q), out_dtype(q), seqs.cu_seqlens_k
    if isinstance(k, PagedKV):
        k, v, cu_k = k.gather(seqs.k_lens(), dtype)
    assert v is not None
    q, k, v = (dequantized(x, dtype) for x in (q, k, v))
    heads = q.shape[1]
    group, num_blocks = heads // k.shape[1], seqs.num_blocks(block_size)
    outs, lses = [q.new_zeros((0, heads, q.shape[2]))], [q.new_zeros((0, heads))]
    scores = q.new_full((heads, q.shape[0], num_blocks), -torch.inf)
    for b in range(seqs.batch):
        q0, q1 = seqs.cu_seqlens_q[b : b + 2].tolist()
        k0, k1 = cu_k[b : b + 2].tolist()
        position = seqs.first_positions()[b] + torch.arange(q1 - q0, device=q.device)
        visible = torch.arange(k1 - k0, device=q.device) <= position[:, None]  # [q_len, k_len]
        if not causal:
            visible = torch.ones_like(visible)
        keys, values = (x[k0:k1].repeat_interleave(group, dim=1) for x in (k, v))  # [k_len, heads, dim]
        products = torch.einsum("qhd,khd->hqk", q[q0:q1], keys)
        logits = (products * softmax_scale).masked_fill(~visible, -torch.inf)
        sums = logits.logsumexp(-1)  # [heads, q_len]
        weights = (logits - sums.masked_fill(sums == -torch.inf, 0)[..., None]).exp()
        outs.append(weighted_sum(weights.transpose(0, 1), values, visible[:, None]))
        lses.append(sums.T)
        seen = products.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).masked_fill(~visible, -torch.inf)
        whole = torch.nn.functional.pad(seen, (0, num_blocks * block_size - (k1 - k0)), value=-torch.inf)
        scores[:, q0:q1] = whole.unflatten(2, (num_blocks, block_size)).amax(3)
    return chosen_results(
        delivered(torch.cat(outs).to(result), out) if return_out else None,
        delivered(torch.cat(lses), lse) if return_lse else None,
        delivered(scores if max_score is None else scores[..., : max_score.shape[2]], max_score) if return_max_score else None,
    )
