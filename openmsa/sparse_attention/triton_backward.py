# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This module computes the gradients of `sparse_attention` in Triton, by key blocks: a program holds a block's keys and values
and the sums for their gradients, gathers the queries that read the block a few at a time, and leaves for each (query, slot)
what the block adds to dq. A second kernel adds up the slots of each query, a third the items of each block.

Lists ascend and every sum is taken in a fixed order, without atomics: results repeat bit for bit. Rows of K and V up to
the last key that some query of the sequence sees must be finite.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.primitives.gradients import RowTerms, weights_and_slopes
from openmsa.primitives.operands import Bounds, KeyRows
from openmsa.primitives.readers import Readers, buckets_of, most_extra
from openmsa.primitives.rows import query_rows
from openmsa.primitives.triton_readers import listed
from openmsa.runtime.devices import facts
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two, runs_hopper_kernels
from openmsa.sparse_attention.triton_config import SHARED_BYTES
from openmsa.sparse_attention.triton_lists import position_of_token_zero
from openmsa.types import Layout

WORKSPACE_BYTES = 4 << 30  # What blocks add to dq takes at most so many bytes at a time, at least one query's.


@dataclass(frozen=True)
class BackwardConfig:
    """Says how the gradients of one call are tiled.

    keys:        keys that a program holds; a wider block takes several programs and partial gradients.
    rows:        gathered (query, head) rows of a step.
    item:        readers of one block that a program walks; more are split across programs.
    warps:       warps of a program.
    stages:      steps whose loads are on their way.
    sum_tokens:  queries whose slots one program adds up.
    """

    keys: int
    rows: int
    item: int
    warps: int
    stages: int
    sum_tokens: int


