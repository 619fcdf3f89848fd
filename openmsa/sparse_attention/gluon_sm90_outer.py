# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This Gluon kernel attends to 16-bit keys and values by key blocks on Hopper, in place of `attend_outer` of
`triton_outer_kernels.py`, whose lists it reads and whose partials it writes, for heads of 128 numbers in blocks of 128 keys.

A program stays and takes one item of the lists after another. It has four groups of warps:

    load              one warp brings a block's keys and values, and its readers' queries, ROWS (query, head) rows a step
    attend 0, 1, 2    four warps each attend with every third step, and wait for the loading warp alone

Keys and values have two places in shared memory, so that those of the next item arrive while this one is walked; queries have
STAGES places. A step reads one block alone, so that its softmax needs no running sums. A group that has started the product of
its weights with the values starts the product of its next queries with their keys right behind, and writes the results of this
step meanwhile:

    unit      q k(0)          p(0) v    q k(1)           p(1) v    q k(2)
    threads         softmax(0)          write(0)  softmax(1)       write(1)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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

from openmsa.primitives.gluon_sm90_attention import (
    BLOCK,
    ROWS,
    bring,
    clear_behind,
    descriptor,
    give_back,
    in_threads,
    rounded,
    row_maxima,
    stay,
)
from openmsa.primitives.softmax import Partials
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.launch import launch_kernel, zeros
from openmsa.sparse_attention import triton_lists
from openmsa.sparse_attention.triton_config import Factors, Keys, hopper_outer_serves
from openmsa.sparse_attention.triton_keys import SMALLEST_SCALE
from openmsa.sparse_attention.triton_lists import HOME_BIT, HOME_TOKENS, ITEM_FIELDS, TILE_FIELDS, OuterLists, Plan, PrefillCall

position_of_token_zero = gluon.jit(triton_lists.position_of_token_zero.fn)  # Gluon compiles the source of the Triton function.

DIM = gl.constexpr(128)
"""A head has so many elements."""
HALF = gl.constexpr(64)
"""A box of queries has so many columns."""
MOST_PARTIALS = 1 << 24
"""A chunk has fewer (query, slot, KV head) triples, because their numbers share a word with the last key that is seen."""
GROUPS = gl.constexpr(3)
"""So many groups of warps attend."""
MOST_ITEMS = 1 << 20
"""A chunk has at most so many items, because their numbers share a word with flags."""
OPTIONS: dict[str, Any] = {"STAGES": 6, "ATTEND_REGISTERS": 160, "LOAD_REGISTERS": 32, "num_warps": 4}
"""Queries have STAGES places, a multiple of GROUPS: the parity of a barrier tells apart rounds of one group alone."""
HOME_GROUP, HOME_TOPK = 16, 5
"""The merge attends to home blocks of so many query heads, and of so many slots or more, with which its ring is filled."""


class Operands(NamedTuple):
    """Holds what Hopper's own KV-outer and its merge read. Boxes of queries are [1, 1, group, HALF], those of `rows`, for home
    blocks, [1, HOME_TOKENS, group, DIM], those of keys and values [1, 1, BLOCK, DIM]; the latter two have factors."""

    q: TensorDescriptor
    k: TensorDescriptor
    v: TensorDescriptor
    factors: Factors
    rows: TensorDescriptor | None


class Cut(NamedTuple):
    """Says how work is cut; it is a constant of the kernel.

    group:      query heads of a key head.
    topk:       slots of a query.
    page_size:  keys of a page, 0 where keys are packed.
    scaled:     whether keys have a factor.
    """

    group: int
    topk: int
    page_size: int
    scaled: bool


class Ring(NamedTuple):
    """Holds the queries of steps in shared memory, STAGES places of ROWS rows each. Barriers of each place say that it is
    filled, and that its group has read it.

    q:        queries, in boxes [group, HALF] as the copy engine writes them.
    reads:    int32, for each row the number of its (query, KV head, slot) in the chunk times BLOCK, plus the last key of the
              block that it sees; -1 behind the last row.
    control:  int32, what is to be done (`word_of`); -1 at the end of all work.
    scale:    float32, the scale of the logits; not used where keys have no factor.
    """

    q: Any
    reads: Any
    control: Any
    scale: Any
    full: Any
    free: Any


