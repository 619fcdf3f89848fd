# SPDX-License-Identifier: MIT
"""Configurations depend on these facts about a device, which are read once for each device, and never at import."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from openmsa.runtime import compiler_key


class Device(NamedTuple):
    """Configurations depend on these facts about a device.

    arch:          80 (Ampere, Ada), 90 (Hopper), 100 (Blackwell, data center) or 120 (Blackwell, workstation).
    num_sms:       streaming multiprocessors.
    shared_bytes:  bytes of shared memory that one program may use.
    l2_bytes:      bytes of the L2 cache.
    """

    arch: int
    num_sms: int
    shared_bytes: int
    l2_bytes: int

    @property
    def has_tma(self) -> bool:
        return self.arch >= 90


COMPILE_TARGETS = {
    80: Device(80, 108, 163 << 10, 40 << 20),
    90: Device(90, 132, 227 << 10, 50 << 20),
    100: Device(100, 148, 227 << 10, 126 << 20),
    120: Device(120, 170, 99 << 10, 96 << 20),
}
"""Kernels are compiled for these typical devices of each architecture where there is no GPU."""

_INTERPRETED = Device(90, 4, 227 << 10, 50 << 20)  # Triton's interpreter, which CPU tensors use


def facts(device: torch.device) -> Device:
    """Returns the facts of a CUDA device, and those of a small Hopper GPU for any other device."""
    if device.type != "cuda":
        return _INTERPRETED
    return _read(torch.cuda.current_device() if device.index is None else device.index)


def has_pdl(device: torch.device) -> bool:
    """Says whether a kernel may start before the one in front has ended and wait for it inside (programmatic dependent
    launch)."""
    return device.type == "cuda" and facts(device).arch >= 90


def capturing(device: torch.device) -> bool:
    """Says whether the current stream of the device is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _read(index: int) -> Device:
    compiler_key.remember()  # a launch follows, which needs the key
    properties = torch.cuda.get_device_properties(index)
    major, minor = properties.major, properties.minor
    arch = {8: 80, 9: 90, 10: 100, 11: 100}.get(major, 120)
    small = (major, minor) in ((8, 6), (8, 9)) or major >= 12
    shared_bytes = 99 << 10 if small else COMPILE_TARGETS[arch].shared_bytes
    return Device(arch, properties.multi_processor_count, shared_bytes, properties.L2_cache_size)
