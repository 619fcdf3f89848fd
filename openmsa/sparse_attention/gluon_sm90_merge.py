# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"
"""This Gluon kernel merges the partials that Hopper's own kernel for KV-outer has written, in place of `combine_outer` of
`triton_outer_kernels.py`.

A program serves a tile's queries of one KV head, one after the other. The partials of a query, TOPK slots of GROUP rows, lie
together, and each thread has 16 bytes of every slot. They pass through a ring in shared memory, which a thread fills and reads
at its own places alone, and which runs ahead of the sums by several slots, into the next queries: so a multiprocessor has some
160 KB on their way at any time, and a few of them read nearly as fast as memory gives, while another kernel works on the
others.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait

from openmsa.primitives.softmax import LN_2, Partials
from openmsa.runtime.launch import ceil_div, launch_kernel
from openmsa.sparse_attention import triton_lists
from openmsa.sparse_attention.triton_lists import SIZE_FIELDS, TILE_FIELDS, PrefillCall

load_tile = gluon.jit(triton_lists.load_tile.fn)  # Gluon compiles the source of the Triton function.

DIM = gl.constexpr(128)
"""A head has so many elements."""
MINE = gl.constexpr(8)
"""A thread has so many neighbouring numbers of a slot."""
STEP = gl.constexpr(4)
"""So many slots are sent for at a time."""
ROW_COST = gl.constexpr(3.2)
"""A row of queries takes the union kernel as long for a block as the merge of so many rows of partials."""
MOST_LEFT = gl.constexpr(0.5)
"""The union kernel leaves at most this part of the multiprocessors to the merge, on which that reaches the rate of memory."""
RING_BYTES = 96 << 10
"""The ring of a program has at most so many bytes, if a step and the one before have room in them: two programs share a
multiprocessor."""


class Cut(NamedTuple):
    """Says how work is cut; it is a constant of the kernel.

    group:  query heads of a key head.
    topk:   slots of a query.
    ahead:  steps that are sent for before the first is read.
    beside: whether the kernel in front may still run.
    """

    group: int
    topk: int
    ahead: int
    beside: bool


@gluon.jit
def left_to_merge(outer, num_segments, num_kv_heads, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """Returns how many programs of the union kernel leave their multiprocessors to the merge of the last chunk, so that both
    take about as long. ROWS: rows of queries that attend to a block of a union list."""
    AT_ONCE: gl.constexpr = 128
    o_s = gl.arange(0, AT_ONCE, gl.BlockedLayout([1], [32], [4], [0]))
    visits, entries = 0, 0
    for start in range(0, num_segments, AT_ONCE):
        i_segment = start + o_s
        m_s = i_segment < num_segments
        visits += gl.sum(gl.load(outer.num_visits + i_segment, mask=m_s, other=0), 0)
        m_s = m_s & (i_segment >= num_segments - num_kv_heads)
        entries += gl.sum(gl.load(outer.num_entries + i_segment, mask=m_s, other=0), 0)
    merged, attended = entries.to(gl.float32) * GROUP, visits.to(gl.float32) * (ROWS * ROW_COST)
    return (gl.num_programs(0) * gl.minimum(merged / gl.maximum(merged + attended, 1.0), MOST_LEFT)).to(gl.int32)


@gluon.jit
def send(ring, s, p_rows, filled, STEP_OF_QUERY: gl.constexpr, PLACES: gl.constexpr, CUT: gl.constexpr):
    """Sends for the partials of a step of a query's slots, which go to step s of the ring, if they are there."""
    SIZE: gl.constexpr = ring.shape[1] * MINE
    o_t = gl.arange(0, ring.shape[1], gl.SliceLayout(1, PLACES))
    o_n = gl.arange(0, MINE, gl.SliceLayout(0, PLACES))
    for j in gl.static_range(STEP):
        if STEP_OF_QUERY * STEP + j < CUT.topk:
            p = p_rows + (STEP_OF_QUERY * STEP + j) * SIZE + (o_t * MINE)[:, None] + o_n[None, :]
            there = ((filled >> (STEP_OF_QUERY * STEP + j)) & 1 != 0) & (o_t >= 0)
            async_copy.async_copy_global_to_shared(ring.index(s * STEP + j), p, mask=there[:, None] & (o_n >= 0)[None, :])
    async_copy.commit_group()


