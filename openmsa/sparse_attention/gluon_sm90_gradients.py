# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This Gluon kernel computes the gradients of `sparse_attention` by key blocks on Hopper, in place of `block_gradients` of
`triton_backward.py`, for heads of 128 numbers in blocks of 128 keys.

A program holds a block's keys and values in shared memory, walks readers of the block, and has three groups of warps:

    load         one warp brings the queries and gradients of the next 64 (query, head) rows, and what belongs to each row
    multiply 0   four warps hold the sums of dk and dv of the first 64 keys
    multiply 1   four warps hold those of the other 64 keys

A step makes five products. Each group makes logits, weights' gradients, dv and dk of its own keys. The gradients of logits of
both groups meet in shared memory, from which one group makes the first half of dq's columns, the other the second. A group
starts each product before it needs what its threads compute meanwhile, and the product for dk before it waits for the other's
gradients of logits:

    unit      q k      g v       dv        dk       dq                                q k of the next step ...
    threads            weights   slopes    wait               dq is rounded and written

Nothing is added atomically, and every sum has one order: results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmsa.primitives.gluon_sm90_attention import ROWS, descriptor, exchanged, following, give_back, rounded
from openmsa.primitives.gradients import RowTerms
from openmsa.primitives.operands import Bounds
from openmsa.primitives.readers import Readers
from openmsa.primitives.rows import key_rows
from openmsa.runtime.launch import launch_kernel
from openmsa.sparse_attention import triton_lists

position_of_token_zero = gluon.jit(triton_lists.position_of_token_zero.fn)  # Gluon compiles the source of the Triton function.

BLOCK = gl.constexpr(128)
"""A block has so many keys."""
DIM = gl.constexpr(128)
"""A head has so many elements."""
HALF = gl.constexpr(64)
"""Each group has so many keys of the block and so many columns of dq; tiles in shared memory are so wide."""
GROUPS = (8, 16, 32, 64)
"""It serves groups of so many query heads to a key head."""
NO_ENTRY = gl.constexpr(2147483647)
"""It is greater than every entry of a list."""
OPTIONS: dict[str, Any] = {"STAGES": 3, "MULTIPLY_REGISTERS": 240, "LOAD_REGISTERS": 24, "num_warps": 4}
"""The ring has STAGES places."""


class Cut(NamedTuple):
    """Says how work is cut; it is a constant of the kernel.

    group:  query heads of a key head.
    lists:  heads of the selection: as many as key heads, or 1.
    topk:   slots of a query.
    item:   readers of an item.
    """

    group: int
    lists: int
    topk: int
    item: int


class Ring(NamedTuple):
    """Holds rows in shared memory, STAGES places of ROWS rows each. Barriers of each place say that it is filled, and that both
    groups have read it.

    q, g:       queries and gradients of the output, in boxes [group, HALF] as the copy engine writes them.
    lse, delta: float32, the terms of each row; lse is +inf behind the last row.
    last:       int32, the last key of the block that the row sees.
    slot:       int32, the row of `Sums.slots` that belongs to it, -1 behind the last row.
    """

    q: Any
    g: Any
    lse: Any
    delta: Any
    last: Any
    slot: Any
    full: Any
    free: Any


class Tiles(NamedTuple):
    """Holds tiles [HALF, HALF] in shared memory.

    k, v:   keys and values: the first half of the keys, its first and its second half of columns; then the other keys.
    ds:     gradients of logits, [keys, rows], of the first and of the other keys, for two steps in turn.
    ready:  barriers of these steps, which say that both halves are written.
    """

    k: Any
    v: Any
    ds: Any
    ready: Any


class Item(NamedTuple):
    """Says what a program does: entries from `begin` to `end` of the list of a block, for key head i_h. Token t sees keys up to
    `position` + t, counted from the first key of the block, and up to key `most`. i_sum: the item's number among those that
    leave extra sums, -1 where it is the first one of its block. row: the block's first key, as keys are packed."""

    begin: Any
    end: Any
    i_h: Any
    position: Any
    most: Any
    i_sum: Any
    row: Any


