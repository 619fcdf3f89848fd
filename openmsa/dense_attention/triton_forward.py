# SPDX-License-Identifier: MIT
"""This module runs dense attention in Triton: one kernel serves prefill, short queries on a long prefix, and decode.

A tile's rows are (query token, head of the group) pairs of one sequence and KV head, tokens outermost, so that a key is read
once for the whole group and any group size fills the tile. Where the rows alone do not fill the GPU the keys are split over
programs; each leaves a normalised partial, rounded as the outputs are, and its lse, and the last program of a tile to
arrive, found by a counter that it resets, merges them. Keys that all rows of a tile see are walked without masks, through TMA
descriptors where strides allow; the rest, at the diagonal and at the end of a sequence, by masked loads. Stored keys and values
(E4M3, NVFP4) are read as they are and become numbers in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.dense_attention.call import chosen_results
from openmsa.dense_attention.triton_config import (
    GROUP_WORDS,
    GROUPS,
    HEAD_FACTOR,
    NO_FACTOR,
    PAGE_FACTOR,
    SWIZZLED,
    SWIZZLED_WORDS,
    Config,
    Cut,
    Forms,
    configure,
)
from openmsa.dense_attention.triton_kernel import dense_kernel
from openmsa.kv_cache import E4M3, NVFP4, PagedKV, Stored
from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.primitives.operands import Bounds, KeyRows, Output, PageTable, QueryRows, Scores
from openmsa.primitives.rows import pool_of, tma_tiles
from openmsa.primitives.softmax import UNSPLIT, Partials
from openmsa.runtime import checks, devices
from openmsa.runtime.devices import Device
from openmsa.runtime.kinds import computes
from openmsa.runtime.launch import ceil_div, launch_kernel, runs_hopper_kernels
from openmsa.types import Layout, out_dtype

LOG2_E = 1.4426950408889634


def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    return_out: bool,
    return_lse: bool,
    return_max_score: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_score: Tensor | None = None,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Does what `openmsa.dense_attention.dense_attention` says. config: tiles and split; None: those of `configure`."""
    total_q, heads, head_dim = q.shape
    stored, facts = (k.k, k.v) if isinstance(k, PagedKV) else (k, v), devices.facts(q.device)
    keys, values = (Operand.of(x, native=facts.arch >= 90) for x in stored)
    num_blocks, num_kv_heads = seqs.num_blocks(block_size), keys.pool.shape[1]
    if return_out and out is None:
        out = torch.empty((total_q, heads, head_dim), dtype=out_dtype(q), device=q.device)
    if return_lse and lse is None:
        lse = torch.empty((total_q, heads), dtype=torch.float32, device=q.device)
    if return_max_score and max_score is None:
        computes("scores of blocks that no query sees")
        max_score = torch.full((heads, total_q, num_blocks), -torch.inf, dtype=torch.float32, device=q.device)
    if config is None and out is not None and runs_hopper_kernels(q.device):
        from openmsa.dense_attention import gluon_sm90_dense

        if gluon_sm90_dense.launched(facts, q, k, v, seqs, causal, softmax_scale * LOG2_E, block_size, out, lse, max_score):
            return chosen_results(out, lse, max_score)
    if config is None:
        sizes = (seqs.batch, seqs.max_seqlen_q, seqs.max_seqlen_k, num_kv_heads, heads // num_kv_heads, head_dim)
        config = configure(*sizes, facts, checks.format_of(stored[0]), checks.format_of(q), return_max_score)
    if total_q and heads:
        table = k.page_table if isinstance(k, PagedKV) else None
        _launch(config, facts, q, keys, values, table, seqs, causal, softmax_scale, block_size, (out, lse, max_score))
    return chosen_results(out, lse, max_score)


class Operand(NamedTuple):
    """Holds keys or values as the kernel takes them.

    pool:   ``[num_pages, heads, page_size, columns]``; packed rows are one page.
    rows:   the pool with its strides, scales and factors.
    format: one of `FORMAT_IDS`.
    form:   the form of what multiplies them, one of the constants of `openmsa.dense_attention.triton_config`.
    """

    pool: Tensor
    rows: KeyRows
    format: int
    form: int

    @classmethod
    def of(cls, rows: Tensor | Stored | None, native: bool) -> Operand:
        """Describes packed ``[total, heads, dim]`` or a pool. native: whether the GPU knows E4M3, else its bytes are passed."""
        assert rows is not None
        if isinstance(rows, E4M3):
            pool = _pool(codes(rows.data, native))
            form = NO_FACTOR if rows.scale is None else PAGE_FACTOR if rows.scale.dim() == 2 else HEAD_FACTOR
            keys = KeyRows(pool, *_strides(pool), None, 0, 0, 0, 0, rows.scale, *rows.scale_strides)
            return cls(pool, keys, FORMAT_IDS["e4m3"], form)
        if isinstance(rows, NVFP4):
            pool, scales = _pool(rows.data), codes(rows.scale, native)
            form, strides = _groups(rows, scales)
            keys = KeyRows(pool, *_strides(pool), scales, *strides, rows.global_scale)
            return cls(pool, keys, FORMAT_IDS["nvfp4"], form)
        assert isinstance(rows, Tensor)
        pool = _pool(rows)
        return cls(pool, KeyRows(pool, *_strides(pool)), FORMAT_IDS["plain"], NO_FACTOR)


def _groups(rows: NVFP4, scales: Tensor) -> tuple[int, tuple[int, int, int, int]]:
    """Returns the form of scales of groups, and their strides from page to page, head, key and group, in bytes, in words or, in
    the 128x4 layout, in rows of scales. They are read four at a time where a tile's row holds four and they lie so."""
    words = rows.shape[-1] > 32 and scales.data_ptr() % 4 == 0
    if rows.layout == "linear":
        page, head, row, group = _strides(_pool(scales))
        if words and rows.groups % 4 == 0 and group == 1 and not (page % 4 or head % 4 or row % 4):
            return GROUP_WORDS, (page // 4, head // 4, row // 4, 1)
        return GROUPS, (page, head, row, group)
    heads, size = rows.shape[1], rows.shape[2]
    return SWIZZLED_WORDS if words else SWIZZLED, (heads * size, size, 1, 0) if rows.dim() == 4 else (0, 1, heads, 0)


def codes(data: Tensor, native: bool) -> Tensor:
    """Returns E4M3 data, as bytes unless `native`."""
    return data if native else data.view(torch.uint8)


def _pool(rows: Tensor) -> Tensor:
    """Returns packed rows as one page, and a pool as it is."""
    return pool_of(rows) if rows.dim() == 3 else rows


def _strides(pool: Tensor) -> tuple[int, int, int, int]:
    """Returns the strides from page to page, head to head, row to row and column to column."""
    page, head, row, column = pool.stride()
    return page, head, row, column


def _launch(
    config: Config,
    device: Device,
    q: Tensor | Stored,
    keys: Operand,
    values: Operand,
    table: Tensor | None,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    results: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Launches the kernel once. results: out, lse and max_score as they are allocated; None where one is not returned."""
    out, lse, max_score = results
    (_, heads, head_dim), (num_pages, num_kv_heads, page_rows, _) = q.shape, keys.pool.shape
    group = heads // num_kv_heads
    tiles = ceil_div(seqs.max_seqlen_q * group, config.rows)
    splits = config.splits if out is not None or lse is not None else 1
    page_size = 0 if table is None else page_rows
    cut = Cut.of(config, group, head_dim, page_size, keys.format, None if max_score is None else block_size)
    boxes: tuple[TensorDescriptor | None, ...] = (None, None)
    if device.has_tma and cut.span % cut.keys == 0 and page_size % cut.keys == 0:
        columns = cut.dim_pad // (2 if keys.format == FORMAT_IDS["nvfp4"] else 1)
        boxes = tuple(tma_tiles(x.pool, cut.keys, columns) for x in (keys, values))
        if boxes[0] is None or boxes[1] is None:
            boxes = (None, None)
    staged = None
    if config.stages_rows(keys.format > 0 or isinstance(q, E4M3), q.dtype == torch.float16, device.arch):
        staged = (torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out).view(torch.int16)
    programs, partials = seqs.batch * tiles * num_kv_heads, UNSPLIT
    if splits > 1:
        partials = Partials.allocate(programs, programs * splits, cut.rows, cut.dim, out_dtype(q), q.device)
    capacity = page_rows if table is None else table.shape[1] * page_rows * (num_pages > 0)
    launch_kernel(
        dense_kernel,
        (seqs.batch * tiles, num_kv_heads, splits),
        _queries(q, device.arch >= 90),
        keys.rows,
        values.rows,
        *boxes,
        PageTable(None) if table is None else PageTable(table, table.stride(0), table.stride(1)),
        Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset),
        _output(out, lse),
        _scores(max_score),
        staged,
        partials,
        softmax_scale * LOG2_E,
        *(tiles, splits, num_pages, 0 if max_score is None else max_score.shape[2], capacity),
        CUT=cut,
        FORMS=Forms(keys.format, keys.form, values.form, config.qk8),
        CAUSAL=causal,
        POSITIVE=softmax_scale > 0,
        SPLIT=splits > 1,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _queries(q: Tensor | Stored, native: bool) -> QueryRows:
    """Describes queries to the kernel. native: whether the GPU knows E4M3."""
    if isinstance(q, E4M3):
        rows = codes(q.data, native)
        token, head, dim = rows.stride()
        return QueryRows(rows, token, head, dim, q.scale, q.scale_strides[1])
    assert isinstance(q, Tensor)
    token, head, dim = q.stride()
    return QueryRows(q, token, head, dim)


def _output(out: Tensor | None, lse: Tensor | None) -> Output:
    """Describes the results that are not None to the kernel; elements of out, and heads of lse, lie side by side."""
    token, head = (0, 0) if out is None else (out.stride(0), out.stride(1))
    return Output(out, token, head, 1, lse, 0 if lse is None else lse.stride(0), 1)


def _scores(max_score: Tensor | None) -> Scores:
    """Describes where maximum scores go to the kernel."""
    if max_score is None:
        return Scores(None, 0, 0, 1)
    head, token, block = max_score.stride()
    return Scores(max_score, head, token, block)
