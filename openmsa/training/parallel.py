# SPDX-License-Identifier: MIT
"""Several processes, one a GPU, share a run: `torchrun` starts them, FSDP2 cuts weights and optimizer states among them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn


@dataclass(frozen=True)
class World:
    """Says which process this is, among how many, and where it computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Says whether this process writes files and shows progress."""
        return self.rank == 0

    def share(self, batch: int) -> slice:
        """Returns which of `batch` windows this process takes."""
        each = batch // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean over processes."""
        if self.size > 1:
            values = values.clone()
            distributed.all_reduce(values)
            values /= self.size
        return values

    def any(self, flag: bool) -> bool:
        """Returns whether it is so in some process."""
        if self.size == 1:
            return flag
        found = torch.tensor(float(flag), device=self.device)
        distributed.all_reduce(found)
        return bool(found.item())

    def wait(self) -> None:
        """Waits for all processes."""
        if self.size > 1:
            distributed.barrier()

    def close(self, code: int = 0) -> None:
        """Ends what `join` began, and with it a process that shared a run, at once; one of its own goes on.

        A thread of gloo may still hold the last tensors of a collective that has ended, and needs Python to let them go. If
        Python is at its own end by then, the process is aborted, and `torchrun` calls the whole run failed."""
        if self.size > 1:
            if distributed.is_initialized():
                distributed.destroy_process_group()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def join(device: torch.device) -> World:
    """Returns the world of one process, or the one that `torchrun` described in the environment. device: "cpu", or "cuda",
    which becomes the GPU that is the process's own."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    if size > 1:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(rank, size, device)


def shard(
    world: World, model: nn.Module, layers: Iterable[nn.Module], branches: Iterable[nn.Module], uncut: set[nn.Parameter]
) -> None:
    """Cuts the weights of a frozen model, layer by layer, and of index branches, which do not belong to its modules, among the
    processes. Each branch is a root of its own, as it is differentiated while the model still runs.

    uncut: parameters of the model that stay whole, those of its own index branches.
    """
    if world.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=uncut)
    fully_shard(model, mesh=mesh, ignored_params=uncut)
    for branch in branches:
        fully_shard(branch, mesh=mesh)


def cut_again(branches: nn.Module) -> None:
    """Lets go of whole weights that the last forward left, so that the parameters are those that the optimizer knows."""
    from torch.distributed.fsdp import FSDPModule

    for module in branches.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(value: Any) -> Tensor:
    """Returns a tensor, or all processes' parts of one, on the CPU."""
    from torch.distributed.tensor import DTensor

    tensor: Tensor = value.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def local(value: Tensor) -> Tensor:
    """Returns a tensor, or this process's part of one that is cut."""
    from torch.distributed.tensor import DTensor

    part: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return part


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns a whole tensor placed as `parameter` is: on its device, and this process's part of it where it is cut."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value.clone()
