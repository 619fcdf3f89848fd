# SPDX-License-Identifier: MIT
"""Ranks exchange the candidates of a selection and partial results of attention by collectives of torch.distributed.

This is what `openmsa.parallel.triton_exchange` does in two kernels, in plain PyTorch: it runs on every backend and device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.parallel.ranks import Ranks, finished


class Choice(NamedTuple):
    """Says what a selection over all ranks depends on. page_blocks: blocks of a page; page p lies on rank ``p % ranks``."""

    topk: int
    init_blocks: int
    local_blocks: int
    page_blocks: int


class Collectives:
    """Exchanges by `all_gather`, one a call."""

    name = "collective"

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def choose(self, scores: Tensor, ids: Tensor, visible_blocks: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """Selects among the candidates of all ranks.

        scores:          ``[index_heads, total_q, blocks of the rank]``.
        ids:             int32 ``[total_q, index_heads, topk]``, the rank's best blocks, counted among its own; -1: none.
        visible_blocks:  int32 ``[total_q]``, blocks of the whole sequence that each query sees.

        Returns the selection, counted in the whole sequence, and the part of it that this rank holds, counted among its own
        blocks: int32 ``[total_q, index_heads, topk]`` each, -1 where there is none.
        """
        best = scores.transpose(0, 1).gather(2, ids.clamp(min=0).long()).masked_fill(ids < 0, -torch.inf)
        page, in_page = ids // choice.page_blocks, ids % choice.page_blocks
        named = torch.where(ids < 0, -1, (page * self._ranks.size + self._ranks.rank) * choice.page_blocks + in_page)
        integers = torch.int64 if best.dtype == torch.float64 else torch.int32
        mine = torch.stack((best.contiguous().view(integers), named.to(integers)), -1)
        everyone = self._gathered(mine)  # [ranks, total_q, index_heads, topk, 2]
        bits, named = (x.movedim(0, 2).flatten(2) for x in everyone.unbind(-1))
        blocks = merge_candidates(bits.contiguous().view(best.dtype), named, visible_blocks, choice)
        page, in_page = blocks // choice.page_blocks, blocks % choice.page_blocks
        here = (blocks >= 0) & (page % self._ranks.size == self._ranks.rank)
        return blocks, torch.where(here, page // self._ranks.size * choice.page_blocks + in_page, -1).to(torch.int32)

    def merge(self, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merges what each rank made of its own keys, ``part [total_q, heads, dim]`` with its natural-log ``part_lse [total_q,
        heads]``, into `out` and `lse` of the same shapes."""
        mine = torch.cat((part.to(part_lse.dtype), part_lse[..., None]), -1)
        everyone = self._gathered(mine)
        merged, total = merge_partials(everyone[..., :-1], everyone[..., -1])
        out.copy_(merged)
        lse.copy_(total)

    def _gathered(self, mine: Tensor) -> Tensor:
        everyone = mine.new_empty(self._ranks.size, *mine.shape)
        finished(self._ranks.all_gather(mine, everyone))
        return everyone


def merge_candidates(scores: Tensor, ids: Tensor, visible_blocks: Tensor, choice: Choice) -> Tensor:
    """Selects among candidates as `openmsa.select_blocks` does among all blocks: forced blocks first, then the best; ties go to
    the lower id.

    scores, ids:  ``[total_q, index_heads, candidates]``, in any order, each block once; a score of -inf or NaN is no candidate.

    Returns int32 ``[total_q, index_heads, topk]``, ascending, then -1.
    """
    seen = visible_blocks.to(ids.dtype)[:, None, None]
    first = torch.arange(choice.init_blocks, device=ids.device, dtype=ids.dtype).expand(*ids.shape[:2], -1)
    last = seen - choice.local_blocks + torch.arange(choice.local_blocks, device=ids.device, dtype=ids.dtype)
    last = last.masked_fill(last < choice.init_blocks, -1).expand(*ids.shape[:2], -1)
    forced = torch.cat((first.masked_fill(first >= seen, -1), last), -1)
    free = (ids >= choice.init_blocks) & (ids < seen - choice.local_blocks) & (scores > -torch.inf)
    ids = torch.cat((forced, ids.masked_fill(~free, -1)), -1)
    scores = torch.cat((scores.new_full(forced.shape, torch.inf), scores), -1).masked_fill(ids < 0, -torch.inf)
    must = torch.cat((forced >= 0, torch.zeros_like(free)), -1)
    order = ids.argsort(-1)  # Each sort keeps the order of the one before among equals: by id, by score, forced ones first.
    order = order.gather(-1, scores.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    order = order.gather(-1, must.gather(-1, order).byte().argsort(dim=-1, descending=True, stable=True))
    chosen = ids.gather(-1, order[..., : choice.topk])
    none = torch.iinfo(chosen.dtype).max
    chosen = chosen.masked_fill(chosen < 0, none).sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, choice.topk - chosen.shape[-1]), value=none)
    return chosen.masked_fill(chosen == none, -1).to(torch.int32)


def merge_partials(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges partial results ``[parts, ..., dim]`` with natural-log lse ``[parts, ...]`` into one; -inf stands for no key."""
    total = lses.logsumexp(0)
    weights = (lses - total.masked_fill(total == -torch.inf, 0)).exp()
    return (parts * weights[..., None]).sum(0), total
