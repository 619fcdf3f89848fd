# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This Gluon kernel attends to E4M3 keys and values by key blocks on Hopper. It is the kernel of `gluon_sm90_outer.py` with
two more warps, which bring keys and values in place of the copy engine: the loading warp names the place of each item (`name`),
and they read its codes and write them to shared memory as numbers of the queries' type (`convert`), once for all queries that
read the block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from openmsa.primitives.gluon_sm90_attention import BLOCK
from openmsa.primitives.gluon_sm90_codes import DIM, TO_BF16, TO_FP16, code_layout, code_rows, load_codes, write_numbers
from openmsa.primitives.softmax import Partials
from openmsa.runtime.devices import Device
from openmsa.sparse_attention.gluon_sm90_outer import attend, boxes_of_queries, launch_sm90_outer, load, memory_of
from openmsa.sparse_attention.triton_config import Keys
from openmsa.sparse_attention.triton_keys import SMALLEST_SCALE
from openmsa.sparse_attention.triton_lists import OuterLists, Plan, PrefillCall

SERVES = False
"""Whether it serves calls: not before a GPU has run it."""
STEP = gl.constexpr(8)
"""So many keys of a block are converted at a time; the registers of the converting warps have no room for more."""


class Held(NamedTuple):
    """Holds the keys and values of two items in shared memory, as `Held` of `gluon_sm90_outer.py` does.

    where:    int32, for each place the page, the first row, the head and the number of keys (`name`).
    factors:  float32, those of the place's keys and values; they are written together with `where`.
    named:    barriers, which say that both are written.
    """

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    free: Any
    where: Any
    factors: Any
    named: Any


@gluon.jit
def factor_of(rows, head):
    """Loads the factor of a head's keys or values, 1 where they have none."""
    if rows.factor is None:
        return head.to(gl.float32) * 0 + 1
    else:
        return gl.load(rows.factor + head * rows.s_factor_head)


@gluon.jit
def name(held, s, page, head, at, count, keys, values):
    """Names the item of place s: `count` keys of a head, from row `at` of a page on; page -1 says that there are no more."""
    o_f = gl.arange(0, 4, gl.BlockedLayout([1], [32], [1], [0]))
    b_where = gl.where(o_f == 0, page, gl.where(o_f == 1, at, gl.where(o_f == 2, head, count)))
    held.where.index(s).store(b_where)
    held.factors.index(s).store(gl.where(o_f == 0, factor_of(keys, head), factor_of(values, head)))
    gl.thread_barrier()  # All lanes have written before one says so.
    mbarrier.arrive(held.named.index(s), count=1)


