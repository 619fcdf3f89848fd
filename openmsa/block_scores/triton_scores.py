# SPDX-License-Identifier: MIT
"""`block_scores` on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.index_branch.triton_launch import launch_scores
from openmsa.kv_cache import PagedIndexKeys
from openmsa.types import Layout


def block_scores(index_q: Tensor, index_k: Tensor | PagedIndexKeys, seqs: Layout, block_size: int) -> Tensor:
    """See `openmsa.block_scores.block_scores`."""
    total_q, heads, _ = index_q.shape
    scores = torch.empty(heads, total_q, seqs.num_blocks(block_size), dtype=torch.float32, device=index_q.device)
    if scores.numel():
        launch_scores(index_q, index_k, seqs, block_size, scores, None)
    return scores