@gluon.jit
def sums_of(p_lse, filled, CUT: gl.constexpr):
    """Loads the logarithms of a query's sums, one tensor a slot; -inf where there is no partial."""
    TOPK: gl.constexpr = CUT.topk
    found = ()
    for slot in gl.static_range(TOPK):
        there = (filled >> slot) & 1 != 0
        found += (gl.load(p_lse + slot * CUT.group, mask=there, other=-float("inf")),)
    return found


@gluon.jit(do_not_specialize=["first_tile", "num_kv_heads"])
def sm90_merge_kernel(
    partials,  # Partials
    slots,  # int64 [total_q, kv_heads], where bit i says that slot i has a partial
    union,  # UnionLists
    result,  # Result
    factors,  # Factors
    first_tile,
    num_kv_heads,
    CUT: gl.constexpr,
):
    """Merges the partials of each query of a chunk. The grid has a program for each tile and KV head. Slots are added in order,
    so that the sum is always the same."""
    THREADS: gl.constexpr = CUT.group * DIM // MINE
    TOPK: gl.constexpr = CUT.topk
    AHEAD: gl.constexpr = CUT.ahead
    STEPS: gl.constexpr = (TOPK + STEP - 1) // STEP
    PLACES: gl.constexpr = gl.BlockedLayout([1, MINE], [32, 1], [THREADS // 32, 1], [1, 0])
    NUMBER: gl.constexpr = partials.rows.dtype.element_ty
    i_h, i_tile = gl.program_id(0) % num_kv_heads, first_tile + gl.program_id(0) // num_kv_heads
    if gl.load(union.sizes + (i_tile * num_kv_heads + i_h) * SIZE_FIELDS) < 0:
        # 1. The first steps are sent for. A tile of 8 rows lies together: 32 numbers of each row, then the next 32 of each.
        first, tokens, _, _ = load_tile(union.tiles, i_tile)
        o_t = gl.arange(0, THREADS, gl.SliceLayout(1, PLACES))
        head = o_t // 128 * 8 + o_t % 32 // 4
        row = (first - gl.load(union.tiles + first_tile * TILE_FIELDS)).to(gl.int64) * num_kv_heads + i_h
        p_rows = partials.rows + row * (TOPK * CUT.group * DIM)
        p_lse = partials.lse + row * (TOPK * CUT.group) + head
        p_slots = slots + first.to(gl.int64) * num_kv_heads + i_h
        s_rows = (num_kv_heads * (TOPK * CUT.group * DIM)).to(gl.int64)
        ring = gl.allocate_shared_memory(NUMBER, [(AHEAD + 1) * STEP, THREADS, MINE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        filled = gl.load(p_slots, mask=tokens > 0, other=0)
        filled_1 = gl.load(p_slots + num_kv_heads, mask=tokens > 1, other=0)
        filled_2 = gl.load(p_slots + 2 * num_kv_heads, mask=tokens > 2, other=0)
        for i in gl.static_range(AHEAD):
            send(ring, i, p_rows + i // STEPS * s_rows, filled if i < STEPS else filled_1, i % STEPS, PLACES, CUT)
        sums = sums_of(p_lse, filled, CUT)
        s = first * 0
        for i_q in range(tokens):
            filled_3 = gl.load(p_slots + (i_q + 3) * num_kv_heads, mask=i_q + 3 < tokens, other=0)
            sums_1 = sums_of(p_lse + (i_q + 1) * num_kv_heads * (TOPK * CUT.group), filled_1, CUT)

            # 2. The weighted sum of the slots is formed, and steps are sent for as their places become free.
            m_i = sums[0]
            for slot in gl.static_range(1, TOPK):
                m_i = gl.maximum(m_i, sums[slot])
            m_i = gl.where(m_i == -float("inf"), 0.0, m_i)
            acc = gl.zeros([THREADS, MINE], gl.float32, PLACES)
            l_i = gl.zeros([THREADS], gl.float32, gl.SliceLayout(1, PLACES))
            for i in gl.static_range(STEPS):
                free = gl.where(s == 0, AHEAD, s - 1)
                there = filled if i + AHEAD < STEPS else filled_1 if i + AHEAD < 2 * STEPS else filled_2
                send(ring, free, p_rows + (i_q + (i + AHEAD) // STEPS) * s_rows, there, (i + AHEAD) % STEPS, PLACES, CUT)
                async_copy.wait_group(AHEAD)
                for j in gl.static_range(STEP):
                    if i * STEP + j < TOPK:
                        weight = gl.exp2(sums[i * STEP + j] - m_i)
                        b_o = ring.index(s * STEP + j).load(PLACES).to(gl.float32)
                        l_i += weight
                        acc += weight[:, None] * gl.where((filled >> (i * STEP + j)) & 1 != 0, b_o, 0.0)
                s = gl.where(s == AHEAD, 0, s + 1)

            # 3. The result is written. Of 32 numbers, those at 8 * i + 2 * j and behind it belong to 8 * j + 2 * i (`rounded`).
            m_any = l_i > 0
            inverse = gl.where(m_any, 1.0 / gl.where(m_any, l_i, 1.0), 0.0)
            if factors.v is not None:
                inverse *= gl.load(factors.v + i_h * factors.s_v_head)
            b_out = (acc * inverse[:, None]).to(result.rows.dtype.element_ty)
            b_out = b_out.reshape([THREADS // 4, 4, 4, 2]).permute((0, 2, 1, 3)).reshape([THREADS, MINE])
            b_out = gl.convert_layout(b_out, PLACES)
            o_row = ((first + i_q).to(gl.int64) * num_kv_heads + i_h) * CUT.group + head
            o_d = o_t % 128 // 32 * 32 + o_t % 4 * MINE
            p_out = result.rows + (o_row * DIM + o_d)[:, None] + gl.arange(0, MINE, gl.SliceLayout(0, PLACES))[None, :]
            gl.store(p_out, b_out)
            b_lse = (m_i + gl.log2(gl.where(m_any, l_i, 1.0))) * LN_2
            b_lse = gl.where(m_any, b_lse, l_i - float("inf"))
            gl.store(result.lse + o_row, b_lse, mask=(o_t % 128 < 32) & (o_t % 4 == 0))
            filled, filled_1, filled_2, sums = filled_1, filled_2, filled_3, sums_1
        async_copy.wait_group(0)
    if CUT.beside:  # noqa: SIM102 (it is a constant)
        if gl.program_id(0) == 0:  # This launch ends behind the one in front, so that what follows it waits for both.
            gdc_wait()


def launch_sm90_merge(
    call: PrefillCall, partials: Partials, slots: Tensor, first_tile: int, num_tiles: int, *, beside: bool
) -> None:
    """Launches the merge of the partials of so many tiles. beside: whether it starts before the kernel in front has ended,
    which must not be the one that writes the partials, and must have waited for that."""
    plan, heads = call.plan, call.keys.heads
    ahead = RING_BYTES // (STEP.value * plan.group * DIM.value * 2) - 1
    ahead = max(1, min(ahead, 2 * ceil_div(plan.topk, STEP.value)))  # Words of slots are loaded two queries ahead.
    launch_kernel(
        sm90_merge_kernel,
        (num_tiles * heads,),
        partials,
        slots,
        call.lists.union,
        call.result,
        call.keys.factors,
        first_tile,
        heads,
        CUT=Cut(plan.group, plan.topk, ahead, beside),
        num_warps=plan.group // 2,
        **({"launch_pdl": True} if beside else {}),
    )
