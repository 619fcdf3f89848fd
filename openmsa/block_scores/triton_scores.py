# SPDX-License-Identifier: MIT
"""`block_scores` on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.index_branch.triton_launch import launch_scores, score_rows
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.types import Layout


def block_scores(index_q: Tensor | Stored, index_k: Tensor | Stored | PagedIndexKeys, seqs: Layout, block_size: int) -> Tensor:
    """See `openmsa.block_scores.block_scores`."""
    total_q, heads, _ = index_q.shape
    num_blocks = seqs.num_blocks(block_size)
    padded = torch.empty(heads, total_q, score_rows(num_blocks), dtype=torch.float32, device=index_q.device)
    scores = padded[..., :num_blocks]
    if scores.numel():
        launch_scores(index_q, index_k, seqs, block_size, scores, None)
    return scores