@functools.lru_cache(256)
def backward_config(head_dim: int, group: int, block_size: int, major: int, element_bytes: int) -> BackwardConfig:
    """Chooses the tiles of a call. major: the major compute capability."""
    dim, heads = max(next_power_of_two(head_dim), 16), next_power_of_two(group)
    roomy = SHARED_BYTES.get(major, 99 << 10) >= 160 << 10
    if element_bytes == 4:  # Products of float32 numbers are made without the matrix unit.
        keys, rows = 32, 16
    elif major == 9:
        keys, rows = (64, 32) if dim > 128 else (128, 64)
    elif roomy:  # Sums of 128 keys spill on sm_80, and ptxas emits a trap for them on sm_100.
        keys, rows = (32, 32) if dim > 128 else (64, 64)
    else:
        keys, rows = (32, 16) if dim > 128 else (64, 32)
    keys = min(keys, max(16, next_power_of_two(block_size)))
    return BackwardConfig(
        keys=keys,
        rows=rows,
        item=max(1, 128 * rows // heads),
        warps=8 if keys * (dim + rows) >= 64 * 128 or element_bytes == 4 else 4,
        stages=2,
        sum_tokens=max(1, 16 // heads),
    )


class Shape(NamedTuple):
    """Says how rows and keys are cut; it is a constant of the kernels.

    heads:      query heads of a key head; head_pad: rounded up to a power of two.
    lists:      heads of the selection: as many as key heads, or 1.
    topk:       slots of a query; topk_pad: rounded up to a power of two.
    block:      keys of a block.
    keys:       keys of a program; cuts: programs of a block.
    rows:       rows of a step.
    item:       readers of an item.
    dim:        elements of a head; dim_pad: of a tile's row.
    precision:  of products, as Triton names it.
    """

    heads: int
    head_pad: int
    lists: int
    topk: int
    topk_pad: int
    block: int
    keys: int
    cuts: int
    rows: int
    item: int
    dim: int
    dim_pad: int
    precision: str


class Sums(NamedTuple):
    """Holds what programs leave.

    slots:   ``[queries, key heads, topk, cuts, group, dim]``: what each block adds to dq, rounded as the inputs are.
    dk, dv:  float32 ``[total_k, key heads, dim]``, sums of the first items of each block and, in the end, of all.
    extra:   float32 ``[lists that share an item, items, 2, cuts, keys, dim]``: dk and dv of the other items.
    offsets: int32, the number of the first extra item of each list.
    """

    slots: Tensor
    dk: Tensor
    dv: Tensor
    extra: Tensor
    offsets: Tensor


def sparse_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    return_lse: bool,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *,
    workspace_bytes: int = WORKSPACE_BYTES,
    config: BackwardConfig | None = None,
    tuned: bool | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, summed in float32.

    The first arguments are those of the call, out and lse its results, grad_out and grad_lse their gradients (None: lse was not
    used). `return_lse` says nothing here.

    workspace_bytes:  bound on what blocks add to dq, held for a chunk of queries at a time (lists and float32 sums of dk and dv
                      are not counted). It changes the order of the sums for dk and dv.
    config:           tile shapes; None: those of `backward_config`, with items twice as long for Hopper's own kernel.
    tuned:            whether Hopper's own kernel makes the products; where it cannot, True raises NotImplementedError. None:
                      where it can.
    options:          what differs from the usual in the launch of Hopper's own kernel.
    """
    (total_q, heads, dim), (total_k, kv_heads, _), topk = q.shape, k.shape, blocks.shape[2]
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    usual = backward_config(dim, heads // kv_heads, block_size, facts(q.device).arch // 10, q.element_size())
    tuned = _is_tuned(tuned, config or usual, q, k, blocks, block_size)
    config = config or (replace(usual, item=2 * usual.item) if tuned else usual)
    grad_out = grad_out if grad_out.stride(2) == 1 else grad_out.contiguous()
    terms = RowTerms.of(out, lse, grad_out, grad_lse)  # While it runs, the host goes on.
    dk, dv = torch.zeros((2, *k.shape), dtype=torch.float32, device=q.device)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    whole = (q, grad_out, dq, blocks, *terms)
    shape = _shape(config, heads // kv_heads, blocks, block_size, dim, q.dtype)
    query_bytes = heads * topk * shape.cuts * dim * q.element_size()
    chunk = ceil_div(total_q, ceil_div(total_q, max(1, workspace_bytes // query_bytes)))
    for start in range(0, total_q, chunk):
        stop = min(start + chunk, total_q)
        here = seqs if chunk == total_q else seqs.query_chunk(start, stop)
        own_q, own_grad, own_dq, own_blocks, *own_terms = whole if chunk == total_q else [x[start:stop] for x in whole]
        lists = listed(own_blocks, here, total_k, block_size, config.item)
        sums = _sums(lists, dk, dv, shape, own_q)
        given = (config, shape, own_q, k, v, own_grad, RowTerms(*own_terms), lists, here, softmax_scale, sums)
        _launch_tuned(*given, **(options or {})) if tuned else _launch(*given)
        _add_up(config, shape, own_dq, lists, sums, buckets_of(total_k, seqs.batch, block_size), here)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _is_tuned(tuned: bool | None, config: BackwardConfig, q: Tensor, k: Tensor, blocks: Tensor, block_size: int) -> bool:
    """Says whether Hopper's own kernel serves a call."""
    if tuned is False:
        return False
    reason: str | None = "it runs on Hopper GPUs with Triton 3.6 only"
    if runs_hopper_kernels(q.device):
        from openmsa.sparse_attention.gluon_sm90_gradients import why_not

        reason = why_not(q, k, blocks, block_size, config.keys)
    if reason is not None and tuned:
        raise NotImplementedError(f"tuned must be False or None, as Hopper's own kernel does not serve this call: {reason}")
    return reason is None


def _shape(config: BackwardConfig, group: int, blocks: Tensor, block_size: int, dim: int, dtype: torch.dtype) -> Shape:
    return Shape(
        heads=group,
        head_pad=next_power_of_two(group),
        lists=blocks.shape[1],
        topk=blocks.shape[2],
        topk_pad=next_power_of_two(blocks.shape[2]),
        block=block_size,
        keys=config.keys,
        cuts=ceil_div(block_size, config.keys),
        rows=config.rows,
        item=config.item,
        dim=dim,
        dim_pad=max(16, next_power_of_two(dim)),
        precision="ieee" if dtype == torch.float32 else "tf32",
    )


def _sums(lists: Readers, dk: Tensor, dv: Tensor, shape: Shape, q: Tensor) -> Sums:
    """Allocates what programs leave."""
    kv_heads, most = dk.shape[1], most_extra(lists.entries.numel(), shape.item)
    slots = torch.empty((q.shape[0] * q.shape[1], shape.topk * shape.cuts, shape.dim), dtype=q.dtype, device=q.device)
    size = (kv_heads // shape.lists, most, 2, shape.cuts, shape.keys, shape.dim)
    extra = torch.empty(size, dtype=torch.float32, device=q.device)
    return Sums(slots, dk, dv, extra, lists.extra_starts)


def _launch(
    config: BackwardConfig,
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    terms: RowTerms,
    lists: Readers,
    seqs: Layout,
    softmax_scale: float,
    sums: Sums,
) -> None:
    """Launches the kernel that walks the readers of blocks."""
    kv_heads, shared = k.shape[1], sums.extra.shape[0]
    launch_kernel(
        block_gradients,
        (lists.lists.numel(), shared, shape.cuts),
        query_rows(q, True),
        query_rows(grad_out, True),
        terms,
        _key_rows(k),
        _key_rows(v),
        Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset),
        lists,
        sums,
        softmax_scale,
        kv_heads,
        lists.sequences.numel(),
        sums.extra.shape[1],
        SHAPE=shape,
        STAGES=config.stages,
        num_warps=config.warps,
    )


def _launch_tuned(
    config: BackwardConfig,
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    terms: RowTerms,
    lists: Readers,
    seqs: Layout,
    softmax_scale: float,
    sums: Sums,
    **options: Any,
) -> None:
    """Launches Hopper's own kernel, which does what `block_gradients` does."""
    from openmsa.sparse_attention.gluon_sm90_gradients import Cut, launch_sm90_gradients

    bounds = Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset)
    cut = Cut(shape.heads, shape.lists, shape.topk, shape.item)
    launch_sm90_gradients(q, k, v, grad_out, terms, lists, bounds, softmax_scale, sums, cut, **options)


def _key_rows(x: Tensor) -> KeyRows:
    s_row, s_head, s_dim = x.stride()
    return KeyRows(x, 0, s_head, s_row, s_dim)


def _add_up(
    config: BackwardConfig, shape: Shape, dq: Tensor, lists: Readers, sums: Sums, num_buckets: int, seqs: Layout
) -> None:
    """Launches the sums over slots and, where blocks may have several items, over items."""
    kv_heads, shared = sums.dk.shape[1], sums.extra.shape[0]
    launch_kernel(
        add_slots,
        (ceil_div(dq.shape[0], config.sum_tokens), kv_heads),
        sums.slots,
        lists.reads.view(torch.uint8),
        dq,
        dq.shape[0],
        kv_heads,
        SHAPE=shape,
        TOKENS=config.sum_tokens,
        num_warps=4,
    )
    if sums.extra.shape[1]:
        launch_kernel(
            add_items,
            (lists.starts.numel() - 1, shared, shape.cuts),
            lists,
            sums,
            seqs.cu_seqlens_k,
            kv_heads,
            num_buckets,
            sums.extra.shape[1],
            SHAPE=shape,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["num_buckets", "most_extra"])
def block_gradients(
    queries,  # QueryRows
    grad_out,  # QueryRows
    terms,  # RowTerms
    keys,  # KeyRows
    values,
    bounds,  # Bounds
    lists,  # Readers
    sums,  # Sums, of which slots, dk, dv and extra are written
    softmax_scale,
    num_kv_heads,
    num_buckets,
    most_extra,
    SHAPE: tl.constexpr,  # Shape
    STAGES: tl.constexpr,
):
    """Walks the readers of an item. A program serves an item, a KV head of those with this list, and a cut of the block."""
    # 1. The program finds its item.
    GROUP: tl.constexpr = SHAPE.heads
    HEADS: tl.constexpr = SHAPE.head_pad
    TOPK: tl.constexpr = SHAPE.topk
    BLOCK: tl.constexpr = SHAPE.block
    KEYS: tl.constexpr = SHAPE.keys
    CUTS: tl.constexpr = SHAPE.cuts
    ROWS: tl.constexpr = SHAPE.rows
    DIM: tl.constexpr = SHAPE.dim
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    PRECISION: tl.constexpr = SHAPE.precision
    i_list = tl.load(lists.lists + tl.program_id(0))
    if i_list >= SHAPE.lists * num_buckets:
        return
    i_item = tl.program_id(0) - tl.load(lists.item_starts + i_list)  # in its list
    begin = tl.load(lists.starts + i_list) + i_item * SHAPE.item
    end = tl.minimum(tl.load(lists.starts + i_list + 1), begin + SHAPE.item)
    i_h = i_list // num_buckets + tl.program_id(1)
    i_cut = tl.program_id(2)
    bucket = i_list % num_buckets
    i_b = tl.load(lists.sequences + bucket)
    k_begin = tl.load(bounds.cu_k + i_b)
    k_len = tl.load(bounds.cu_k + i_b + 1) - k_begin
    q_begin, q_end = tl.load(bounds.cu_q + i_b), tl.load(bounds.cu_q + i_b + 1)
    position = position_of_token_zero(bounds.q_offset, i_b, q_begin, q_end, k_len)

    # 2. It loads its keys and values.
    o_n, o_d, o_r = tl.arange(0, KEYS), tl.arange(0, DIM_PAD), tl.arange(0, ROWS)
    o_key = i_cut * KEYS + o_n
    key = (bucket - k_begin // BLOCK - i_b) * BLOCK + o_key
    m_key = (o_key < BLOCK) & (key < k_len)
    key = tl.where(m_key, key, 2147483647)
    m_d = o_d < DIM
    m_kd = m_key[:, None] & m_d[None, :]
    row = (k_begin + key).to(tl.int64)
    p_k = keys.data + i_h.to(tl.int64) * keys.s_head + row[:, None] * keys.s_row + o_d[None, :] * keys.s_dim
    p_v = values.data + i_h.to(tl.int64) * values.s_head + row[:, None] * values.s_row + o_d[None, :] * values.s_dim
    b_k, b_v = tl.load(p_k, mask=m_kd, other=0.0), tl.load(p_v, mask=m_kd, other=0.0)

    # 3. It walks its readers, ROWS (query, head) rows at a time.
    b_dk = tl.zeros([KEYS, DIM_PAD], tl.float32)
    b_dv = tl.zeros([KEYS, DIM_PAD], tl.float32)
    scale = softmax_scale * 1.4426950408889634
    p_q = queries.data + i_h * GROUP * queries.s_head
    p_g = grad_out.data + i_h * GROUP * grad_out.s_head
    for i in tl.range(begin * HEADS, end * HEADS, ROWS, num_stages=STAGES):
        o_e, head = (i + o_r) // HEADS, (i + o_r) % HEADS
        m_r = (o_e < end) & (head < GROUP)
        entry = tl.load(lists.entries + o_e, mask=m_r, other=0)
        token = (entry // TOPK).to(tl.int64)
        m_rd = m_r[:, None] & m_d[None, :]
        o_q = (token * queries.s_token + head * queries.s_head)[:, None] + o_d[None, :] * queries.s_dim
        o_g = (token * grad_out.s_token + head * grad_out.s_head)[:, None] + o_d[None, :] * grad_out.s_dim
        b_q, b_g = tl.load(p_q + o_q, mask=m_rd, other=0.0), tl.load(p_g + o_g, mask=m_rd, other=0.0)
        o_t = (token * num_kv_heads + i_h) * GROUP + head
        b_lse = tl.load(terms.lse + o_t, mask=m_r, other=float("inf"))
        b_delta = tl.load(terms.delta + o_t, mask=m_r, other=0.0)
        last_key = tl.minimum(position + entry // TOPK, k_len - 1)
        m_seen = key[:, None] <= last_key[None, :]
        b_p, b_ds = weights_and_slopes(
            b_k, b_q, b_v, b_g, b_lse[None, :], b_delta[None, :], m_seen, scale, PRECISION
        )  # [KEYS, ROWS]
        b_dv = tl.dot(b_p.to(b_g.dtype), b_g, b_dv, input_precision=PRECISION)
        b_ds = b_ds.to(b_q.dtype)
        b_dk = tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION)
        b_dq = tl.dot(tl.trans(b_ds), b_k, input_precision=PRECISION) * softmax_scale  # [ROWS, DIM_PAD]
        o_s = ((token * (num_kv_heads - 1) * TOPK + entry + i_h * TOPK) * CUTS + i_cut) * GROUP + head
        p_s = sums.slots + o_s[:, None] * DIM + o_d[None, :]
        tl.store(p_s, b_dq.to(sums.slots.dtype.element_ty), mask=m_rd)

    # 4. The first item of a block adds to the sums of the block, the others leave theirs.
    b_dk *= softmax_scale
    if i_item == 0:
        o_sum = (row * num_kv_heads + i_h)[:, None] * DIM + o_d[None, :]
        tl.store(sums.dk + o_sum, tl.load(sums.dk + o_sum, mask=m_kd, other=0.0) + b_dk, mask=m_kd)
        tl.store(sums.dv + o_sum, tl.load(sums.dv + o_sum, mask=m_kd, other=0.0) + b_dv, mask=m_kd)
    else:
        i_extra = tl.program_id(1).to(tl.int64) * most_extra + tl.load(sums.offsets + i_list) + i_item - 1
        p_extra = sums.extra + ((i_extra * 2 * CUTS + i_cut) * KEYS + o_n)[:, None] * DIM + o_d[None, :]
        tl.store(p_extra, b_dk, mask=m_d[None, :])
        tl.store(p_extra + CUTS * KEYS * DIM, b_dv, mask=m_d[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def add_slots(
    slots,
    reads,  # bytes [tokens, selection heads, topk], whether a slot is read
    dq,
    num_tokens,
    num_kv_heads,
    SHAPE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Adds up what the blocks of TOKENS queries and a KV head add to dq, in the order of slots."""
    GROUP: tl.constexpr = SHAPE.heads
    HEADS: tl.constexpr = SHAPE.head_pad
    DIM: tl.constexpr = SHAPE.dim
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    ROWS: tl.constexpr = TOKENS * HEADS
    CUTS: tl.constexpr = SHAPE.cuts
    PARTS: tl.constexpr = SHAPE.topk * CUTS
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    i_h = tl.program_id(1)
    token = (tl.program_id(0) * TOKENS + o_r // HEADS).to(tl.int64)
    head = o_r % HEADS
    m_r = (token < num_tokens) & (head < GROUP)
    m_rd = m_r[:, None] & (o_d < DIM)[None, :]
    o_s = tl.arange(0, SHAPE.topk_pad)
    p_reads = reads + (token * SHAPE.lists + tl.minimum(i_h, SHAPE.lists - 1)) * SHAPE.topk
    b_reads = tl.load(p_reads[:, None] + o_s[None, :], mask=m_r[:, None] & (o_s < SHAPE.topk)[None, :], other=0)
    b_filled = tl.sum(b_reads.to(tl.int64) << o_s[None, :], 1)  # Bit i says that slot i is read.
    o_part = ((token * num_kv_heads + i_h) * PARTS * GROUP + head)[:, None] * DIM + o_d[None, :]
    b_sum = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for i in tl.range(0, PARTS, num_stages=4):
        m = m_rd & (((b_filled >> (i // CUTS)) & 1) != 0)[:, None]
        b_sum += tl.load(slots + o_part + i * GROUP * DIM, mask=m, other=0.0).to(tl.float32)
    o_q = ((token * num_kv_heads + i_h) * GROUP + head)[:, None] * DIM + o_d[None, :]
    tl.store(dq + o_q, b_sum.to(dq.dtype.element_ty), mask=m_rd)


@triton.jit(do_not_specialize=["num_buckets", "most_extra"])
def add_items(
    lists,  # Readers
    sums,  # Sums, of which dk and dv are read and written
    cu_k,
    num_kv_heads,
    num_buckets,
    most_extra,
    SHAPE: tl.constexpr,
):
    """Adds the extra items of a list to the sums of its block, in order. The grid is that of `block_gradients`, lists in the
    place of items."""
    BLOCK: tl.constexpr = SHAPE.block
    KEYS: tl.constexpr = SHAPE.keys
    CUTS: tl.constexpr = SHAPE.cuts
    DIM: tl.constexpr = SHAPE.dim
    i_list, i_cut = tl.program_id(0), tl.program_id(2)
    first, last = tl.load(sums.offsets + i_list), tl.load(sums.offsets + i_list + 1)
    if first == last:
        return
    i_h = i_list // num_buckets + tl.program_id(1)
    bucket = i_list % num_buckets
    i_b = tl.load(lists.sequences + bucket)
    k_begin = tl.load(cu_k + i_b)
    o_n, o_d = tl.arange(0, KEYS), tl.arange(0, SHAPE.dim_pad)
    o_key = i_cut * KEYS + o_n
    key = (bucket - k_begin // BLOCK - i_b) * BLOCK + o_key
    m_key = (o_key < BLOCK) & (key < tl.load(cu_k + i_b + 1) - k_begin)
    m_d = (o_d < DIM)[None, :]
    o_sum = ((k_begin + key).to(tl.int64) * num_kv_heads + i_h)[:, None] * DIM + o_d[None, :]
    m_kd = m_key[:, None] & m_d
    o_extra = ((i_cut * KEYS) + o_n)[:, None] * DIM + o_d[None, :]
    for i_of in tl.static_range(2):
        p_sum = (sums.dk if i_of == 0 else sums.dv) + o_sum
        b_sum = tl.load(p_sum, mask=m_kd, other=0.0)
        for i in range(first, last):
            i_extra = (tl.program_id(1).to(tl.int64) * most_extra + i) * 2 + i_of
            b_sum += tl.load(sums.extra + i_extra * CUTS * KEYS * DIM + o_extra, mask=m_kd, other=0.0)
        tl.store(p_sum, b_sum, mask=m_kd)
