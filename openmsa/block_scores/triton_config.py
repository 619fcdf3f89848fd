# SPDX-License-Identifier: MIT
"""Which form of the scoring kernels serves a call, and with which tiles, warps and stages."""

from __future__ import annotations

import functools

from openmsa.primitives.walks import Config, Kind, tall_rows, walk
from openmsa.runtime.devices import Device
from openmsa.runtime.integers import next_power_of_two


@functools.lru_cache(256)
def config(device: Device, rows: int, kind: Kind) -> Config:
    """rows: the most a sequence has for a key head.

    Many rows on Hopper: 128 rows of one warpgroup, held in registers, and two programs a multiprocessor, one multiplying while
    the other takes maxima. Shared memory then moves 94 bytes a clock of its 128; with 64 rows there (160) it was the limit.
    Few rows: keys are the left factor, and one that is converted first never leaves its registers."""
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
    """Of the kernel of `triton_lanes`: two buffers of 64 keys, and as many programs of one warp as registers (of a quarter of a
    multiprocessor: four of 128) and shared memory hold. Beside the buffers are queries, page ids and what the system takes."""
    chunk, buffers = 64, 2
    scales = kind.dim // 16
    resident = min(16, device.shared_bytes // (buffers * chunk * (kind.key_bytes + scales) + 3584))
    return Config(4, True, False, 1, buffers * (1 + kind.indirect) + 1, resident, max_registers=128, lanes=chunk)
