# SPDX-License-Identifier: MIT
"""How a program walks tiles of index keys: what its configuration depends on, how many tiles are on their way at a time,
and into how many splits a context is cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from openmsa.primitives import codes
from openmsa.primitives.operands import KeyRows
from openmsa.primitives.rows import FLAT, PAGES, Form, KeyTiles, Tile
from openmsa.runtime.devices import Device
from openmsa.runtime.integers import next_power_of_two


class Kind(NamedTuple):
    """What a configuration must know of tiles of keys.

    key_bytes:     bytes of a key as it is stored, and `factor_bytes` as a factor of the product; converted: they differ.
    groups:        groups of elements that have a scale, of FP4 keys; 0 of others. must_group: factors cannot hold the scales.
    indirect:      keys lie in pages, whose ids are read one stage ahead.
    lanes:         `triton_lanes` can read them.
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
    def of(cls, dim: int, tile: int, format: int, product: Any, indirect: bool, tma: bool, lanes: bool = False) -> Kind:
        """format: how keys are stored; product: the Triton dtype of factors."""
        padded, fp4 = next_power_of_two(dim), format >= codes.NVFP4
        key_bytes = padded // 2 if fp4 else padded * (2 if format == codes.PLAIN else 1)
        factor_bytes = padded * product.primitive_bitwidth // 8
        groups = next_power_of_two(dim // (16 if format == codes.NVFP4 else 32)) if fp4 else 0
        must_group = format == codes.MXFP4 and product == tl.float16
        return cls(dim, tile, key_bytes, factor_bytes, key_bytes != factor_bytes, groups, must_group, indirect, tma, lanes)

    @property
    def narrow(self) -> bool:
        """Whether factors are bytes."""
        return self.factor_bytes == next_power_of_two(self.dim)


@dataclass(frozen=True)
class Config:
    """How a scoring kernel runs.

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
    """Rows of a program where rows are the left factor, and whether they are held in registers. Rows of e4m3 are not: their
    layout in registers is not the one of a product's result, and is made anew for every tile. Beside keys that are converted
    there is no room for them."""
    wide = (device.arch == 90 or (device.arch == 100 and not kind.converted)) and kind.tma and kind.dim <= 128
    return 128 if wide else 64, device.arch == 90 and kind.tma and not kind.narrow and not kind.converted


def walk(device: Device, row_bytes: int, kind: Kind, swap: bool = False) -> tuple[int, int]:
    """Stages of the walk, and resident programs a multiprocessor, that fit its shared memory beside the rows there.

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
    """Into how many parts the walk over `tiles` key tiles is cut, each a multiple of `step` and at least `least`: time is the
    number of rounds that `slots` places need, times a part's tiles and its start-up, worth two. The finest within 3 % of the
    best."""
    if not programs or programs >= 8 * slots:
        return 1
    most = max(1, min(tiles // least, 8 * slots // programs))
    cost = {n: -(-programs * n // slots) * (-(-tiles // (n * step)) * step + 2) for n in range(1, most + 1)}
    best = min(cost.values())
    return max(n for n, c in cost.items() if c <= 1.03 * best)


def kind_of(keys: KeyTiles, product: Any, tile: Tile) -> Kind:
    """What the configuration of a call depends on. product: the Triton dtype of factors."""
    view, tma = keys.view, keys.tma is not None
    return Kind.of(view.dim, tile.tile, view.form.format, product, keys.paging.mode != FLAT, tma, reads_lanes(keys, tile))


def reads_lanes(keys: KeyTiles, tile: Tile) -> bool:
    """Whether `openmsa.block_scores.triton_lanes` can read keys: NVFP4 of 128 elements, whole tiles of one block or a part of
    one, scales in words, offsets in a tile of 32 bits."""
    rows, form = keys.view.rows, keys.view.form
    if form.format != codes.NVFP4 or keys.view.dim != 128 or form.split != 4 or keys.paging.mode == PAGES:
        return False
    if (tile.tile, tile.keys, tile.sub) != (128, 128, 1) or rows.scales is None or rows.scales.itemsize < 4:
        return False
    return rows.data.numel() > 0 and tile.tile * max(rows.s_row, rows.s_scales_row * words_a_stride(rows, form)) < 2**31


def in_words(rows: KeyRows, form: Form) -> KeyRows:
    """Returns rows whose scales of groups, in words of four or eight, are taken as words of four, int32."""
    assert rows.scales is not None
    words = words_a_stride(rows, form)
    return KeyRows(
        rows.data,
        rows.s_page,
        rows.s_head,
        rows.s_row,
        rows.s_dim,
        rows.scales.view(torch.int32),
        rows.s_scales_page * words,
        rows.s_scales_head * words,
        rows.s_scales_row * words,
        rows.s_scales_group,
        rows.factor,
        s_factor_page=rows.s_factor_page,
        s_factor_head=rows.s_factor_head,
    )


def words_a_stride(rows: KeyRows, form: Form) -> int:
    """By what strides of scales are multiplied to count words of four; in the 128x4 layout they count rows, and stay."""
    assert rows.scales is not None
    return 1 if form.swizzled else rows.scales.itemsize // 4