class Held(NamedTuple):
    """Holds the keys and values of two items in shared memory. Barriers of each place say that both have arrived, and that all
    groups have read them."""

    k: Any
    v: Any
    full: Any
    free: Any


class Item(NamedTuple):
    """Says what belongs to an item: entries from `begin` to `end` of its segment, and a block, which begins at row `at` of
    `page`. Token t sees keys up to `position` + t, counted from the first key of the block, and up to key `most`. count: keys
    of the block that some query of the sequence sees. is_masked: whether some query of the item does not see the whole
    block."""

    begin: Any
    end: Any
    page: Any
    at: Any
    position: Any
    most: Any
    count: Any
    is_masked: Any


@gluon.jit
def word_of(n, count, clears, releases, is_masked):
    """Packs what a step does into a word that is not negative: the number of its item among those of the program, keys of the
    block that exist, whether the rest of the values is to be overwritten by 0 before, whether the group then has done with the
    item, and whether keys are masked."""
    flags = clears.to(gl.int32) * 4 + releases.to(gl.int32) * 2 + is_masked.to(gl.int32)
    return n * 2048 + count * 8 + flags


@gluon.jit
def take(taken):
    """Takes the next item. The first items go to the programs by number."""
    o_l = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    before = gl.atomic_add(taken + o_l, o_l * 0 + 1, mask=o_l == 0, sem="relaxed")
    return gl.sum(gl.where(o_l == 0, before, 0), 0) + gl.num_programs(0)


@gluon.jit
def seek(i, i_h, start, count, p_counts, num_kv_heads):
    """Finds the KV head of item i, at or behind head i_h, whose items are `count` from `start` on. It is num_kv_heads where
    there is no such item."""
    while (i >= start + count) & (i_h < num_kv_heads):
        start += count
        i_h += 1
        count = gl.load(p_counts + gl.minimum(i_h, num_kv_heads - 1))
    return i_h, start, count


