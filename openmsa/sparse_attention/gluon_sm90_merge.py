# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"
"""This Gluon kernel merges the partials that Hopper's own kernel for KV-outer has written, in place of `combine_outer` of
`triton_outer_kernels.py`, and attends to the block that neighbouring queries share.

A program serves a tile's queries of one KV head. Nearly all of them read the block in which the tile lies, its home: so the
program attends to that itself, all rows at a time, and memory holds no partials of it. Then it takes one query after the
other. The partials of a query, TOPK slots of GROUP rows, lie together, and each thread has 16 bytes of every slot. They pass
through a ring in shared memory, which a thread fills and reads at its own places alone, and which runs ahead of the sums by
many slots, into the next queries: so a multiprocessor has some 130 KB on their way at any time, and a few of them read nearly
as fast as memory gives, while another kernel works on the others.

    ring   | keys of the home block | values of the home block | spare |    | queries, then results |
    places | 0            1         | 2            3           | 4     |
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from openmsa.primitives.gluon_sm90_attention import BLOCK, bring, clear_behind, words_of
from openmsa.primitives.softmax import LN_2, Partials
from openmsa.runtime.launch import ceil_div, launch_kernel
from openmsa.sparse_attention import triton_lists
from openmsa.sparse_attention.gluon_sm90_outer import DIM, Operands, approximately, place_of
from openmsa.sparse_attention.triton_keys import SMALLEST_SCALE
from openmsa.sparse_attention.triton_lists import HOME_BIT, OUTER_BUT_HOME, SIZE_FIELDS, TILE_FIELDS, PrefillCall

home_of = gluon.jit(triton_lists.home_of.fn)  # Gluon compiles the sources of the Triton functions.
load_tile = gluon.jit(triton_lists.load_tile.fn)

WORDS = gl.constexpr(4)
"""A thread has so many neighbouring words, of two numbers each, of a slot."""
STEP = gl.constexpr(4)
"""So many slots are sent for at a time."""
ROW_COST = gl.constexpr(2.6)
"""A row of queries takes the union kernel as long for a block as the merge of so many rows of partials."""
SHARES = gl.constexpr(16)
"""Of so many neighbouring tiles, each chunk's merge has some beside it in the union kernel."""
MOST_LEFT = gl.constexpr(0.5)
"""The union kernel leaves at most this part of the multiprocessors to the merge, on which that reaches the rate of memory."""
RING_BYTES = 96 << 10
"""The ring of a program has at most so many bytes, if a step and the one before have room in them."""
HOME_PLACES = 5  # of the ring, where programs attend to home blocks; it begins with the last, which these do not need.
EXP2 = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")


class Cut(NamedTuple):
    """Says how work is cut; it is a constant of the kernel.

    group:      query heads of a key head.
    topk:       slots of a query.
    ahead:      steps that are sent for before the first is read.
    beside:     whether the kernel in front may still run.
    start:      the place of the first step; 0 where programs do not attend to home blocks.
    page_size:  keys of a page, 0 where keys are packed.
    """

    group: int
    topk: int
    ahead: int
    beside: bool
    start: int
    page_size: int


