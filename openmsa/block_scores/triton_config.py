# SPDX-License-Identifier: MIT
"""The form of the scoring kernels that serves a call is chosen here, with its tiles, warps and stages."""

from __future__ import annotations

import functools

from openmsa.primitives.walks import Config, Kind, tall_rows, walk
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import next_power_of_two


@functools.lru_cache(256)
def config(device: Device, rows: int, kind: Kind) -> Config:
    """Chooses for so many (query, head) rows, the most that a sequence has for a key head.

    Where rows are many, Hopper holds 128 of one warpgroup in registers, and two programs a multiprocessor, of which one
    multiplies while the other takes maxima; its shared memory then moves 94 of the 128 bytes a clock that it can. Where rows
    are few, keys are the left factor, and keys that are converted first never leave registers."""
    if kind.lanes and rows <= 4:
        return lane_config(device, kind)
    swap, hold, grouped = rows <= 64 or kind.must_group, False, kind.must_group
    if kind.groups and rows <= 8 and kind.groups * max(4, next_power_of_two(rows)) >= 16:
        rows, grouped = max(4, next_power_of_two(rows)), True
    elif device.arch == 90 and kind.converted and not kind.groups and rows <= 8:
        rows = max(4, next_power_of_two(rows))  # spread over 16 columns
    elif swap:
        rows = min(max(16, next_power_of_two(rows)), 16 if grouped else 64)
    else:
        rows, hold = tall_rows(device, kind)
    row_bytes = 0 if hold else kind.factor_bytes * max(16, rows * max(1, kind.groups * grouped))
    stages, resident = walk(device, row_bytes, kind, swap)
    if device.arch == 90 and kind.tma and swap and kind.converted and rows <= 16:
        return Config(rows, swap, hold, 4, stages, 4, grouped, 128)  # as many as the conversions need to hide their latency
    if device.arch == 90 and kind.tma and not swap and kind.narrow and rows == 128:
        return Config(rows, swap, hold, 4, 2 * (1 + kind.indirect) + 1, 3, grouped, 168)  # a third hides the others' maxima
    return Config(rows, swap, hold, 4, stages, resident, grouped)


def lane_config(device: Device, kind: Kind) -> Config:
    """Chooses for the kernel of `triton_lanes`: two buffers of 64 keys, and as many programs of one warp as fit. A quarter of a
    multiprocessor has registers for four warps of 128; shared memory holds queries and page ids beside the buffers."""
    chunk, buffers = 64, 2
    scales = kind.dim // 16
    resident = min(16, device.shared_bytes // (buffers * chunk * (kind.key_bytes + scales) + 3584))
    return Config(4, True, False, 1, buffers * (1 + kind.indirect) + 1, resident, max_registers=128, lanes=chunk)
