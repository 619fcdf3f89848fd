# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This Gluon kernel runs dense attention of 16-bit queries, keys and values on Hopper.

A tile is 128 (query token, head of the group) rows of one sequence and KV head, tokens outermost, and a program has three
groups of warps:

    load        one warp brings queries, and blocks of 128 keys and values, through the copy engine
    attend 0    four warps multiply the first 64 rows with the blocks
    attend 1    four warps do the same for the other 64 rows

Queries lie in registers, keys and values in a ring of blocks in shared memory. A group that attends starts the product of its
queries with the next block before it takes the exponentials of this one, and the product of its weights with this block's
values right behind. Programs stay and take one tile after another, those with the most keys first, so that the blocks of a tile
arrive while results of the tile before are written. Where the L2 cache does not hold a sequence's keys and values, all tiles of
a KV head come before those of the next: what the programs read then passes through the cache once a round, and the power that
reading it again from memory would take is left to the products (`docs/log/dense.md`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from openmsa.kv_cache import PagedKV, Stored
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
from openmsa.primitives.operands import Bounds, PageTable, Scores
from openmsa.primitives.rows import pool_of
from openmsa.primitives.softmax import Result
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import launch_kernel, next_power_of_two
from openmsa.types import Layout

OPTIONS: dict[str, Any] = {"STAGES": 3, "ATTEND_REGISTERS": 232, "LOAD_REGISTERS": 40, "num_warps": 4}
"""The ring has STAGES blocks."""
BUSY = 0.85
"""The kernel serves calls whose tiles, taken in rounds, keep at least so large a share of the multiprocessors busy."""

SMALLEST_SCALE = 1e-37
"""A softmax scale of 0 becomes this number, too small to matter, so that masked logits, -inf times the scale, stay -inf."""


class Cut(NamedTuple):
    """Says how work is cut; it is a constant of the kernel.

    group:         query heads of a KV head.
    heads, parts:  heads of the group in a tile, a power of two, and tiles that cover the group.
    dim, dim_pad:  elements of a head, and of a row in shared memory.
    page_size:     keys of a page, 0 where keys are packed.
    """

    group: int
    heads: int
    parts: int
    dim: int
    dim_pad: int
    page_size: int

    @classmethod
    def of(cls, group: int, dim: int, page_size: int) -> Cut:
        """Cuts heads of this dim, so many to a KV head."""
        heads = min(next_power_of_two(group), ROWS.value)
        return cls(group, heads, -(-group // heads), dim, max(next_power_of_two(dim), 64), page_size)

    @property
    def tokens(self) -> int:
        """Counts the queries of a tile."""
        return 2 * ROWS.value // self.heads


class Sizes(NamedTuple):
    """Counts what the programs share: items of work, tiles that the longest sequence has, KV heads, pages of the pool, and keys
    that a sequence has at most."""

    items: Any
    tiles: Any
    num_kv_heads: Any
    num_pages: Any
    capacity: Any


@gluon.jit
def item_at(i_turn, sizes, bounds, CUT: gl.constexpr, CAUSAL: gl.constexpr, HEADS_APART: gl.constexpr):
    """Finds an item of work: a tile, a KV head and a part of its group. Returns part and head; the blocks that some query of
    the tile sees, -1 where the tile has no queries, or the turn no item; the tile's first token and how many it has; its
    sequence, where the sequence's keys start and how many they are; and the position of the first token."""
    TOKENS: gl.constexpr = 2 * ROWS // CUT.heads
    i_item = dealt(i_turn, gl.num_programs(0))
    is_item = i_item < sizes.items
    i_item = gl.minimum(i_item, sizes.items - 1)
    i_part, i_pair = i_item % CUT.parts, i_item // CUT.parts
    tiles, num_kv_heads = sizes.tiles, sizes.num_kv_heads
    i_b, i_rest = i_pair // (tiles * num_kv_heads), i_pair % (tiles * num_kv_heads)
    if HEADS_APART:
        i_h, i_tile = i_rest // tiles, i_rest % tiles
    else:
        i_h, i_tile = i_rest % num_kv_heads, i_rest // num_kv_heads
    i_q0, i_k0 = gl.load(bounds.cu_q + i_b), gl.load(bounds.cu_k + i_b)
    n_q, n_k = gl.load(bounds.cu_q + i_b + 1) - i_q0, gl.load(bounds.cu_k + i_b + 1) - i_k0
    position = n_k - n_q
    if bounds.q_offset is not None:
        position = gl.load(bounds.q_offset + i_b)
    n_k = gl.minimum(n_k, sizes.capacity)
    i_tile = (n_q + TOKENS - 1) // TOKENS - 1 - i_tile
    first = i_tile * TOKENS
    tokens = gl.minimum(n_q - first, TOKENS)
    n_any = n_k  # number of keys that some query of the tile sees
    if CAUSAL:
        n_any = gl.maximum(gl.minimum(n_k, position + first + tokens), 0)
    size = gl.where(is_item & (i_tile >= 0), (n_any + BLOCK - 1) // BLOCK, -1)
    return i_part, i_h, size, i_q0 + first, tokens, i_b, i_k0, n_k, position + first


@gluon.jit
def place_of(table, i_b, i_k0, i, sizes, CUT: gl.constexpr):
    """Returns the page of a block of keys, and the block's first row there."""
    page, at = 0, i_k0 + i * BLOCK
    if CUT.page_size > 0:
        page = gl.load(table.ids + i_b.to(gl.int64) * table.s_sequence + (i * BLOCK // CUT.page_size) * table.s_page)
        page = gl.minimum(gl.maximum(page, 0), sizes.num_pages - 1)
        at = i * BLOCK % CUT.page_size
    return page, at


@gluon.jit
def load(
    ring, rows, tma_q, tma_k, tma_v, bounds, table, sizes,
    CUT: gl.constexpr, CAUSAL: gl.constexpr, HEADS_APART: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Does the loading warp's share of a program: a block's values follow the keys of the next block, as they are read."""
    TOKENS: gl.constexpr = ROWS // CUT.heads
    s, phase, n, any_v = 0, 0, 0, 0
    s_v, page_v, h_v, at_v = 0, 0, 0, 0
    for i_turn in range(gl.program_id(0), turns_of(sizes.items, gl.num_programs(0)), gl.num_programs(0)):
        i_part, i_h, size, first, _, i_b, i_k0, _, _ = item_at(i_turn, sizes, bounds, CUT, CAUSAL, HEADS_APART)
        if size > 0:
            next_page, next_at = place_of(table, i_b, i_k0, 0, sizes, CUT)
            for i in range(size):
                page, at = next_page, next_at
                next_page, next_at = place_of(table, i_b, i_k0, gl.minimum(i + 1, size - 1), sizes, CUT)
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
def store_largest(scores, largest, block, o_score, m_row):
    """Stores each row's largest product with a block, as the softmax has found it; NaN counts as -inf. A maximum passes over
    NaN, so that it is NaN only where all products are."""
    b_x = gl.convert_layout(gl.where(largest == largest, largest, -float("inf")), m_row.type.layout, assert_trivial=True)
    gl.store(scores.maxima + o_score + block.to(gl.int64) * scores.s_block, b_x, mask=m_row)


@gluon.jit
def attend(
    ring, rows, result, scores, bounds, sizes, scale,
    SIDE: gl.constexpr, CUT: gl.constexpr, CAUSAL: gl.constexpr, NEGATIVE: gl.constexpr,
    HEADS_APART: gl.constexpr, STAGES: gl.constexpr,
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
    head_of_row = gl.arange(0, ROWS, ROW) % CUT.heads
    zero = gl.zeros([ROWS, BLOCK], gl.float32, LOGITS)
    q_rows = rows.q.index(SIDE).reshape((ROWS, DIM_PAD))
    s, phase, n = 0, 0, 0
    for i_turn in range(gl.program_id(0), turns_of(sizes.items, gl.num_programs(0)), gl.num_programs(0)):
        i_part, i_h, size, first, tokens, _, _, n_k, position = item_at(i_turn, sizes, bounds, CUT, CAUSAL, HEADS_APART)
        if size >= 0:
            acc = gl.zeros([ROWS, DIM_PAD], gl.float32, OUTPUTS)
            m_i, l_i = no_rows(LOGITS)
            head = i_part * CUT.heads + head_of_row
            m_score = (token < tokens) & (head < CUT.group)
            o_score = (i_h * CUT.group + head).to(gl.int64) * scores.s_head + (first + token).to(gl.int64) * scores.s_token
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
                    last_key, n_all = token * 0 + (n_k - 1), n_k
                    if CAUSAL:
                        last_key = gl.minimum(position + token, n_k - 1)
                        n_all = gl.maximum(gl.minimum(position + SIDE * TOKENS + 1, n_k), 0)
                    whole = n_all // BLOCK  # blocks that every row of the group sees
                    b_s = warpgroup_mma_wait(0, deps=(b_s,))
                    gl.thread_barrier()
                    if NEGATIVE:
                        b_s = -b_s
                    b_s = seen(b_s, 0, last_key)
                    largest = row_maxima(b_s)
                    if scores.maxima is not None:
                        store_largest(scores, largest, size * 0, o_score, m_score)
                    weights, m_i, l_i, alpha = online_step(b_s, largest, m_i, l_i, scale, None, WEIGHTS, OUT_ROW, NUMBER)
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
                        if NEGATIVE:
                            b_s = -b_s
                        if i >= whole:
                            b_s = seen(b_s, i, last_key)
                        largest = row_maxima(b_s)
                        if scores.maxima is not None:
                            store_largest(scores, largest, i, o_score, m_score)
                        p, m_i, l_i, alpha = online_step(b_s, largest, m_i, l_i, scale, None, WEIGHTS, OUT_ROW, NUMBER)
                        q = kept(q)
                        stay(i)
                        acc = warpgroup_mma_wait(0, deps=(acc,))
                        weights = p

                    # 3. The last values follow.
                    give_back(ring.free, s)
                    acc = acc * alpha[:, None]
                    tile = ring.v.index(s).reshape((BLOCK, DIM_PAD))
                    count = n_k - (size - 1) * BLOCK
                    mbarrier.wait(ring.v_full.index(s), phase)
                    if count < BLOCK:  # No other block reaches behind its sequence.
                        clear_behind(tile, count)
                    acc = warpgroup_mma(weights, tile, acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    s, phase = following(s, phase, STAGES)

            # 4. The results are written.
            o_r = gl.arange(0, ROWS, gl.SliceLayout(1, MEMORY))
            o_w = gl.arange(0, DIM_PAD // 2, gl.SliceLayout(0, MEMORY))
            inverse, b_lse = row_results(m_i, l_i, scale)
            words = rounded(acc * gl.convert_layout(inverse, OUT_ROW, assert_trivial=True)[:, None], NUMBER)
            here, o_h = SIDE * TOKENS + o_r // CUT.heads, i_part * CUT.heads + o_r % CUT.heads
            m_row = (here < tokens) & (o_h < CUT.group)
            o_out = ((first + here).to(gl.int64) * sizes.num_kv_heads + i_h) * CUT.group + o_h
            m_out = m_row[:, None]
            if CUT.dim < DIM_PAD:
                m_out = m_out & (o_w < CUT.dim // 2)[None, :]
            p_out = result.rows.to(gl.pointer_type(gl.int32), bitcast=True)
            gl.store(p_out + o_out[:, None] * (CUT.dim // 2) + o_w[None, :], words, mask=m_out)
            gl.store(result.lse + o_out, gl.convert_layout(b_lse, gl.SliceLayout(1, MEMORY), assert_trivial=True), mask=m_row)


@gluon.jit(do_not_specialize=["batch", "tiles", "num_pages", "capacity"])
def sm90_dense_kernel(
    tma_q,  # boxes [1, tokens, heads, dim_pad] of the queries
    tma_k,  # boxes [1, 1, BLOCK, dim_pad]
    tma_v,
    result,  # Result
    scores,  # Scores: maxima hold -inf; None in its place where they are not asked for
    bounds,  # Bounds
    table,  # PageTable
    scale,  # the softmax scale times log2(e), not negative
    batch,
    tiles,
    num_kv_heads,
    num_pages,
    capacity,
    CUT: gl.constexpr,
    CAUSAL: gl.constexpr,
    NEGATIVE: gl.constexpr,
    HEADS_APART: gl.constexpr,  # whether all tiles of a sequence's KV head come before those of the next
    STAGES: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """Attends in tiles, which the programs share. The grid has as many programs as run at a time."""
    sizes = Sizes(batch * tiles * num_kv_heads * CUT.parts, tiles, num_kv_heads, num_pages, capacity)
    ring, rows = ring_of(tma_q, tma_k, tma_v, CUT.heads, CUT.dim_pad, STAGES)
    SIDE_0: gl.constexpr = 0
    SIDE_1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (attend, (ring, rows, result, scores, bounds, sizes, scale, SIDE_0, CUT, CAUSAL, NEGATIVE, HEADS_APART, STAGES)),
            (attend, (ring, rows, result, scores, bounds, sizes, scale, SIDE_1, CUT, CAUSAL, NEGATIVE, HEADS_APART, STAGES)),
            (load, (ring, rows, tma_q, tma_k, tma_v, bounds, table, sizes, CUT, CAUSAL, HEADS_APART, STAGES)),
        ],
        [4, 1],
        [ATTEND_REGISTERS, LOAD_REGISTERS],
    )


def serves(device: Device, q: Tensor, k: Tensor, v: Tensor, page_size: int, seqs: Layout) -> bool:
    """Says whether the kernel serves these queries, and keys and values, packed or (page_size > 0) in a pool: of one 16-bit
    type, dims 40, 48, ... 128, in groups that fill at least three quarters of a tile's heads; pages of whole blocks; enough
    tiles for the multiprocessors."""
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype or v.dtype != q.dtype or page_size % BLOCK.value:
        return False
    heads = k.shape[1]
    cut = Cut.of(q.shape[1] // heads, q.shape[2], page_size)
    if q.shape[2] % 8 or cut.dim_pad > 128 or q.shape[2] <= 32 or 4 * cut.group < 3 * cut.heads * cut.parts:
        return False
    items = seqs.batch * -(-seqs.max_seqlen_q // cut.tokens) * heads * cut.parts
    return items >= BUSY * device.num_sms * -(-items // device.num_sms)


def launched(
    device: Device,
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Layout,
    causal: bool,
    scale: float,
    block_size: int,
    out: Tensor,
    lse: Tensor | None,
    max_score: Tensor | None,
) -> bool:
    """Launches the kernel where it serves the call, and says whether it did.

    scale:           the softmax scale times log2(e).
    out, lse:        contiguous results; lse is None where it is not asked for.
    max_score:       largest scores of blocks of `block_size`, which hold -inf; None where they are not asked for. They need
                     blocks of 128 keys and a positive scale.
    """
    keys, values, table = (k.k, k.v, k.page_table) if isinstance(k, PagedKV) else (k, v, None)
    if not isinstance(q, Tensor) or not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        return False
    page_size = 0 if table is None else keys.shape[2]
    if not serves(device, q, keys, values, page_size, seqs) or out.data_ptr() % 4:
        return False
    if max_score is not None and (block_size != BLOCK.value or scale <= 0):
        return False
    pools = (q[None], *((pool_of(keys), pool_of(values)) if table is None else (keys, values)))
    num_pages, num_kv_heads, page_rows, _ = pools[1].shape
    cut = Cut.of(q.shape[1] // num_kv_heads, q.shape[2], page_size)
    boxes = (1, ROWS.value // cut.heads, cut.heads), (1, 1, BLOCK.value), (1, 1, BLOCK.value)
    tma_q, tma_k, tma_v = (descriptor(pool, [*box, cut.dim_pad]) for pool, box in zip(pools, boxes, strict=True))
    if tma_q is None or tma_k is None or tma_v is None:
        return False
    tiles = -(-seqs.max_seqlen_q // cut.tokens)
    head, token, block = (0, 0, 1) if max_score is None else max_score.stride()
    launch_kernel(
        sm90_dense_kernel,
        (min(seqs.batch * tiles * num_kv_heads * cut.parts, device.num_sms),),
        *(tma_q, tma_k, tma_v),
        Result(out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse is None else lse),
        Scores(max_score, head, token, block),
        Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset),
        PageTable(None) if table is None else PageTable(table, table.stride(0), table.stride(1)),
        max(abs(scale), SMALLEST_SCALE),
        *(seqs.batch, tiles, num_kv_heads, num_pages, page_rows if table is None else table.shape[1] * page_rows),
        CUT=cut,
        CAUSAL=causal,
        NEGATIVE=scale < 0,
        HEADS_APART=not l2_holds(device, seqs.max_seqlen_k, num_kv_heads, q.shape[2]),
        **OPTIONS,
    )
    return True