@gluon.jit
def place_of(bounds, table, i_b, first_key, num_pages, PAGE_SIZE: gl.constexpr):
    """Finds the block of a sequence that begins with a key: its page and the row there where it begins, the position of the
    sequence's token 0, its keys, and how many keys of the block some query of the sequence sees."""
    k_begin = gl.load(bounds.cu_k + i_b)
    k_len = gl.load(bounds.cu_k + i_b + 1) - k_begin
    q_begin, q_end = gl.load(bounds.cu_q + i_b), gl.load(bounds.cu_q + i_b + 1)
    position = position_of_token_zero(bounds.q_offset, i_b, q_begin, q_end, k_len)
    page, at = i_b * 0, k_begin + first_key
    if PAGE_SIZE > 0:
        page = gl.load(table.ids + i_b.to(gl.int64) * table.s_sequence + (first_key // PAGE_SIZE) * table.s_page)
        page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
        at = first_key % PAGE_SIZE
    return page, at, position, k_len, gl.maximum(gl.minimum(gl.minimum(position + q_end, k_len) - first_key, BLOCK), 0)


@gluon.jit
def item_at(outer, bounds, table, i_list, i_item, there, num_pages, CUT: gl.constexpr):
    """Loads item i_item of those from i_list on. Nothing else is read with its help where it is not there."""
    p_item = outer.items + (i_list + i_item) * ITEM_FIELDS
    begin, end, i_b, marked = gl.load(p_item), gl.load(p_item + 1), gl.load(p_item + 2), gl.load(p_item + 3)
    i_b = gl.where(there, i_b, 0)
    first_key = gl.where(there, gl.where(marked < 0, -1 - marked, marked), 0) * BLOCK
    page, at, position, k_len, count = place_of(bounds, table, i_b, first_key, num_pages, CUT.page_size)
    return Item(begin, end, page, at, position - first_key, k_len - 1 - first_key, count, marked < 0)


@gluon.jit
def load(
    ring, held, tma_q, tma_k, tma_v, factors, bounds, table, tiles, outer, taken, scale, i_chunk, chunk_tiles, chunk_entries,
    item_bound, num_kv_heads, num_pages, CUT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Does the loading warp's share of a program."""
    # 1. It finds its first item. The newest blocks come first: their lists are longest.
    TOKENS: gl.constexpr = ROWS // CUT.group
    TOPK: gl.constexpr = CUT.topk
    BYTES: gl.constexpr = 2 * TOKENS * tma_q.block_type.nbytes
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    o_r = gl.arange(0, ROWS, gl.BlockedLayout([2], [32], [1], [0]))
    i_segment = i_chunk * num_kv_heads
    p_counts = outer.num_items + i_segment
    first_token = gl.load(tiles + i_chunk * chunk_tiles * TILE_FIELDS)
    i = gl.program_id(0)
    i_h, start, count = seek(i, i * 0, i * 0, gl.load(p_counts), p_counts, num_kv_heads)
    there = i_h < num_kv_heads
    i_item = gl.where(there, count - 1 - (i - start), 0)
    i_list = (i_segment + gl.minimum(i_h, num_kv_heads - 1)).to(gl.int64) * item_bound
    item = item_at(outer, bounds, table, i_list, i_item, there, num_pages, CUT)
    t, n = i * 0, i * 0
    while i_h < num_kv_heads:
        # 2. It brings keys and values as soon as the item before the last is done with, and takes its next item.
        begin, end, page, at, position, most, count_keys, is_masked = item
        head = i_h
        entries = outer.entries + (i_segment + head).to(gl.int64) * chunk_entries
        entry = gl.load(entries + gl.minimum(begin + o_r // CUT.group, end - 1))
        if CUT.scaled:
            x_scale = gl.maximum(scale * gl.load(factors.k + head * factors.s_k_head), SMALLEST_SCALE)
        mbarrier.wait(held.free.index(n & 1), n >> 1 & 1 ^ 1)
        bring(tma_k, page, head, at, held.k, held.full, n & 1)
        bring(tma_v, page, head, at, held.v, held.full, n & 1)
        i = take(taken)
        i_h, start, count = seek(i, i_h, start, count, p_counts, num_kv_heads)
        there = i_h < num_kv_heads
        i_item = gl.where(there, count - 1 - (i - start), 0)
        i_list = (i_segment + gl.minimum(i_h, num_kv_heads - 1)).to(gl.int64) * item_bound
        item = item_at(outer, bounds, table, i_list, i_item, there, num_pages, CUT)

        # 3. It brings the queries, step by step. Rows past the end repeat the last one.
        for i_e in range(begin, end, TOKENS):
            ahead = gl.load(entries + gl.minimum(i_e + TOKENS + o_r // CUT.group, end - 1))
            token = entry // TOPK
            b_reads = ((token - first_token) * num_kv_heads + head) * TOPK + (entry - token * TOPK)
            b_reads = b_reads * BLOCK + gl.minimum(gl.minimum(position + token, most), BLOCK - 1)
            b_reads = gl.where(i_e + o_r // CUT.group < end, b_reads, -1)
            clears = (count_keys < BLOCK) & (i_e < begin + GROUPS * TOKENS)
            word = word_of(n, count_keys, clears, i_e + GROUPS * TOKENS >= end, is_masked)
            s = t % STAGES
            mbarrier.wait(ring.free.index(s), t // STAGES & 1 ^ 1)
            ring.reads.index(s).store(b_reads)
            ring.control.index(s).store(gl.full([1], 0, gl.int32, ONE) + word)
            if CUT.scaled:
                ring.scale.index(s).store(gl.full([1], 0.0, gl.float32, ONE) + x_scale)
            gl.thread_barrier()  # All lanes have written before one says so.
            mbarrier.expect(ring.full.index(s), BYTES)
            for i_t in gl.static_range(TOKENS):
                one = gl.load(entries + gl.minimum(i_e + i_t, end - 1)) // TOPK
                for half in gl.static_range(2):
                    place = [0, one, head * CUT.group, half * HALF]
                    box = ring.q.index((s * 2 + half) * TOKENS + i_t)
                    tma.async_copy_global_to_shared(tma_q, place, ring.full.index(s), box)
            t += 1
            entry = ahead
        for _ in range((end - begin + TOKENS - 1) // TOKENS, GROUPS):  # These groups have no step of the item.
            mbarrier.arrive(held.free.index(n & 1), count=1)
        n += 1

    # 4. It tells every group that there is no more.
    for _ in range(GROUPS):
        s = t % STAGES
        mbarrier.wait(ring.free.index(s), t // STAGES & 1 ^ 1)
        ring.control.index(s).store(gl.full([1], -1, gl.int32, ONE))
        gl.thread_barrier()
        mbarrier.arrive(ring.full.index(s), count=1)
        t += 1


@gluon.jit
def number_at(line, s):
    """Loads the only number at a place of the ring."""
    return gl.max(line.index(s).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def approximately(FUNCTION: gl.constexpr, x):
    """Computes a function of float32 numbers by one instruction, which errs by less than 2e-7 of sums of weights (between 1 and
    BLOCK, 0, or NaN) and of exponents that are not positive."""
    return gl.inline_asm_elementwise(FUNCTION, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def leave(partials, b_o, b_lse, b_reads, GROUP: gl.constexpr, NUMBER: gl.constexpr):
    """Writes the results of a step to their partials, past the caches. A tile of 8 rows lies together, and in it 32 numbers of
    each row, in quads, then the next 32 of each: so threads exchange nothing, and a warp writes 512 neighbouring bytes at a
    time."""
    words = rounded(b_o, NUMBER, True)
    row_of = gl.convert_layout(b_reads, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
    o_r = gl.arange(0, ROWS, row_of.type.layout)
    o_w = gl.arange(0, DIM // 2, gl.SliceLayout(0, words.type.layout))
    o_row = (row_of // BLOCK) * GROUP + o_r % GROUP
    m_row = row_of >= 0
    o_first = (o_row - o_r % 8).to(gl.int64) * (DIM // 2) + o_r % 8 * 16
    p_o = partials.rows.to(gl.pointer_type(gl.int32), bitcast=True) + o_first[:, None] + (o_w // 16 * 128 + o_w % 16)[None, :]
    gl.store(p_o, words, mask=m_row[:, None], cache_modifier=".cs")
    gl.store(partials.lse + o_row, gl.convert_layout(b_lse, row_of.type.layout, assert_trivial=True), mask=m_row)


@gluon.jit
def attend(ring, held, partials, scale, SIDE: gl.constexpr, CUT: gl.constexpr, STAGES: gl.constexpr):
    """Does a group's share of a program: every GROUPS-th step, from step SIDE on."""
    NUMBER: gl.constexpr = ring.q.dtype
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUTPUTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUTS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUTS)
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], NUMBER)
    q_rows = ring.q._reinterpret(NUMBER, [STAGES, ROWS, DIM], WIDE)
    no_logits = gl.zeros([ROWS, BLOCK], gl.float32, LOGITS)
    no_outputs = gl.zeros([ROWS, DIM], gl.float32, OUTPUTS)
    o_key = gl.arange(0, BLOCK, gl.SliceLayout(0, LOGITS))

    # 1. The first queries are multiplied with their keys.
    t = gl.to_tensor(SIDE)
    mbarrier.wait(ring.full.index(SIDE), 0)
    control = number_at(ring.control, SIDE)
    if control >= 0:
        n = control >> 11
        mbarrier.wait(held.full.index(n & 1), n >> 1 & 1)
        b_k = held.k.index(n & 1).reshape((BLOCK, DIM))
        b_s = warpgroup_mma(q_rows.index(SIDE), b_k.permute((1, 0)), no_logits, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        b_reads = ring.reads.index(SIDE).load(ROW)
        if CUT.scaled:
            scale = number_at(ring.scale, SIDE)
        give_back(ring.free, SIDE)
        while control >= 0:
            # 2. It takes the softmax over the block.
            n = control >> 11
            if control & 1 != 0:
                b_s = gl.where(o_key[None, :] <= (b_reads & (BLOCK - 1))[:, None], b_s, -float("inf"))
            offset = row_maxima(b_s) * scale
            offset = gl.where(offset == -float("inf"), 0.0, offset)  # All logits of a row may be -inf; then its sum is 0.
            b_p = gl.exp2(b_s * scale - offset[:, None])
            l_i = gl.convert_layout(gl.sum(in_threads(b_p, gl.sum), 1), ROW, assert_trivial=True)
            weights = gl.convert_layout(b_p.to(NUMBER), WEIGHTS, assert_trivial=True)

            # 3. The weights are multiplied with the values, and the next queries with their keys.
            b_v = held.v.index(n & 1).reshape((BLOCK, DIM))
            if control & 4 != 0:
                clear_behind(b_v, (control >> 3) & 255)
            b_o = warpgroup_mma(weights, b_v, no_outputs, use_acc=False, is_async=True)
            t += GROUPS
            s = t % STAGES
            if control & 2 == 0:
                mbarrier.wait(ring.full.index(s), t // STAGES & 1)
            # Registers have no room for the results of both products beside weights.
            b_o, weights = warpgroup_mma_wait(0, deps=(b_o, weights))
            if control & 2 != 0:  # The group's next queries may come only behind an item that takes the place of this one.
                give_back(held.free, n & 1)
                mbarrier.wait(ring.full.index(s), t // STAGES & 1)
            following = number_at(ring.control, s)
            n_k = gl.where(following >= 0, following >> 11, 0)
            if n_k > n:
                mbarrier.wait(held.full.index(n_k & 1), n_k >> 1 & 1)
            b_k = held.k.index(n_k & 1).reshape((BLOCK, DIM))
            b_s = warpgroup_mma(q_rows.index(s), b_k.permute((1, 0)), no_logits, use_acc=False, is_async=True)

            # 4. Results are written while the product of the next step is made.
            inverse = approximately("rcp.approx.ftz.f32 $0, $1;", gl.maximum(l_i, 1e-30))
            inverse = gl.convert_layout(inverse, OUT_ROW, assert_trivial=True)
            b_lse = offset + approximately("lg2.approx.ftz.f32 $0, $1;", l_i)
            leave(partials, b_o * inverse[:, None], b_lse, b_reads, CUT.group, NUMBER)
            stay(n)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            b_reads = ring.reads.index(s).load(ROW)
            if CUT.scaled:
                scale = number_at(ring.scale, s)
            give_back(ring.free, s)
            control = following


@gluon.jit
def memory_of(tma_q, CUT: gl.constexpr, STAGES: gl.constexpr):
    """Allocates a program's ring and the places of two items, with their barriers."""
    NUMBER: gl.constexpr = tma_q.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, DIM], NUMBER)
    q = gl.allocate_shared_memory(NUMBER, [STAGES * 2 * (ROWS // CUT.group), 1, 1, CUT.group, HALF], tma_q.layout)
    k = gl.allocate_shared_memory(NUMBER, [2, 1, 1, BLOCK, DIM], BOX)
    v = gl.allocate_shared_memory(NUMBER, [2, 1, 1, BLOCK, DIM], BOX)
    reads = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], LINE)
    control = gl.allocate_shared_memory(gl.int32, [STAGES, 1], LINE)
    scale = gl.allocate_shared_memory(gl.float32, [STAGES, 1], LINE) if CUT.scaled else control
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    kv_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=2)
        mbarrier.init(kv_free.index(i), count=GROUPS)
    return Ring(q, reads, control, scale, full, free), Held(k, v, kv_full, kv_free)


@gluon.jit(do_not_specialize=["i_chunk", "chunk_tiles", "chunk_entries", "item_bound", "num_pages"])
def sm90_outer_kernel(
    tma_q,  # boxes [1, 1, group, HALF] of the queries
    tma_k,  # boxes [1, 1, BLOCK, DIM]
    tma_v,
    factors,  # Factors
    partials,  # Partials, rows [chunk tokens, kv_heads, topk, group, DIM]
    bounds,  # Bounds
    table,  # PageTable
    tiles,
    outer,  # OuterLists
    taken,  # int32 [1], how many items programs have taken beyond their first ones; 0 before
    scale,  # the softmax scale times log2(e), not negative
    i_chunk,
    chunk_tiles,
    chunk_entries,
    item_bound,
    num_kv_heads,
    num_pages,
    CUT: gl.constexpr,
    STAGES: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """Writes the partials of a chunk, whose items the programs share. The grid has as many programs as run at a time."""
    ring, held = memory_of(tma_q, CUT, STAGES)
    fence_async_shared()
    gl.thread_barrier()
    SIDE_0: gl.constexpr = 0
    SIDE_1: gl.constexpr = 1
    SIDE_2: gl.constexpr = 2
    gl.warp_specialize(
        [
            (attend, (ring, held, partials, scale, SIDE_0, CUT, STAGES)),
            (attend, (ring, held, partials, scale, SIDE_1, CUT, STAGES)),
            (attend, (ring, held, partials, scale, SIDE_2, CUT, STAGES)),
            (load, (
                ring, held, tma_q, tma_k, tma_v, factors, bounds, table, tiles, outer, taken, scale, i_chunk, chunk_tiles,
                chunk_entries, item_bound, num_kv_heads, num_pages, CUT, STAGES,
            )),
        ],
        [4, 4, 1],
        [ATTEND_REGISTERS, ATTEND_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def outer_operands(device: Device, q: torch.Tensor, keys: Keys, plan: Plan) -> Operands | None:
    """Returns what the kernel reads; None where it does not serve the call. It serves queries, keys and values of a
    16-bit type, also with factors, which the copy engine can read, and partials of that type, of heads that
    `hopper_outer_serves` names; blocks of 128 keys, packed or whole in pages."""
    if device.arch != 90 or plan.block_size != BLOCK.value or not keys.by_row:
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or keys.dtype != q.dtype or keys.stored:
        return None
    if not hopper_outer_serves(plan.group, q.shape[2]) or plan.partial_dtype != q.dtype or plan.cuts != 1:
        return None
    items = min(plan.chunk.items, plan.chunk.entries) * keys.heads
    if plan.chunk.entries * keys.heads >= MOST_PARTIALS or items > MOST_ITEMS:
        return None
    tma_q = descriptor(q[None], [1, 1, plan.group, HALF.value])
    tma_k, tma_v = (descriptor(x.rows.data, [1, 1, BLOCK.value, DIM.value]) for x in (keys.k, keys.v))
    if tma_q is None or tma_k is None or tma_v is None:
        return None
    home = plan.group == HOME_GROUP and HOME_TOPK <= plan.topk <= HOME_BIT.value
    rows = descriptor(q[None], [1, HOME_TOKENS, plan.group, DIM.value]) if home else None
    return Operands(tma_q, tma_k, tma_v, keys.factors, rows)


def launch_sm90_outer(read: Operands, call: PrefillCall, outer: OuterLists, partials: Partials, i_chunk: int) -> None:
    """Launches attention of a chunk."""
    keys, plan, device = call.keys, call.plan, call.result.lse.device
    launch_kernel(
        sm90_outer_kernel,
        (min(plan.chunk.items * keys.heads, facts(device).num_sms),),
        *read[:4],
        partials,
        call.bounds,
        keys.k.table,
        call.lists.union.tiles,
        outer,
        zeros(1, torch.int32, device),
        call.scale,
        i_chunk,
        *plan.chunk,
        keys.heads,
        keys.k.num_pages,
        CUT=Cut(plan.group, plan.topk, keys.page_size, keys.k.rows.factor is not None),
        **OPTIONS,
    )
