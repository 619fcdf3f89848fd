# SPDX-License-Identifier: MIT
"""Block scores of many e4m3 queries with e4m3 keys on Hopper, in Gluon.

A program holds two tiles of (query, head) rows in the registers from which the matrix unit reads them, and keys come through a
ring of tiles in shared memory. While the unit multiplies one tile of rows, the threads take the maxima of the other:

    unit      top(0)  low(0)  top(1)  low(1)  top(2) ...
    threads           max of  max of  max of  max of
                      top(0)  low(0)  top(1)  low(1) ...

With rows in registers, shared memory moves 96 bytes a clock at the unit's full rate (64 for the product, 32 for the copy engine
that fills the ring); rows in shared memory would take all of its 128. Triton cannot hold them so: `triton_config.tall_rows`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmsa.index_branch import triton_tiles

BLOCK = gl.constexpr(128)
"""Keys of a block, and of a tile."""

sequence_bounds = gluon.jit(triton_tiles.sequence_bounds.fn)


@gluon.jit
def load_rows(
    q, i_row, q_len, i_h, s_qt, s_qh, GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Rows i_row to i_row + ROWS (query i_row // GROUP, head i_h + i_row % GROUP) as left factors, zero past q_len."""
    o_r = i_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    p_q = q + (o_r // GROUP).to(gl.int64) * s_qt + (i_h + o_r % GROUP) * s_qh
    return gl.load(p_q[:, None] + o_d[None, :], mask=(o_r // GROUP < q_len)[:, None], other=0.0)


@gluon.jit
def tile_place(page_row, i_t, here, k_start, MODE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Page of key tile i_t, and its first row there. here: whether there is such a tile."""
    if MODE == 0:
        i_page, i_key = 0, k_start + i_t * BLOCK
    else:
        i_page, i_key = gl.load(page_row + i_t * BLOCK // PAGE_SIZE, mask=here, other=-1), i_t * BLOCK % PAGE_SIZE
    return i_page, i_key


@gluon.jit
def fetch(keys, tiles, full, slot, i_page, i_h, i_key, here):
    """Starts to copy a key tile, if `here`, to its place in the ring."""
    mbarrier.expect(full.index(slot), keys.block_type.nbytes, pred=here)
    tma.async_copy_global_to_shared(keys, [i_page, i_h, i_key, 0], full.index(slot), tiles.index(slot), pred=here)


@gluon.jit
def multiply(b_q, tiles, slot, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Starts the product of rows with a tile of the ring."""
    zero = gl.zeros([b_q.shape[0], BLOCK], gl.float32, LAYOUT)
    b_k = tiles.index(slot).reshape((BLOCK, DIM)).permute((1, 0))
    return warpgroup_mma(b_q, b_k, zero, use_acc=False, is_async=True)


@gluon.jit
def block_maxima(s, i_t, i_full, i_last, LAYOUT: gl.constexpr):
    """Largest product of each row with the keys of tile i_t that it sees: all of them before tile i_full."""
    if i_t < i_full:
        m = gl.max(s, 1)
    else:
        o_k = i_t * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
        m = gl.max(gl.where(o_k[None, :] <= i_last[:, None], s, float("-inf")), 1)
    return m


@gluon.jit
def keep(held, m, i_t, SECTOR: gl.constexpr):
    """Maxima of the last eight blocks, [rows, 8], with those of block i_t."""
    o_8 = gl.arange(0, 8, gl.SliceLayout(0, SECTOR))
    m = gl.convert_layout(m, gl.SliceLayout(1, SECTOR), assert_trivial=True)
    return gl.where((o_8 == i_t % 8)[None, :], m[:, None], held)


@gluon.jit
def scored(held, b_f):
    """Maxima as scores: times the factor of each row (None: 1), and NaN as -inf."""
    held = held if b_f is None else held * b_f[:, None]
    return gl.where(held > float("-inf"), held, float("-inf"))


@gluon.jit
def row_factors(q_scale, k_factor, o_r, i_h, s_qs, s_kf, GROUP: gl.constexpr):
    """What scales of tensors and heads multiply each row of scores by, None if neither has one."""
    b_f = None
    if q_scale is not None:
        b_f = gl.load(q_scale + (i_h * GROUP + o_r % GROUP) * s_qs)
    if k_factor is not None:
        factor = gl.load(k_factor + i_h * s_kf)
        b_f = gl.full(o_r.shape, 1.0, gl.float32, o_r.type.layout) * factor if b_f is None else b_f * factor
    return b_f


@gluon.jit(do_not_specialize=["num_blocks", "capacity", "max_keys", "blocks_per_split"])
def sm90_score_kernel(
    q, q_scale, keys, k_factor, page_table, cu_q, cu_k, seq_lens, q_offset, scores, visible,
    s_qt, s_qh, s_qs, s_kf, s_table, s_sh, s_st, num_blocks, capacity, max_keys, blocks_per_split,
    KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, MODE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    FILL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (splits, row tiles of 32 rows a warp, batch * key heads); late rows, which see most keys, start first.
    blocks_per_split: a multiple of 8."""
    HALF: gl.constexpr = 16 * gl.num_warps()
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
    SECTOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 8, 32])  # rows where PRODUCT has them
    ROW: gl.constexpr = gl.SliceLayout(1, SECTOR)
    i_split = gl.program_id(0)
    i_m = gl.num_programs(1) - 1 - gl.program_id(1)
    i_s, i_h = gl.program_id(2) // KEY_HEADS, gl.program_id(2) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(cu_q, cu_k, seq_lens, q_offset, i_s, capacity, max_keys)
    i_row = i_m * 2 * HALF
    if i_row >= q_len * GROUP:
        return

    seen_by_all = gl.maximum(gl.minimum(offset + i_row // GROUP, k_len - 1) + 1, 0)
    last_token = gl.minimum((i_row + 2 * HALF - 1) // GROUP, q_len - 1)
    seen_by_any = gl.maximum(gl.minimum(offset + last_token, k_len - 1) + 1, 0)
    first = i_split * blocks_per_split
    last = gl.minimum(first + blocks_per_split, num_blocks)
    i_full = seen_by_all // BLOCK
    i_end = gl.minimum(gl.cdiv(seen_by_any, BLOCK), last)
    page_row = page_table
    if MODE != 0:
        page_row += i_s.to(gl.int64) * s_table

    o_top = i_row + gl.arange(0, HALF, ROW)
    o_low = o_top + HALF
    m_top, m_low = o_top < q_len * GROUP, o_low < q_len * GROUP
    if visible is not None:
        for half in gl.static_range(2):
            o_r = o_top + half * HALF
            sees = gl.maximum(gl.minimum(offset + o_r // GROUP, k_len - 1) + BLOCK, 0) // BLOCK
            m_v = (o_r < q_len * GROUP) & (o_r % GROUP == 0) & (i_split + i_h == 0)
            gl.store(visible + q_start + o_r // GROUP, sees, mask=m_v)
    f_top = row_factors(q_scale, k_factor, o_top, i_h, s_qs, s_kf, GROUP)
    f_low = row_factors(q_scale, k_factor, o_low, i_h, s_qs, s_kf, GROUP)
    o_8 = gl.arange(0, 8, gl.SliceLayout(0, SECTOR))
    p_top = (i_h * GROUP + o_top % GROUP).to(gl.int64) * s_sh + (q_start + o_top // GROUP).to(gl.int64) * s_st
    p_low = (i_h * GROUP + o_low % GROUP).to(gl.int64) * s_sh + (q_start + o_low // GROUP).to(gl.int64) * s_st
    p_top = scores + gl.multiple_of(p_top, 4)[:, None] + o_8[None, :]
    p_low = scores + gl.multiple_of(p_low, 4)[:, None] + o_8[None, :]

    if first < i_end:
        tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 1, 1, BLOCK, DIM], keys.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        gl.thread_barrier()
        for i in gl.static_range(STAGES - 1):
            here = first + i < i_end
            i_page, i_key = tile_place(page_row, first + i, here, k_start, MODE, PAGE_SIZE)
            fetch(keys, tiles, full, i, i_page, i_h, i_key, here)
        q += q_start.to(gl.int64) * s_qt
        q_top = load_rows(q, i_row, q_len, i_h * GROUP, s_qt, s_qh, GROUP, DIM, HALF, LEFT)
        q_low = load_rows(q, i_row + HALF, q_len, i_h * GROUP, s_qt, s_qh, GROUP, DIM, HALF, LEFT)
        COLUMN: gl.constexpr = gl.SliceLayout(1, PRODUCT)
        last_top = gl.minimum(offset + (i_row + gl.arange(0, HALF, COLUMN)) // GROUP, k_len - 1)
        last_low = gl.minimum(offset + (i_row + HALF + gl.arange(0, HALF, COLUMN)) // GROUP, k_len - 1)
        held_top = gl.full([HALF, 8], float("-inf"), gl.float32, SECTOR)
        held_low = held_top

        # The compiler knows a product that crosses the end of the loop only if it is the one that all wait for.
        mbarrier.wait(full.index(0), 0)
        top = multiply(q_top, tiles, 0, DIM, PRODUCT)
        gl.thread_barrier()
        slot, phase, free = 0, 0, STAGES - 1
        for i_t in range(first, i_end - 1):
            here = i_t + STAGES - 1 < i_end
            i_page, i_key = tile_place(page_row, i_t + STAGES - 1, here, k_start, MODE, PAGE_SIZE)
            s = warpgroup_mma_wait(0, deps=(top,))
            low = multiply(q_low, tiles, slot, DIM, PRODUCT)
            held_top = keep(held_top, block_maxima(s, i_t, i_full, last_top, PRODUCT), i_t, SECTOR)
            spent = slot
            slot = slot + 1 if slot + 1 < STAGES else 0
            phase = phase ^ (slot == 0)
            mbarrier.wait(full.index(slot), phase)
            top = multiply(q_top, tiles, slot, DIM, PRODUCT)
            gl.thread_barrier()  # every warp has waited for the products of tile i_t - 1
            fetch(keys, tiles, full, free, i_page, i_h, i_key, here)
            gl.thread_barrier()  # here, beside two products, not where the compiler would put it
            free = spent
            gl.store(p_top + i_t // 8 * 8, scored(held_top, f_top), mask=m_top[:, None] & (i_t % 8 == 7))
            s = warpgroup_mma_wait(1, deps=(low,))
            held_low = keep(held_low, block_maxima(s, i_t, i_full, last_low, PRODUCT), i_t, SECTOR)
            gl.store(p_low + i_t // 8 * 8, scored(held_low, f_low), mask=m_low[:, None] & (i_t % 8 == 7))
        i_t = i_end - 1
        s = warpgroup_mma_wait(0, deps=(top,))
        low = multiply(q_low, tiles, slot, DIM, PRODUCT)
        held_top = keep(held_top, block_maxima(s, i_t, i_full, last_top, PRODUCT), i_t, SECTOR)
        s = warpgroup_mma_wait(0, deps=(low,))
        held_low = keep(held_low, block_maxima(s, i_t, i_full, last_low, PRODUCT), i_t, SECTOR)
        m_8 = (i_t // 8 * 8 + o_8 < i_end)[None, :]
        gl.store(p_top + i_t // 8 * 8, scored(held_top, f_top), mask=m_top[:, None] & m_8)
        gl.store(p_low + i_t // 8 * 8, scored(held_low, f_low), mask=m_low[:, None] & m_8)
    if FILL:
        unseen = gl.full([HALF, 8], float("-inf"), gl.float32, SECTOR)
        for i_b in range(gl.maximum(first, i_end), last, 8):
            m_8 = (i_b + o_8 < last)[None, :]
            gl.store(p_top + i_b, unseen, mask=m_top[:, None] & m_8)
            gl.store(p_low + i_b, unseen, mask=m_low[:, None] & m_8)
