# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""These Gluon functions of Hopper's attention kernels pass blocks of 16-bit keys and values from one loading warp to two groups
of four warps, through a ring of places in shared memory, and bring results into the order of memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmsa.primitives.gluon_sm90_softmax import BLOCK, ROWS
from openmsa.primitives.tiles import tma_tiles


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
def clear_behind(tile, count):
    """Overwrites the rows of values behind the first `count` by 0. Both groups may do so at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_n = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(BLOCK // 32):
        rows = tile.slice(part * 32, 32)
        b_x = rows.load(LAYOUT)
        rows.store(gl.where((part * 32 + o_n < count)[:, None], b_x, gl.zeros_like(b_x)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.constexpr_function
def exchanged(pairs, first, second):
    """Returns the layout [ROWS, pairs] of pairs of columns of a product, but for what the four threads of a row exchange: where
    a thread has pairs 4 (8) apart, it has neighbours (neighbouring twos) instead if `first` (`second`) says so."""
    lanes = [[0, 4 if first else 1], [0, 8 if second else 2], [1, 0], [2, 0], [4, 0]]
    held = [[0, 1 if first else 4], [0, 2 if second else 8], [8, 0], [0, 16], [0, 32]][: 4 + (pairs > 32)]
    return gl.DistributedLinearLayout(held, lanes, [[16, 0], [32, 0]], [], [64, pairs])


@gluon.jit
def rounded(x, NUMBER: gl.constexpr):
    """Rounds a product [ROWS, dim] to 16 bits. Returns words of two numbers, [ROWS, dim // 2], four neighbouring ones a thread.
    They are exchanged in two steps, since Triton would do it at once through shared memory, which has no room."""
    PAIRS: gl.constexpr = x.shape[1] // 2
    low, high = x.reshape([ROWS, PAIRS, 2]).split()
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == NUMBER else "cvt.rn.f16x2.f32 $0, $2, $1;"
    words = gl.inline_asm_elementwise(CONVERT, "=r,f,f", [low, high], gl.int32, True, 1)
    words = gl.convert_layout(words, exchanged(PAIRS, False, False), assert_trivial=True)
    words = gl.convert_layout(words, exchanged(PAIRS, True, False))
    return gl.convert_layout(words, exchanged(PAIRS, True, True))


def descriptor(pool: torch.Tensor, box: list[int]) -> TensorDescriptor | None:
    """Describes boxes of a pool ``[pages, heads, rows, columns]`` of 16-bit numbers to the copy engine, in the layout that the
    matrix unit reads; None where the engine cannot read them. box: its size in each dimension."""
    tiles = tma_tiles(pool, box[2], box[3])
    if tiles is None:
        return None
    kind = gl.bfloat16 if pool.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(tiles.base, tiles.shape, tiles.strides, box, gl.NVMMASharedLayout.get_default_for(box, kind))
