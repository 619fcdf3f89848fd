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

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.dense_attention.call import chosen_results
from openmsa.dense_attention.triton_config import Config, Cut, configure
from openmsa.dense_attention.triton_kernel import dense_kernel
from openmsa.kv_cache import E4M3, PagedKV, Stored
from openmsa.primitives.operands import PLAIN, Bounds, Output, Scores
from openmsa.primitives.rows import KeyView, query_rows, tma_tiles
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
    stored, table = ((k.k, k.v), k.page_table) if isinstance(k, PagedKV) else ((k, v), None)
    facts = devices.facts(q.device)
    keys, values = [KeyView.of(x, table, facts.arch >= 90, items=False, words=4) for x in stored if x is not None]
    num_blocks, num_kv_heads = seqs.num_blocks(block_size), keys.heads
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
        _launch(config, facts, q, keys, values, seqs, causal, softmax_scale, block_size, (out, lse, max_score))
    return chosen_results(out, lse, max_score)


def _launch(
    config: Config,
    device: Device,
    q: Tensor | Stored,
    keys: KeyView,
    values: KeyView,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    results: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Launches the kernel once. results: out, lse and max_score as they are allocated; None where one is not returned."""
    out, lse, max_score = results
    (_, heads, head_dim), num_kv_heads = q.shape, keys.heads
    group = heads // num_kv_heads
    tiles = ceil_div(seqs.max_seqlen_q * group, config.rows)
    splits = config.splits if out is not None or lse is not None else 1
    cut = Cut.of(config, group, head_dim, keys.page_size, keys.form.format, None if max_score is None else block_size)
    boxes: tuple[TensorDescriptor | None, ...] = (None, None)
    if device.has_tma and cut.span % cut.keys == 0 and keys.page_size % cut.keys == 0:
        boxes = tuple(tma_tiles(x.rows.data, cut.keys, cut.dim_pad // keys.form.split) for x in (keys, values))
        if boxes[0] is None or boxes[1] is None:
            boxes = (None, None)
    staged = None
    if config.stages_rows(keys.form.format != PLAIN or isinstance(q, E4M3), q.dtype == torch.float16, device.arch):
        staged = (torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out).view(torch.int16)
    programs, partials = seqs.batch * tiles * num_kv_heads, UNSPLIT
    if splits > 1:
        partials = Partials.allocate(programs, programs * splits, cut.rows, cut.dim, out_dtype(q), q.device)
    launch_kernel(
        dense_kernel,
        (seqs.batch * tiles, num_kv_heads, splits),
        query_rows(q, device.arch >= 90),
        keys.rows,
        values.rows,
        *boxes,
        keys.table,
        Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset),
        _output(out, lse),
        _scores(max_score),
        staged,
        partials,
        softmax_scale * LOG2_E,
        *(tiles, splits, keys.num_pages, 0 if max_score is None else max_score.shape[2], keys.capacity * (keys.num_pages > 0)),
        CUT=cut,
        K_FORM=keys.form,
        V_FORM=values.form,
        CAUSAL=causal,
        POSITIVE=softmax_scale > 0,
        SPLIT=splits > 1,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


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
