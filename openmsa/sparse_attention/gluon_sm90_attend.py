# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This Gluon kernel attends to 16-bit keys and values in union tiles on Hopper.

A tile is 128 rows, and a program has three groups of warps:

    load        one warp brings queries, and the keys and values of each block of the union, through the copy engine
    attend 0    four warps multiply the first 64 rows with the blocks of the union
    attend 1    four warps do the same for the other 64 rows

Queries lie in registers, keys and values in a ring of blocks in shared memory. A group that attends starts the product of its
queries with the next block before it takes the exponentials of this one, and the product of its weights with this block's
values right behind:

    unit      q k(1)  p(0) v(0)   q k(2)  p(1) v(1) ...
    threads       softmax(1)          softmax(2) ...

Programs stay and take one tile after another, so that the blocks of a tile arrive while results of the tile before are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from openmsa.primitives.gluon_sm90_attention import (
    BLOCK,
    ROWS,
    bring,
    clear_behind,
    dealt,
    descriptor,
    exchanged,
    following,
    give_back,
    kept,
    l2_holds,
    no_rows,
    online_step,
    pass_by,
    ring_of,
    rounded,
    row_maxima,
    row_results,
    seen,
    stay,
    turns_of,
)
from openmsa.primitives.operands import QueryRows
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.launch import launch_kernel
from openmsa.sparse_attention import triton_lists
from openmsa.sparse_attention.gluon_sm90_merge import SHARES, shared_out
from openmsa.sparse_attention.triton_config import MAX_UNION_TOKENS, Keys, PrefillConfig, padded_dim
from openmsa.sparse_attention.triton_keys import SMALLEST_SCALE
from openmsa.sparse_attention.triton_lists import SIZE_FIELDS, PrefillCall

load_tile = gluon.jit(triton_lists.load_tile.fn)  # Gluon compiles the source of the Triton function.

OPTIONS: dict[str, Any] = {"STAGES": 3, "ATTEND_REGISTERS": 232, "LOAD_REGISTERS": 40, "num_warps": 4}
"""The ring has STAGES blocks."""


class Cut(NamedTuple):
    """Says how work is cut; it is a constant of the kernel.

    group:         query heads of a key head.
    heads, parts:  heads of the group in a tile, and tiles that cover the group.
    dim, dim_pad:  elements of a head, and of a row in shared memory.
    page_size:     keys of a page, 0 where keys are packed.
    negative:      whether the softmax scale is negative.
    """

    group: int
    heads: int
    parts: int
    dim: int
    dim_pad: int
    page_size: int
    negative: bool


@gluon.jit
def programs_of(work):
    """Returns how many programs share the items. A word says how they do: whether items are `dealt`; among how many programs;
    how many of SHARES neighbouring tiles are theirs, and the first of these."""
    return (work >> 1) & 1023


@gluon.jit
def item_at(i_turn, num_items, work, num_kv_heads, CUT: gl.constexpr):
    """Finds the item of a turn, anew at its turn, as registers are few: part, key head, tile, list, whether there is one."""
    i_item = gl.where(work & 1 != 0, num_items - 1 - dealt(i_turn, programs_of(work)), i_turn)
    is_item = (i_item >= 0) & (i_item < num_items)
    i_item = gl.maximum(gl.minimum(i_item, num_items - 1), 0)
    i_part, i_pair = i_item % CUT.parts, i_item // CUT.parts
    i_h, i_tile = i_pair % num_kv_heads, i_pair // num_kv_heads
    width = (work >> 11) & 31
    i_tile = i_tile // width * SHARES + (work >> 16) + i_tile % width
    return i_part, i_h, i_tile, i_tile * num_kv_heads + i_h, is_item


@gluon.jit
def load_item(i_turn, num_items, work, union, num_kv_heads, CUT: gl.constexpr):
    """Loads what is written of the item of a turn: the blocks in its list (-1: the tile goes to another kernel, or the turn has
    none) and how many of them all queries see whole; the tile's first token, tokens, sequence and first position."""
    _, _, i_tile, i_list, is_item = item_at(i_turn, num_items, work, num_kv_heads, CUT)
    size, whole = gl.load(union.sizes + i_list * SIZE_FIELDS), gl.load(union.sizes + i_list * SIZE_FIELDS + 1)
    first, tokens, i_b, position = load_tile(union.tiles, i_tile)
    return gl.where(is_item, size, -1), whole, first, tokens, i_b, position


