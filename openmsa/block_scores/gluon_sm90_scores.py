# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment, misc"
"""Many e4m3 queries are scored with e4m3 keys on Hopper, in Gluon.

A program holds two tiles of (query, head) rows in the registers from which the matrix unit reads them, and keys come through a
ring of tiles in shared memory. While the unit multiplies one tile of rows, the threads take the maxima of the other:

    unit      top(0)  low(0)  top(1)  low(1)  top(2) ...
    threads           max of  max of  max of  max of
                      top(0)  low(0)  top(1)  low(1) ...

With rows in registers, shared memory moves 96 bytes a clock at the unit's full rate (64 for the product, 32 for the copy engine
that fills the ring); rows in shared memory would take all of its 128. Triton cannot hold them so (see
`openmsa.primitives.walks.tall_rows`).

The walk goes by four tiles, the places of the ring, so that places and phases are constants. What each thread found of them is
exchanged between the threads of a row once in four tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

from openmsa.block_scores import triton_route
from openmsa.block_scores.triton_route import Lengths
from openmsa.primitives import scoring
from openmsa.primitives.operands import QueryRows, Scores
from openmsa.primitives.rows import KeyTiles, Tile
from openmsa.primitives.walks import Kind, splits
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import ceil_div, launch_kernel

BLOCK = gl.constexpr(128)
"""A block has so many keys, and a tile is one block."""
sequence_bounds = gluon.jit(scoring.sequence_bounds.fn)
scored = gluon.jit(triton_route.scored.fn)


@gluon.constexpr_function
def four_blocks(num_warps, dims):
    """Gives the layout of maxima of four blocks, [rows, 4], in which rows lie where the matrix unit has them and a thread holds
    two rows of one block; with dims 3, [rows, 4, 4], behind what each of the four threads of a row held before."""
    here = [0] * (dims - 2)
    held = [[0, 1, 0], [0, 2, 0]] if dims == 3 else []
    lanes = [[0, *here, 1], [0, *here, 2], *([1 << i, *here, 0] for i in range(3))]
    warps = [[16 << i, *here, 0] for i in range(num_warps.bit_length() - 1)]
    shape = [16 * num_warps, *([4] * (dims - 1))]
    return gl.DistributedLinearLayout([*held, [8, *here, 0]], lanes, warps, [], shape)


@gluon.jit
def load_rows(q, q_start, i_row, q_len, i_h, GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Loads rows i_row to i_row + ROWS (query q_start + i_row // GROUP, head i_h + i_row % GROUP) as left factors, zero past
    q_len."""
    o_r = i_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    p_q = q.data + q_start.to(gl.int64) * q.s_token
    p_q = p_q + (o_r // GROUP).to(gl.int64) * q.s_token + (i_h + o_r % GROUP) * q.s_head
    return gl.load(p_q[:, None] + o_d[None, :], mask=(o_r // GROUP < q_len)[:, None], other=0.0)


@gluon.jit
def tile_place(page_row, i_t, here, k_start, PAGING: gl.constexpr):
    """Gives the page of key tile i_t, and its first row in it. here: whether there is such a tile."""
    if PAGING.mode == 0:
        i_page, i_key = 0, k_start + i_t * BLOCK
    else:
        i_page = gl.load(page_row + i_t * BLOCK // PAGING.page_size, mask=here, other=-1)
        i_key = i_t * BLOCK % PAGING.page_size
    return i_page, i_key


@gluon.jit
def multiply(b_q, tile, old, never, DIM: gl.constexpr):
    """Starts the product of rows with a tile of the ring. It takes the registers of an older one, `old`, whose maxima are
    taken. never: false, but not a constant: then the compiler would take others, for three products, and run out of them."""
    return warpgroup_mma(b_q, tile.reshape((BLOCK, DIM)).permute((1, 0)), old, use_acc=never, is_async=True)


@gluon.jit
def taken(m):
    """Returns m, computed before what follows. The compiler would put maxima behind later products and run out of registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $2; mov.b32 $1, $3;", "=f,=f,f,f", [m], gl.float32, False, 2)


@gluon.jit
def thread_maxima(s, i_t, i_last, EDGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Takes the largest product of each row in one thread, [rows, 4]; EDGE: some rows do not see all of tile i_t."""
    if EDGE:
        o_k = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
        sees = (i_last - i_t * BLOCK)[:, None] - (o_k & 6)[None, :]  # the part of o_k that differs between threads
        s = gl.where((o_k & ~6)[None, :] <= sees, s, float("-inf"))
    left, right = gl.max(s.reshape([s.shape[0], 16, 8]), 1).reshape([s.shape[0], 4, 2]).split()  # four chains a thread
    return taken(gl.maximum(left, right))


@gluon.jit
def block_maxima(p_0, p_1, p_2, p_3, EXCHANGED: gl.constexpr, FOUR: gl.constexpr):
    """Joins the `thread_maxima` of four tiles to the maxima of their blocks, [rows, 4], a block a thread."""
    parts = gl.join(gl.join(p_0, p_2), gl.join(p_1, p_3)).reshape([p_0.shape[0], 4, 4])
    return gl.convert_layout(gl.max(gl.convert_layout(parts, EXCHANGED), 1), FOUR, assert_trivial=True)


@gluon.jit
def row_factors(q, keys, o_r, i_h, FORM: gl.constexpr, GROUP: gl.constexpr):
    """Gives what scales of tensors and heads multiply each row of scores by, None if neither has one."""
    b_f = None
    if q.factor is not None:
        b_f = gl.load(q.factor + (i_h * GROUP + o_r % GROUP) * q.s_factor_head)
    if FORM.factor == 1:
        factor = gl.load(keys.factor + i_h * keys.s_factor_head)
        b_f = gl.full(o_r.shape, 1.0, gl.float32, o_r.type.layout) * factor if b_f is None else b_f * factor
    return b_f


@gluon.jit(do_not_specialize=["num_blocks", "capacity", "max_keys", "blocks_per_split"])
def sm90_score_kernel(
    q, keys, tma_keys, table, bounds, scores, num_blocks, capacity, max_keys, blocks_per_split,
    KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, FORM: gl.constexpr, PAGING: gl.constexpr,
    FILL: gl.constexpr,
):  # fmt: skip
    """Scores blocks in a grid of (row tiles of 32 rows a warp, splits, batch * key heads), so that programs which run at a time
    read the same keys; late rows, which see most keys, start first. blocks_per_split: a multiple of 8."""
    HALF: gl.constexpr = 16 * gl.num_warps()
    gl.static_assert(HALF % GROUP == 0)  # rows HALF apart are of the same head
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
    FOUR: gl.constexpr = four_blocks(gl.num_warps(), 2)
    EXCHANGED: gl.constexpr = four_blocks(gl.num_warps(), 3)
    ROW: gl.constexpr = gl.SliceLayout(1, FOUR)
    i_m = gl.num_programs(0) - 1 - gl.program_id(0)
    i_split = gl.program_id(1)
    i_s, i_h = gl.program_id(2) // KEY_HEADS, gl.program_id(2) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(bounds, i_s, capacity, max_keys)
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
    page_row = table.ids
    if PAGING.mode != 0:
        page_row += i_s.to(gl.int64) * table.s_sequence

    o_top = i_row + gl.arange(0, HALF, ROW)
    o_low = o_top + HALF
    m_top, m_low = o_top < q_len * GROUP, o_low < q_len * GROUP
    if scores.visible is not None:
        for half in gl.static_range(2):
            o_r = o_top + half * HALF
            sees = gl.maximum(gl.minimum(offset + o_r // GROUP, k_len - 1) + BLOCK, 0) // BLOCK
            m_v = (o_r < q_len * GROUP) & (o_r % GROUP == 0) & (i_split + i_h == 0)
            gl.store(scores.visible + q_start + o_r // GROUP, sees, mask=m_v)
    b_f = row_factors(q, keys, o_top, i_h, FORM, GROUP)
    o_4 = gl.arange(0, 4, gl.SliceLayout(0, FOUR))
    p_top = (i_h * GROUP + o_top % GROUP).to(gl.int64) * scores.s_head
    p_top += (q_start + o_top // GROUP).to(gl.int64) * scores.s_token
    p_top = scores.maxima + gl.multiple_of(p_top, 4)[:, None] + o_4[None, :]
    p_low = p_top + gl.multiple_of(HALF // GROUP * scores.s_token.to(gl.int64), 4)

    if first < i_end:
        tiles, full = (), ()
        for i in gl.static_range(4):  # apart, so that the compiler sees that what is copied to one is not read from another
            tiles += (gl.allocate_shared_memory(gl.float8e4nv, [1, 1, BLOCK, DIM], tma_keys.layout),)
            full += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
            mbarrier.init(full[i], count=1)
        fence_async_shared()
        gl.thread_barrier()
        for i in gl.static_range(3):
            mbarrier.expect(full[i], tma_keys.block_type.nbytes, pred=first + i < i_end)
        gl.thread_barrier()
        for i in gl.static_range(3):
            here = first + i < i_end
            i_page, i_key = tile_place(page_row, first + i, here, k_start, PAGING)
            tma.async_copy_global_to_shared(tma_keys, [i_page, i_h, i_key, 0], full[i], tiles[i], pred=here)
        q_top = load_rows(q, q_start, i_row, q_len, i_h * GROUP, GROUP, DIM, HALF, LEFT)
        q_low = load_rows(q, q_start, i_row + HALF, q_len, i_h * GROUP, GROUP, DIM, HALF, LEFT)

        # The compiler knows a product that crosses the end of the loop only if it is the one that all wait for.
        mbarrier.wait(full[0], 0)
        never = num_blocks < 0
        s_top = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
        s_low = s_top
        top = multiply(q_top, tiles[0], s_top, never, DIM)
        phase = 0
        i_edge = first + gl.maximum(gl.minimum(i_full, i_end - 1) - first, 0) // 4 * 4
        COLUMN: gl.constexpr = gl.SliceLayout(1, PRODUCT)
        last_top, last_low = None, None
        for EDGE in gl.static_range(2):
            if EDGE:
                last_top = gl.minimum(offset + (i_row + gl.arange(0, HALF, COLUMN)) // GROUP, k_len - 1)
                last_low = gl.minimum(offset + (i_row + HALF + gl.arange(0, HALF, COLUMN)) // GROUP, k_len - 1)
            for i_4 in range(i_edge if EDGE else first, i_end if EDGE else i_edge, 4):
                tops, lows = (), ()
                for i in gl.static_range(4):
                    i_t = i_4 + i
                    here = i_t + 3 < i_end
                    i_page, i_key = tile_place(page_row, i_t + 3, here, k_start, PAGING)
                    if i == 3:
                        phase = phase ^ 1
                    if EDGE:
                        mbarrier.wait(full[(i + 1) % 4], phase, pred=i_t + 1 < i_end)
                    s_top = warpgroup_mma_wait(0, deps=(top,))
                    low = multiply(q_low, tiles[i], s_low, never, DIM)
                    if not EDGE:
                        mbarrier.wait(full[(i + 1) % 4], phase)
                    tops += (thread_maxima(s_top, i_t, last_top, EDGE, PRODUCT),)
                    mbarrier.expect(full[(i + 3) % 4], tma_keys.block_type.nbytes, pred=here)
                    top = multiply(q_top, tiles[(i + 1) % 4], s_top, never, DIM)
                    s_low = warpgroup_mma_wait(1, deps=(low,))
                    lows += (thread_maxima(s_low, i_t, last_low, EDGE, PRODUCT),)
                    gl.thread_barrier()  # every warp has waited for the products of tile i_t - 1
                    tma.async_copy_global_to_shared(
                        tma_keys, [i_page, i_h, i_key, 0], full[(i + 3) % 4], tiles[(i + 3) % 4], pred=here
                    )
                m_4 = (i_4 + o_4 < i_end)[None, :]
                m_1 = m_top[:, None] & m_4 if EDGE else m_top[:, None]
                m_2 = m_low[:, None] & m_4 if EDGE else m_low[:, None]
                m = block_maxima(tops[0], tops[1], tops[2], tops[3], EXCHANGED, FOUR)
                gl.store(p_top + i_4, scored(m, b_f), mask=m_1)
                m = block_maxima(lows[0], lows[1], lows[2], lows[3], EXCHANGED, FOUR)
                gl.store(p_low + i_4, scored(m, b_f), mask=m_2)
        warpgroup_mma_wait(0, deps=(top,))
    if FILL:
        unseen = gl.full([HALF, 4], float("-inf"), gl.float32, FOUR)
        for i_b in range(gl.maximum(first, i_end), last, 4):
            m_4 = (i_b + o_4 < last)[None, :]
            gl.store(p_top + i_b, unseen, mask=m_top[:, None] & m_4)
            gl.store(p_low + i_b, unseen, mask=m_low[:, None] & m_4)


SECTOR = 8
"""So many scores are written at a time; splits are multiples of it."""


@dataclass(frozen=True)
class Config:
    """The kernel runs with these numbers. resident: programs that one multiprocessor holds at a time."""

    num_warps: int
    resident: int

    @property
    def rows(self) -> int:
        """Counts the rows of a program: two tiles of 16 rows for each warp."""
        return 32 * self.num_warps


def serves(device: Device, kind: Kind, tile: Tile, rows: int, group: int) -> bool:
    """Says whether the kernel serves so many rows a sequence and key head: e4m3 times e4m3, blocks of 128 keys, and groups of
    heads that divide the rows of a product."""
    factors = kind.narrow and not kind.converted and kind.dim in (64, 128)
    return device.arch == 90 and kind.tma and factors and tile.block == 128 and rows > 64 and 64 % group == 0


CONFIG = Config(num_warps=4, resident=2)
"""A multiprocessor holds two programs of 128 rows: the products of one run while the other does what it cannot overlap."""


def launch(
    queries: QueryRows, keys: KeyTiles, product: Any, lengths: Lengths, scores: Scores, num_blocks: int, device: Device
) -> None:
    """Does what `triton_route.launch` does. product: e4m3. scores: rows that can be written in sectors."""
    view, pool = keys.view, keys.tma
    assert pool is not None
    group = queries.data.shape[1] // view.heads
    row_tiles = ceil_div(lengths.max_seqlen_q * group, CONFIG.rows)
    parts = splits(row_tiles * lengths.batch * view.heads, num_blocks, CONFIG.resident * device.num_sms, SECTOR, SECTOR)
    blocks_per_split = ceil_div(num_blocks, parts * SECTOR) * SECTOR
    layout = gl.NVMMASharedLayout.get_default_for(pool.block_shape, gl.float8e4nv)
    launch_kernel(
        sm90_score_kernel,
        (row_tiles, ceil_div(num_blocks, blocks_per_split), lengths.batch * view.heads),
        queries,
        view.rows,
        TensorDescriptor(pool.base, pool.shape, pool.strides, pool.block_shape, layout),
        view.table,
        lengths.bounds,
        scores,
        num_blocks,
        view.capacity,
        lengths.max_seqlen_k,
        blocks_per_split,
        KEY_HEADS=view.heads,
        GROUP=group,
        DIM=view.dim,
        FORM=view.form,
        PAGING=keys.paging,
        FILL=scores.visible is None,
        num_warps=CONFIG.num_warps,
    )
