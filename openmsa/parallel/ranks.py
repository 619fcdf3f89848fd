# SPDX-License-Identifier: MIT
"""`Ranks` is the group of processes that share a computation, and the collectives that they use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Ranks(NamedTuple):
    """Names this process's place in a group. group is None for a group of one process that nobody initialised."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh | None, expected: int | None = None) -> Ranks:
        """Takes a process group, a `DeviceMesh` of one dimension, or None for the default group. expected: how many ranks the
        shards of the call have."""
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a DeviceMesh of one dimension, such as mesh['context'], got {group.ndim}")
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            kind = type(group).__name__
            raise TypeError(f"group must be a torch.distributed ProcessGroup, a DeviceMesh or None, got {kind}")
        if group is None and not (dist.is_available() and dist.is_initialized()):
            if expected not in (None, 1):
                raise ValueError(f"group must have {expected} ranks, got None where torch.distributed is not initialised")
            return cls(None, 0, 1)
        group = dist.group.WORLD if group is None else group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("group must hold this process, which is none of its ranks")
        if expected not in (None, size):
            raise ValueError(f"group must have {expected} ranks, as the shards have, got {size}")
        return cls(group, rank, size)

    def all_gather(self, mine: Tensor, everyone: Tensor) -> dist.Work | None:
        """Starts to fill ``everyone [size * n, ...]`` with ``mine [n, ...]`` of each rank; both are contiguous, of any dtype,
        and have the same shape on all ranks. On a GPU the transfer runs beside kernels that are launched before its `wait`."""
        if self.size == 1:
            everyone.copy_(mine)
            return None
        if not mine.numel():
            return None
        return _collective("all_gather")(_as_bytes(everyone), _as_bytes(mine), group=self.group, async_op=True)

    def all_to_all(self, of_everyone: Tensor, mine: Tensor) -> dist.Work | None:
        """Starts to fill ``mine [size * n, ...]`` with this rank's n rows of ``of_everyone [size * n, ...]`` of each rank; both
        are contiguous, of any dtype, and have the same shape on all ranks. Otherwise as `all_gather`."""
        if self.size == 1:
            mine.copy_(of_everyone)
            return None
        if not mine.numel():
            return None
        work: dist.Work = dist.all_to_all_single(_as_bytes(mine), _as_bytes(of_everyone), group=self.group, async_op=True)
        return work

    def reduce_scatter(self, of_everyone: Tensor) -> Tensor:
        """Returns this rank's rows of the sum over ranks of ``of_everyone [size * n, ...]``: ``[n, ...]``."""
        if self.size == 1:
            return of_everyone
        mine = of_everyone.new_empty(of_everyone.shape[0] // self.size, *of_everyone.shape[1:])
        if mine.numel():
            _collective("reduce_scatter")(mine, of_everyone.contiguous(), group=self.group)
        return mine


def finished(work: dist.Work | None) -> None:
    """Waits for a transfer: on a GPU the current stream waits, on a CPU the process, at most for the group's timeout."""
    if work is not None:
        work.wait()


def _collective(name: str) -> Callable[..., Any]:
    """Returns the collective of one tensor, whose name changed in PyTorch 2.13."""
    newer = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
    older = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    found: Callable[..., Any] = getattr(dist, newer[name], None) or getattr(dist, older[name])
    return found


def _as_bytes(x: Tensor) -> Tensor:
    """Sees elements as bytes, because not every backend knows every dtype."""
    return x.view(-1).view(torch.uint8)