@gluon.jit
def load(
    ring, rows, tma_q, tma_k, tma_v, union, num_items, work, num_kv_heads, capacity,
    CUT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Does the loading warp's share of a program: a block's values follow the keys of the next block, as they are read."""
    TOKENS: gl.constexpr = ROWS // CUT.heads
    s, phase, n, any_v = 0, 0, 0, 0
    s_v, page_v, h_v, at_v = 0, 0, 0, 0
    item = load_item(gl.program_id(0), num_items, work, union, num_kv_heads, CUT)
    for i_turn in range(gl.program_id(0), turns_of(num_items, programs_of(work)), programs_of(work)):
        i_part, i_h, _, i_list, _ = item_at(i_turn, num_items, work, num_kv_heads, CUT)
        size, _, first, _, _, _ = item
        item = load_item(i_turn + programs_of(work), num_items, work, union, num_kv_heads, CUT)
        if size > 0:
            p_rows = union.rows + i_list.to(gl.int64) * capacity
            row = gl.load(p_rows)
            for i in range(size):
                page, at = 0, row
                if CUT.page_size > 0:
                    page, at = row // CUT.page_size, row % CUT.page_size
                row = gl.load(p_rows + gl.minimum(i + 1, size - 1))
                mbarrier.wait(ring.free.index(s), phase ^ 1)
                bring(tma_k, page, i_h, at, ring.k, ring.k_full, s)
                if any_v > 0:
                    bring(tma_v, page_v, h_v, at_v, ring.v, ring.v_full, s_v)
                if i == 0:
                    head = i_h * CUT.group + i_part * CUT.heads
                    for side in gl.static_range(2):
                        mbarrier.wait(rows.free.index(side), n & 1 ^ 1)
                        mbarrier.expect(rows.full.index(side), tma_q.block_type.nbytes)
                        place = [0, first + side * TOKENS, head, 0]
                        tma.async_copy_global_to_shared(tma_q, place, rows.full.index(side), rows.q.index(side))
                s_v, page_v, h_v, at_v, any_v = s, page, i_h, at, 1
                s, phase = following(s, phase, STAGES)
            n += 1
    if any_v > 0:
        mbarrier.wait(ring.free.index(s), phase ^ 1)
        bring(tma_v, page_v, h_v, at_v, ring.v, ring.v_full, s_v)


@gluon.jit
def attend(
    ring, rows, factors, result, bounds, union, scale, num_items, work, num_kv_heads, capacity,
    SIDE: gl.constexpr, CUT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Does a group's share of a program: the first (SIDE 0) or the second half of each tile's rows."""
    NUMBER: gl.constexpr = ring.k.dtype
    TOKENS: gl.constexpr = ROWS // CUT.heads
    DIM_PAD: gl.constexpr = CUT.dim_pad
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUTPUTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_PAD, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, LOGITS, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUTS, 2)
    MEMORY: gl.constexpr = exchanged(DIM_PAD // 2, True, True)
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUTS)
    token = SIDE * TOKENS + gl.arange(0, ROWS, ROW) // CUT.heads
    zero = gl.zeros([ROWS, BLOCK], gl.float32, LOGITS)
    q_rows = rows.q.index(SIDE).reshape((ROWS, DIM_PAD))
    s, phase, n = 0, 0, 0
    item = load_item(gl.program_id(0), num_items, work, union, num_kv_heads, CUT)
    for i_turn in range(gl.program_id(0), turns_of(num_items, programs_of(work)), programs_of(work)):
        i_part, i_h, _, i_list, _ = item_at(i_turn, num_items, work, num_kv_heads, CUT)
        size, whole, first, tokens, i_b, position = item
        item = load_item(i_turn + programs_of(work), num_items, work, union, num_kv_heads, CUT)  # It is on its way.
        if size >= 0:
            acc = gl.zeros([ROWS, DIM_PAD], gl.float32, OUTPUTS)
            m_i, l_i = no_rows(LOGITS)
            x_scale = scale
            if factors.k is not None:
                x_scale = gl.maximum(scale * gl.load(factors.k + i_h * factors.s_k_head), SMALLEST_SCALE)
            if size > 0:
                mbarrier.wait(rows.full.index(SIDE), n & 1)
                n += 1
                if tokens <= SIDE * TOKENS:
                    give_back(rows.free, SIDE)
                    s, phase = pass_by(ring, s, phase, size, STAGES)
                else:
                    # 1. The first block is multiplied with the queries.
                    q = q_rows.load(QUERIES)
                    give_back(rows.free, SIDE)
                    mbarrier.wait(ring.k_full.index(s), phase)
                    b_k = ring.k.index(s).reshape((BLOCK, DIM_PAD))
                    b_s = warpgroup_mma(q, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
                    p_ids, p_bits = union.ids + i_list.to(gl.int64) * capacity, union.bits + i_list.to(gl.int64) * capacity
                    bits, block = gl.load(p_bits), gl.load(p_ids)
                    k_len = gl.load(bounds.cu_k + i_b + 1) - gl.load(bounds.cu_k + i_b)
                    last_key = gl.minimum(position + token, k_len - 1)
                    # Keys behind the last query of the sequence may hold anything.
                    end_key = gl.minimum(position + gl.load(bounds.cu_q + i_b + 1) - first, k_len)
                    b_s = warpgroup_mma_wait(0, deps=(b_s,))
                    gl.thread_barrier()
                    if CUT.negative:
                        b_s = -b_s
                    b_s = seen(b_s, block, last_key)
                    m_member = bits >> token & 1 != 0
                    bits = gl.load(p_bits + gl.minimum(1, size - 1))
                    weights, m_i, l_i, alpha = online_step(
                        b_s, row_maxima(b_s), m_i, l_i, x_scale, m_member, WEIGHTS, OUT_ROW, NUMBER
                    )
                    q = kept(q)

                    # 2. Each further block is multiplied with the queries, and the values before it with their weights.
                    for i in range(1, size):
                        s_v, phase_v = s, phase
                        s, phase = following(s, phase, STAGES)
                        mbarrier.wait(ring.k_full.index(s), phase)
                        b_k = ring.k.index(s).reshape((BLOCK, DIM_PAD))
                        b_s = warpgroup_mma(q, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
                        give_back(ring.free, s_v)
                        mbarrier.wait(ring.v_full.index(s_v), phase_v)
                        acc = acc * alpha[:, None]
                        acc = warpgroup_mma(weights, ring.v.index(s_v).reshape((BLOCK, DIM_PAD)), acc, is_async=True)
                        b_s = warpgroup_mma_wait(1, deps=(b_s,))
                        m_member = bits >> token & 1 != 0
                        bits = gl.load(p_bits + gl.minimum(i + 1, size - 1))
                        if CUT.negative:
                            b_s = -b_s
                        if i >= whole:
                            b_s = seen(b_s, gl.load(p_ids + i), last_key)
                        p, m_i, l_i, alpha = online_step(
                            b_s, row_maxima(b_s), m_i, l_i, x_scale, m_member, WEIGHTS, OUT_ROW, NUMBER
                        )
                        q = kept(q)
                        stay(i_list)
                        acc = warpgroup_mma_wait(0, deps=(acc,))
                        weights = p

                    # 3. The last values follow.
                    give_back(ring.free, s)
                    acc = acc * alpha[:, None]
                    tile = ring.v.index(s).reshape((BLOCK, DIM_PAD))
                    count = end_key - gl.load(p_ids + size - 1) * BLOCK
                    mbarrier.wait(ring.v_full.index(s), phase)
                    if count < BLOCK:  # No other block of a list reaches behind its sequence.
                        clear_behind(tile, count)
                    acc = warpgroup_mma(weights, tile, acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    s, phase = following(s, phase, STAGES)

            # 4. The results are written.
            o_r = gl.arange(0, ROWS, gl.SliceLayout(1, MEMORY))
            o_w = gl.arange(0, DIM_PAD // 2, gl.SliceLayout(0, MEMORY))
            inverse, b_lse = row_results(m_i, l_i, x_scale)
            if factors.v is not None:
                inverse *= gl.load(factors.v + i_h * factors.s_v_head)
            words = rounded(acc * gl.convert_layout(inverse, OUT_ROW, assert_trivial=True)[:, None], NUMBER)
            here, head = SIDE * TOKENS + o_r // CUT.heads, i_part * CUT.heads + o_r % CUT.heads
            m_row = (here < tokens) & (head < CUT.group)
            o_out = ((first + here).to(gl.int64) * num_kv_heads + i_h) * CUT.group + head
            m_out = m_row[:, None]
            if CUT.dim < DIM_PAD:
                m_out = m_out & (o_w < CUT.dim // 2)[None, :]
            p_out = result.rows.to(gl.pointer_type(gl.int32), bitcast=True)
            gl.store(p_out + o_out[:, None] * (CUT.dim // 2) + o_w[None, :], words, mask=m_out)
            gl.store(result.lse + o_out, gl.convert_layout(b_lse, gl.SliceLayout(1, MEMORY), assert_trivial=True), mask=m_row)


@gluon.jit(do_not_specialize=["i_chunk", "num_segments", "num_tiles", "is_dealt", "capacity"])
def sm90_attend_kernel(
    tma_q,  # boxes [1, tokens, heads, dim_pad] of the queries
    tma_k,  # boxes [1, 1, BLOCK, dim_pad]
    tma_v,
    factors,  # Factors
    result,  # Result
    bounds,  # Bounds
    union,  # UnionLists
    scale,  # the softmax scale times log2(e), not negative
    outer,  # OuterLists, or None where no merge runs beside
    i_chunk,
    num_segments,
    num_tiles,
    is_dealt,  # 1 where items are `dealt`, from the last ones on, which are the largest; else 0
    num_kv_heads,
    capacity,
    CUT: gl.constexpr,
    STAGES: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """Attends in union tiles, which the programs share. The grid has as many programs as run at a time. Beside a merge, they
    take the share of one chunk, and some end at once: the merge behind this launch starts on their multiprocessors."""
    gdc_launch_dependents()
    programs, tiles = gl.num_programs(0), gl.minimum((gl.load(union.listed) + num_kv_heads - 1) // num_kv_heads, num_tiles)
    first, width = programs * 0, programs * 0 + SHARES
    if outer is not None:
        first, width, left = shared_out(outer, i_chunk, num_segments, num_kv_heads, CUT.group, CUT.parts * 2 * ROWS)
        programs -= left
    tiles = tiles // SHARES * width + gl.minimum(gl.maximum(tiles % SHARES - first, 0), width)
    num_items = gl.where(gl.program_id(0) < programs, tiles * num_kv_heads * CUT.parts, 0)
    work = (gl.where(num_items > 0, first * 32 + width, SHARES) * 1024 + programs) * 2 + is_dealt
    ring, rows = ring_of(tma_q, tma_k, tma_v, CUT.heads, CUT.dim_pad, STAGES)
    SIDE_0: gl.constexpr = 0
    SIDE_1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (attend, (
                ring, rows, factors, result, bounds, union, scale, num_items, work, num_kv_heads, capacity,
                SIDE_0, CUT, STAGES,
            )),
            (attend, (
                ring, rows, factors, result, bounds, union, scale, num_items, work, num_kv_heads, capacity,
                SIDE_1, CUT, STAGES,
            )),
            (load, (ring, rows, tma_q, tma_k, tma_v, union, num_items, work, num_kv_heads, capacity, CUT, STAGES)),
        ],
        [4, 1],
        [ATTEND_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def attend_launch(
    device: Device, queries: QueryRows, keys: Keys, out: torch.Tensor, config: PrefillConfig, block_size: int
) -> Callable[[PrefillCall], None] | None:
    """Returns the launch of attention of the tiles that stay together, whose lists must have `listed`; None where the kernel
    does not serve. It serves queries, keys and values of one 16-bit type, also with factors, which the copy engine can read, of
    dims 40, 48, ... 128 in groups of at least three heads; blocks of 128 keys, packed or whole in pages; outputs at multiples
    of four bytes."""
    q = queries.data
    if device.arch != 90 or block_size != BLOCK.value or 2 * ROWS.value > MAX_UNION_TOKENS * config.heads or not keys.by_row:
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or keys.dtype != q.dtype or keys.stored:
        return None
    dim_pad = padded_dim(q.shape[2], q.dtype)
    if q.shape[2] % 8 != 0 or dim_pad not in (64, 128) or out.data_ptr() % 4 != 0:
        return None
    boxes = (1, ROWS.value // config.heads, config.heads), (1, 1, BLOCK.value), (1, 1, BLOCK.value)
    pools = q[None], keys.k.rows.data, keys.v.rows.data
    tma_q, tma_k, tma_v = (descriptor(pool, [*box, dim_pad]) for pool, box in zip(pools, boxes, strict=True))
    if tma_q is None or tma_k is None or tma_v is None:
        return None
    return functools.partial(launch_sm90_attend, (tma_q, tma_k, tma_v))


def launch_sm90_attend(tma: tuple[TensorDescriptor, ...], call: PrefillCall, i_chunk: int | None = None) -> None:
    """Launches it with descriptors of queries, keys and values. i_chunk: attends to the share of this chunk, whose merge runs
    beside; None: to all tiles."""
    keys, plan, config, device = call.keys, call.plan, call.config, facts(call.result.lse.device)
    dim = keys.k.dim
    share = (None, 0, 0) if i_chunk is None else (call.lists.outer, i_chunk, plan.num_chunks * keys.heads)
    is_dealt = int(l2_holds(device, plan.limits.max_blocks * BLOCK.value, keys.heads, dim))
    launch_kernel(
        sm90_attend_kernel,
        (min(plan.num_tiles * keys.heads * plan.parts, device.num_sms),),
        *tma, keys.factors, call.result, call.bounds, call.lists.union, call.scale, *share, plan.num_tiles, is_dealt,
        keys.heads, plan.limits.capacity,
        CUT=Cut(plan.group, config.heads, plan.parts, dim, padded_dim(dim, keys.dtype), keys.page_size, call.negative),
        **OPTIONS,
    )  # fmt: skip
