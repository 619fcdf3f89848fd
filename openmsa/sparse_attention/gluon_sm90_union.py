# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This Gluon kernel attends to E4M3 keys and values in union tiles on Hopper, and converts each block once for two tiles.

Triton's union kernel converts a block for 64 rows, which costs more than the bytes that codes save. Here a program serves
neighbouring tiles of a head in pairs, and three groups of four warps share its work:

    convert     reads the codes of the next block, and writes them as float16 to a ring in shared memory
    attend 0    multiplies the rows of the first tile with keys and values of the ring
    attend 1    does the same for the rows of the second tile

All three walk the two ascending lists of blocks as one: the smaller block is next, and where both lists have it, it is
converted once for both tiles. Neighbours select alike, so most blocks are. While one group takes the exponentials of its
weights, the matrix unit multiplies for the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from openmsa.primitives import query_parts
from openmsa.primitives.gluon_sm90_attention import BLOCK, ROWS, kept, no_rows, online_step, row_maxima, row_results, seen
from openmsa.primitives.operands import KeyRows, QueryRows
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.launch import ceil_div, launch_kernel
from openmsa.sparse_attention import triton_lists
from openmsa.sparse_attention.triton_config import Keys, PrefillConfig
from openmsa.sparse_attention.triton_keys import SMALLEST_SCALE
from openmsa.sparse_attention.triton_lists import SIZE_FIELDS, PrefillCall

OPTIONS = {"STAGES": 3, "ATTEND_REGISTERS": 208, "CONVERT_REGISTERS": 96, "num_warps": 4}
"""The ring has STAGES tiles. The registers are those of a thread that attends with second tiles, and of one that converts; a
thread of first tiles has what is left of 504. With fewer than 208 the values of a thread that attends do not fit."""
DIM = gl.constexpr(128)
"""A head has so many elements."""
HALF = gl.constexpr(64)
"""So many keys of a block are converted at a time."""
LONGEST_ROW = 1 << 24
"""A key is at most so many elements from the next, because offsets within a block have 32 bits."""
TO_FP16 = gl.constexpr(
    """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }"""
)
"""Converts four codes to two words of two float16 numbers."""
NOTHING = gl.constexpr(1 << 30)
"""It stands in the place of a block behind the end of a list."""

in_range = gluon.jit(query_parts.in_range.fn)  # Gluon compiles the sources of these Triton functions.
load_tile = gluon.jit(triton_lists.load_tile.fn)


class Ring(NamedTuple):
    """Holds tiles of keys and of values in shared memory, [STAGES, BLOCK, DIM] float16 each, with two barriers for each tile:
    `full` says that both are written, and `free` that both tiles of queries have read them."""

    k: Any
    v: Any
    full: Any
    free: Any


@gluon.constexpr_function
def code_layout():
    """Returns the layout of the codes of HALF keys in words of four, [HALF, 32]: a thread has 16 neighbouring codes of a key.
    Eight lanes that write together take the even chunks of one row and the odd ones of the next, which the swizzle puts in
    other banks."""
    lanes = [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [16, 0], [32, 0]], lanes, [[4, 0], [8, 0]], [], [64, 32])


