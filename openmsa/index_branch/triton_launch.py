# SPDX-License-Identifier: MIT
"""Launches of the scoring kernel. Its variants: `triton_variants`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
from torch import Tensor

from openmsa.index_branch.triton_config import Config, Kind, config, splits
from openmsa.index_branch.triton_formats import NO_SCALE, padded
from openmsa.index_branch.triton_scores import score_kernel
from openmsa.index_branch.triton_sources import KeySource, QuerySource
from openmsa.index_branch.triton_tiles import FLAT, Tile
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.runtime.devices import Device, facts
from openmsa.types import Layout

SECTOR = 8
"""Scores that the scoring kernel writes at a time where it can."""


def score_rows(num_blocks: int) -> int:
    """Length of a row of stored scores: an odd number of 32-byte sectors. Rows a power of two apart would share few places of
    the cache, and each 4-byte write would go to memory on its own."""
    return triton.cdiv(num_blocks, SECTOR) * SECTOR | SECTOR


def launch_scores(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    scores: Tensor,
    visible: Tensor | None,
    chosen: Config | None = None,
    upper: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Writes block scores ``[index_heads, total_q, num_blocks]``, any strides. visible: int32 ``[total_q]`` receives how many
    blocks each query sees, and then the scores of blocks that it does not see are undefined; without it they are -inf.

    upper: of the strides of `scores`; index_k must then be `Int8`. `scores` receives the maxima of lower bounds and `upper`
    those of upper bounds of the scores that the keys before quantisation have, computed by any of these kernels or exactly:
    -inf where the block has no score, +inf in `upper` where the arithmetic bounds nothing (there even if no key is seen)."""
    device = facts(index_q.device)
    tile = Tile.of(block_size)
    source = KeySource.of(index_k, tile, device)
    lengths = (seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset)
    longest = (seqs.max_seqlen_q, seqs.max_seqlen_k)
    launch(index_q, source, tile, lengths, seqs.batch, longest, scores, visible, device, chosen, pdl, upper)


def kind_of(source: KeySource, queries: QuerySource, dim: int, tile: Tile) -> Kind:
    """What the configuration depends on."""
    return Kind.of(dim, tile.tile, source.format, queries.product, source.mode != FLAT, source.tma)


def launch(
    index_q: Tensor | Stored,
    source: KeySource,
    tile: Tile,
    lengths: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    batch: int,
    longest: tuple[int, int],
    scores: Tensor,
    visible: Tensor | None,
    device: Device,
    chosen: Config | None = None,
    pdl: bool = False,
    upper: Tensor | None = None,
) -> None:
    """lengths: cu_seqlens_q, then cu_seqlens_k or seq_lens, then the positions of first queries or None: the last of the keys.
    longest: bounds of the query and key lengths. pdl: the next launch waits for this one inside its kernel. upper: see
    `launch_scores`."""
    _, heads, dim = index_q.shape
    group = heads // source.heads
    queries = QuerySource.of(index_q, source, device)
    rows = longest[0] * group
    tuned = None if chosen or pdl or upper is not None else _tuned(queries, source, tile, rows, scores, device)
    if tuned is not None:
        tuned(queries, source, lengths, batch, longest, scores, visible, device)
        return
    chosen = chosen or config(device, rows, kind_of(source, queries, dim, tile))
    if upper is not None:  # twice the maxima to hold
        chosen = replace(chosen, rows=min(chosen.rows, 64))
    row_tiles = triton.cdiv(rows, chosen.rows)
    num_blocks = scores.shape[2]
    blocks = -(-num_blocks // tile.sub)
    programs = row_tiles * batch * source.heads
    collect = not chosen.swap and upper is None and tile.sub == tile.parts == 1 and _in_sectors(scores)
    step = SECTOR if collect else 1
    num_splits = splits(programs, blocks, chosen.resident * device.num_sms, 1 if rows <= 64 else 8, step)
    blocks_a_split = triton.cdiv(blocks, num_splits * step) * step
    num_splits = -(-blocks // blocks_a_split)
    constants: dict[str, Any] = source.constexprs() | tile.constexprs()
    score_kernel[(num_splits, row_tiles, batch * source.heads)](
        queries.rows,
        queries.scale,
        source.keys,
        source.scales.scale,
        None if upper is None else source.scales.error,
        source.scales.factor,
        source.page_table,
        *lengths,
        scores,
        upper,
        visible,
        *queries.rows.stride(),
        queries.scale_stride,
        *source.strides,
        *source.scales.strides,
        source.scales.factor_stride,
        source.table_stride,
        *scores.stride(),
        num_blocks,
        source.num_pages,
        source.capacity,
        longest[1],
        blocks_a_split * tile.parts,
        GROUP=group,
        DIM=dim,
        DIM_PAD=padded(dim, source.format),
        PRODUCT=queries.product,
        GROUPED=chosen.grouped,
        ROWS=chosen.rows,
        SWAP=chosen.swap,
        HOLD=chosen.hold,
        FILL=visible is None,
        COLLECT=collect,
        STAGES=chosen.num_stages,
        PDL=pdl,
        num_warps=chosen.num_warps,
        maxnreg=chosen.max_registers,
        **constants,
    )


def _tuned(queries: QuerySource, source: KeySource, tile: Tile, rows: int, scores: Tensor, device: Device) -> Any:
    """The launch of Hopper's own kernel where that serves, else None: the interpreter knows no Gluon, and Gluon's names change
    from version to version."""
    if not scores.is_cuda or device.arch != 90 or triton.__version__.split(".")[:2] != ["3", "6"]:
        return None
    from openmsa.index_branch import gluon_sm90_launch

    kind = kind_of(source, queries, queries.rows.shape[2], tile)
    plain = source.scales.where == NO_SCALE and queries.rows.stride(2) == 1 and _in_sectors(scores)
    group = queries.rows.shape[1] // source.heads
    return gluon_sm90_launch.launch if plain and gluon_sm90_launch.serves(device, kind, tile, rows, group) else None


def _in_sectors(scores: Tensor) -> bool:
    """Whether eight scores of a row, from a multiple of eight, can be written 16 bytes at a time."""
    heads, tokens, blocks = scores.stride()
    return blocks == 1 and heads % 4 == 0 and tokens % 4 == 0 and scores.data_ptr() % 16 == 0
