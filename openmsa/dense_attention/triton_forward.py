# SPDX-License-Identifier: MIT
"""Dense attention in Triton: prefill, short queries on a long prefix, and decode, by one kernel.

A tile's rows are (query token, head of the group) pairs of one sequence and KV head, tokens outermost, so that a key is read
once for the whole group and any group size fills the tile. Where the rows alone do not fill the GPU the keys are split over
programs; each leaves a normalised partial, rounded as the outputs are, and its lse, and the last program of a tile to
arrive, found by a counter that it resets, merges them. Keys that all rows of a tile see are walked without masks, through TMA
descriptors where strides allow; the rest, at the diagonal and at the end of a sequence, by masked loads. Stored keys and values
(E4M3, NVFP4) are read as they are and become numbers in registers (`openmsa.dense_attention.triton_tiles`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.dense_attention import chosen_results
from openmsa.dense_attention.triton_config import Config, configure, spans
from openmsa.dense_attention.triton_kernel import dense_kernel
from openmsa.dense_attention.triton_operands import Operand, codes, operand
from openmsa.kv_cache import E4M3, PagedKV, Stored
from openmsa.kv_cache.stored import format_of, out_dtype
from openmsa.runtime import devices
from openmsa.runtime.integers import ceil_div, next_power_of_two
from openmsa.runtime.launch import launch_kernel
from openmsa.types import Layout


def dense_attention(
    q: Tensor | E4M3,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    return_out: bool,
    return_lse: bool,
    return_max_score: bool,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """See `openmsa.dense_attention.dense_attention`. config: None: `configure`."""
    total_q, heads, head_dim = q.shape
    stored, facts = (k.k, k.v) if isinstance(k, PagedKV) else (k, v), devices.facts(q.device)
    keys, values = (operand(x, native=facts.arch >= 90) for x in stored)
    num_blocks, num_kv_heads = seqs.num_blocks(block_size), keys.pool.shape[1]
    out = torch.empty((total_q, heads, head_dim), dtype=out_dtype(q), device=q.device) if return_out else None
    lse = torch.empty((total_q, heads), dtype=torch.float32, device=q.device) if return_lse else None
    shape = (heads, total_q, num_blocks)
    max_score = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device) if return_max_score else None
    if config is None:
        sizes = (seqs.batch, seqs.max_seqlen_q, seqs.max_seqlen_k, num_kv_heads, heads // num_kv_heads, head_dim)
        config = configure(*sizes, facts, *(format_of(x) for x in (stored[0], q)), return_max_score)
    if total_q and heads:
        table = k.page_table if isinstance(k, PagedKV) else None
        results = (out, lse, max_score)
        _launch(config, q, keys, values, table, seqs, causal, softmax_scale, block_size, num_blocks, results)
    return chosen_results(out, lse, max_score)


def _launch(
    config: Config,
    q: Tensor | E4M3,
    keys: Operand,
    values: Operand,
    table: Tensor | None,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    num_blocks: int,
    results: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    (_, heads, head_dim), (num_pages, num_kv_heads, page_rows, _) = q.shape, keys.pool.shape
    out, lse, max_score = results
    capacity = page_rows if table is None else table.shape[1] * page_rows * (num_pages > 0)
    group = heads // num_kv_heads
    tiles = ceil_div(seqs.max_seqlen_q * group, config.rows)
    splits = config.splits if out is not None or lse is not None else 1
    span, blocks_a_tile = spans(config.keys, block_size if max_score is not None else None)
    descriptors = (None, None)
    in_one_page = span % config.keys == 0 and (table is None or page_rows % config.keys == 0)
    device = devices.facts(q.device)
    if device.has_tma and in_one_page and keys.descriptor_fits and values.descriptor_fits:
        descriptors = (keys.descriptor(config.keys), values.descriptor(config.keys))
    partials = _partials(splits, seqs.batch * tiles * num_kv_heads, config.rows, head_dim, out_dtype(q), q.device)
    q_scale, rows, arch = None, q, device.arch
    if isinstance(q, E4M3):
        q_scale, rows = q.scale, codes(q.data, arch >= 90)
    staged = None
    if config.stages_rows(keys.format > 0 or rows is not q, q.dtype == torch.float16, arch):
        staged = (torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out).view(torch.int16)
    launch_kernel(
        dense_kernel,
        (seqs.batch * tiles, num_kv_heads, splits),
        rows,
        keys.pool,
        values.pool,
        *descriptors,
        q_scale,
        keys.scale,
        values.scale,
        keys.whole,
        values.whole,
        table,
        seqs.cu_seqlens_q,
        seqs.cu_seqlens_k,
        seqs.q_offset,
        *results,
        staged,
        *partials,
        softmax_scale * 1.4426950408889634,
        tiles,
        splits,
        num_pages,
        num_blocks,
        capacity,
        *rows.stride(),
        *keys.pool.stride(),
        *values.pool.stride(),
        q.scale_strides[1] if isinstance(q, E4M3) else 0,
        *keys.strides,
        *values.strides,
        *(table.stride() if table is not None else (0, 0)),
        *(out.stride()[:2] if out is not None else (0, 0)),
        lse.stride(0) if lse is not None else 0,
        *(max_score.stride()[:2] if max_score is not None else (0, 0)),
        G=group,
        D=head_dim,
        BM=config.rows,
        BN=config.keys,
        BD=next_power_of_two(head_dim),
        PAGE=0 if table is None else page_rows,
        SPAN=span,
        NB=blocks_a_tile,
        FORMAT=keys.format,
        KS=keys.scales,
        VS=values.scales,
        QK8=config.qk8,
        CAUSAL=causal,
        POSITIVE=softmax_scale > 0,
        SPLIT=splits > 1,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _partials(
    splits: int, tiles: int, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Results of each split [tiles, splits, rows, head_dim], their lse, and a counter a tile."""
    if splits == 1:
        return None, None, None
    return (
        torch.empty(tiles * splits * rows * head_dim, dtype=dtype, device=device),
        torch.empty(tiles * splits * rows, dtype=torch.float32, device=device),
        torch.zeros(tiles, dtype=torch.int32, device=device),
    )
