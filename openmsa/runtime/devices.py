# SPDX-License-Identifier: MIT
"""Configurations depend on these facts about a device, which are read once a device and never at import."""

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
    """

    arch: int
    num_sms: int
    shared_bytes: int

    @property
    def has_tma(self) -> bool:
        return self.arch >= 90


COMPILE_TARGETS = {
    80: Device(80, 108, 163 * 1024),
    90: Device(90, 132, 227 * 1024),
    100: Device(100, 148, 227 * 1024),
    120: Device(120, 170, 99 * 1024),
}
"""Kernels are compiled for these typical devices of each architecture where there is no GPU."""

_INTERPRETED = Device(90, 4, 227 * 1024)  # Triton's interpreter, which CPU tensors use


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
    return Device(arch, properties.multi_processor_count, (99 if small else COMPILE_TARGETS[arch].shared_bytes // 1024) * 1024)
