# SPDX-License-Identifier: MIT
"""These are the measured rates that predictions rest on, with their source, and what a machine has of them."""

from __future__ import annotations

from dataclasses import dataclass

from openmsa.runtime import checks

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """Holds what was measured on one kind of GPU. Rates are bytes a second, times are seconds.

    memory:    bytes that programs may use.
    read:      the fastest read of its memory.
    of_limit:  time of a long decode step, over that of reading its bytes at that rate.
    link:      rate of a kernel that reads blocks of 64 KiB out of pinned host memory.
    launch:    one kernel in a CUDA graph.
    exchange:  one exchange of candidates or of partial results between two GPUs of one host, in a CUDA graph.
    lookup:    what a step over host memory takes beyond its launches and fetches: to look blocks up and keep slots in order.
    """

    name: str
    memory: float
    read: float
    of_limit: float
    link: float
    launch: float
    exchange: float
    lookup: float


GPUS = {
    # One and two H200 of one host, torch 2.11, 2026-11-21 and 22: the design's performance page ("Ceilings of that card",
    # "Links"), and docs/log/decode.md for of_limit (long rows reach 1.04 to 1.15 of the byte limit). Of 2026-11-23, exchange is
    # half of what the two of a layer took with 8 sequences (docs/log/parallel.md), lookup what docs/log/host-kv.md says.
    "h200": Gpu("NVIDIA H200", 139 * GIB, read=4.55e12, of_limit=1.1, link=51.2e9, launch=2e-6, exchange=8e-6, lookup=26e-6),
}
"""Predictions are made for these. Another GPU comes with its own measurement."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Holds GPUs of one host. gpu_memory: bytes of one, None: all of it. host_memory: bytes that caches may take of the host,
    None: not said. reserve: bytes of each GPU for activations, workspaces and the CUDA context. weights: bytes of the model's
    weights, spread over the GPUs evenly."""

    gpu: Gpu
    gpus: int = 1
    gpu_memory: float | None = None
    host_memory: float | None = None
    reserve: float = 6 * GIB
    weights: float = 0.0

    def __post_init__(self) -> None:
        checks.integer("gpus", self.gpus, 1)
        for name in ("gpu_memory", "host_memory", "reserve", "weights"):
            value = getattr(self, name)
            if value is not None and checks.scale(name, value) < 0:
                raise ValueError(f"{name} must be at least 0 bytes, got {value}")

    @property
    def room(self) -> float:
        """Returns the bytes of one GPU that caches may take."""
        return (self.gpu.memory if self.gpu_memory is None else self.gpu_memory) - self.reserve - self.weights / self.gpus
