# SPDX-License-Identifier: MIT
"""`block_scores` on the GPU chooses which of the scoring kernels serves a call, and launches it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmsa.block_scores.triton_config import config
from openmsa.block_scores.triton_lanes import in_words, lane_kernel, reads_lanes
from openmsa.block_scores.triton_score_kernel import score_kernel
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.primitives.operands import PAGE_FACTOR, QueryRows, Scores
from openmsa.primitives.queries import product_type, query_rows
from openmsa.primitives.rows import KeyTiles, padded
from openmsa.primitives.scoring import Kind, Lengths, Product, kind_of, splits
from openmsa.primitives.tiles import Tile
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.launch import ceil_div, launch_kernel, runs_hopper_kernels
from openmsa.types import Layout


def block_scores(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    scores: Tensor | None = None,
) -> Tensor:
    """See `openmsa.block_scores.block_scores`."""
    total_q, heads, _ = index_q.shape
    if scores is not None:
        if scores.numel():
            visible = torch.empty(total_q, dtype=torch.int32, device=index_q.device)
            launch_scores(index_q, index_k, seqs, block_size, scores, visible)
        return scores
    num_blocks = seqs.num_blocks(block_size)
    stored = torch.empty(heads, total_q, score_rows(num_blocks), dtype=torch.float32, device=index_q.device)
    scores = stored[..., :num_blocks]
    if scores.numel():
        launch_scores(index_q, index_k, seqs, block_size, scores, None)
    return scores


EVEN_SPLITS = False  # Whether splits share what rows see, not what there is room for; not timed yet (`docs/log/engine.md`).
SECTOR = 8
"""The scoring kernel writes so many scores at a time where it can."""


def score_rows(num_blocks: int) -> int:
    """Returns the length of a row of stored scores, an odd number of 32-byte sectors. Rows that lie a power of two apart would
    share few places of the cache, and each 4-byte write would go to memory on its own."""
    return ceil_div(num_blocks, SECTOR) * SECTOR | SECTOR


def launch_scores(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    scores: Tensor,
    visible: Tensor | None,
) -> None:
    """Writes block scores ``[index_heads, total_q, num_blocks]``, any strides. visible: int32 ``[total_q]`` receives how many
    blocks each query sees, and then the scores of blocks that it does not see are undefined; without it they are -inf."""
    device = facts(index_q.device)
    tile = Tile.of(block_size)
    launch(index_q, KeyTiles.of(index_k, tile, device), tile, Lengths.of(seqs), scores, visible, device)


def launch(
    index_q: Tensor | Stored,
    keys: KeyTiles,
    tile: Tile,
    lengths: Lengths,
    scores: Tensor,
    visible: Tensor | None,
    device: Device,
    pdl: bool = False,
) -> None:
    """Does what `launch_scores` does. pdl: the next launch waits for this one inside its kernel."""
    view, heads = keys.view, keys.view.heads
    queries, product = query_rows(index_q, view.form.native), product_type(index_q, view)
    group = index_q.shape[1] // heads
    rows = lengths.max_seqlen_q * group
    kind = kind_of(keys, product, tile)
    if kind.groups and reads_lanes(keys, tile):
        kind = kind._replace(lanes=True)
    s_head, s_token, s_block = scores.stride()
    num_blocks, even = scores.shape[2], _in_sectors(scores)
    written = Scores(scores, s_head, s_token, s_block, visible)
    tuned = _tuned(queries, keys, kind, tile, rows, group, even, device, pdl) if runs_hopper_kernels(index_q.device) else None
    if tuned is not None:
        tuned(queries, keys, product, lengths, written, num_blocks, device)
        return
    chosen = config(device, rows, kind)
    row_tiles = ceil_div(rows, chosen.rows)
    blocks = -(-num_blocks // tile.sub)
    programs = row_tiles * lengths.batch * heads
    collect = not chosen.swap and tile.sub == tile.parts == 1 and even
    step = SECTOR if collect else 1
    num_splits = splits(programs, blocks, chosen.resident * device.num_sms, 1 if rows <= 64 else 8, step)
    blocks_a_split = ceil_div(blocks, num_splits * step) * step
    grid = (-(-blocks // blocks_a_split), row_tiles, lengths.batch * heads)
    numbers = (num_blocks, view.num_pages, view.capacity, lengths.max_seqlen_k, blocks_a_split * tile.parts)
    constants: dict[str, Any] = {
        "KEY_HEADS": heads,
        "GROUP": group,
        "FORM": view.form,
        "PAGING": keys.paging,
        "CUT": tile,
        "PRODUCT": Product(product, view.dim, padded(view.dim, view.form.format), chosen.rows, chosen.swap, chosen.grouped),
        "FILL": visible is None,
        "STAGES": chosen.num_stages,
        "PDL": pdl,
        "num_warps": chosen.num_warps,
        "maxnreg": chosen.max_registers,
    }
    others = view.table, lengths.bounds, written, *numbers
    if chosen.lanes:
        launch_kernel(lane_kernel, grid, queries, in_words(view.rows, view.form), *others, CHUNK=chosen.lanes, **constants)
    else:
        shared = step * tile.parts if EVEN_SPLITS and visible is not None else 0
        constants |= {"HOLD": chosen.hold, "COLLECT": collect, "EVEN": shared}
        launch_kernel(score_kernel, grid, queries, view.rows, keys.tma, *others, **constants)


def _tuned(
    queries: QueryRows,
    keys: KeyTiles,
    kind: Kind,
    tile: Tile,
    rows: int,
    group: int,
    even: bool,
    device: Device,
    pdl: bool,
) -> Callable[..., None] | None:
    """Returns the function that launches one of Hopper's own kernels, or None where none of them serves. even: scores can be
    written in sectors."""
    if kind.lanes:
        from openmsa.block_scores import gluon_sm90_lanes

        if gluon_sm90_lanes.serves(device, keys, queries, tile, rows, kind.lanes):
            return partial(gluon_sm90_lanes.launch, pdl=pdl)
    if keys.view.form.factor == PAGE_FACTOR or queries.s_dim != 1 or not even or pdl:
        return None
    from openmsa.block_scores import gluon_sm90_scores

    return gluon_sm90_scores.launch if gluon_sm90_scores.serves(device, kind, tile, rows, group) else None


def _in_sectors(scores: Tensor) -> bool:
    """Says whether eight scores of a row, from a multiple of eight, can be written 16 bytes at a time."""
    s_head, s_token, s_block = scores.stride()
    return s_block == 1 and s_head % 4 == s_token % 4 == 0 and scores.data_ptr() % 16 == 0