@gluon.jit
def item_of(bounds, lists, offsets, num_buckets, most_extra, CUT: gl.constexpr):
    """Finds the item of this program; where there is none, its end is its beginning."""
    i_list = gl.load(lists.lists + gl.program_id(0))
    there = i_list < CUT.lists * num_buckets
    i_list = gl.minimum(i_list, CUT.lists * num_buckets - 1)
    i_item = gl.program_id(0) - gl.load(lists.item_starts + i_list)  # in its list
    begin = gl.load(lists.starts + i_list) + i_item * CUT.item
    end = gl.where(there, gl.minimum(gl.load(lists.starts + i_list + 1), begin + CUT.item), begin)
    bucket = i_list % num_buckets
    i_b = gl.maximum(gl.load(lists.sequences + bucket), 0)
    k_begin = gl.load(bounds.cu_k + i_b)
    k_len = gl.load(bounds.cu_k + i_b + 1) - k_begin
    q_begin, q_end = gl.load(bounds.cu_q + i_b), gl.load(bounds.cu_q + i_b + 1)
    first_key = (bucket - k_begin // BLOCK - i_b) * BLOCK
    position = position_of_token_zero(bounds.q_offset, i_b, q_begin, q_end, k_len) - first_key
    i_sum = gl.where(i_item == 0, -1, gl.program_id(1) * most_extra + gl.load(offsets + i_list) + i_item - 1)
    return Item(
        begin, end, i_list // num_buckets + gl.program_id(1), position, k_len - 1 - first_key, i_sum, k_begin + first_key
    )


@gluon.jit
def fill(tiles, x, item):
    """Copies the block's keys or values to tiles; past the keys of the sequence they are 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_n = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    p_x = x.data + item.i_h.to(gl.int64) * x.s_head + (item.row + o_n).to(gl.int64)[:, None] * x.s_row + o_d[None, :] * x.s_dim
    for half in gl.static_range(2):
        m_n = (half * HALF + o_n <= item.most)[:, None]
        for part in gl.static_range(2):
            b_x = gl.load(p_x + half * HALF * x.s_row + part * HALF * x.s_dim, mask=m_n, other=0.0)
            tiles.index(half * 2 + part).store(b_x)


@gluon.jit
def load(ring, tma_q, tma_g, terms, entries, item, num_kv_heads, CUT: gl.constexpr, STAGES: gl.constexpr):
    """Does the loading warp's share of a program."""
    GROUP: gl.constexpr = CUT.group
    TOPK: gl.constexpr = CUT.topk
    TOKENS: gl.constexpr = ROWS // GROUP
    BYTES: gl.constexpr = 4 * TOKENS * tma_q.block_type.nbytes
    o_r = gl.arange(0, ROWS, gl.BlockedLayout([2], [32], [1], [0]))
    s, phase = 0, 0
    for i in range(item.begin, item.end, TOKENS):
        o_e = i + o_r // GROUP
        m_r = o_e < item.end
        entry = gl.load(entries + gl.minimum(o_e, item.end - 1))  # Rows past the end repeat the last one.
        token = entry // TOPK
        o_t = (token * num_kv_heads + item.i_h) * GROUP + o_r % GROUP
        b_lse = gl.where(m_r, gl.load(terms.lse + o_t), float("inf"))
        b_delta = gl.load(terms.delta + o_t)
        b_slot = ((token * (num_kv_heads - 1) + item.i_h) * TOPK + entry) * GROUP + o_r % GROUP
        mbarrier.wait(ring.free.index(s), phase ^ 1)
        ring.lse.index(s).store(b_lse)
        ring.delta.index(s).store(b_delta)
        ring.last.index(s).store(gl.minimum(item.position + token, item.most))
        ring.slot.index(s).store(gl.where(m_r, b_slot, -1))
        gl.thread_barrier()  # All lanes have written before one says so.
        mbarrier.expect(ring.full.index(s), BYTES)
        for t in gl.static_range(TOKENS):
            one = gl.load(entries + gl.minimum(i + t, item.end - 1)) // TOPK
            for half in gl.static_range(2):
                box = (s * 2 + half) * TOKENS + t
                place = [0, one, item.i_h * GROUP, half * HALF]
                tma.async_copy_global_to_shared(tma_q, place, ring.full.index(s), ring.q.index(box))
                tma.async_copy_global_to_shared(tma_g, place, ring.full.index(s), ring.g.index(box))
        s, phase = following(s, phase, STAGES)


@gluon.jit
def leave(slots, b_dq, slot, softmax_scale, SIDE: gl.constexpr, NUMBER: gl.constexpr):
    """Writes what a step adds to half of the columns of dq. slot: the rows' places, -1 where there is none."""
    words = rounded(b_dq * softmax_scale, NUMBER)
    o_w = SIDE * (HALF // 2) + gl.arange(0, HALF // 2, gl.SliceLayout(0, words.type.layout))
    p_dq = slots.to(gl.pointer_type(gl.int32), bitcast=True) + slot.to(gl.int64)[:, None] * (DIM // 2) + o_w[None, :]
    gl.store(p_dq, words, mask=(slot >= 0)[:, None])


@gluon.jit
def add_sum(sums, extra, b_x, item, key, o_d, num_kv_heads):
    """Adds to the sums of the block, where the item is its first, or leaves an extra sum."""
    if item.i_sum < 0:
        o_sum = ((item.row + key).to(gl.int64) * num_kv_heads + item.i_h)[:, None] * DIM + o_d[None, :]
        m_key = (key <= item.most)[:, None]
        gl.store(sums + o_sum, gl.load(sums + o_sum, mask=m_key, other=0.0) + b_x, mask=m_key)
    else:
        gl.store(extra + (item.i_sum.to(gl.int64) * 2 * BLOCK + key)[:, None] * DIM + o_d[None, :], b_x)


@gluon.jit
def multiply(
    ring, tiles, sums, entries, item, softmax_scale, num_kv_heads,
    SIDE: gl.constexpr, CUT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Does a group's share of a program: the first (SIDE 0) or the second half of the block's keys and of dq's columns."""
    # 1. The group names its tiles.
    NUMBER: gl.constexpr = ring.q.dtype
    TOKENS: gl.constexpr = ROWS // CUT.group
    TOPK: gl.constexpr = CUT.topk
    OTHER: gl.constexpr = 1 - SIDE
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    MEMORY_ROW: gl.constexpr = gl.SliceLayout(1, exchanged(HALF // 2, True, True))
    OF_ROW: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, DIM], NUMBER)
    q_rows = ring.q._reinterpret(NUMBER, [STAGES, ROWS, DIM], WIDE)
    g_rows = ring.g._reinterpret(NUMBER, [STAGES, ROWS, DIM], WIDE)
    own_k = tiles.k._reinterpret(NUMBER, [2, HALF, DIM], WIDE).index(SIDE)
    own_v = tiles.v._reinterpret(NUMBER, [2, HALF, DIM], WIDE).index(SIDE)
    scale = softmax_scale * 1.4426950408889634
    key = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(1, PRODUCT))
    zero = gl.zeros([HALF, HALF], gl.float32, PRODUCT)
    b_dk = gl.zeros([HALF, DIM], gl.float32, SUM)
    b_dv = gl.zeros([HALF, DIM], gl.float32, SUM)
    s, phase, turn = 0, 0, 0

    if item.begin < item.end:
        # 2. It walks the rows, ROWS at a time.
        first = gl.load(entries + item.begin)
        hidden_from = gl.minimum(gl.maximum(BLOCK - 1 - item.position, 0), NO_ENTRY // TOPK) * TOPK
        hidden_from = gl.where(item.most < BLOCK - 1, NO_ENTRY, hidden_from)  # Entries below it do not see the whole block.
        for i in range(item.begin, item.end, TOKENS):
            mbarrier.wait(ring.full.index(s), phase)
            b_q, b_g = q_rows.index(s), g_rows.index(s)
            b_s = warpgroup_mma(own_k, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
            b_dp = warpgroup_mma(own_v, b_g.permute((1, 0)), zero, use_acc=False, is_async=True)
            some_hidden = first < hidden_from  # The first row sees least.
            first = gl.load(entries + gl.minimum(i + TOKENS, item.end - 1))
            b_s = warpgroup_mma_wait(1, deps=(b_s,))
            b_lse = ring.lse.index(s).load(OF_ROW)
            b_p = gl.exp2(b_s * scale - b_lse[None, :])
            if some_hidden:
                b_p = gl.where(key[:, None] <= ring.last.index(s).load(OF_ROW)[None, :], b_p, 0.0)
            p_factor = gl.convert_layout(b_p.to(NUMBER), FACTOR, assert_trivial=True)
            b_dv = warpgroup_mma(p_factor, b_g, b_dv, is_async=True)
            b_dp = warpgroup_mma_wait(1, deps=(b_dp,))
            b_delta = ring.delta.index(s).load(OF_ROW)
            b_ds = (b_p * (b_dp - b_delta[None, :])).to(NUMBER)
            ours, theirs = tiles.ds.index((turn & 1) * 2 + SIDE), tiles.ds.index((turn & 1) * 2 + OTHER)
            ours.store(b_ds)
            fence_async_shared()
            give_back(tiles.ready, turn & 1)
            ds_factor = gl.convert_layout(b_ds, FACTOR, assert_trivial=True)
            b_dk = warpgroup_mma(ds_factor, b_q, b_dk, is_async=True)
            b_dq = warpgroup_mma(ours.permute((1, 0)), tiles.k.index(SIDE * 3), zero, use_acc=False, is_async=True)
            mbarrier.wait(tiles.ready.index(turn & 1), turn >> 1)
            b_dq = warpgroup_mma(theirs.permute((1, 0)), tiles.k.index(OTHER * 2 + SIDE), b_dq, is_async=True)
            slot = ring.slot.index(s).load(MEMORY_ROW)
            b_dv, p_factor, b_dk, ds_factor = warpgroup_mma_wait(2, deps=(b_dv, p_factor, b_dk, ds_factor))
            give_back(ring.free, s)
            b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
            leave(sums.slots, b_dq, slot, softmax_scale, SIDE, NUMBER)
            s, phase = following(s, phase, STAGES)
            turn = (turn + 1) & 3

        # 3. The first item of a block adds to the sums of the block, the others leave theirs.
        o_key = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SUM))
        o_d = gl.arange(0, DIM, gl.SliceLayout(0, SUM))
        add_sum(sums.dk, sums.extra, b_dk * softmax_scale, item, o_key, o_d, num_kv_heads)
        add_sum(sums.dv, sums.extra + BLOCK * DIM, b_dv, item, o_key, o_d, num_kv_heads)


@gluon.jit(do_not_specialize=["num_buckets", "most_extra"])
def sm90_gradients_kernel(
    tma_q,  # boxes [1, 1, group, HALF] of the queries
    tma_g,  # and of the gradients of the output
    terms,  # RowTerms
    keys,  # KeyRows
    values,
    bounds,  # Bounds
    lists,  # Readers
    sums,  # Sums of `triton_backward.py`, of which slots, dk, dv and extra are written
    softmax_scale,
    num_kv_heads,
    num_buckets,
    most_extra,
    CUT: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """Walks the readers of an item. A program serves an item and a KV head of those with this list."""
    NUMBER: gl.constexpr = tma_q.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HALF], NUMBER)
    BOXES: gl.constexpr = STAGES * 2 * (ROWS // CUT.group)
    q = gl.allocate_shared_memory(NUMBER, [BOXES, 1, 1, CUT.group, HALF], tma_q.layout)
    g = gl.allocate_shared_memory(NUMBER, [BOXES, 1, 1, CUT.group, HALF], tma_g.layout)
    k = gl.allocate_shared_memory(NUMBER, [4, HALF, HALF], TILE)
    v = gl.allocate_shared_memory(NUMBER, [4, HALF, HALF], TILE)
    ds = gl.allocate_shared_memory(NUMBER, [4, HALF, HALF], TILE)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    last = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], LINE)
    slot = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=2)
    item = item_of(bounds, lists, sums.offsets, num_buckets, most_extra, CUT)
    if item.begin < item.end:
        fill(k, keys, item)
        fill(v, values, item)
    fence_async_shared()
    gl.thread_barrier()
    ring, tiles = Ring(q, g, lse, delta, last, slot, full, free), Tiles(k, v, ds, ready)
    SIDE_0: gl.constexpr = 0
    SIDE_1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (multiply, (ring, tiles, sums, lists.entries, item, softmax_scale, num_kv_heads, SIDE_0, CUT, STAGES)),
            (multiply, (ring, tiles, sums, lists.entries, item, softmax_scale, num_kv_heads, SIDE_1, CUT, STAGES)),
            (load, (ring, tma_q, tma_g, terms, lists.entries, item, num_kv_heads, CUT, STAGES)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def why_not(q: Tensor, k: Tensor, blocks: Tensor, block_size: int, keys: int) -> str | None:
    """Says why the kernel does not serve a call on Hopper, a sentence; None where it does. keys: of a program."""
    group = q.shape[1] // k.shape[1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies 16-bit numbers, got {q.dtype}"
    if q.shape[2] != DIM.value or block_size != BLOCK.value:
        return f"it serves head_dim {DIM.value} and blocks of {BLOCK.value} keys, got {q.shape[2]} and {block_size}"
    if keys != BLOCK.value:
        return f"a program of it holds {BLOCK.value} keys, got {keys}"
    if group not in GROUPS:
        return f"it serves groups of {GROUPS} query heads, got {group}"
    if q.shape[0] * q.shape[1] * blocks.shape[2] >= 2**31:
        return f"it numbers rows of slots with int32, got {q.shape[0] * q.shape[1] * blocks.shape[2]} of them"
    return None


def launch_sm90_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    terms: RowTerms,
    lists: Readers,
    bounds: Bounds,
    softmax_scale: float,
    sums: Any,
    cut: Cut,
    **options: Any,
) -> None:
    """Launches it. sums: `Sums` of `triton_backward.py`, a block in one piece. options: those that differ from `OPTIONS`."""
    kv_heads, most_extra = k.shape[1], sums.extra.shape[1]
    launch_kernel(
        sm90_gradients_kernel,
        (lists.lists.numel(), sums.extra.shape[0]),
        *(boxes_of(q, cut.group), boxes_of(grad_out, cut.group), terms, key_rows(k), key_rows(v), bounds, lists, sums),
        softmax_scale,
        kv_heads,
        lists.sequences.numel(),
        most_extra,
        CUT=cut,
        **{**OPTIONS, **options},
    )


def boxes_of(x: Tensor, group: int) -> TensorDescriptor:
    """Describes boxes of a group of heads of rows ``[total_q, heads, DIM]`` to the copy engine, of a copy where it cannot read
    them as they lie."""
    box = [1, 1, group, HALF.value]
    boxes = descriptor(x[None], box)
    if boxes is None:
        boxes = descriptor(x.clone(memory_format=torch.contiguous_format)[None], box)
        assert boxes is not None  # The copy engine can read a fresh copy.
    return boxes
