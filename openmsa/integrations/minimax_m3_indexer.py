# SPDX-License-Identifier: MIT
"""This module runs the block selection of transformers' MiniMax-M3 (`minimax_m3_vl`) on this library.

The model's own indexer holds the scores of every query with every key in float32; `select_blocks` holds those of a few queries
at a time, which is what makes long prompts fit.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from openmsa.block_topk import select_blocks
from openmsa.types import Sequences


def replace_indexers(model: nn.Module, *, impl: str = "auto") -> int:
    """Lets every sparse layer of a MiniMax-M3 model select its blocks with `openmsa.select_blocks`; returns how many there are.

    impl: as in `openmsa.select_blocks`. Weights, cache and what the layers hand on stay as they are, so that any attention
    implementation may follow, the eager one too; a query's ids ascend instead of following scores. A new call sets `impl` anew.
    Two cases stay with the model's own code, whose result is the same: hidden states that need gradients, and position ids that
    do not count up by one (left padding with positions counted from the first real token).
    Raises ValueError where the model has no such layer.
    """
    found = [module for module in model.modules() if type(module).__name__ == "MiniMaxM3VLIndexer"]
    if not found:
        raise ValueError(f"model must have MiniMax-M3's sparse layers, got {type(model).__name__} without any")
    for indexer in found:
        indexer.forward = MethodType(_selection(impl), indexer)
    return len(found)


def _selection(impl: str) -> Any:
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Any,
        position_ids: Tensor,
    ) -> Tensor:
        """Returns the selected blocks, int64 ``[batch, index_heads, q_len, topk]``, -1 behind the last."""
        if (torch.is_grad_enabled() and hidden_states.requires_grad) or not _counts_up(position_ids):
            return type(self).forward(self, hidden_states, position_embeddings, past_key_values, position_ids)
        index_q, index_k = _branch(self, hidden_states, position_embeddings)
        if past_key_values is not None:
            index_k = past_key_values.layers[self.layer_idx].update_index(index_k)
        batch, _, q_len, _ = index_q.shape
        k_len = index_k.shape[2]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=index_q.device)
        first = position_ids[:, 0].expand(batch).to(torch.int32).contiguous()
        ids = select_blocks(
            index_q.transpose(1, 2).flatten(0, 1),
            index_k.transpose(1, 2).flatten(0, 1),
            min(self.topk_blocks, -(-k_len // self.block_size)),
            Sequences(starts * q_len, starts * k_len, q_len, k_len, first),
            block_size=self.block_size,
            local_blocks=min(self.local_blocks, self.topk_blocks, -(-k_len // self.block_size)),
            impl=impl,
        )
        return ids.unflatten(0, (batch, q_len)).transpose(1, 2).long()

    return forward


def _branch(indexer: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns index queries ``[batch, index_heads, q_len, index_dim]`` and keys ``[batch, 1, q_len, index_dim]``, rotated."""
    queries = indexer.q_norm(indexer.q_proj(hidden).unflatten(-1, (-1, indexer.head_dim))).transpose(1, 2)
    keys = indexer.k_norm(indexer.k_proj(hidden).unflatten(-1, (1, indexer.head_dim))).transpose(1, 2)
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    return rotate(queries, keys, *(x[..., : indexer.head_dim] for x in embeddings))


def _counts_up(position_ids: Tensor) -> bool:
    """Tells whether every row is first, first + 1, ..., for which it syncs with the host where there is more than one query."""
    if position_ids.shape[1] == 1:
        return True
    steps = torch.arange(position_ids.shape[1], device=position_ids.device)
    return bool((position_ids - position_ids[:, :1] == steps).all())