@gluon.jit
def field(words, PLACE: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Loads one of the four words of a place."""
    b_w = words.load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    o_f = gl.arange(0, 4, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    return gl.sum(gl.where(o_f == PLACE, b_w, b_w * 0), 0)


@gluon.jit
def convert(held, keys, values):
    """Does the converting warps' share of a program. Codes of the next keys are on their way while others are converted."""
    CODES: gl.constexpr = code_layout(STEP, 2)
    CONVERT: gl.constexpr = TO_BF16 if gl.bfloat16 == held.k.dtype else TO_FP16
    n = 0
    mbarrier.wait(held.named.index(0), 0)
    page = field(held.where.index(0), 0, 2)
    while page >= 0:
        s = n & 1
        at, head = field(held.where.index(s), 1, 2).to(gl.int64), field(held.where.index(s), 2, 2).to(gl.int64)
        limit = field(held.where.index(s), 3, 2) - 1
        for part in gl.static_range(2):
            x = keys if part == 0 else values
            place = page.to(gl.int64) * x.s_page + head * x.s_head + at * x.s_row
            tile = (held.k if part == 0 else held.v).index(s).reshape((BLOCK, DIM))
            words = load_codes(x.data, place, limit, x.s_row, 0, CODES)
            for i in gl.static_range(BLOCK // STEP):
                ahead = words
                if i + 1 < BLOCK // STEP:
                    ahead = load_codes(x.data, place, limit, x.s_row, (i + 1) * STEP, CODES)
                write_numbers(words, tile, i * STEP, CONVERT)
                words = ahead
            fence_async_shared()
            gl.thread_barrier()  # Every thread has written before one says so.
            mbarrier.arrive((held.k_full if part == 0 else held.v_full).index(s), count=1)
        n += 1
        mbarrier.wait(held.named.index(n & 1), n >> 1 & 1)
        page = field(held.where.index(n & 1), 0, 2)


@gluon.jit
def load_by_name(
    ring, held, tma_q, keys, values, bounds, table, tiles, outer, taken, i_chunk, chunk_tiles, chunk_entries, item_bound,
    num_kv_heads, num_pages, CUT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Does the loading warp's share of a program."""
    n = load(
        ring, held, tma_q, keys, values, bounds, table, tiles, outer, taken, i_chunk, chunk_tiles, chunk_entries, item_bound,
        num_kv_heads, num_pages, name, CUT, STAGES,
    )  # fmt: skip
    mbarrier.wait(held.free.index(n & 1), n >> 1 & 1 ^ 1)
    name(held, n & 1, n * 0 - 1, n * 0, n, n, keys, values)


@gluon.jit
def factors_of(held, s, scale):
    """Returns the softmax scale of an item and what its results are multiplied by."""
    x_scale = gl.maximum(scale * field(held.factors.index(s), 0, 4), SMALLEST_SCALE)
    return x_scale, field(held.factors.index(s), 1, 4)


@gluon.jit(do_not_specialize=["i_chunk", "chunk_tiles", "chunk_entries", "item_bound", "num_pages"])
def sm90_outer_codes_kernel(
    tma_q,  # boxes [1, 1, group, HALF] of the queries
    keys,  # KeyRows
    values,
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
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring, plain = memory_of(tma_q, CUT, STAGES)
    where = gl.allocate_shared_memory(gl.int32, [2, 4], LINE)
    factors = gl.allocate_shared_memory(gl.float32, [2, 4], LINE)
    named = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(named.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    held = Held(plain.k, plain.v, plain.k_full, plain.v_full, plain.free, where, factors, named)
    SIDE_0: gl.constexpr = 0
    SIDE_1: gl.constexpr = 1
    SIDE_2: gl.constexpr = 2
    FACTORS: gl.constexpr = factors_of
    gl.warp_specialize(
        [
            (attend, (ring, held, partials, scale, SIDE_0, FACTORS, CUT, STAGES)),
            (attend, (ring, held, partials, scale, SIDE_1, FACTORS, CUT, STAGES)),
            (attend, (ring, held, partials, scale, SIDE_2, FACTORS, CUT, STAGES)),
            (load_by_name, (
                ring, held, tma_q, keys, values, bounds, table, tiles, outer, taken, i_chunk, chunk_tiles, chunk_entries,
                item_bound, num_kv_heads, num_pages, CUT, STAGES,
            )),
            (convert, (held, keys, values)),
        ],
        [4, 4, 1, 2],
        [ATTEND_REGISTERS, ATTEND_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def outer_launch(
    device: Device, q: torch.Tensor, keys: Keys, plan: Plan
) -> Callable[[PrefillCall, OuterLists, Partials, int], None] | None:
    """Returns the launch of a chunk; None where the kernel does not serve the call: beside what `boxes_of_queries` asks for, it
    needs E4M3 keys and values, a key's 128 codes together, with factors of tensors, of heads or none."""
    if not SERVES or keys.dtype != torch.float8_e4m3fn or keys.factors_by_page:
        return None
    tma_q, codes = boxes_of_queries(device, q, keys, plan), (code_rows(keys.k.rows), code_rows(keys.v.rows))
    if tma_q is None or None in codes:
        return None
    return functools.partial(launch_sm90_outer, sm90_outer_codes_kernel, (tma_q, *codes))
