# SPDX-License-Identifier: MIT
"""This is `select_blocks` in plain PyTorch, which is its specification."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.block_scores import STAGE as SCORING
from openmsa.inputs import ScoringCall, exact_keys
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys, Stored
from openmsa.types import Layout


def select_from_scores(scores: Tensor, topk: int, visible_blocks: Tensor, init_blocks: int, local_blocks: int) -> Tensor:
    """See `openmsa.block_topk.select_blocks_from_scores`."""
    num_blocks = scores.shape[2]
    block = torch.arange(num_blocks, device=scores.device)
    seen = visible_blocks[:, None]  # [total_q, 1]
    visible = block < seen  # [total_q, num_blocks]
    forced = visible & ((block < init_blocks) | (block >= seen - local_blocks))
    scores = scores.detach().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).masked_fill(~visible, -torch.inf)
    # Forced blocks come first, then higher scores, then lower ids: two stable sorts, the less important one first.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    first = forced.expand_as(scores).gather(-1, order).byte().argsort(dim=-1, descending=True, stable=True)
    chosen = order.gather(-1, first)[..., :topk]  # [heads, total_q, at most topk]
    readable = (scores.gather(-1, chosen) > -torch.inf) | forced.expand_as(scores).gather(-1, chosen)
    chosen = chosen.masked_fill(~readable, num_blocks).sort(dim=-1).values
    chosen = torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=num_blocks)
    return chosen.masked_fill(chosen == num_blocks, -1).transpose(0, 1).to(torch.int32).contiguous()


def select_blocks(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    blocks: Tensor | None = None,
) -> Tensor:
    """See `openmsa.block_topk.select_blocks`."""
    with torch.no_grad():
        scores = SCORING.run("reference", ScoringCall(index_q, index_k, seqs, block_size))
    visible_blocks = seqs.visible_blocks(index_q.shape[0], block_size)
    chosen = select_from_scores(scores, topk, visible_blocks, init_blocks, local_blocks)
    return chosen if blocks is None else blocks.copy_(chosen)


def select_certified(
    index_q: Tensor,
    index_k: CertifiedKeys | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `openmsa.block_topk.select_blocks` with ``certified=True``: every visible block counts as scored exactly."""
    blocks = select_blocks(index_q, exact_keys(index_k), seqs, block_size, topk, init_blocks, local_blocks, blocks)
    visible = seqs.visible_blocks(index_q.shape[0], block_size)
    return blocks, visible[:, None].expand(-1, index_q.shape[1])
