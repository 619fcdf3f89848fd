# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""`index_loss` in Triton goes by key blocks: a program holds a block's keys and index keys, and gathers the queries that read
the block a few at a time. A first kernel leaves the sum of exponentials of each (index query, slot), which add up to the index
branch's lse. A second makes the teacher's and the student's weights of a tile, their divergence and the student's gradients: a
share of d index_k that stays in registers, and for each (query, slot) what the block adds to d index_q. Two more add these up.
The main branch's lse is the caller's, or made as the index branch's is. Where all visible keys are read, every block is
selected.

Lists are sorted and every sum is taken in a fixed order, without atomics: results repeat bit for bit. Rows of keys and index
keys up to the last key that some query of the sequence sees must be finite.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.index_loss import share
from openmsa.primitives.gradients import LseRows
from openmsa.primitives.operands import Bounds, KeyRows, QueryRows
from openmsa.primitives.readers import Readers, buckets_of
from openmsa.primitives.rows import key_rows, query_rows
from openmsa.primitives.triton_readers import listed
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two
from openmsa.types import Layout

WORKSPACE_BYTES = 2 << 30  # What blocks leave for each query takes at most so many bytes at a time, at least one query's.
BLOCK = 128  # keys of a block where all are read
PROGRAMS = 2048  # Lists are cut into about so many items.
SUM_TOKENS = 16  # queries whose slots one program adds up


@dataclass(frozen=True)
class LossConfig:
    """Says how one call is tiled.

    keys:    keys that a program holds; a wider block takes several programs.
    rows:    gathered queries of a step.
    item:    readers of one block that a program walks, at least; more are split across programs.
    warps:   warps of a program.
    stages:  steps whose loads are on their way.
    """

    keys: int
    rows: int
    item: int
    warps: int
    stages: int


@functools.lru_cache(256)
def loss_config(widest_dim: int, kv: int, block_size: int, element_bytes: int, device: Device) -> LossConfig:
    """Chooses the tiles of a call; it is a pure function. widest_dim: the greater of head_dim and index_dim. kv: key heads of
    an index head; of several, a program loads the keys for every query head."""
    wide, roomy = widest_dim > 128 or kv > 1, device.shared_bytes > 128 * 1024
    if element_bytes == 4:  # Products of float32 numbers are made without the matrix unit.
        keys, rows = 32, 16
    elif device.arch == 90:
        keys, rows = (64, 32) if wide else (128, 64)
    else:
        keys, rows = (32, 32) if wide else (64, 64 if roomy else 32)
    keys = min(keys, max(16, next_power_of_two(block_size)))
    stages = 3 if keys * rows >= 128 * 64 else 2
    return LossConfig(keys, rows, 512, 8 if keys * rows >= 64 * 64 or element_bytes == 4 else 4, stages)


class Shape(NamedTuple):
    """Says how rows and keys are cut; it is a constant of the kernels.

    heads:      query heads of an index head; kv: key heads among which they are divided.
    lists:      heads of the selection: as many as index heads, or 1.
    shared:     index heads of an index key head.
    block:      keys of a block.
    keys:       keys of a program; cuts: programs of a block.
    rows:       queries of a step.
    dim:        elements of a main head; dim_pad: of a tile's row.
    index_dim:  elements of an index head; index_pad: of a tile's row.
    gain:       power of two that multiplies the gradients of logits where these are rounded to float16.
    precision:  of products, as Triton names it.
    """

    heads: int
    kv: int
    lists: int
    shared: int
    block: int
    keys: int
    cuts: int
    rows: int
    dim: int
    dim_pad: int
    index_dim: int
    index_pad: int
    gain: float
    precision: str


class Branch(NamedTuple):
    """Holds the queries and keys of the main branch or of the index branch, and the lse of its rows."""

    queries: QueryRows
    keys: KeyRows
    lse: LseRows

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, lse: Tensor) -> Branch:
        """Returns the tensors with their strides."""
        return cls(query_rows(queries, True), key_rows(keys), LseRows(lse, *lse.stride()))


class Left(NamedTuple):
    """Holds what programs leave, all contiguous.

    losses:  float32 ``[items, index heads of a list, cuts]``, sums of divergences in bits; 0 where there is no item.
    slots:   ``[queries, index heads, topk, cuts, index_dim]``: what each block adds to d index_q, before the scale.
    shares:  float32 ``[items, index heads of a list, cuts, keys, index_dim]``: d index_k of each item, before the scale.
    """

    losses: Tensor
    slots: Tensor
    shares: Tensor


