# SPDX-License-Identifier: MIT
"""Pure functions choose here how the programs of scoring kernels walk tiles of keys, and how a context is cut between them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from openmsa.primitives import operands
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import next_power_of_two


class Kind(NamedTuple):
    """A configuration depends on these facts about tiles of keys.

    key_bytes:     bytes of a key as it is stored, and `factor_bytes` as a factor of the product; converted: they differ.
    groups:        groups of elements that have a scale, of FP4 keys; 0 of others. must_group: factors cannot hold the scales.
    indirect:      keys lie in pages, whose ids are read one stage ahead.
    lanes:         `openmsa.block_scores.triton_lanes` can read them, which its stage finds out.
    """

    dim: int
    tile: int
    key_bytes: int
    factor_bytes: int
    converted: bool
    groups: int
    must_group: bool
    indirect: bool
    tma: bool
    lanes: bool = False

    @classmethod
    @functools.lru_cache(256)
    def of(cls, dim: int, tile: int, format: int, product: Any, indirect: bool, tma: bool) -> Kind:
        """Derives the facts of keys. format: how keys are stored; product: the Triton dtype of factors."""
        padded, fp4 = next_power_of_two(dim), format >= operands.NVFP4
        key_bytes = padded // 2 if fp4 else padded * (2 if format == operands.PLAIN else 1)
        factor_bytes = padded * product.primitive_bitwidth // 8
        groups = next_power_of_two(dim // (16 if format == operands.NVFP4 else 32)) if fp4 else 0
        must_group = format == operands.MXFP4 and product == tl.float16
        return cls(dim, tile, key_bytes, factor_bytes, key_bytes != factor_bytes, groups, must_group, indirect, tma)

    @property
    def narrow(self) -> bool:
        """Says whether factors are bytes."""
        return self.factor_bytes == next_power_of_two(self.dim)


@dataclass(frozen=True)
class Config:
    """A configuration says how a scoring kernel runs.

    rows:           (query, head) rows of a program.
    swap:           keys are the left factor, not rows.
    hold:           rows stay in registers.
    num_stages:     stages of the walk over keys.
    resident:       programs that one multiprocessor holds at a time.
    grouped:        scales of FP4 keys multiply sums over groups of elements, not the elements.
    max_registers:  a thread has at most so many, so that more programs are resident.
    lanes:          keys that a program of the kernel of `triton_lanes` copies at a time; 0 for the other kernel.
    """

    rows: int
    swap: bool
    hold: bool
    num_warps: int
    num_stages: int
    resident: int
    grouped: bool = False
    max_registers: int | None = None
    lanes: int = 0


def tall_rows(device: Device, kind: Kind) -> tuple[int, bool]:
    """Gives the rows of a program where rows are the left factor, and whether they are held in registers. Rows of e4m3 are not:
    their layout in registers is not the one of a product's result, and is made anew for every tile. Beside keys that are
    converted there is no room for them."""
    wide = (device.arch == 90 or (device.arch == 100 and not kind.converted)) and kind.tma and kind.dim <= 128
    return 128 if wide else 64, device.arch == 90 and kind.tma and not kind.narrow and not kind.converted


def walk(device: Device, row_bytes: int, kind: Kind, swap: bool = False) -> tuple[int, int]:
    """Gives the stages of the walk, and resident programs a multiprocessor, that fit its shared memory beside the rows there.

    Keys of a byte an element and less take more buffers where rows are many; where rows are few (swap) three buffers and more
    programs stream faster than deeper ones."""
    deepest = 3 if kind.key_bytes > 128 or swap else 5
    held = 0 if swap or not kind.converted else kind.tile * kind.factor_bytes  # the tile that the product reads
    for resident, buffers in [(2, n) for n in range(deepest, 1, -1)] + [(1, n) for n in range(deepest, 0, -1)]:
        if resident * (row_bytes + held + buffers * kind.tile * kind.key_bytes + 1536) <= device.shared_bytes:
            break
    asynchronous = device.arch in (90, 100)  # the product reads the buffers itself, so it holds one
    ahead = max(buffers - asynchronous, 1)  # stages between a load and its use
    return ahead * (1 + kind.indirect) + 1, resident


@functools.lru_cache(4096)
def splits(programs: int, tiles: int, slots: int, least: int, step: int = 1) -> int:
    """Says into how many parts the walk over `tiles` key tiles is cut, each a multiple of `step` and at least `least`. Time is
    the number of rounds that `slots` places need, times a part's tiles and its start-up, worth two; the finest cut within 3 %
    of the least time is taken."""
    if not programs or programs >= 8 * slots:
        return 1
    most = max(1, min(tiles // least, 8 * slots // programs))
    cost = {n: -(-programs * n // slots) * (-(-tiles // (n * step)) * step + 2) for n in range(1, most + 1)}
    best = min(cost.values())
    return max(n for n, c in cost.items() if c <= 1.03 * best)
