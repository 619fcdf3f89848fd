# SPDX-License-Identifier: MIT
"""This module has the kinds of attention that the demonstration compares, each registered with transformers under one name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openmsa.block_topk import select_blocks_from_scores
from openmsa.integrations.transformers import register, register_packed
from openmsa.sparse_attention import sparse_attention
from openmsa.types import Sequences

BLOCK_SIZE = 64
NAME = "openmsa-demo"  # Sparse variants are registered under this name, one at a time.


@dataclass(frozen=True)
class Variant:
    """Describes one row of the table. kind: "dense", "msa", "window" (the first block and the last ones) or "random" (the
    query's own block and random ones); topk: blocks that a query reads; percent: that number as the table names it."""

    kind: str
    percent: int = 100
    topk: int = 0

    @property
    def title(self) -> str:
        """Returns the variant's name in the table."""
        names = {"dense": "dense", "msa": "MSA", "window": "sliding window", "random": "random blocks"}
        return names[self.kind] if self.kind == "dense" else f"{names[self.kind]}, {self.percent} %"


def variants(tokens: int) -> list[Variant]:
    """Returns dense attention, MSA at 6, 12, 25 and 50 % of the blocks of `tokens` keys, and the baselines at 12 and 25 %.

    Percentages of a short text that give the same number of blocks are one row, under the name of the largest.
    """
    blocks = -(-tokens // BLOCK_SIZE)
    topk = {percent: max(2, min(64, blocks // divisor)) for percent, divisor in ((6, 16), (12, 8), (25, 4), (50, 2))}
    sparse = [("msa", percent) for percent in {blocks: percent for percent, blocks in topk.items()}.values()]
    sparse += [(kind, percent) for kind in ("window", "random") for percent in (12, 25)]
    return [Variant("dense"), *(Variant(kind, percent, topk[percent]) for kind, percent in sparse)]


def attention_name(variant: Variant, num_layers: int, num_kv_heads: int, tokens: int) -> str:
    """Registers the variant and returns the name that transformers knows it by. Dense is what the model runs by default."""
    if variant.kind == "dense":
        return "sdpa"
    if variant.kind == "msa":
        register(NAME, topk=variant.topk, block_size=BLOCK_SIZE)
        return NAME
    if variant.kind == "window":
        layers = [_window_blocks(tokens, variant.topk)] * num_layers
    else:
        layers = [_random_blocks(tokens, variant.topk, num_kv_heads, seed) for seed in range(num_layers)]

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float) -> Tensor:
        blocks = layers[int(module.layer_idx)]  # type: ignore[arg-type]
        return sparse_attention(q, k, v, blocks, seqs, block_size=BLOCK_SIZE, softmax_scale=softmax_scale)

    register_packed(NAME, attend)
    return NAME


def _window_blocks(tokens: int, topk: int) -> Tensor:
    """Returns the first block and each query's last ``topk - 1`` blocks, int32 ``[tokens, 1, topk]``."""
    scores = torch.zeros(1, tokens, -(-tokens // BLOCK_SIZE), device="cpu")
    seqs = Sequences.from_lengths([tokens], [tokens])
    return select_blocks_from_scores(scores, topk, seqs, block_size=BLOCK_SIZE, init_blocks=1, local_blocks=topk - 1)


def _random_blocks(tokens: int, topk: int, num_kv_heads: int, seed: int) -> Tensor:
    """Returns each query's own block and random visible ones, int32 ``[tokens, num_kv_heads, topk]``."""
    shape, generator = (num_kv_heads, tokens, -(-tokens // BLOCK_SIZE)), torch.Generator().manual_seed(seed)
    scores = torch.rand(shape, generator=generator, device="cpu")
    return select_blocks_from_scores(scores, topk, Sequences.from_lengths([tokens], [tokens]), block_size=BLOCK_SIZE)
