# SPDX-License-Identifier: MIT
"""`select_blocks` on a CPU scores a bounded number of queries at a time, then takes one top-k over exact integer keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openmsa.block_scores import STAGE as SCORING
from openmsa.block_topk import cpu_choose
from openmsa.inputs import ScoringCall
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.runtime.environment import cpu_workspace_bytes
from openmsa.types import Layout

BYTES_A_SCORE = 32  # the score, its integer key and what torch.topk holds beside them
FORCED = 0x7FFFFFFF  # above the ordered bits of +inf
LOWEST = -0x7F800001  # the ordered bits of -inf
ID_BITS = 24
LARGEST = torch.finfo(torch.float32).max / 2  # Sums of products below it stay finite in any order.
FEW_SCORES = 512  # So few scores are sorted sooner by Python than by the two dozen calls of PyTorch.


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
    total_q, heads, _ = index_q.shape
    chunk = max(64, cpu_workspace_bytes() // (BYTES_A_SCORE * heads * max(1, seqs.num_blocks(block_size))))
    spans = [(range(offset, offset + q1 - q0), k_len - 1) for q0, q1, _, k_len, offset in seqs.on_host()]
    seen = [max(0, min(position, last_key) // block_size + 1) for positions, last_key in spans for position in positions]
    visible_blocks = torch.tensor(seen, dtype=torch.int32, device="cpu")
    first, end = _scored(index_q, index_k, seen, block_size, topk)
    if blocks is None and (first, end) == (0, total_q) and total_q <= chunk:
        scores = SCORING.run("cpu", ScoringCall(index_q.detach(), index_k, seqs, block_size))
        return select_from_scores(scores, topk, visible_blocks, init_blocks, local_blocks)
    blocks = torch.empty((total_q, heads, topk), dtype=torch.int32, device="cpu") if blocks is None else blocks
    slot = torch.arange(topk, dtype=torch.int32, device="cpu")
    for rows in (slice(0, first), slice(end, total_q)):
        blocks[rows] = torch.where(slot < visible_blocks[rows, None], slot, -1)[:, None]
    for start in range(first, end, chunk):
        rows = slice(start, min(start + chunk, end))
        part = ScoringCall(index_q[rows].detach(), index_k, seqs.query_chunk(rows.start, rows.stop), block_size)
        scores = SCORING.run("cpu", part)  # [heads, rows, num_blocks]
        blocks[rows] = select_from_scores(scores, topk, visible_blocks[rows], init_blocks, local_blocks)
    return blocks


def _scored(
    index_q: Tensor | Stored, index_k: Tensor | Stored | PagedIndexKeys, seen: list[int], block_size: int, topk: int
) -> tuple[int, int]:
    """Returns the first and the end of the packed queries that are scored, which see `seen` blocks each. The others see at most
    topk blocks and select all of them, because no score of plain tensors can be NaN or -inf where the greatest magnitudes bound
    every product."""
    crowded = [i for i, count in enumerate(seen) if count > topk]
    first, end = (crowded[0], crowded[-1] + 1) if crowded else (0, 0)
    unscored = (sum(seen[:first]) + sum(seen[end:])) * block_size  # products of a head
    if not (isinstance(index_q, Tensor) and isinstance(index_k, Tensor)) or unscored < max(1, index_k.shape[0]):
        return 0, len(seen)  # Reading the magnitudes of all keys would cost more than these products.
    largest = index_q.shape[2] * math.prod(
        max(-float(low), float(high)) for low, high in map(torch.aminmax, (index_q, index_k))
    )
    return (first, end) if largest < LARGEST else (0, len(seen))  # A NaN is not below it.


def select_from_scores(scores: Tensor, topk: int, visible_blocks: Tensor, init_blocks: int, local_blocks: int) -> Tensor:
    """See `openmsa.block_topk.select_blocks_from_scores`."""
    heads, total_q, num_blocks = scores.shape
    if scores.numel() <= FEW_SCORES:
        return _select_few(scores.detach(), topk, visible_blocks, init_blocks, local_blocks)
    if (found := cpu_choose.choose(scores.detach(), topk, visible_blocks, init_blocks, local_blocks)) is not None:
        return found
    blocks = torch.full((total_q, heads, topk), -1, dtype=torch.int32, device="cpu")
    chunk = max(64, cpu_workspace_bytes() // (BYTES_A_SCORE * heads * max(1, num_blocks)))
    for start in range(0, total_q if num_blocks else 0, chunk):
        rows = slice(start, min(start + chunk, total_q))
        chosen = _select(scores[:, rows].detach(), topk, visible_blocks[rows], init_blocks, local_blocks)
        blocks[rows, :, : chosen.shape[2]] = chosen.transpose(0, 1)
    return blocks


def _select_few(scores: Tensor, topk: int, visible_blocks: Tensor, init_blocks: int, local_blocks: int) -> Tensor:
    """Does what `select_from_scores` does, without PyTorch."""
    heads, total_q, num_blocks = scores.shape
    chosen = []
    for of_query, seen in zip(scores.transpose(0, 1).tolist(), visible_blocks.tolist(), strict=True):
        for of_head in of_query:
            ids = choose(of_head, min(seen, num_blocks), topk, init_blocks, max(0, seen - local_blocks))
            chosen.append(ids + [-1] * (topk - len(ids)))
    return torch.tensor(chosen, dtype=torch.int32, device="cpu").view(total_q, heads, topk)


def choose(scores: list[float], visible: int, topk: int, init_blocks: int, local: int) -> list[int]:
    """Returns the ids, ascending, of the blocks that a query selects of the first `visible` ones; from `local` on all are
    forced, as the first `init_blocks` are."""
    first = min(init_blocks, visible)
    last = max(first, min(local, visible))
    count = topk - first - (visible - last)
    free = [i for i in range(first, last) if scores[i] > -math.inf]
    if len(free) > count:
        free.sort(key=scores.__getitem__, reverse=True)  # Equal scores stay in the order of their ids.
        free = sorted(free[:count])
    return [*range(first), *free, *range(last, visible)]


def _select(scores: Tensor, topk: int, visible_blocks: Tensor, init_blocks: int, local_blocks: int) -> Tensor:
    """Returns chosen ids, ascending, then -1: int64 ``[heads, rows, min(topk, num_blocks)]``."""
    num_blocks = scores.shape[2]
    block, seen = torch.arange(num_blocks, device="cpu"), visible_blocks[:, None]
    rank = _ordered(scores)  # int64 [heads, rows, num_blocks]
    rank.masked_fill_(block >= seen, LOWEST)
    rank.masked_fill_((block < seen) & ((block < init_blocks) | (block >= seen - local_blocks)), FORCED)
    # The rank lies above, the inverted id below: one integer order in which the lower of two equal blocks is the greater.
    key = rank.mul_(1 << ID_BITS).add_(num_blocks - 1 - block)
    best = torch.topk(key, min(topk, num_blocks), dim=-1, sorted=False).values
    ids = (num_blocks - 1 - best.bitwise_and((1 << ID_BITS) - 1)).masked_fill_(best >> ID_BITS == LOWEST, num_blocks)
    ids = ids.sort(dim=-1).values
    return ids.masked_fill_(ids == num_blocks, -1)


def _ordered(scores: Tensor) -> Tensor:
    """Returns int64 ranks in the order of the scores, from LOWEST (-inf and NaN) to below FORCED; equal scores of at most 32
    bits have equal ranks."""
    scores = torch.where(scores.isnan(), -torch.inf, scores) + 0.0  # + 0.0 turns -0.0 into 0.0
    if scores.dtype == torch.float64:
        order = scores.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(scores.shape[-1], 0, -1, device="cpu").expand_as(order))
        return rank.masked_fill_(scores == -torch.inf, LOWEST)
    bits = scores.float().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
