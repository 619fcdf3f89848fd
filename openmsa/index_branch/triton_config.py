# SPDX-License-Identifier: MIT
"""Tiles, warps and stages of the scoring kernel, and the cut of its context: pure functions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

from openmsa.runtime.devices import Device


@dataclass(frozen=True)
class Kind:
    """What tiles of keys are. key_bytes, factor_bytes: of a key as it is stored and as a factor of the product; converted:
    whether these differ; indirect: keys in pages, whose ids are read one stage ahead."""

    dim: int
    tile: int
    key_bytes: int
    factor_bytes: int
    converted: bool
    indirect: bool
    tma: bool

    @property
    def narrow(self) -> bool:
        """Whether factors are bytes."""
        return self.factor_bytes == triton.next_power_of_2(self.dim)


@dataclass(frozen=True)
class Config:
    """rows: (query, head) rows a program; swap: keys times queries, not queries times keys; hold: rows in registers;
    num_stages: of the walk; resident: programs that one multiprocessor holds at a time."""

    rows: int
    swap: bool
    hold: bool
    num_warps: int
    num_stages: int
    resident: int


def config(device: Device, rows: int, kind: Kind) -> Config:
    """rows: the most a sequence has for a key head.

    Many rows on Hopper: 128 rows of one warpgroup, held in registers, and two programs a multiprocessor, one multiplying while
    the other takes maxima. Shared memory then moves 94 bytes a clock of its 128; with 64 rows there (160) it was the limit.
    Keys that are converted first are the left factor, which may stay in registers."""
    swap = rows <= 64 or kind.converted
    if swap:
        rows, hold = min(max(16, triton.next_power_of_2(rows)), 64), False
    else:
        rows, hold = tall_rows(device, kind)
    return Config(rows, swap, hold, 4, *walk(device, 0 if hold else rows, kind))


def tall_rows(device: Device, kind: Kind) -> tuple[int, bool]:
    """Rows of a program where rows are the left factor, and whether they are held in registers. Rows of e4m3 are not: their
    layout in registers is not the one of a product's result, and is made anew for every tile."""
    wide = device.arch in (90, 100) and kind.tma and kind.dim <= 128
    return 128 if wide else 64, device.arch == 90 and kind.tma and not kind.narrow


def walk(device: Device, rows: int, kind: Kind) -> tuple[int, int]:
    """Stages of the walk, and resident programs a multiprocessor, that fit its shared memory beside `rows` rows."""
    deepest = 3 if kind.key_bytes > 128 else 4 if kind.key_bytes > 64 else 5
    held = kind.tile * kind.factor_bytes if kind.converted and device.arch >= 90 else 0  # should they not stay in registers
    for resident, buffers in [(2, n) for n in range(deepest, 1, -1)] + [(1, n) for n in range(deepest, 0, -1)]:
        if resident * (rows * kind.factor_bytes + held + buffers * kind.tile * kind.key_bytes + 1536) <= device.shared_bytes:
            break
    asynchronous = device.arch in (90, 100) and not kind.converted  # the product reads the buffers itself, so it holds one
    ahead = max(buffers - asynchronous, 1)  # stages between a load and its use
    return ahead * (1 + kind.indirect) + 1, resident


@functools.lru_cache(4096)
def splits(programs: int, tiles: int, slots: int, least: int) -> int:
    """Into how many parts the walk over `tiles` key tiles is cut, each keeping at least `least`: time is the number of rounds
    that `slots` places need, times a part's tiles and its start-up, worth two. The finest within 3 % of the best."""
    if not programs or programs >= 8 * slots:
        return 1
    most = max(1, min(tiles // least, 8 * slots // programs))
    cost = {n: -(-programs * n // slots) * (-(-tiles // n) + 2) for n in range(1, most + 1)}
    best = min(cost.values())
    return max(n for n, c in cost.items() if c <= 1.03 * best)
