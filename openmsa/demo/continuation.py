# SPDX-License-Identifier: MIT
"""This module decodes greedily over paged caches: every layer appends its new key, selects blocks and attends to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openmsa.attention import msa_attention
from openmsa.demo.sweep import hidden_states
from openmsa.demo.variants import BLOCK_SIZE
from openmsa.integrations.transformers import group_mean_index, register_packed
from openmsa.kv_cache import PagedIndexKeys, PagedKV
from openmsa.types import Sequences

NAME = "openmsa-demo-paged"


class PagedCaches:
    """Holds a `PagedKV` and a `PagedIndexKeys` for each layer, for one sequence, behind one page table in shuffled order."""

    def __init__(self, num_layers: int, capacity: int, num_kv_heads: int, head_dim: int) -> None:
        pages = -(-capacity // BLOCK_SIZE)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0), device="cpu")
        self.table = order.to(torch.int32)[None]  # [1, pages]
        shape = (self.table, pages, num_kv_heads, BLOCK_SIZE, head_dim)
        self.kv = [PagedKV.allocate(*shape) for _ in range(num_layers)]
        self.index = [PagedIndexKeys.allocate(*shape) for _ in range(num_layers)]

    def fill(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Appends the key and value ``[tokens, num_kv_heads, head_dim]`` of a layer; its index key is its key."""
        self.kv[layer].append(key, value)
        self.index[layer].append(key)

    def register(self, topk: int) -> str:
        """Registers attention that appends what a layer is given and reads the caches; returns its name."""

        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float) -> Tensor:
            layer = int(module.layer_idx)  # type: ignore[arg-type]
            index_q, index_k = group_mean_index(module, q, k)
            self.kv[layer].append(k, v)
            self.index[layer].append(index_k)
            return msa_attention(
                q, self.kv[layer], None, index_q, self.index[layer], topk, block_size=BLOCK_SIZE, softmax_scale=softmax_scale
            )

        register_packed(NAME, attend)
        return NAME


def decode_step(model: Any, token: int, position: int) -> Tensor:
    """Returns the logits ``[vocabulary]`` after one more token."""
    hidden = hidden_states(model, torch.tensor([[token]], device="cpu"), position)
    return model.lm_head(hidden[0])
