# SPDX-License-Identifier: MIT
"""This module describes which blocks a trained index branch selects, and how they compare with those that the main branch
attends to most."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.evidence.ways import selected, shared
from openmsa import sparse_attention
from openmsa.modules import IndexBranch

LAGS = (1, 2, 4, 8, 16, 32, 64, 128)
TILES = (4, 8, 16)
SAMPLED = 256  # queries of a window whose attention over all keys is computed


class Recorder:
    """Is a way of attending that keeps the selections of one window at a time, and how they compare with the main branch.

    blocks:  of each layer the last window's selection, int32 ``[queries, heads, topk]``.
    quality: of each layer and window its `Quality`.
    """

    def __init__(self, topk: int) -> None:
        self.topk, self.blocks, self.quality = topk, dict[int, Tensor](), dict[int, list[dict[str, float]]]()

    def __call__(
        self, layer: int, branch: IndexBranch, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, seqs: Any
    ) -> Tensor:
        size = branch.config.index_block_size
        blocks = selected(branch.config, index_q, index_k, seqs, self.topk)
        self.blocks[layer] = blocks
        found = quality(q, k, blocks, size, q.shape[-1] ** -0.5)
        if found:
            self.quality.setdefault(layer, []).append(found)
        return sparse_attention(q, k, v, blocks, seqs, block_size=size)


def quality(q: Tensor, k: Tensor, blocks: Tensor, size: int, scale: float) -> dict[str, float]:
    """Compares a selection with the main branch on up to `SAMPLED` evenly spread queries of one string that see more blocks
    than are selected; empty where there is none.

    The mass of a block is the main branch's softmax weight over all visible keys in it, the mean of the query heads of a group.
    I* are the topk blocks of the largest mass. block_recall: the share of I* that is selected; score_recall: the mass of that
    part over the mass of I*; mass: that of all selected blocks; best_mass: that of I*.
    """
    topk, kv_heads, keys = blocks.shape[2], k.shape[1], k.shape[0]
    first = topk * size
    if keys <= first:
        return {}
    rows = torch.linspace(first, keys - 1, min(SAMPLED, keys - first), device=q.device).long()
    num_blocks = -(-keys // size)
    key = torch.arange(keys, device=q.device)
    sums: list[Tensor] = []
    for head in range(kv_heads):
        group = q[rows].unflatten(1, (kv_heads, -1))[:, head].float()  # [rows, group, dim]
        logits = torch.einsum("rgd,kd->grk", group, k[:, head].float()) * scale
        weights = logits.masked_fill(key > rows[:, None], -torch.inf).softmax(-1).mean(0)  # [rows, keys]
        mass = weights.new_zeros(len(rows), num_blocks).index_add_(1, key // size, weights)
        best_mass, best = mass.topk(topk, 1)
        chosen = blocks[rows, min(head, blocks.shape[1] - 1)].long()
        hit = (best[..., None] == chosen[:, None]).any(-1)  # [rows, topk]
        got = mass.gather(1, chosen.clamp(min=0)) * (chosen >= 0)
        hit_mass = (best_mass * hit).sum(1) / best_mass.sum(1)
        sums.append(torch.stack([x.mean() for x in (hit.float(), hit_mass, got.sum(1), best_mass.sum(1))]))
    names = ("block_recall", "score_recall", "mass", "best_mass")
    return dict(zip(names, torch.stack(sums).mean(0).tolist(), strict=True))


def statistics(blocks: Tensor, size: int) -> dict[str, Any]:
    """Describes a selection, int32 ``[queries, heads, topk]``, of all queries of one string, over those that see more than topk
    blocks; empty where there is none. Means are over queries and heads.

    shared_after:   of each lag, the share of a query's blocks that the query so many positions later selects, too; lag 1 is
                    what consecutive decode steps share.
    union:          of each tile size, how many blocks the queries of a tile read together.
    distance:       the share of selected blocks by how many blocks they lie back: 0, 1, then octaves from 2, 4, ...
    first_block:    the share of queries that select block 0.
    heads_share:    the share of a head's blocks that the next head selects, too.
    """
    queries, heads, topk = blocks.shape
    own = torch.arange(queries, device=blocks.device) // size
    blocks, own = blocks[own >= topk], own[own >= topk]
    if not len(blocks):
        return {}
    back = own[:, None, None] - blocks
    blocks = blocks.masked_fill(back < 0, -1)
    octave = torch.where(back < 1, 0, back.clamp(min=1).float().log2().floor().long() + 1)
    counts = torch.bincount(octave[blocks >= 0].flatten())
    found: dict[str, Any] = {
        "queries": len(blocks),
        "shared_after": {str(n): shared(blocks[:-n], blocks[n:]).item() for n in LAGS if n < len(blocks)},
        "union": {str(n): unions(blocks, n).float().mean().item() for n in TILES if n <= len(blocks)},
        "distance": (counts / counts.sum()).tolist(),
        "first_block": (blocks == 0).any(-1).float().mean().item(),
    }
    if heads > 1:
        found["heads_share"] = shared(blocks[:, :-1].flatten(0, 1), blocks[:, 1:].flatten(0, 1)).item()
    return found


def unions(blocks: Tensor, tile: int) -> Tensor:
    """Returns how many distinct blocks the queries of each whole tile select, ``[tiles, heads]``."""
    whole = blocks[: len(blocks) // tile * tile].unflatten(0, (-1, tile)).transpose(1, 2).flatten(2)  # [tiles, heads, ids]
    ordered = whole.sort(-1).values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return (new & (ordered >= 0)).sum(-1)


def as_uint16(blocks: Tensor) -> Any:
    """Returns a selection as a numpy array of uint16, 65535 where nothing is selected."""
    return blocks.masked_fill(blocks < 0, 65535).cpu().numpy().astype("uint16")
