# SPDX-License-Identifier: MIT
"""`block_scores` on the GPU: which of the scoring kernels serves a call, and its launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmsa.block_scores.triton_config import config
from openmsa.block_scores.triton_lanes import lane_kernel
from openmsa.block_scores.triton_score_kernel import score_kernel
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.primitives.codes import NO_SCALE, padded
from openmsa.primitives.queries import QuerySource
from openmsa.primitives.rows import KeySource, Tile
from openmsa.primitives.scoring import Lengths
from openmsa.primitives.walks import Config, kind_of, splits
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.integers import ceil_div
from openmsa.runtime.launch import launch_kernel, runs_hopper_kernels
from openmsa.types import Layout


def block_scores(index_q: Tensor | Stored, index_k: Tensor | Stored | PagedIndexKeys, seqs: Layout, block_size: int) -> Tensor:
    """See `openmsa.block_scores.block_scores`."""
    total_q, heads, _ = index_q.shape
    num_blocks = seqs.num_blocks(block_size)
    stored = torch.empty(heads, total_q, score_rows(num_blocks), dtype=torch.float32, device=index_q.device)
    scores = stored[..., :num_blocks]
    if scores.numel():
        launch_scores(index_q, index_k, seqs, block_size, scores, None)
    return scores


SECTOR = 8
"""Scores that the scoring kernel writes at a time where it can."""


def score_rows(num_blocks: int) -> int:
    """Length of a row of stored scores: an odd number of 32-byte sectors. Rows a power of two apart would share few places of
    the cache, and each 4-byte write would go to memory on its own."""
    return ceil_div(num_blocks, SECTOR) * SECTOR | SECTOR


def launch_scores(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    scores: Tensor,
    visible: Tensor | None,
    chosen: Config | None = None,
    pdl: bool = False,
) -> None:
    """Writes block scores ``[index_heads, total_q, num_blocks]``, any strides. visible: int32 ``[total_q]`` receives how many
    blocks each query sees, and then the scores of blocks that it does not see are undefined; without it they are -inf."""
    device = facts(index_q.device)
    tile = Tile.of(block_size)
    source = KeySource.of(index_k, tile, device)
    launch(index_q, source, tile, Lengths.of(seqs), scores, visible, device, chosen, pdl)


def launch(
    index_q: Tensor | Stored,
    source: KeySource,
    tile: Tile,
    lengths: Lengths,
    scores: Tensor,
    visible: Tensor | None,
    device: Device,
    chosen: Config | None = None,
    pdl: bool = False,
) -> None:
    """pdl: the next launch waits for this one inside its kernel."""
    _, heads, dim = index_q.shape
    group = heads // source.heads
    queries = QuerySource.of(index_q, source, device)
    rows = lengths.max_seqlen_q * group
    tuned = None if chosen else _tuned(queries, source, tile, rows, scores, device, pdl)
    if tuned is not None:
        tuned(queries, source, lengths, scores, visible, device)
        return
    chosen = chosen or config(device, rows, kind_of(source, queries, dim, tile))
    row_tiles = ceil_div(rows, chosen.rows)
    num_blocks = scores.shape[2]
    blocks = -(-num_blocks // tile.sub)
    programs = row_tiles * lengths.batch * source.heads
    collect = not chosen.swap and tile.sub == tile.parts == 1 and _in_sectors(scores)
    step = SECTOR if collect else 1
    num_splits = splits(programs, blocks, chosen.resident * device.num_sms, 1 if rows <= 64 else 8, step)
    blocks_a_split = ceil_div(blocks, num_splits * step) * step
    num_splits = -(-blocks // blocks_a_split)
    grid = (num_splits, row_tiles, lengths.batch * source.heads)
    words, word_strides = source.scales.words() if chosen.lanes else (None, ())
    strides = (
        *queries.rows.stride(),
        queries.scale_stride,
        *source.strides,
        *(word_strides if chosen.lanes else source.scales.strides),
        source.scales.factor_stride,
        source.table_stride,
        *scores.stride(),
    )
    numbers = (num_blocks, source.num_pages, source.capacity, lengths.max_seqlen_k, blocks_a_split * tile.parts)
    constants: dict[str, Any] = source.constexprs() | tile.constexprs()
    constants |= {"GROUP": group, "PRODUCT": queries.product, "ROWS": chosen.rows, "FILL": visible is None, "PDL": pdl}
    if chosen.lanes:
        launch_kernel(
            lane_kernel,
            grid,
            queries.rows,
            queries.scale,
            source.pool,
            words,
            source.scales.factor,
            source.page_table,
            *lengths.tensors,
            scores,
            visible,
            *strides,
            *numbers,
            CHUNK=chosen.lanes,
            STAGES=chosen.num_stages,
            num_warps=chosen.num_warps,
            maxnreg=chosen.max_registers,
            **{name: value for name, value in constants.items() if name in lane_kernel.arg_names},
        )
        return
    launch_kernel(
        score_kernel,
        grid,
        queries.rows,
        queries.scale,
        source.keys,
        source.scales.scale,
        source.scales.factor,
        source.page_table,
        *lengths.tensors,
        scores,
        visible,
        *strides,
        *numbers,
        DIM=dim,
        DIM_PAD=padded(dim, source.format),
        GROUPED=chosen.grouped,
        SWAP=chosen.swap,
        HOLD=chosen.hold,
        COLLECT=collect,
        STAGES=chosen.num_stages,
        num_warps=chosen.num_warps,
        maxnreg=chosen.max_registers,
        **constants,
    )


def _tuned(
    queries: QuerySource, source: KeySource, tile: Tile, rows: int, scores: Tensor, device: Device, pdl: bool
) -> Callable[..., None] | None:
    """The launch of Hopper's own kernel where one serves, else None."""
    if not runs_hopper_kernels(scores.device):
        return None
    from openmsa.block_scores import gluon_sm90_lanes, gluon_sm90_scores

    if gluon_sm90_lanes.serves(device, source, queries, tile, rows):
        return partial(gluon_sm90_lanes.launch, pdl=pdl)
    kind = kind_of(source, queries, queries.rows.shape[2], tile)
    plain = source.scales.where == NO_SCALE and queries.rows.stride(2) == 1 and _in_sectors(scores) and not pdl
    group = queries.rows.shape[1] // source.heads
    return gluon_sm90_scores.launch if plain and gluon_sm90_scores.serves(device, kind, tile, rows, group) else None


def _in_sectors(scores: Tensor) -> bool:
    """Whether eight scores of a row, from a multiple of eight, can be written 16 bytes at a time."""
    heads, tokens, blocks = scores.stride()
    return blocks == 1 and heads % 4 == 0 and tokens % 4 == 0 and scores.data_ptr() % 16 == 0