@gluon.jit
def load_codes(x, place, limit, s_row, FIRST: gl.constexpr):
    """Loads the codes of HALF keys, from key FIRST on, of the block that lies `place` elements behind x. They are 0 behind the
    block's key `limit`, which may lie behind the block; with limit -1 nothing is read."""
    LAYOUT: gl.constexpr = code_layout()
    o_n = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, DIM // 4, gl.SliceLayout(0, LAYOUT))
    x = (x + place + FIRST * s_row).to(gl.pointer_type(gl.int32), bitcast=True)
    p_x = x + o_n[:, None] * (s_row // 4) + o_d[None, :]
    return gl.load(p_x, mask=(o_n <= limit - FIRST)[:, None], other=0, cache_modifier=".cg")


@gluon.jit
def write_numbers(words, tile, FIRST: gl.constexpr):
    """Writes the codes of HALF keys as float16 to a tile [BLOCK, DIM], from row FIRST on."""
    low, high = gl.inline_asm_elementwise(TO_FP16, "=r,=r,r", [words], (gl.int32, gl.int32), True, 1)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM // 2], gl.int32)
    pairs = tile._reinterpret(gl.int32, [BLOCK, DIM // 2], TILE)
    pairs.slice(FIRST, HALF).store(gl.join(low, high).reshape([HALF, DIM // 2]))


@gluon.jit
def tile_of(i_tile, i_h, union, cu_k, num_tiles, num_kv_heads):
    """Returns the number of a tile's list, the blocks in it (-1: the tile goes to another kernel) and how many of them all its
    queries see whole; its first token, tokens, sequence, first position, and the last key that any of its queries sees."""
    here = i_tile < num_tiles
    i_tile = gl.minimum(i_tile, num_tiles - 1)
    i_list = i_tile * num_kv_heads + i_h
    first, tokens, i_b, position = load_tile(union.tiles, i_tile)
    size = gl.where(here & (tokens > 0), gl.load(union.sizes + i_list * SIZE_FIELDS), -1)
    whole = gl.load(union.sizes + i_list * SIZE_FIELDS + 1)
    k_len = gl.load(cu_k + i_b + 1) - gl.load(cu_k + i_b)
    last = gl.minimum(position + tokens - 1, k_len - 1)
    return i_list.to(gl.int64), size, whole, first, tokens, i_b, position, last


@gluon.jit
def entry(p, i, size):
    """Loads entry i of a list of `size` entries; behind its end it is NOTHING."""
    return gl.load(p + i, mask=i < size, other=NOTHING)


@gluon.jit
def next_block(a, a_row, last_a, b, b_row, last_b, same, keys, PAGE_SIZE: gl.constexpr):
    """Picks the smaller of the blocks that come next in two lists. Returns whether it is the first list's and whether it is the
    second's (both where they are equal and the tiles of one sequence), whether there is one, where it lies, and up to which of
    its keys it is read (-1: there is none). last_a, last_b: positions of the last keys that the tiles see."""
    take_a, take_b = a <= b, b < a + same
    block = gl.minimum(a, b)
    left = block < NOTHING
    row = gl.where(left, gl.where(take_a, a_row, b_row), 0)
    last = gl.maximum(gl.where(take_a, last_a, -1), gl.where(take_b, last_b, -1))
    if PAGE_SIZE > 0:
        place = (row // PAGE_SIZE).to(gl.int64) * keys.s_page + (row % PAGE_SIZE).to(gl.int64) * keys.s_row
    else:
        place = row.to(gl.int64) * keys.s_row
    return take_a, take_b, left, place, gl.where(left, last - block * BLOCK, -1)


@gluon.jit
def convert(
    ring, keys, v, cu_k, union, num_pairs, num_tiles, num_kv_heads, capacity,
    PARTS: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Does the converter's share of a program. Half a tile of codes is on its way while another half is written."""
    t = 0
    for i_pair in range(gl.program_id(0), num_pairs, gl.num_programs(0)):
        i_h = i_pair // PARTS % num_kv_heads
        i_tile = i_pair // PARTS // num_kv_heads * 2
        list_a, size_a, _, _, _, seq_a, _, last_a = tile_of(i_tile, i_h, union, cu_k, num_tiles, num_kv_heads)
        list_b, size_b, _, _, _, seq_b, _, last_b = tile_of(i_tile + 1, i_h, union, cu_k, num_tiles, num_kv_heads)
        same = (seq_a == seq_b).to(gl.int32)
        ids_a, ids_b = union.ids + list_a * capacity, union.ids + list_b * capacity
        rows_a, rows_b = union.rows + list_a * capacity, union.rows + list_b * capacity
        x_k, x_v = keys.data + i_h.to(gl.int64) * keys.s_head, v + i_h.to(gl.int64) * keys.s_head
        i_a, i_b = 0, 0
        a, a_row = entry(ids_a, 0, size_a), entry(rows_a, 0, size_a)
        b, b_row = entry(ids_b, 0, size_b), entry(rows_b, 0, size_b)
        take_a, take_b, left, place, limit = next_block(a, a_row, last_a, b, b_row, last_b, same, keys, PAGE_SIZE)
        k_upper = load_codes(x_k, place, limit, keys.s_row, 0)
        k_lower = load_codes(x_k, place, limit, keys.s_row, HALF)
        while left:
            i_a += take_a.to(gl.int32)
            i_b += take_b.to(gl.int32)
            a, a_row = entry(ids_a, i_a, size_a), entry(rows_a, i_a, size_a)
            b, b_row = entry(ids_b, i_b, size_b), entry(rows_b, i_b, size_b)
            v_upper = load_codes(x_v, place, limit, keys.s_row, 0)
            mbarrier.wait(ring.free.index(t % STAGES), t // STAGES & 1 ^ 1)
            write_numbers(k_upper, ring.k.index(t % STAGES), 0)
            v_lower = load_codes(x_v, place, limit, keys.s_row, HALF)
            write_numbers(k_lower, ring.k.index(t % STAGES), HALF)
            take_a, take_b, left, place, limit = next_block(a, a_row, last_a, b, b_row, last_b, same, keys, PAGE_SIZE)
            k_upper = load_codes(x_k, place, limit, keys.s_row, 0)
            write_numbers(v_upper, ring.v.index(t % STAGES), 0)
            k_lower = load_codes(x_k, place, limit, keys.s_row, HALF)
            write_numbers(v_lower, ring.v.index(t % STAGES), HALF)
            fence_async_shared()
            gl.thread_barrier()  # Every thread has written before one says so.
            mbarrier.arrive(ring.full.index(t % STAGES), count=1)
            t += 1


@gluon.jit
def attend(
    ring, queries, keys, values, result, cu_k, union, scale, num_pairs, num_tiles, num_kv_heads, capacity,
    SIDE: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, PARTS: gl.constexpr, NEGATIVE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Does a program's share of attention: the first (SIDE 0) or the second tile of each pair."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUTPUTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, LOGITS, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUTS, 2)
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUTS)
    o_s, o_r = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, gl.SliceLayout(1, MEMORY))
    o_d = gl.arange(0, DIM, gl.SliceLayout(0, MEMORY))
    token = o_s // HEADS
    zero = gl.zeros([ROWS, BLOCK], gl.float32, LOGITS)
    t = 0
    for i_pair in range(gl.program_id(0), num_pairs, gl.num_programs(0)):
        i_part = i_pair % PARTS
        i_h = i_pair // PARTS % num_kv_heads
        i_tile = i_pair // PARTS // num_kv_heads * 2
        i_list, size, whole, first, tokens, i_b, position, _ = tile_of(i_tile + SIDE, i_h, union, cu_k, num_tiles, num_kv_heads)
        i_other, other_size, _, _, _, other_b, _, _ = tile_of(i_tile + 1 - SIDE, i_h, union, cu_k, num_tiles, num_kv_heads)
        same = (i_b == other_b).to(gl.int32)
        ids, other_ids, p_bits = union.ids + i_list * capacity, union.ids + i_other * capacity, union.bits + i_list * capacity

        head = (i_h * GROUP + i_part * HEADS + o_r % HEADS).to(gl.int64)
        row = (first + o_r // HEADS).to(gl.int64)
        m_row = (o_r // HEADS < tokens) & (i_part * HEADS + o_r % HEADS < GROUP) & (size >= 0)
        p_q = queries.data + (row * queries.s_token + head * queries.s_head)[:, None] + o_d[None, :]
        b_q = gl.load(p_q, mask=m_row[:, None], other=0.0)
        x_scale = scale
        if keys.factor is not None:
            x_scale = gl.maximum(scale * gl.load(keys.factor + i_h * keys.s_factor_head), SMALLEST_SCALE)
        if queries.data.dtype.element_ty == gl.bfloat16:
            b_q, x_scale = in_range(b_q, x_scale)
            x_scale = gl.convert_layout(x_scale, ROW)
        else:
            x_scale = gl.zeros([ROWS], gl.float32, ROW) + x_scale
        if NEGATIVE:
            b_q = -b_q.to(gl.float32)
        b_q = gl.convert_layout(b_q.to(gl.float16), QUERIES)
        k_len = gl.load(cu_k + i_b + 1) - gl.load(cu_k + i_b)
        last_key = gl.minimum(position + token, k_len - 1)

        acc = gl.zeros([ROWS, DIM], gl.float32, OUTPUTS)
        m_i, l_i = no_rows(LOGITS)
        i, j = 0, 0
        mine, theirs, bits = entry(ids, 0, size), entry(other_ids, 0, other_size), entry(p_bits, 0, size)
        while (mine < NOTHING) | (theirs < NOTHING):
            take = mine <= theirs if SIDE == 0 else mine < theirs + same
            they_take = theirs < mine + same if SIDE == 0 else theirs <= mine
            block, sees_all = mine, i < whole
            m_member = ((bits >> token) & 1) != 0
            i += take.to(gl.int32)
            j += they_take.to(gl.int32)
            mine, theirs, bits = entry(ids, i, size), entry(other_ids, j, other_size), entry(p_bits, i, size)
            mbarrier.wait(ring.full.index(t % STAGES), t // STAGES & 1)
            if take:
                s = warpgroup_mma(b_q, ring.k.index(t % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                if not sees_all:
                    s = seen(s, block, last_key)
                weights, m_i, l_i, alpha = online_step(
                    s, row_maxima(s), m_i, l_i, x_scale, m_member, WEIGHTS, OUT_ROW, gl.float16
                )
                acc = acc * alpha[:, None]
                acc = warpgroup_mma(weights, ring.v.index(t % STAGES), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                b_q = kept(b_q)
            gl.thread_barrier()  # Every warp has read before one thread says so.
            mbarrier.arrive(ring.free.index(t % STAGES), count=1)
            t += 1

        inverse, b_lse = row_results(m_i, l_i, x_scale)
        if values.factor is not None:
            inverse *= gl.load(values.factor + i_h * values.s_factor_head)
        b_out = (acc * gl.convert_layout(inverse, OUT_ROW)[:, None]).to(result.rows.dtype.element_ty)
        o_out = row * num_kv_heads * GROUP + head
        gl.store(result.rows + o_out[:, None] * DIM + o_d[None, :], gl.convert_layout(b_out, MEMORY), mask=m_row[:, None])
        gl.store(result.lse + o_out, gl.convert_layout(b_lse, gl.SliceLayout(1, MEMORY)), mask=m_row)


@gluon.jit(do_not_specialize=["num_tiles", "capacity"])
def sm90_union_kernel(
    queries,  # QueryRows
    keys,  # KeyRows
    values,  # KeyRows with the strides of `keys`
    result,  # Result
    cu_k,
    union,  # UnionLists; where listed is 0, no tile stays together, not even an empty one
    scale,  # the softmax scale times log2(e), not negative
    num_tiles,
    num_kv_heads,
    capacity,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    NEGATIVE: gl.constexpr,  # whether the softmax scale is negative
    STAGES: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr,
    CONVERT_REGISTERS: gl.constexpr,
):
    """Attends in pairs of union tiles, which the programs share. The grid has as many programs as run at a time."""
    num_pairs = (num_tiles + 1) // 2 * num_kv_heads * PARTS * gl.minimum(gl.load(union.listed), 1)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], gl.float16)
    ring_k = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK, DIM], TILE)
    ring_v = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK, DIM], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    ring = Ring(ring_k, ring_v, full, free)
    SIDE_0: gl.constexpr = 0
    SIDE_1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (attend, (
                ring, queries, keys, values, result, cu_k, union, scale, num_pairs, num_tiles, num_kv_heads, capacity,
                SIDE_0, GROUP, HEADS, PARTS, NEGATIVE, STAGES,
            )),
            (attend, (
                ring, queries, keys, values, result, cu_k, union, scale, num_pairs, num_tiles, num_kv_heads, capacity,
                SIDE_1, GROUP, HEADS, PARTS, NEGATIVE, STAGES,
            )),
            (convert, (
                ring, keys, values.data, cu_k, union, num_pairs, num_tiles, num_kv_heads, capacity, PARTS, PAGE_SIZE, STAGES,
            )),
        ],
        [4, 4],
        [ATTEND_REGISTERS, CONVERT_REGISTERS],
    )  # fmt: skip


def code_rows(rows: KeyRows) -> KeyRows | None:
    """Returns rows of codes that can be read 16 at a time; None where they cannot. Where there is only one page, head or row,
    the stride becomes 16, as it is never used."""
    pages, heads, keys, _ = rows.data.shape
    s_page, s_head = 16 if pages == 1 else rows.s_page, 16 if heads == 1 else rows.s_head
    s_row = 16 if keys == 1 else rows.s_row
    if (rows.data.data_ptr() | s_page | s_head | s_row) % 16 or rows.s_dim != 1 or s_row >= LONGEST_ROW:
        return None
    return rows._replace(s_page=s_page, s_head=s_head, s_row=s_row)


def serves(device: Device, queries: QueryRows, keys: Keys, config: PrefillConfig, block_size: int) -> bool:
    """Tells whether the kernel serves this call: 16-bit queries of dim 128 in tiles of 64 rows; blocks of 128 keys, packed or
    whole in pages; and E4M3 keys and values, laid out alike, a key's codes together, with factors of tensors, of heads or none.
    At dim 64 the exponentials of a tile weigh twice as much, and copies of the keys in 16 bits serve better."""
    rows = config.union_tokens * config.heads
    if device.arch != 90 or (block_size, rows, keys.k.dim) != (BLOCK.value, ROWS.value, DIM.value) or not keys.by_row:
        return False
    if queries.data.dtype not in (torch.bfloat16, torch.float16) or keys.dtype != torch.float8_e4m3fn:
        return False
    if keys.factors_by_page or queries.s_dim != 1:
        return False
    k, v = code_rows(keys.k.rows), code_rows(keys.v.rows)
    return k is not None and v is not None and k[1:5] == v[1:5]  # Strides of pages, heads, rows and elements are one set.


def launch_sm90_union(call: PrefillCall) -> None:
    """Launches attention of the tiles that stay together; the lists must have `listed`."""
    keys, plan, config = call.keys, call.plan, call.config
    launch_kernel(
        sm90_union_kernel,
        (min(ceil_div(plan.num_tiles, 2) * keys.heads * plan.parts, facts(call.result.lse.device).num_sms),),
        call.queries,
        code_rows(keys.k.rows),
        code_rows(keys.v.rows),
        call.result,
        call.bounds.cu_k,
        call.lists.union,
        call.scale,
        plan.num_tiles,
        keys.heads,
        plan.limits.capacity,
        GROUP=plan.group,
        HEADS=config.heads,
        PARTS=plan.parts,
        PAGE_SIZE=keys.page_size,
        NEGATIVE=call.negative,
        **OPTIONS,
    )
