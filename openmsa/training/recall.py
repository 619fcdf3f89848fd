# SPDX-License-Identifier: MIT
"""Recall says how much of what the main branch attends to a selection holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.training.layers import LayerInputs

ROWS_AT_A_TIME = 64
"""Queries whose weights on all keys are held at a time."""


class Recall(NamedTuple):
    """Holds means over (query, KV head) pairs. `pairs` counts those that see more blocks than are selected: all others are left
    out, as they have nothing to choose; without any, both means are NaN.

    blocks:  the share of the topk blocks of most mass that are selected.
    scores:  the mass of those that are selected, over the mass of all of them.
    mass:    the share of the main branch's whole mass that the selection holds.
    """

    blocks: float
    scores: float
    mass: float
    pairs: int


def spaced_rows(length: int, count: int) -> Tensor:
    """Returns `count` query positions spread evenly over a window of `length`, the last one included."""
    count = min(count, length)
    return (torch.arange(1, count + 1, device="cpu") * length).div(count, rounding_mode="floor") - 1


def block_mass(inputs: LayerInputs, rows: Tensor, block_size: int) -> Tensor:
    """Returns how much weight the main branch, attending to all visible keys, puts on each block: the mean over the query heads
    of a KV head, float32 ``[batch, rows, num_kv_heads, num_blocks]``, for the same positions `rows` of each window."""
    length = int(inputs.seqs.max_seqlen_q or 0)
    q, k = (x.unflatten(0, (-1, length)) for x in (inputs.q, inputs.k))  # [batch, length, heads, head_dim]
    kv_heads, blocks = k.shape[2], -(-length // block_size)
    keys = k.permute(0, 2, 3, 1).float()  # [batch, kv_heads, head_dim, length]
    position = torch.arange(length, device=q.device)
    found = []
    for some in rows.to(q.device).split(ROWS_AT_A_TIME):
        queries = q[:, some].float().unflatten(2, (kv_heads, -1)).permute(0, 2, 1, 3, 4)  # [batch, kv_heads, rows, group, dim]
        with torch.autocast(q.device.type, enabled=False):
            logits = torch.matmul(queries.flatten(2, 3), keys).unflatten(2, (len(some), -1)) * inputs.softmax_scale
        weights = logits.masked_fill_((position > some[:, None])[:, None], -torch.inf).softmax(-1).mean(3)
        whole = torch.nn.functional.pad(weights, (0, blocks * block_size - length))
        found.append(whole.unflatten(-1, (blocks, block_size)).sum(-1).transpose(1, 2))
    return torch.cat(found, 1)


def recall(mass: Tensor, blocks: Tensor, rows: Tensor, block_size: int) -> Recall:
    """Compares a selection with the blocks of most mass.

    mass:    ``[batch, rows, num_kv_heads, num_blocks]``, as `block_mass` returns it.
    blocks:  int32 ``[total_q, num_kv_heads or 1, topk]``, the selection of all queries of the same windows.
    rows:    the positions in their window that `mass` holds.
    """
    batch, _, heads, num_blocks = mass.shape
    rows = rows.to(mass.device)
    ids = blocks.unflatten(0, (batch, -1))[:, rows].long().expand(-1, -1, heads, -1)
    topk = ids.shape[-1]
    chosen = torch.zeros(*mass.shape[:3], num_blocks + 1, dtype=torch.bool, device=mass.device)
    chosen = chosen.scatter_(3, ids.masked_fill(ids < 0, num_blocks), True)[..., :num_blocks]
    some = rows.div(block_size, rounding_mode="floor") + 1 > topk
    pairs = batch * int(some.sum()) * heads
    if not pairs:
        return Recall(float("nan"), float("nan"), float("nan"), 0)
    mass, chosen = mass[:, some].double(), chosen[:, some]
    best = mass.topk(topk, -1)
    hit = chosen.gather(3, best.indices)
    scores = (best.values * hit).sum(-1) / best.values.sum(-1)
    return Recall(hit.double().mean().item(), scores.mean().item(), (mass * chosen).sum(-1).mean().item(), pairs)


def mean_recall(parts: list[Recall]) -> Recall:
    """Returns the mean of several recalls, weighted by their pairs."""
    pairs = sum(p.pairs for p in parts)
    if not pairs:
        return Recall(float("nan"), float("nan"), float("nan"), 0)
    means = [sum(p[i] * p.pairs for p in parts if p.pairs) / pairs for i in range(3)]
    return Recall(means[0], means[1], means[2], pairs)
