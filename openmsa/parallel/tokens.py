# SPDX-License-Identifier: MIT
"""Tokens of all ranks are gathered, in the order of their sequences; gradients return to the ranks that own the tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from openmsa.parallel.ranks import Ranks, finished
from openmsa.parallel.shards import TokenShards, check_shards
from openmsa.runtime import checks


def gather_tokens(x: Tensor, shards: TokenShards, group: dist.ProcessGroup | DeviceMesh | None = None) -> Tensor:
    """Gathers the tokens of all ranks.

    x:       ``[shards.tokens(rank), ...]``, this rank's tokens in the order of `TokenShards`; trailing sizes and dtype are the
             same on all ranks.
    shards:  who owns which tokens.
    group:   a process group, a `DeviceMesh` of one dimension, or None for the default group; it has ``shards.ranks`` ranks.

    Returns ``[total, ...]``, the tokens of all sequences, packed. The gradient of a token is the sum of those of all ranks,
    taken in float32 (float64 for float64) and rounded once. Every rank of the group must call this, and its backward.
    """
    if not isinstance(x, Tensor) or x.dim() == 0:
        got = "a tensor without dimensions" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a torch.Tensor of shape [tokens, ...], got {got}")
    check_shards(shards)
    ranks = Ranks.of(group, shards.ranks)
    checks.size("x", x, 0, shards.tokens(ranks.rank), "the tokens that the rank owns")
    return Gathering(x, shards, ranks).wait()


class Gathering:
    """Holds tokens that are on their way from all ranks."""

    def __init__(self, x: Tensor, shards: TokenShards, ranks: Ranks) -> None:
        self.shards, self.ranks, self._x = shards, ranks, x
        with torch.no_grad():
            most, rest = shards.most(), x.shape[1:]
            self._mine = x.detach().contiguous()
            if x.shape[0] < most:
                self._mine = torch.cat((self._mine, x.new_zeros(most - x.shape[0], *rest)))
            self._everyone = x.new_empty(ranks.size * most, *rest)
            self._work = ranks.all_gather(self._mine, self._everyone)

    def wait(self) -> Tensor:
        """Returns the tokens of all sequences, packed, after the end of their transfer."""
        gathered: Tensor = _Gathered.apply(self._x, self)
        return gathered

    def finish(self) -> Tensor:
        """Does what `wait` does, without gradients."""
        finished(self._work)
        return self._everyone.index_select(0, self.shards.gathered_rows(self._everyone.device))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gathering: Gathering) -> Tensor:
        ctx.shards, ctx.ranks, ctx.dtype = gathering.shards, gathering.ranks, x.dtype
        return gathering.finish()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shards, ranks = ctx.shards, ctx.ranks
        wide = torch.promote_types(ctx.dtype, torch.float32)
        spread = grad.new_zeros(ranks.size * shards.most(), *grad.shape[1:], dtype=wide)
        spread.index_copy_(0, shards.gathered_rows(grad.device), grad.to(wide))
        return ranks.reduce_scatter(spread)[: shards.tokens(ranks.rank)].to(ctx.dtype), None
