# SPDX-License-Identifier: MIT
"""Which keys can have the best score of their block, found from bounds of their scores: one bit for each key and row.

A key with the best exact score has an upper bound that is not below it, nor so below any lower bound of its block. All such
keys are found, ties and zeros of either sign too, and others with them. The bits lie as the threads of a product hold them, so
that writing costs a comparison a bit and one store a tile; they are sorted out where they are read, for few blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from openmsa.index_branch.triton_tiles import Tile
from openmsa.runtime.integers import next_power_of_two


@dataclass(frozen=True)
class Words:
    """How `possible_maxima` lies in memory: for each sequence and key head and each tile `number` words of `dtype`, which has a
    bit for each of `rows`, those of a product with keys: at least the sequence's, at most 16."""

    rows: int
    number: int
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: int, tile: Tile) -> Words:
        """rows: the most a sequence has for a key head."""
        held = max(4, next_power_of_two(rows))
        return cls(held, min(2 * tile.tile, 128), torch.int16 if held > 8 else torch.int8)

    @property
    def type(self) -> str:
        """Of a pointer to them, as Triton writes it."""
        return f"*i{8 * self.dtype.itemsize}"

    def bytes(self, tile: Tile, num_blocks: int) -> int:
        """Of a sequence and key head."""
        return tile.count(num_blocks) * self.number * self.dtype.itemsize


@triton.jit
def grouped_maxima(
    s, i_k, i_last, TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Maxima of the blocks of a tile, as `block_maxima` of s [TILE, rows]; and of groups of keys that a warp holds, which wait
    for no other warp: [groups, rows], group g having every `groups`-th 16 neighbours from the g-th on, all of one block."""
    WARPS: tl.constexpr = min(TILE // 16, 4)
    LOOPS: tl.constexpr = TILE // (16 * WARPS)
    ROWS: tl.constexpr = s.shape[1]
    if MASKED or KEYS < TILE:
        o_k = tl.arange(0, TILE)[:, None]
        s = tl.where((o_k < KEYS) & (i_k + o_k <= i_last[None, :]), s, float("-inf"))
    s = s.reshape(LOOPS, WARPS, 16, ROWS)
    if SUB == 1:
        best = tl.max(tl.max(s, 0), 1)
        m = tl.max(best, 0)
    else:
        best = tl.max(s, 2).reshape(LOOPS * WARPS, ROWS)
        m = tl.max(best.reshape(SUB, LOOPS * WARPS // SUB, ROWS), 1).T
    return m, best


@triton.jit
def possible_maxima(upper, least, KEYS: tl.constexpr):
    """Which of a tile's keys can have their block's best score for a row: upper [keys, rows] is not below least [groups, rows],
    the best lower bound of their group, whose NaN bounds nothing. A group has every `groups`-th 16 neighbours. Words [keys / 16
    up to 4, 8, 4] laid flat: bit 4 * c + 2 * j + i of word (w, l, r) is that of key 64 * j + 16 * w + 8 * i + l and row
    4 * c + r: what one thread holds of the product."""
    TILE: tl.constexpr = upper.shape[0]
    ROWS: tl.constexpr = upper.shape[1]
    WARPS: tl.constexpr = min(TILE // 16, 4)
    LOOPS: tl.constexpr = TILE // (16 * WARPS)
    GROUPS: tl.constexpr = least.shape[0]
    least = tl.broadcast_to(least[None, :, None, :], [TILE // (16 * GROUPS), GROUPS, 16, ROWS]).reshape(TILE, ROWS)
    can = ~(upper < least)
    if KEYS < TILE:
        can = can & (tl.arange(0, TILE) < KEYS)[:, None]
    can = can.reshape(LOOPS, WARPS, 2, 8, ROWS // 4, 4)
    o_j = tl.arange(0, LOOPS)[:, None, None, None, None, None]
    o_i = tl.arange(0, 2)[None, None, :, None, None, None]
    o_c = tl.arange(0, ROWS // 4)[None, None, None, None, :, None]
    bits = tl.where(can, 1 << (4 * o_c + 2 * o_j + o_i), 0)
    return tl.sum(tl.sum(tl.sum(bits, 4), 2), 0).reshape(WARPS * 32)


@triton.jit
def candidate_words(candidates, i_tile, i_16, m_unit, i_four, TILE: tl.constexpr):
    """Keys that can have the best score of their block for a row (`possible_maxima`), as bits of words of 16 neighbours: words
    i_16 of tiles i_tile, [units, words], where m_unit [units]; 0 elsewhere. candidates: those of the first tile, from word
    row % 4 on; i_four: row // 4."""
    WARPS: tl.constexpr = min(TILE // 16, 4)
    o_l = tl.arange(0, 8)[None, None, :]
    o_w = i_tile.to(tl.int64) * (WARPS * 32) + i_16 % WARPS * 32
    held = tl.load(candidates + o_w[:, :, None] + o_l * 4, mask=m_unit[:, None, None], other=0).to(tl.int32)
    held = held >> (4 * i_four + i_16 // WARPS * 2)[:, :, None]
    return tl.sum(((held & 1) << o_l) | ((held >> 1 & 1) << (o_l + 8)), 2)
