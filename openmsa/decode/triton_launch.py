# SPDX-License-Identifier: MIT
"""This module decides whether a decode layer is one launch, cuts it into programs and launches it."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from openmsa.decode.triton_layer import EVERY, Attending, IndexBranch, MainBranch, Scoring, Words, layer_kernel
from openmsa.decode.triton_select import LANES
from openmsa.kv_cache import E4M3, PagedIndexKeys, PagedKV
from openmsa.primitives.operands import Output, PageTable
from openmsa.primitives.queries import query_rows
from openmsa.primitives.tiles import Tile, tma_tiles
from openmsa.runtime import devices
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two
from openmsa.sparse_attention import triton_decode
from openmsa.sparse_attention.triton_decode import key_rows
from openmsa.sparse_attention.triton_decode_walk import Shape

MAX_BLOCKS = 256
"""One launch is faster than three where a sequence has at most so many blocks, those of 32K keys."""
MAX_ROWS = 2
"""One launch is faster than three where a multiprocessor has at most so many outputs (token and head)."""
RESIDENT = 4
"""Scoring is cut so that a multiprocessor has so many programs of all kinds."""
MOST_SPLITS = 64
"""A merge program holds at most so many splits."""
LEAST_SHARE = 2
"""A scoring program has at least so many tiles: with one, programs of all kinds are too many to be resident together."""
FETCH_BYTES = 12 << 20
"""Index keys of at most so many bytes are fetched while the kernel in front still runs."""


class Sizes(NamedTuple):
    """Holds the sizes of a plan's layer, in the terms of `DecodePlan`; num_blocks is the most blocks of a sequence."""

    new_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    index_heads: int
    index_key_heads: int
    index_dim: int
    page_size: int
    num_blocks: int
    topk: int
    init_blocks: int
    local_blocks: int
    block_size: int


class Step(NamedTuple):
    """Holds the checked arguments of one layer of a decode step, and where its results go."""

    q: Tensor | E4M3
    kv: PagedKV
    index_q: Tensor | E4M3
    index_keys: PagedIndexKeys
    softmax_scale: float
    blocks: Tensor
    out: Tensor
    lse: Tensor


class Config(NamedTuple):
    """Says how one launch is cut into programs.

    attend:       how attention is cut.
    score_tiles:  key tiles of a scoring program.
    rows:         (token, head) rows of a scoring program, padded.
    reps:         scores of a row that a thread of an attention program holds.
    merging:      programs that merge splits, `merge_parts` for an output.
    """

    attend: triton_decode.Config
    score_tiles: int
    score_splits: int
    score_stages: int
    rows: int
    reps: int
    scoring: int
    attending: int
    merging: int
    merge_parts: int

    @property
    def programs(self) -> int:
        """Returns the number of programs of all kinds."""
        return self.scoring + self.attending + self.merging