@gluon.jit
def shared_out(outer, i_chunk, num_segments, num_kv_heads, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """Says what the union kernel does beside the merge of a chunk: of SHARES tiles, which ones (first and number), so that each
    chunk's part of union lists is that of its partials; and how many programs leave their multiprocessors to the merge, so that
    both take about as long. ROWS: rows of queries that attend to a block of a union list."""
    AT_ONCE: gl.constexpr = 128
    o_s = gl.arange(0, AT_ONCE, gl.BlockedLayout([1], [32], [4], [0]))
    visits, before, until, entries = 0, 0, 0, 0
    for start in range(0, num_segments, AT_ONCE):
        i_segment = start + o_s
        m_s = i_segment < num_segments
        visits += gl.sum(gl.load(outer.num_visits + i_segment, mask=m_s, other=0), 0)
        found = gl.load(outer.num_entries + i_segment, mask=m_s, other=0)
        entries += gl.sum(found, 0)
        before += gl.sum(gl.where(i_segment < i_chunk * num_kv_heads, found, 0), 0)
        until += gl.sum(gl.where(i_segment < (i_chunk + 1) * num_kv_heads, found, 0), 0)
    a_share = SHARES / gl.maximum(entries, 1).to(gl.float32)
    first, end = (before * a_share).to(gl.int32), (until * a_share).to(gl.int32)
    end = gl.where((i_chunk + 1) * num_kv_heads == num_segments, SHARES, gl.minimum(end, SHARES))
    merged = (until - before).to(gl.float32) * GROUP
    attended = visits.to(gl.float32) * (end - first) * (ROWS * ROW_COST / SHARES)
    left = gl.num_programs(0) * gl.minimum(merged / gl.maximum(merged + attended, 1.0), MOST_LEFT)
    return first, end - first, left.to(gl.int32)


@gluon.jit
def send(ring, s, p_rows, filled, BEGIN: gl.constexpr, CUT: gl.constexpr):
    """Sends for the partials of a query's step, slots from BEGIN on, which go to place s of the ring, if they are there."""
    THREADS: gl.constexpr = ring.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, WORDS], [1, 32, 1], [1, THREADS // 32, 1], [2, 1, 0])
    slot = BEGIN + gl.arange(0, STEP, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    o_t = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    o_w = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    there = (filled >> slot) & 1 != 0
    if CUT.topk < BEGIN + STEP:
        there = there & (slot < CUT.topk)
    p = p_rows + (slot * THREADS + o_t) * WORDS + o_w
    async_copy.async_copy_global_to_shared(ring.index(s), p, mask=there & (o_t >= 0) & (o_w >= 0))
    async_copy.commit_group()


@gluon.jit
def send_first(ring, p_rows, s_rows, filled, filled_1, BEGIN: gl.constexpr, END: gl.constexpr, CUT: gl.constexpr):
    """Sends for steps BEGIN to END of a tile, counted from its first query on."""
    STEPS: gl.constexpr = (CUT.topk + STEP - 1) // STEP
    for i in gl.static_range(BEGIN, END):
        there = filled if i < STEPS else filled_1
        send(ring, (CUT.start + i) % (CUT.ahead + 1), p_rows + i // STEPS * s_rows, there, i % STEPS * STEP, CUT)


@gluon.jit
def numbers_of(words, there, NUMBER: gl.constexpr):
    """Returns the lower and the upper 16-bit numbers of words in float32; 0 where they are not there, whatever they hold."""
    if gl.bfloat16 == NUMBER:
        low, high = words * gl.where(there, 65536, 0), words & gl.where(there, -65536, 0)
        return low.to(gl.float32, bitcast=True), high.to(gl.float32, bitcast=True)
    else:
        words = words & gl.where(there, -1, 0)
        low, high = words.to(gl.int16), (words >> 16).to(gl.int16)
        return low.to(gl.float16, bitcast=True).to(gl.float32), high.to(gl.float16, bitcast=True).to(gl.float32)


@gluon.constexpr_function
def quad_words(threads, first, second):
    """Returns the layout [threads // 4, 16] of the words of four threads each, but for what they exchange: where a thread has
    words 4 (8) apart, it has neighbours (neighbouring twos) instead if `first` (`second`) says so."""
    lanes = [[0, 4 if first else 1], [0, 8 if second else 2], [1, 0], [2, 0], [4, 0]]
    warps = [[8 << i, 0] for i in range((threads // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1 if first else 4], [0, 2 if second else 8]], lanes, warps, [], [threads // 4, 16])


@gluon.jit
def attend_home(
    tma_k, tma_v, tma_rows, factors, bounds, table, result, p_slots, scale, tile, i_h, num_kv_heads, num_pages, max_blocks,
    room, ring, q, p_rows, s_rows, filled, filled_1, CUT: gl.constexpr,
):  # fmt: skip
    """Attends with a tile's queries to its home block, and sends for the first steps as places become free. Results go where
    queries were, in the order of partials, and the logarithms of sums where those of the last results will be."""
    NUMBER: gl.constexpr = room.dtype
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK, 16])
    OUTPUTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DIM, 16])
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, DIM], NUMBER)
    first, tokens, i_b, position = tile

    # 1. Keys, queries and values arrive.
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.expect(full.index(2), tma_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(tma_rows, [0, first, i_h * CUT.group, 0], full.index(2), q)
    first_key = home_of(position, gl.load(bounds.cu_k + i_b + 1) - gl.load(bounds.cu_k + i_b), max_blocks, BLOCK) * BLOCK
    page, at, _, k_len, count = place_of(bounds, table, i_b, first_key, num_pages, CUT.page_size)
    kv = room._reinterpret(NUMBER, [2, 1, 1, BLOCK, DIM], BOX)
    bring(tma_k, page, i_h, at, kv, full, 0)
    bring(tma_v, page, i_h, at, kv, full, 1)
    send_first(ring, p_rows, s_rows, filled, filled_1, 0, 1, CUT)
    if factors.k is not None:
        scale = gl.maximum(scale * gl.load(factors.k + i_h * factors.s_k_head), SMALLEST_SCALE)
    o_r, o_key = gl.arange(0, BLOCK, gl.SliceLayout(1, LOGITS)), gl.arange(0, BLOCK, gl.SliceLayout(0, LOGITS))
    token = o_r // CUT.group
    reads = gl.load(p_slots + token * num_kv_heads, mask=token < tokens, other=0) >> HOME_BIT & 1
    last_key = gl.where(reads != 0, gl.minimum(position + token, k_len - 1) - first_key, -1)

    # 2. The softmax is taken over the block.
    mbarrier.wait(full.index(2), 0)
    mbarrier.wait(full.index(0), 0)
    b_k, b_v = kv.index(0).reshape((BLOCK, DIM)), kv.index(1).reshape((BLOCK, DIM))
    b_s = gl.zeros([BLOCK, BLOCK], gl.float32, LOGITS)
    b_s = warpgroup_mma(q.reshape((BLOCK, DIM)), b_k.permute((1, 0)), b_s, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=(b_s,))
    gl.thread_barrier()  # Every warp has read keys before others come.
    send_first(ring, p_rows, s_rows, filled, filled_1, 1, 3, CUT)
    b_s = gl.where(o_key[None, :] <= last_key[:, None], b_s, -float("inf"))
    offset = gl.max(b_s, 1) * scale
    offset = gl.where(offset == -float("inf"), 0.0, offset)
    b_p = gl.exp2(b_s * scale - offset[:, None])
    l_i = gl.sum(b_p, 1)
    weights = gl.convert_layout(b_p.to(NUMBER), gl.DotOperandLayout(0, OUTPUTS, 2), assert_trivial=True)

    # 3. The weights are multiplied with the values.
    mbarrier.wait(full.index(1), 0)
    if count < BLOCK:
        clear_behind(b_v, count, 8)
    b_o = warpgroup_mma(weights, b_v, gl.zeros([BLOCK, DIM], gl.float32, OUTPUTS), use_acc=False, is_async=True)
    b_o = warpgroup_mma_wait(0, deps=(b_o,))
    gl.thread_barrier()  # Every warp has read values before others come.
    send_first(ring, p_rows, s_rows, filled, filled_1, 3, CUT.ahead, CUT)

    # 4. Results are written: of 8 rows, 32 numbers of each, in quads.
    inverse = approximately("rcp.approx.ftz.f32 $0, $1;", gl.maximum(l_i, 1e-30))
    b_o = b_o * gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUTS), assert_trivial=True)[:, None]
    low, high = b_o.reshape([BLOCK, DIM // 2, 2]).split()
    b_out = words_of(low, high, NUMBER).reshape([BLOCK // 8, 8, DIM // 32, 4, 4]).permute((0, 2, 1, 4, 3))
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q._reinterpret(gl.int32, [BLOCK * DIM // 8, WORDS], LINES).store(b_out.reshape([BLOCK * DIM // 8, WORDS]))
    p_lse = result.lse + ((first + token).to(gl.int64) * num_kv_heads + i_h) * CUT.group + o_r % CUT.group
    gl.store(p_lse, offset + approximately("lg2.approx.ftz.f32 $0, $1;", l_i), mask=token < tokens)
    gl.thread_barrier()


@gluon.jit
def sums_of(p_lse, filled, CUT: gl.constexpr):
    """Loads the logarithms of a query's sums, one tensor a slot; -inf where there is no partial."""
    TOPK: gl.constexpr = CUT.topk
    found = ()
    for slot in gl.static_range(TOPK):
        there = (filled >> slot) & 1 != 0
        found += (gl.load(p_lse + slot * CUT.group, mask=there, other=-float("inf")),)
    return found


@gluon.jit(do_not_specialize=["first_tile", "num_kv_heads", "num_pages", "max_blocks"])
def sm90_merge_kernel(
    tma_k,  # Operands
    tma_v,
    factors,
    tma_rows,
    bounds,  # Bounds
    table,  # PageTable
    scale,  # the softmax scale times log2(e), not negative
    partials,  # Partials
    slots,  # int64 [total_q, kv_heads], where bit i says that slot i has a partial, and HOME_BIT that the home block is read
    union,  # UnionLists
    result,  # Result
    first_tile,
    num_kv_heads,
    num_pages,
    max_blocks,
    CUT: gl.constexpr,
):
    """Merges the partials of each query of a chunk. The grid has a program for each tile and KV head. Slots are added in order,
    after the home block, so that the sum is always the same."""
    THREADS: gl.constexpr = CUT.group * DIM // (2 * WORDS)
    TOPK: gl.constexpr = CUT.topk
    AHEAD: gl.constexpr = CUT.ahead
    STEPS: gl.constexpr = (TOPK + STEP - 1) // STEP
    PLACES: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [THREADS // 32, 1], [1, 0])
    QUADS: gl.constexpr = quad_words(THREADS, True, True)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    STEPPED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    NUMBER: gl.constexpr = partials.rows.dtype.element_ty
    i_h, i_tile = gl.program_id(0) % num_kv_heads, first_tile + gl.program_id(0) // num_kv_heads
    if gl.load(union.sizes + (i_tile * num_kv_heads + i_h) * SIZE_FIELDS) < 0:
        # 1. The first steps are sent for. A tile of 8 rows lies together: 32 numbers of each row, then the next 32 of each.
        tile = load_tile(union.tiles, i_tile)
        first, tokens, _, _ = tile
        o_t = gl.arange(0, THREADS, gl.SliceLayout(1, PLACES))
        head = o_t // 128 * 8 + o_t % 32 // 4
        row = (first - gl.load(union.tiles + first_tile * TILE_FIELDS)).to(gl.int64) * num_kv_heads + i_h
        p_rows = partials.rows.to(gl.pointer_type(gl.int32), bitcast=True) + row * (TOPK * CUT.group * DIM // 2)
        p_lse = partials.lse + row * (TOPK * CUT.group) + head
        p_slots = slots + first.to(gl.int64) * num_kv_heads + i_h
        s_rows = (num_kv_heads * (TOPK * CUT.group * DIM // 2)).to(gl.int64)
        filled = gl.load(p_slots, mask=tokens > 0, other=0)
        filled_1 = gl.load(p_slots + num_kv_heads, mask=tokens > 1, other=0)
        filled_2 = gl.load(p_slots + 2 * num_kv_heads, mask=tokens > 2, other=0)
        if CUT.start > 0:
            q = gl.allocate_shared_memory(NUMBER, [1, 8, CUT.group, DIM], tma_rows.layout)
            PLACE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK // 2, DIM], NUMBER)
            room = gl.allocate_shared_memory(NUMBER, [AHEAD + 1, BLOCK // 2, DIM], PLACE)
            ring = room._reinterpret(gl.int32, [AHEAD + 1, STEP, THREADS, WORDS], STEPPED)
            homes = q._reinterpret(gl.int32, [8, THREADS, WORDS], LINES)
            attend_home(
                tma_k, tma_v, tma_rows, factors, bounds, table, result, p_slots, scale, tile, i_h, num_kv_heads, num_pages,
                max_blocks, room, ring, q, p_rows, s_rows, filled, filled_1, CUT,
            )  # fmt: skip
        else:
            ring = gl.allocate_shared_memory(gl.int32, [AHEAD + 1, STEP, THREADS, WORDS], STEPPED)
            send_first(ring, p_rows, s_rows, filled, filled_1, 0, AHEAD, CUT)
        by_slot = ring._reinterpret(gl.int32, [(AHEAD + 1) * STEP, THREADS, WORDS], LINES)
        p_results = result.lse + (first.to(gl.int64) * num_kv_heads + i_h) * CUT.group + head
        o_q, o_w = gl.arange(0, THREADS // 4, gl.SliceLayout(1, QUADS)), gl.arange(0, 16, gl.SliceLayout(0, QUADS))
        o_row = (first.to(gl.int64) * num_kv_heads + i_h) * CUT.group + o_q // 32 * 8 + o_q % 8
        p_out = result.rows.to(gl.pointer_type(gl.int32), bitcast=True)
        p_out += (o_row * (DIM // 2) + o_q % 32 // 8 * 16)[:, None] + o_w[None, :]
        sums = sums_of(p_lse, filled, CUT)
        s = first * 0 + CUT.start
        for i_q in range(tokens):
            filled_3 = gl.load(p_slots + (i_q + 3) * num_kv_heads, mask=i_q + 3 < tokens, other=0)
            sums_1 = sums_of(p_lse + (i_q + 1) * num_kv_heads * (TOPK * CUT.group), filled_1, CUT)

            # 2. The weighted sum of the slots is formed, and steps are sent for as their places become free.
            m_i = sums[0]
            for slot in gl.static_range(1, TOPK):
                m_i = gl.maximum(m_i, sums[slot])
            p_result = p_results + i_q * (num_kv_heads * CUT.group)
            if CUT.start > 0:
                at_home = (filled >> HOME_BIT) & 1 != 0
                b_lse = gl.load(p_result, mask=at_home, other=-float("inf"))
                m_i = gl.maximum(m_i, b_lse)
            m_i = gl.where(m_i == -float("inf"), 0.0, m_i)
            low, high = gl.zeros([THREADS, WORDS], gl.float32, PLACES), gl.zeros([THREADS, WORDS], gl.float32, PLACES)
            l_i = gl.zeros([THREADS], gl.float32, gl.SliceLayout(1, PLACES))
            if CUT.start > 0:
                l_i = approximately(EXP2, b_lse - m_i)
                b_low, b_high = numbers_of(homes.index(i_q).load(PLACES), at_home, NUMBER)
                low, high = l_i[:, None] * b_low, l_i[:, None] * b_high
            for i in gl.static_range(STEPS):
                free = gl.where(s == 0, AHEAD, s - 1)
                there = filled if i + AHEAD < STEPS else filled_1 if i + AHEAD < 2 * STEPS else filled_2
                p_step = p_rows + (i_q + (i + AHEAD) // STEPS) * s_rows
                send(ring, free, p_step, there, (i + AHEAD) % STEPS * STEP, CUT)
                async_copy.wait_group(AHEAD)
                for j in gl.static_range(STEP):
                    if i * STEP + j < TOPK:
                        weight = approximately(EXP2, sums[i * STEP + j] - m_i)
                        words = by_slot.index(s * STEP + j).load(PLACES)
                        b_low, b_high = numbers_of(words, (filled >> (i * STEP + j)) & 1 != 0, NUMBER)
                        l_i += weight
                        low += weight[:, None] * b_low
                        high += weight[:, None] * b_high
                s = gl.where(s == AHEAD, 0, s + 1)

            # 3. The result is written. Of 32 numbers, those at 8 * i + 2 * j and behind it belong to 8 * j + 2 * i (`rounded`).
            m_any = l_i > 0
            inverse = gl.where(m_any, 1.0 / gl.where(m_any, l_i, 1.0), 0.0)
            if factors.v is not None:
                inverse *= gl.load(factors.v + i_h * factors.s_v_head)
            b_out = words_of(low * inverse[:, None], high * inverse[:, None], NUMBER)
            b_out = b_out.reshape([THREADS // 4, 4, WORDS]).permute((0, 2, 1)).reshape([THREADS // 4, 16])
            b_out = gl.convert_layout(gl.convert_layout(b_out, quad_words(THREADS, True, False)), QUADS)
            gl.store(p_out + i_q.to(gl.int64) * (num_kv_heads * CUT.group * (DIM // 2)), b_out)
            b_lse = (m_i + gl.log2(gl.where(m_any, l_i, 1.0))) * LN_2
            b_lse = gl.where(m_any, b_lse, l_i - float("inf"))
            if CUT.start > 0:
                gl.thread_barrier()  # Every thread has loaded what the home block has left here.
            gl.store(p_result, b_lse, mask=(o_t % 128 < 32) & (o_t % 4 == 0))
            filled, filled_1, filled_2, sums = filled_1, filled_2, filled_3, sums_1
        async_copy.wait_group(0)
    if CUT.beside:  # noqa: SIM102 (it is a constant)
        if gl.program_id(0) == 0:  # This launch ends behind the one in front, so that what follows it waits for both.
            gdc_wait()


def launch_sm90_merge(
    read: Operands, call: PrefillCall, partials: Partials, slots: Tensor, first_tile: int, num_tiles: int, *, beside: bool
) -> None:
    """Launches the merge of the partials of so many tiles. beside: whether it starts before the kernel in front has ended,
    which must not be the one that writes the partials, and must have waited for that."""
    plan, heads = call.plan, call.keys.heads
    home = plan.rest == OUTER_BUT_HOME.value
    ahead = HOME_PLACES - 1
    if not home:
        ahead = RING_BYTES // (STEP.value * plan.group * DIM.value * 2) - 1
        ahead = max(1, min(ahead, 2 * ceil_div(plan.topk, STEP.value)))  # Words of slots are loaded two queries ahead.
    launch_kernel(
        sm90_merge_kernel,
        (num_tiles * heads,),
        *read[1:],
        call.bounds,
        call.keys.k.table,
        call.scale,
        partials,
        slots,
        call.lists.union,
        call.result,
        first_tile,
        heads,
        call.keys.k.num_pages,
        plan.limits.max_blocks,
        CUT=Cut(plan.group, plan.topk, ahead, beside, ahead if home else 0, call.keys.page_size),
        num_warps=plan.group // 2,
        **({"maxnreg": 128} if home else {}),  # Two programs share a multiprocessor.
        **({"launch_pdl": True} if beside else {}),
    )
