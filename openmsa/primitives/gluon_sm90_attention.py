# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Hopper's attention kernels share these Gluon functions. A kernel has two groups of four warps, and each attends with 64 rows.

The first functions pass blocks of 16-bit keys and values from one loading warp to both groups, through a ring of places in
shared memory. Those behind them take the softmax of 64 rows, block by block, in registers: four threads hold a row of a
product, in the layout of its matrix instruction, and sums of weights stay apart, [ROWS, 4], until the last block, so that a
block costs exchanges for its maxima alone. The last ones bring results into the order of memory."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmsa.primitives.rows import tma_strides
from openmsa.runtime.devices import Device

BLOCK = gl.constexpr(128)
"""A block, and a tile of keys in shared memory, has so many keys."""
CACHED = 0.75
"""Keys and values that the L2 cache holds take at most so large a share of it."""
ROWS = gl.constexpr(64)
"""Four warps attend with so many rows, one for each token and head."""


class Ring(NamedTuple):
    """Holds blocks of keys and of values in shared memory, [STAGES, 1, 1, BLOCK, dim] each. Barriers of each place say that its
    keys and that its values have arrived, and that both groups have read its keys and the values of the place before."""

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    free: Any


class Rows(NamedTuple):
    """Holds the queries of both groups in shared memory, [2, 1, tokens, heads, dim]. Barriers of each group say that they have
    arrived and that they have been read."""

    q: Any
    full: Any
    free: Any


