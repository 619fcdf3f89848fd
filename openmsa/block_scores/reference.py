# SPDX-License-Identifier: MIT
"""This is `block_scores` in plain PyTorch, which is its specification."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.kv_cache.rows import dequantized
from openmsa.types import Layout, wide_dtype


def block_scores(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    scores: Tensor | None = None,
) -> Tensor:
    """See `openmsa.block_scores.block_scores`. It holds the full score matrix of one sequence."""
    total_q, heads, _ = index_q.shape
    dtype, cu_k = wide_dtype(index_q), seqs.cu_seqlens_k
    keys: Tensor | Stored
    if isinstance(index_k, PagedIndexKeys):
        keys, cu_k = index_k.gather(seqs.k_lens(), dtype)
    else:
        keys = index_k
    index_q, keys = dequantized(index_q, dtype), dequantized(keys, dtype)
    num_blocks = seqs.num_blocks(block_size)
    found = torch.full((heads, total_q, num_blocks), -torch.inf, dtype=dtype, device=index_q.device)
    for b in range(seqs.batch):
        q0, q1 = seqs.cu_seqlens_q[b : b + 2].tolist()
        k0, k1 = cu_k[b : b + 2].tolist()
        q = index_q[q0:q1]  # [q_len, heads, dim]
        k = keys[k0:k1].repeat_interleave(heads // keys.shape[1], dim=1)  # [k_len, heads, dim]
        products = torch.einsum("qhd,khd->hqk", q, k).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        position = seqs.first_positions()[b] + torch.arange(q1 - q0, device=q.device)
        visible = torch.arange(k1 - k0, device=q.device) <= position[:, None]  # [q_len, k_len]
        products = products.masked_fill(~visible, -torch.inf)
        whole = torch.nn.functional.pad(products, (0, num_blocks * block_size - (k1 - k0)), value=-torch.inf)
        found[:, q0:q1] = whole.unflatten(2, (num_blocks, block_size)).amax(3)
    return found if scores is None else scores.copy_(found[..., : scores.shape[2]])