def index_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    blocks: Tensor | None,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    index_scale: float,
    coefficient: float,
    lse: Tensor | None,
    return_loss: bool,
) -> Tensor:
    """See `openmsa.index_loss.index_loss`."""
    if not return_loss:
        return torch.zeros((), dtype=torch.float32, device=q.device)
    return loss_and_gradients(
        q, k, index_q, index_k, blocks, seqs, block_size, softmax_scale, index_scale, coefficient, lse,
        return_loss=True, gradients=False,
    )[0]  # fmt: skip


def loss_and_gradients(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    blocks: Tensor | None,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    index_scale: float,
    coefficient: float,
    lse: Tensor | None,
    return_loss: bool,
    *,
    gradients: bool = True,
    workspace_bytes: int = WORKSPACE_BYTES,
    config: LossConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss, and the gradients of the sum of all divergences by index_q and index_k, all float32; zeros where
    `gradients` is False, and 0 where `return_loss` is.

    workspace_bytes:  bound on what blocks leave for queries and on the lists, held for a chunk of queries at a time. It changes
                      the order of sums over queries.
    config:           tile shapes; None: those of `loss_config`.
    """
    total_q, heads, index_dim = index_q.shape
    dq, dk = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (index_q, index_k))
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    if not index_q.numel() or not index_k.numel():
        return total.float(), dq, dk
    if blocks is None:
        block_size = BLOCK
        every = torch.arange(seqs.num_blocks(block_size), dtype=torch.int32, device=q.device)
        blocks = every.expand(total_q, 1, -1)
    widest = max(q.element_size(), index_q.element_size())
    if config is None:
        config = loss_config(max(q.shape[2], index_dim), k.shape[1] // heads, block_size, widest, facts(q.device))
    shape = _shape(config, q, k, index_q, index_k, blocks, block_size)
    lists, topk = blocks.shape[1:]
    left = index_q.element_size() * index_dim * gradients + 4 * (1 + (shape.heads if lse is None else 0))
    query_bytes = topk * (heads * shape.cuts * left + 32 * lists)
    chunk = ceil_div(total_q, ceil_div(total_q, max(1, workspace_bytes // query_bytes)))
    for start in range(0, total_q, chunk):
        rows = slice(start, min(start + chunk, total_q))
        here = seqs if chunk == total_q else seqs.query_chunk(rows.start, rows.stop)
        part = _Chunk(config, shape, q[rows], index_q[rows], k, index_k, blocks[rows], here, (softmax_scale, index_scale))
        total += part.run(None if lse is None else lse[rows], return_loss, gradients, dq[rows], dk)
    return (total * (math.log(2) * share(index_q, coefficient))).float(), dq, dk


def _shape(
    config: LossConfig, q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, blocks: Tensor, block_size: int
) -> Shape:
    heads = index_q.shape[1]
    return Shape(
        heads=q.shape[1] // heads,
        kv=k.shape[1] // heads,
        lists=blocks.shape[1],
        shared=heads // index_k.shape[1],
        block=block_size,
        keys=config.keys,
        cuts=ceil_div(block_size, config.keys),
        rows=config.rows,
        dim=q.shape[2],
        dim_pad=max(16, next_power_of_two(q.shape[2])),
        index_dim=index_q.shape[2],
        index_pad=max(16, next_power_of_two(index_q.shape[2])),
        gain=4096.0 if index_q.dtype == torch.float16 else 1.0,
        precision="ieee" if torch.float32 in (q.dtype, index_q.dtype) else "tf32",
    )


class _Chunk:
    """Holds a chunk of queries with its lists, and launches the kernels for it."""

    def __init__(
        self,
        config: LossConfig,
        shape: Shape,
        q: Tensor,
        index_q: Tensor,
        k: Tensor,
        index_k: Tensor,
        blocks: Tensor,
        seqs: Layout,
        scales: tuple[float, float],
    ) -> None:
        self.config, self.shape, self.scales = config, shape, scales
        self.q, self.index_q, self.k, self.index_k = q, index_q, k, index_k
        self.topk, self.per_list = blocks.shape[2], index_q.shape[1] // blocks.shape[1]
        self.item = max(config.item, ceil_div(blocks.numel() * self.per_list, PROGRAMS))
        self.lists: Readers = listed(blocks, seqs, k.shape[0], shape.block, self.item)
        self.buckets = buckets_of(k.shape[0], seqs.batch, shape.block)
        self.bounds = Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset)

    def run(self, lse: Tensor | None, return_loss: bool, gradients: bool, dq: Tensor, dk: Tensor) -> Tensor:
        """Returns the sum of divergences in bits, writes dq of the chunk and adds to dk."""
        shape, (softmax_scale, index_scale) = self.shape, self.scales
        own = self.lse(self.index_q, self.index_k, index_scale, shape.shared)
        main = self.lse(self.q, self.k, softmax_scale, shape.heads // shape.kv) if lse is None else lse
        items, heads = self.lists.lists.numel(), self.index_q.shape[1]
        device = dq.device
        narrow = torch.float32 if self.index_q.dtype == torch.float16 else self.index_q.dtype
        slots = (dq.shape[0], heads, self.topk, shape.cuts, shape.index_dim) if gradients else (0,)
        shares = (items, self.per_list, shape.cuts, shape.keys, shape.index_dim) if gradients else (0,)
        left = Left(
            torch.zeros((items, self.per_list, shape.cuts), dtype=torch.float32, device=device),
            torch.empty(slots, dtype=narrow, device=device),
            torch.empty(shares, dtype=torch.float32, device=device),
        )
        launch_kernel(
            loss_items,
            (items, self.per_list, shape.cuts),
            Branch.of(self.q, self.k, main),
            Branch.of(self.index_q, self.index_k, own),
            self.bounds,
            self.lists,
            left,
            softmax_scale,
            index_scale,
            self.topk,
            self.buckets,
            self.item,
            SHAPE=shape,
            LOSS=return_loss,
            GRADIENTS=gradients,
            STAGES=self.config.stages,
            num_warps=self.config.warps,
        )
        if gradients:
            self.add_up(left, dq, dk)
        return left.losses.sum(dtype=torch.float64)

    def lse(self, queries: Tensor, keys: Tensor, scale: float, group: int) -> Tensor:
        """Returns the natural logarithm of the sums of exponentials of queries, float32 ``[queries, heads]``. group: query
        heads of a key head."""
        shape, (total_q, heads, dim) = self.shape, queries.shape
        per_list = heads // shape.lists
        parts = torch.full((total_q, heads, self.topk * shape.cuts), -torch.inf, dtype=torch.float32, device=queries.device)
        launch_kernel(
            lse_parts,
            (self.lists.lists.numel(), per_list, shape.cuts),
            query_rows(queries, True),
            key_rows(keys),
            self.bounds,
            self.lists,
            parts,
            scale,
            heads,
            group,
            per_list,
            self.topk,
            self.buckets,
            self.item,
            SHAPE=shape,
            DIM=dim,
            DIM_PAD=max(16, next_power_of_two(dim)),
            STAGES=self.config.stages,
            num_warps=self.config.warps,
        )
        return parts.logsumexp(2)

    def add_up(self, left: Left, dq: Tensor, dk: Tensor) -> None:
        """Launches the sums over slots and over items."""
        shape, heads, factor = self.shape, self.index_q.shape[1], self.scales[1] / self.shape.gain
        launch_kernel(
            add_index_slots,
            (ceil_div(dq.shape[0], SUM_TOKENS), heads),
            left.slots,
            self.lists.reads,
            dq,
            factor,
            dq.shape[0],
            heads,
            self.topk,
            SHAPE=shape,
            TOKENS=SUM_TOKENS,
            num_warps=4,
        )
        launch_kernel(
            add_index_items,
            (self.buckets, dk.shape[1], shape.cuts),
            left.shares,
            self.lists,
            self.bounds.cu_k,
            dk,
            factor,
            dk.shape[1],
            self.per_list,
            self.buckets,
            SHAPE=shape,
            num_warps=8,
        )


class Item(NamedTuple):
    """Holds, inside a kernel, the first and the end of an item's entries, its sequence's first packed key and number of keys,
    the first key of its block in the sequence, and what is added to a query's number to give its position."""

    begin: tl.tensor
    end: tl.tensor
    k_begin: tl.tensor
    k_len: tl.tensor
    block_begin: tl.tensor
    position: tl.tensor


@triton.jit
def item_of(lists, bounds, i_list, num_buckets, item, BLOCK: tl.constexpr):
    """Loads the `Item` of this program, of a list."""
    i_item = tl.program_id(0) - tl.load(lists.item_starts + i_list)  # in its list
    begin = tl.load(lists.starts + i_list) + i_item * item
    end = tl.minimum(tl.load(lists.starts + i_list + 1), begin + item)
    bucket = i_list % num_buckets
    i_b = tl.load(lists.sequences + bucket)
    k_begin = tl.load(bounds.cu_k + i_b)
    k_len = tl.load(bounds.cu_k + i_b + 1) - k_begin
    q_begin, q_end = tl.load(bounds.cu_q + i_b), tl.load(bounds.cu_q + i_b + 1)
    position = k_len - q_end if bounds.q_offset is None else tl.load(bounds.q_offset + i_b) - q_begin
    return Item(begin, end, k_begin, k_len, (bucket - k_begin // BLOCK - i_b) * BLOCK, position)


@triton.jit
def key_tile(keys, i_h, row, m, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Loads rows of keys of a head, [keys, DIM_PAD]; m: those that exist."""
    o_d = tl.arange(0, DIM_PAD)
    p = keys.data + i_h.to(tl.int64) * keys.s_head + row.to(tl.int64)[:, None] * keys.s_row + o_d[None, :] * keys.s_dim
    return tl.load(p, mask=m[:, None] & (o_d < DIM)[None, :], other=0.0)


@triton.jit
def query_tile(queries, token, i_h, m, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Loads rows of queries of a head, [rows, DIM_PAD]; m: those that exist."""
    o_d = tl.arange(0, DIM_PAD)
    p = queries.data + (token * queries.s_token + i_h.to(tl.int64) * queries.s_head)[:, None] + o_d[None, :] * queries.s_dim
    return tl.load(p, mask=m[:, None] & (o_d < DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["topk", "num_buckets", "item"])
def lse_parts(
    queries,  # QueryRows
    keys,  # KeyRows
    bounds,  # Bounds
    lists,  # Readers
    parts,  # float32 [queries, heads, topk * cuts], written where a slot is read
    scale,
    num_heads,
    group,
    per_list,
    topk,
    num_buckets,
    item,
    SHAPE: tl.constexpr,  # Shape
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes the logarithm of the sum of exponentials of each (query, slot) of an item. A program serves an item, a head of
    those with this list, and a cut of the block."""
    KEYS: tl.constexpr = SHAPE.keys
    CUTS: tl.constexpr = SHAPE.cuts
    ROWS: tl.constexpr = SHAPE.rows
    i_list = tl.load(lists.lists + tl.program_id(0))
    if i_list >= SHAPE.lists * num_buckets:
        return
    i_h = i_list // num_buckets * per_list + tl.program_id(1)
    i_cut = tl.program_id(2)
    at = item_of(lists, bounds, i_list, num_buckets, item, SHAPE.block)
    o_key = i_cut * KEYS + tl.arange(0, KEYS)
    key = at.block_begin + o_key
    m_key = (o_key < SHAPE.block) & (key < at.k_len)
    b_k = key_tile(keys, i_h // group, at.k_begin + key, m_key, DIM, DIM_PAD)
    key = tl.where(m_key, key, 2147483647)
    for i in tl.range(at.begin, at.end, ROWS, num_stages=STAGES):
        o_e = i + tl.arange(0, ROWS)
        m_r = o_e < at.end
        entry = tl.load(lists.entries + o_e, mask=m_r, other=0)
        token = (entry // topk).to(tl.int64)
        b_q = query_tile(queries, token, i_h, m_r, DIM, DIM_PAD)
        last_key = tl.minimum(at.position + entry // topk, at.k_len - 1)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.precision) * (scale * 1.4426950408889634)  # [ROWS, KEYS]
        b_s = tl.where(key[None, :] <= last_key[:, None], b_s, -float("inf"))
        b_m = tl.maximum(tl.max(b_s, 1), -1e30)
        b_lse = (b_m + tl.log2(tl.sum(tl.exp2(b_s - b_m[:, None]), 1))) * 0.6931471805599453
        p_part = parts + ((token * num_heads + i_h) * topk + entry % topk) * CUTS + i_cut
        tl.store(p_part, b_lse, mask=m_r)


@triton.jit(do_not_specialize=["topk", "num_buckets", "item"])
def loss_items(
    main,  # Branch
    index,  # Branch
    bounds,  # Bounds
    lists,  # Readers
    left,  # Left, written
    softmax_scale,
    index_scale,
    topk,
    num_buckets,
    item,
    SHAPE: tl.constexpr,  # Shape
    LOSS: tl.constexpr,
    GRADIENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Makes the loss and the gradients of an item. A program serves an item, an index head of those with this list, and a cut
    of the block."""
    # 1. The program finds its item and loads its keys.
    HEADS: tl.constexpr = SHAPE.heads
    GROUP: tl.constexpr = SHAPE.heads // SHAPE.kv
    KEYS: tl.constexpr = SHAPE.keys
    CUTS: tl.constexpr = SHAPE.cuts
    ROWS: tl.constexpr = SHAPE.rows
    DIM: tl.constexpr = SHAPE.dim
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    INDEX_DIM: tl.constexpr = SHAPE.index_dim
    INDEX_PAD: tl.constexpr = SHAPE.index_pad
    PRECISION: tl.constexpr = SHAPE.precision
    i_list = tl.load(lists.lists + tl.program_id(0))
    if i_list >= SHAPE.lists * num_buckets:
        return
    i_h = i_list // num_buckets + tl.program_id(1)
    i_cut = tl.program_id(2)
    at = item_of(lists, bounds, i_list, num_buckets, item, SHAPE.block)
    o_key = i_cut * KEYS + tl.arange(0, KEYS)
    key = at.block_begin + o_key
    m_key = (o_key < SHAPE.block) & (key < at.k_len)
    row = at.k_begin + key
    key = tl.where(m_key, key, 2147483647)
    b_ik = key_tile(index.keys, i_h // SHAPE.shared, row, m_key, INDEX_DIM, INDEX_PAD)
    if SHAPE.kv == 1:
        b_k = key_tile(main.keys, i_h, row, m_key, DIM, DIM_PAD)

    # 2. It walks its readers, ROWS queries at a time.
    b_dk = tl.zeros([KEYS, INDEX_PAD], tl.float32)
    b_loss = tl.zeros([KEYS], tl.float32)
    scale, own_scale = softmax_scale * 1.4426950408889634, index_scale * 1.4426950408889634
    o_d = tl.arange(0, INDEX_PAD)
    for i in range(at.begin, at.end, ROWS):
        o_e = i + tl.arange(0, ROWS)
        m_r = o_e < at.end
        entry = tl.load(lists.entries + o_e, mask=m_r, other=0)
        token = (entry // topk).to(tl.int64)
        last_key = tl.minimum(at.position + entry // topk, at.k_len - 1)
        m_seen = (key[:, None] <= last_key[None, :]) & m_r[None, :]

        # 2a. The teacher is the mean of the weights of the query heads.
        b_p = tl.zeros([KEYS, ROWS], tl.float32)
        for i_of in tl.range(0, HEADS, num_stages=STAGES):
            head = i_h * HEADS + i_of
            if SHAPE.kv > 1:
                b_k = key_tile(main.keys, head // GROUP, row, m_key, DIM, DIM_PAD)
            b_q = query_tile(main.queries, token, head, m_r, DIM, DIM_PAD)
            p_lse = main.lse.data + token * main.lse.s_token + head * main.lse.s_head
            b_lse = tl.load(p_lse, mask=m_r, other=0.0) * 1.4426950408889634
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            b_p += tl.exp2(b_s * scale - b_lse[None, :])
        b_p = tl.where(m_seen, b_p * (1.0 / HEADS), 0.0)

        # 2b. The student and the divergence.
        b_iq = query_tile(index.queries, token, i_h, m_r, INDEX_DIM, INDEX_PAD)
        p_lse = index.lse.data + token * index.lse.s_token + i_h * index.lse.s_head
        b_lse = tl.load(p_lse, mask=m_r, other=0.0) * 1.4426950408889634
        b_s = tl.dot(b_ik, tl.trans(b_iq), input_precision=PRECISION) * own_scale - b_lse[None, :]
        if LOSS:
            b_loss += tl.sum(tl.where(b_p > 0, b_p * (tl.log2(b_p) - b_s), 0.0), 1)

        # 2c. The gradients.
        if GRADIENTS:
            b_ds = (tl.where(m_seen, tl.exp2(b_s), 0.0) - b_p) * SHAPE.gain  # [KEYS, ROWS]
            b_ds = b_ds.to(b_iq.dtype)
            b_dk = tl.dot(b_ds, b_iq, b_dk, input_precision=PRECISION)
            b_dq = tl.dot(tl.trans(b_ds), b_ik, input_precision=PRECISION)  # [ROWS, INDEX_PAD]
            num_heads = SHAPE.lists * tl.num_programs(1)
            o_s = ((token * num_heads + i_h) * topk + entry % topk) * CUTS + i_cut
            p_s = left.slots + o_s[:, None] * INDEX_DIM + o_d[None, :]
            tl.store(p_s, b_dq.to(left.slots.dtype.element_ty), mask=m_r[:, None] & (o_d < INDEX_DIM)[None, :])

    # 3. It leaves its sums.
    i_left = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * CUTS + i_cut
    if LOSS:
        tl.store(left.losses + i_left, tl.sum(b_loss, 0))
    if GRADIENTS:
        p_share = left.shares + (i_left * KEYS + tl.arange(0, KEYS))[:, None] * INDEX_DIM + o_d[None, :]
        tl.store(p_share, b_dk, mask=(o_d < INDEX_DIM)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "topk"])
def add_index_slots(slots, reads, dq, factor, num_tokens, num_heads, topk, SHAPE: tl.constexpr, TOKENS: tl.constexpr):
    """Adds up what the blocks of TOKENS queries and an index head add to d index_q, in the order of slots, and scales it.

    slots, factor: see `Left`. reads: of `Readers`. dq: float32, contiguous, written.
    """
    INDEX_DIM: tl.constexpr = SHAPE.index_dim
    INDEX_PAD: tl.constexpr = SHAPE.index_pad
    CUTS: tl.constexpr = SHAPE.cuts
    i_h = tl.program_id(1)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    o_d = tl.arange(0, INDEX_PAD)
    m_d = (o_d < INDEX_DIM)[None, :]
    m_r = token < num_tokens
    o_row = token * num_heads + i_h
    p_reads = reads + (token * SHAPE.lists + tl.minimum(i_h, SHAPE.lists - 1)) * topk
    b_sum = tl.zeros([TOKENS, INDEX_PAD], tl.float32)
    for i in tl.range(0, topk * CUTS, num_stages=4):
        m = m_r & (tl.load(p_reads + i // CUTS, mask=m_r, other=0) != 0)
        p_slot = slots + (o_row * (topk * CUTS) + i)[:, None] * INDEX_DIM + o_d[None, :]
        b_sum += tl.load(p_slot, mask=m[:, None] & m_d, other=0.0).to(tl.float32)
    tl.store(dq + o_row[:, None] * INDEX_DIM + o_d[None, :], b_sum * factor, mask=m_r[:, None] & m_d)


@triton.jit(do_not_specialize=["per_list", "num_buckets"])
def add_index_items(shares, lists, cu_k, dk, factor, num_key_heads, per_list, num_buckets, SHAPE: tl.constexpr):
    """Adds the items of a block and of the index heads of an index key head to d index_k, in order. A program serves a bucket,
    an index key head and a cut of the block.

    shares, factor: see `Left`. lists: Readers. dk: float32, contiguous, read and written.
    """
    KEYS: tl.constexpr = SHAPE.keys
    CUTS: tl.constexpr = SHAPE.cuts
    INDEX_DIM: tl.constexpr = SHAPE.index_dim
    INDEX_PAD: tl.constexpr = SHAPE.index_pad
    bucket, i_key_head, i_cut = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b = tl.load(lists.sequences + bucket)
    k_begin = tl.load(cu_k + i_b)
    o_n, o_d = tl.arange(0, KEYS), tl.arange(0, INDEX_PAD)
    o_key = i_cut * KEYS + o_n
    key = (bucket - k_begin // SHAPE.block - i_b) * SHAPE.block + o_key
    m_key = (o_key < SHAPE.block) & (key < tl.load(cu_k + i_b + 1) - k_begin)
    m = m_key[:, None] & (o_d < INDEX_DIM)[None, :]
    b_sum = tl.zeros([KEYS, INDEX_PAD], tl.float32)
    for i_of in range(SHAPE.shared):
        i_h = i_key_head * SHAPE.shared + i_of
        i_list = bucket if SHAPE.lists == 1 else i_h * num_buckets + bucket
        i_shared = i_h if SHAPE.lists == 1 else 0
        for i in range(tl.load(lists.item_starts + i_list), tl.load(lists.item_starts + i_list + 1)):
            i_left = (per_list.to(tl.int64) * i + i_shared) * CUTS + i_cut
            b_sum += tl.load(shares + (i_left * KEYS + o_n)[:, None] * INDEX_DIM + o_d[None, :], mask=m, other=0.0)
    p_dk = dk + ((k_begin + key).to(tl.int64) * num_key_heads + i_key_head)[:, None] * INDEX_DIM + o_d[None, :]
    tl.store(p_dk, tl.load(p_dk, mask=m, other=0.0) + b_sum * factor, mask=m)
