# SPDX-License-Identifier: MIT
"""`plan` computes what fits where and how long a step takes. All of it is arithmetic on sizes and rates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from math import ceil

from openmsa.capacity.model import KV_TENSORS, Model, Request
from openmsa.capacity.rates import GIB, Machine
from openmsa.host_kv.cache import least_blocks
from openmsa.types import INT32_MAX

NUMBERS = 20
"""A slot of a `HostKV` has so many bytes of numbers, and each block of its pools 4."""
LAUNCHES, HOST_LAUNCHES = 3, 5
"""A layer takes so many launches, and so many where its keys and values lie in host memory."""
EXCHANGES = 2
"""A sparse layer of keys that are spread by pages takes so many exchanges: of candidates and of partial results."""


@dataclass(frozen=True)
class Way:
    """Holds one way to place caches: bytes a GPU and of the host by what they hold, and seconds of a decode step's attention.

    fits:     whether GPUs and, where its memory is known, the host have room.
    longest:  the longest context, in keys, that fits with this batch.
    """

    gpu: dict[str, float]
    host: dict[str, float]
    step_s: float
    fits: bool
    longest: int


@dataclass(frozen=True)
class Plan:
    """Answers with both ways, all on the GPUs and keys and values in host memory, and sentences on what to change. room: bytes
    of one GPU that caches may take."""

    model: Model
    request: Request
    machine: Machine
    room: float
    resident: Way
    in_host_memory: Way
    advice: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Returns plain values."""
        return dataclasses.asdict(self)


def plan(model: Model, request: Request, machine: Machine) -> Plan:
    """Says what of a model's caches fits where, how long the attention of a decode step takes, and what to change.

    The caches are spread over the GPUs evenly, by pages or by heads. A step's time is that of the bytes that it reads, of its
    launches and, with several GPUs, of the exchanges of `ContextDecodePlan`; matrix products of the weights are not counted.
    """
    resident, in_host = (
        Way(*memory(model, request, machine, host), step(model, request, machine, host), *bounds(model, request, machine, host))
        for host in (False, True)
    )
    said = tuple(advice(model, request, machine, resident, in_host))
    return Plan(model, request, machine, machine.room, resident, in_host, said)


def memory(model: Model, request: Request, machine: Machine, host: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the bytes of each GPU, and of the host, by what they hold. host: whether keys and values lie there."""
    blocks = -(-request.context // model.block_size)
    tokens, sparse = request.batch * blocks * model.block_size, model.sparse_layers
    kv, of_gpu = tokens * sparse * request.kv_row(model), 1 / machine.gpus
    gpu = {
        "index keys": tokens * sparse * request.index_row(model) * of_gpu,
        "K and V of dense layers": tokens * model.dense_layers * request.kv_row(model) * of_gpu,
    }
    if not host:
        return gpu | {"K and V": kv * of_gpu}, {}
    all_blocks = request.batch * blocks * model.num_kv_heads
    least = least_blocks(request.batch, model.num_kv_heads, model.topk * request.new_tokens, blocks)
    slots = max(round(request.cache * all_blocks), least)
    slot = model.block_size * request.kv_row(model) / model.num_kv_heads + NUMBERS
    gpu["block cache"] = sparse * (slots * slot + 4 * all_blocks) * of_gpu
    return gpu, {"K and V": sparse * machine.gpus * pinned(model, request, tokens * of_gpu)}


def pinned(model: Model, request: Request, tokens: float) -> int:
    """Returns the host memory that PyTorch takes for a layer's keys and values: a power of two of bytes for each tensor."""
    sizes = [ceil(tokens * model.num_kv_heads * model.head_dim * each) for each in KV_TENSORS[request.kv]]
    return 2 * sum(1 << (size - 1).bit_length() for size in sizes)


def step(model: Model, request: Request, machine: Machine, host: bool) -> float:
    """Returns the seconds of the attention of one decode step, all layers."""
    gpu, row = machine.gpu, request.kv_row(model)
    tokens = request.batch * request.context
    chosen = request.batch * request.new_tokens * min(model.topk * model.block_size, request.context) * row
    read = gpu.of_limit / gpu.read / machine.gpus
    apart = gpu.exchange if machine.gpus > 1 else 0.0
    sparse = (tokens * request.index_read(model) + chosen) * read + EXCHANGES * apart
    sparse += (HOST_LAUNCHES if host else LAUNCHES) * gpu.launch
    if host:
        sparse += (1 - request.hits) * chosen / gpu.link / machine.gpus + gpu.lookup
    dense = tokens * row * read + gpu.launch + apart
    return model.sparse_layers * sparse + model.dense_layers * dense


def room_for(model: Model, request: Request, machine: Machine, host: bool) -> bool:
    """Says whether it fits."""
    gpu, main = memory(model, request, machine, host)
    in_host = machine.host_memory is None or sum(main.values()) <= machine.host_memory
    return sum(gpu.values()) <= machine.room and in_host


def bounds(model: Model, request: Request, machine: Machine, host: bool) -> tuple[bool, int]:
    """Returns whether it fits, and the longest context that does: whole blocks, 0 where not even one."""

    def fits(blocks: int) -> bool:
        return room_for(model, replace(request, context=blocks * model.block_size), machine, host)

    low, high = 0, 1
    most = INT32_MAX // model.block_size  # A context has at most so many blocks.
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return room_for(model, request, machine, host), low * model.block_size


def advice(model: Model, request: Request, machine: Machine, resident: Way, in_host: Way) -> list[str]:
    """Returns sentences on what to change."""
    if machine.room <= 0:
        return [f"Weights and reserve leave no room on a GPU: take more than {machine.gpus}, or smaller weights."]
    said = []
    if resident.fits:
        said.append("All fits on the GPUs: keep keys and values there (DecodePlan).")
    elif in_host.fits:
        said.append("Keys and values fit in host memory only: HostKV with HostDecodePlan.")
    else:
        said.append("Neither way fits.")
    if not resident.fits:
        most = next((n for n in range(machine.gpus + 1, 1025) if room_for(model, request, replace(machine, gpus=n), False)), 0)
        if most:
            said.append(f"{most} GPUs hold all keys and values.")
    for way, host in ((resident, False), (in_host, True)):
        others = [f for f in ("e4m3", "nvfp4") if not way.fits and room_for(model, replace(request, index=f), machine, host)]
        if others:
            where = "keys and values in host memory" if host else "all on the GPUs"
            said.append(f"With {where} it fits with {others[0]} index keys.")
    needed = sum(in_host.host.values())
    if not resident.fits and machine.host_memory is not None and needed > machine.host_memory:
        said.append(f"Host memory must have {needed / GIB:.0f} GiB for keys and values, not {machine.host_memory / GIB:.0f}.")
    if sum(in_host.gpu.values()) > machine.room and request.cache > 0:
        least = replace(request, cache=0.0)
        if sum(memory(model, least, machine, True)[0].values()) <= machine.room:
            said.append("A smaller block cache makes room: lower --cache.")
    slower = in_host.step_s / resident.step_s
    if slower > 1.5:
        said.append(
            f"Fetches make a step over host memory {slower:.1f} times as long: a larger block cache finds more than "
            f"{request.hits:.0%} of the blocks, and {'' if request.kv == 'e4m3' else 'e4m3 or '}nvfp4 keys take fewer bytes."
        )
    return said