def configure(batch: int, sizes: Sizes, device: Device) -> Config | None:
    """Chooses how one launch serves `batch` sequences, or None where three launches do; it is a pure function."""
    attend, attending = attend_config(batch, sizes, device)
    tile = Tile.of(sizes.block_size)
    whole = tile.whole and sizes.page_size % tile.span == 0  # whether pages hold whole tiles
    outputs = batch * sizes.new_tokens * sizes.num_q_heads
    if attend.lookup or not whole or sizes.num_blocks > MAX_BLOCKS:
        return None
    if attending > 2 * device.num_sms or outputs > MAX_ROWS * device.num_sms:
        return None
    merge_parts = 2 if attend.tiles == 1 and outputs <= device.num_sms else 1  # Splits are many where a program has one tile.
    merging = outputs * merge_parts if attend.splits > 1 else 0
    tiles, walks = tile.count(sizes.num_blocks), batch * sizes.index_key_heads
    room = max(RESIDENT * device.num_sms - attending - merging, (1 + (attending > device.num_sms)) * device.num_sms)
    share = min(max(ceil_div(tiles * walks, room), LEAST_SHARE), tiles)
    share = ceil_div(share, tile.parts) * tile.parts
    splits = ceil_div(tiles, share)
    rows = max(16, next_power_of_two(sizes.new_tokens * sizes.index_heads // sizes.index_key_heads))
    reps = max(next_power_of_two(sizes.num_blocks) // LANES.value, 1)
    stages = 1 if share == 1 else 3
    return Config(attend, share, splits, stages, rows, reps, walks * splits, attending, merging, merge_parts)


def attend_config(batch: int, sizes: Sizes, device: Device) -> tuple[triton_decode.Config, int]:
    """Returns how attention is cut, and the number of its programs. It is cut as for a launch of its own, but into one tile of
    64 keys a program where that makes at most one program a multiprocessor, or two for one or two tokens, because a merge costs
    no counter here."""
    tokens, group = batch * sizes.new_tokens, sizes.num_q_heads // sizes.num_kv_heads
    shape = (sizes.num_kv_heads, group, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size)
    config = triton_decode.configure(tokens, *shape, device)
    walks = tokens * sizes.num_kv_heads * triton_decode.row_tiles(group, sizes.head_dim)[1]
    finest = ceil_div(sizes.topk * sizes.block_size, 64)
    if config.keys >= 64 and finest <= MOST_SPLITS and walks * finest <= (2 if tokens <= 2 else 1) * device.num_sms:
        config = config._replace(keys=64, tiles=1, splits=finest)
    return config._replace(num_stages=min(config.tiles, 2) + 1), walks * config.splits


def launch(config: Config, sizes: Sizes, words: Words, step: Step, pdl: bool = False, kind: int = EVERY.value) -> None:
    """Launches one layer of plain tensors. pdl: whether it may start before the kernel in front has ended, and waits for its
    end inside. kind: EVERY, or programs of one kind alone, for an interpreter that runs one program after the other."""
    q, kv, index_q, index_keys, softmax_scale, blocks, out, lse = step
    attend, pool, table = config.attend, index_keys.keys, index_keys.page_table
    programs = (config.programs, config.scoring, config.attending, config.merging)[kind]
    if programs == 0:
        return
    assert isinstance(pool, Tensor)
    (batch, pages), page_size = table.shape, sizes.page_size
    scoring, attending = constants(config, sizes)
    tma = tma_tiles(pool, scoring.tile.tile, scoring.dim_pad) if devices.facts(pool.device).has_tma else None
    read = batch * sizes.index_key_heads * sizes.num_blocks * sizes.block_size * sizes.index_dim * pool.element_size()
    launch_kernel(
        layer_kernel,
        (programs,),
        IndexBranch(
            query_rows(index_q, native=False),
            key_rows(pool)[0],
            PageTable(table, *table.stride()),
            index_keys.seq_lens,
        ),
        tma,
        MainBranch(
            query_rows(q, native=False),
            key_rows(kv.k)[0],
            key_rows(kv.v)[0],
            PageTable(kv.page_table, *kv.page_table.stride()),
            kv.seq_lens,
        ),
        words,
        blocks,
        Output.of(out, lse),
        softmax_scale,
        *(sizes.new_tokens, sizes.num_blocks, pool.shape[0], pages * page_size),
        *(kv.k.shape[0], kv.page_table.shape[1] * page_size),
        *(config.score_splits, config.score_tiles, attend.tiles, config.scoring, config.attending, config.programs),
        SCORING=scoring,
        ATTENDING=attending,
        KIND=kind,
        PDL=pdl,
        FETCH=pdl and tma is not None and read <= FETCH_BYTES,
        num_warps=attend.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )


@functools.lru_cache(256)
def constants(config: Config, sizes: Sizes) -> tuple[Scoring, Attending]:
    """Returns the constants that the kernel is compiled for."""
    attend, group = config.attend, sizes.num_q_heads // sizes.num_kv_heads
    scoring = Scoring(
        heads=sizes.index_heads,
        key_heads=sizes.index_key_heads,
        dim=sizes.index_dim,
        dim_pad=next_power_of_two(sizes.index_dim),
        page=sizes.page_size,
        tile=Tile.of(sizes.block_size),
        rows=config.rows,
        share=next_power_of_two(config.score_tiles),
        num_stages=config.score_stages,
    )
    dim_pad = next_power_of_two(sizes.head_dim)
    attending = Attending(
        heads=sizes.num_kv_heads,
        index_heads=sizes.index_heads,
        shape=Shape(group, sizes.head_dim, dim_pad, sizes.topk, sizes.block_size, sizes.page_size),
        cut=attend,
        init_blocks=sizes.init_blocks,
        local_blocks=sizes.local_blocks,
        topk_pad=next_power_of_two(sizes.topk),
        pages_pad=next_power_of_two(ceil_div(sizes.num_blocks * sizes.block_size, sizes.page_size)),
        splits_pad=next_power_of_two(attend.splits),
        reps=config.reps,
        merge_parts=config.merge_parts,
    )
    return scoring, attending