@gluon.jit
def ring_of(tma_q, tma_k, tma_v, HEADS: gl.constexpr, DIM_PAD: gl.constexpr, STAGES: gl.constexpr):
    """Allocates a ring of STAGES places and the queries of both groups, with their barriers, which all threads see afterwards.
    HEADS, DIM_PAD: heads of a tile, and elements of a row in shared memory."""
    NUMBER: gl.constexpr = tma_k.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k = gl.allocate_shared_memory(NUMBER, [STAGES, 1, 1, BLOCK, DIM_PAD], tma_k.layout)
    v = gl.allocate_shared_memory(NUMBER, [STAGES, 1, 1, BLOCK, DIM_PAD], tma_v.layout)
    q = gl.allocate_shared_memory(NUMBER, [2, 1, ROWS // HEADS, HEADS, DIM_PAD], tma_q.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return Ring(k, v, k_full, v_full, free), Rows(q, q_full, q_free)


def l2_holds(device: Device, max_seqlen_k: int, num_kv_heads: int, dim: int) -> bool:
    """Says whether the L2 cache holds the 16-bit keys and values of a sequence, beside what else passes through it."""
    return 2 * 2 * dim * num_kv_heads * max_seqlen_k <= CACHED * device.l2_bytes


@gluon.jit
def dealt(i_turn, num_programs):
    """Returns the item that a program takes in one of its turns: in every second round, programs take items from the last
    program back, so that where items change in size from round to round all have about equally many blocks. A program's turns
    follow its own number by multiples of how many programs there are."""
    back = i_turn + num_programs - 1 - 2 * gl.program_id(0)
    return gl.where((i_turn // num_programs) & 1 == 1, back, i_turn)


@gluon.jit
def turns_of(num_items, num_programs):
    """Returns the number of turns of all programs together, for so many items. Some turns of the last round have none."""
    return (num_items + num_programs - 1) // num_programs * num_programs


@gluon.jit
def following(s, phase, STAGES: gl.constexpr):
    """Returns the ring's next place, and whether it has been filled an even (0) or an odd number of times before."""
    last = s == STAGES - 1
    return gl.where(last, 0, s + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def bring(tma_x, page, i_h, at, x, full, s):
    """Starts the copy of a block's keys or values to a place of the ring."""
    mbarrier.expect(full.index(s), tma_x.block_type.nbytes)
    tma.async_copy_global_to_shared(tma_x, [page, i_h, at, 0], full.index(s), x.index(s))


@gluon.jit
def give_back(free, s):
    """Says that the group has read something."""
    gl.thread_barrier()  # Every warp has read before one thread says so.
    mbarrier.arrive(free.index(s), count=1)


@gluon.jit
def pass_by(ring, s, phase, size, STAGES: gl.constexpr):
    """Gives back the blocks of a tile in which the group has no rows."""
    for _ in range(size):
        mbarrier.wait(ring.k_full.index(s), phase)
        mbarrier.wait(ring.v_full.index(s), phase)
        give_back(ring.free, s)
        s, phase = following(s, phase, STAGES)
    return s, phase


@gluon.jit
def stay(x):
    """Does nothing where x is not negative, but in a branch, over which ptxas moves no wait for a product."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ge.s32 p, $1, 0;
        @p bra done;
        nanosleep.u32 1;
        done:
        mov.b32 $0, $1;
        }""",
        "=r,r", [x], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def clear_behind(tile, count, WARPS: gl.constexpr = 4):
    """Overwrites the rows of values behind the first `count` by 0. Groups of so many warps may do so at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    o_n = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(BLOCK // 32):
        rows = tile.slice(part * 32, 32)
        b_x = rows.load(LAYOUT)
        rows.store(gl.where((part * 32 + o_n < count)[:, None], b_x, gl.zeros_like(b_x)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.constexpr_function
def quad_layout():
    """Returns the layout [ROWS, 4] of one number from each of the four threads that hold a row of a product."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def in_threads(x, REDUCE: gl.constexpr):
    """Reduces what each thread holds of each row of a product with 128 columns, to [ROWS, 4]. It goes pair by pair, so that few
    instructions wait for each other. REDUCE: gl.max or gl.sum."""
    x = REDUCE(x.reshape([ROWS, 16, 4, 2]), 3)
    x = REDUCE(x.reshape([ROWS, 2, 8, 4]), 1)
    x = REDUCE(x.reshape([ROWS, 2, 4, 4]), 1)
    x = REDUCE(x.reshape([ROWS, 2, 2, 4]), 1)
    return gl.convert_layout(REDUCE(x, 1), quad_layout(), assert_trivial=True)


@gluon.jit
def seen(s, block, last_key):
    """Replaces logits of keys behind each row's last key by -inf."""
    o_key = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
    return gl.where(o_key[None, :] <= last_key[:, None], s, -float("inf"))


@gluon.jit
def no_rows(LOGITS: gl.constexpr):
    """Returns the greatest logits and the sums of weights before the first block."""
    m_i = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, LOGITS))
    return m_i, gl.zeros([ROWS, 4], gl.float32, quad_layout())


@gluon.jit
def row_maxima(s):
    """Returns the greatest of each row's logits; NaN only where all of them are."""
    return gl.convert_layout(gl.max(in_threads(s, gl.max), 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def online_step(s, largest, m_i, l_i, scale, m_member, WEIGHTS: gl.constexpr, OUT_ROW: gl.constexpr, NUMBER: gl.constexpr):
    """Returns the weights of logits s as a factor of products with values, the new greatest logits and sums of weights, and by
    what earlier sums of values shrink. largest: `row_maxima` of s. scale: one for all, or one for each row. m_member: which
    rows read the block, None for all."""
    QUAD_ROW: gl.constexpr = gl.SliceLayout(1, quad_layout())
    if m_member is None:
        m_new = gl.maximum(m_i, largest)
        offset = m_new * scale
    else:
        m_new = gl.maximum(m_i, gl.where(m_member, largest, -1e30))
        # Queries that did not select the block get an infinite offset, which makes every weight of theirs exactly 0.
        offset = gl.where(m_member, m_new * scale, float("inf"))
    wide = scale[:, None] if scale.type.is_block() else scale
    p = gl.exp2(s * wide - offset[:, None])
    alpha = gl.exp2((m_i - m_new) * scale)
    l_i = l_i * gl.convert_layout(alpha, QUAD_ROW, assert_trivial=True)[:, None] + in_threads(p, gl.sum)
    weights = gl.convert_layout(p.to(NUMBER), WEIGHTS, assert_trivial=True)
    return weights, m_new, l_i, gl.convert_layout(alpha, OUT_ROW, assert_trivial=True)


@gluon.jit
def row_results(m_i, l_i, scale):
    """Returns by what each row's sum of values is multiplied, and its lse, behind the last block."""
    l_row = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout, assert_trivial=True)
    m_any = l_row > 0
    inverse = gl.where(m_any, 1.0 / gl.where(m_any, l_row, 1.0), 0.0)
    b_lse = (m_i * scale + gl.log2(gl.where(m_any, l_row, 1.0))) * 0.6931471805599453
    return inverse, gl.where(m_any, b_lse, l_row - float("inf"))  # The lse of a NaN query is NaN.


@gluon.jit
def kept(x):
    """Returns x of 16 bits, computed anew as far as ptxas can see. Without this, ptxas 12.8 gives the registers of the queries,
    behind their last product in the loop, to the weights, and the next round multiplies those."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


@gluon.constexpr_function
def exchanged(pairs, first, second):
    """Returns the layout [ROWS, pairs] of pairs of columns of a product, but for what the four threads of a row exchange: where
    a thread has pairs 4 (8) apart, it has neighbours (neighbouring twos) instead if `first` (`second`) says so."""
    lanes = [[0, 4 if first else 1], [0, 8 if second else 2], [1, 0], [2, 0], [4, 0]]
    held = [[0, 1 if first else 4], [0, 2 if second else 8], [8, 0], [0, 16], [0, 32]][: 4 + (pairs > 32)]
    return gl.DistributedLinearLayout(held, lanes, [[16, 0], [32, 0]], [], [64, pairs])


@gluon.jit
def words_of(low, high, NUMBER: gl.constexpr):
    """Rounds numbers to words of two 16-bit numbers."""
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == NUMBER else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(CONVERT, "=r,f,f", [low, high], gl.int32, True, 1)


@gluon.jit
def rounded(x, NUMBER: gl.constexpr, IN_QUADS: gl.constexpr = False):
    """Rounds a product [ROWS, dim] to 16 bits. Returns words of two numbers, [ROWS, dim // 2], four neighbouring ones a thread:
    its own (IN_QUADS: of 32 numbers, those at 8 * i + 2 * j and behind it belong to 8 * j + 2 * i), or neighbours in the
    product. These are exchanged in two steps, since Triton would do it at once through shared memory, which has no room."""
    PAIRS: gl.constexpr = x.shape[1] // 2
    low, high = x.reshape([ROWS, PAIRS, 2]).split()
    words = words_of(low, high, NUMBER)
    if IN_QUADS:
        words = words.reshape([ROWS, PAIRS // 16, 4, 4]).permute((0, 1, 3, 2)).reshape([ROWS, PAIRS])
    else:
        words = gl.convert_layout(words, exchanged(PAIRS, True, False))
    return gl.convert_layout(words, exchanged(PAIRS, True, True), assert_trivial=IN_QUADS)


def descriptor(pool: torch.Tensor, box: list[int]) -> TensorDescriptor | None:
    """Describes boxes of a pool ``[pages, heads, rows, columns]`` of 16-bit numbers to the copy engine, in the layout that the
    matrix unit reads; None where the engine cannot read them. box: its size in each dimension."""
    strides = tma_strides(pool)
    if strides is None:
        return None
    kind = gl.bfloat16 if pool.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(pool, list(pool.shape), strides, box, shared_layout(tuple(box), kind))


@functools.cache
def shared_layout(box: tuple[int, ...], kind: Any) -> Any:
    """Returns the layout in shared memory of a box of numbers of this Triton dtype."""
    return gl.NVMMASharedLayout.get_default_for(list(box), kind)
