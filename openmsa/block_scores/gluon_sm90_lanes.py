# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"
"""Paged NVFP4 keys of 128 elements are scored for up to four rows on Hopper, in Gluon, by the kernel of `triton_lanes` with its
copies placed by hand.

A program is one warp with a ring of one tile, 128 keys, in shared memory. It takes SLOT keys from the ring into registers,
at once sends for those that follow 128 keys later, and only then multiplies, so that nearly all of the ring is always on its
way. Triton's own pipeline sends for keys behind the products, and walks addresses anew for every copy; here a tile has one,
because keys and their scales are contiguous in a page. A program reads the ids of all its pages at its start, one a lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from openmsa.block_scores import triton_lanes, triton_route
from openmsa.block_scores.gluon_sm90_scores import row_factors, sequence_bounds
from openmsa.block_scores.triton_lanes import in_words, words_a_stride
from openmsa.block_scores.triton_route import Lengths
from openmsa.primitives import query_parts
from openmsa.primitives import rows as key_rows
from openmsa.primitives.operands import QueryRows, Scores
from openmsa.primitives.rows import PAGE, KeyTiles, Tile
from openmsa.primitives.walks import splits
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import ceil_div, launch_kernel

BLOCK = gl.constexpr(128)
"""A block has so many keys, and a tile is one block."""
SHARE = gl.constexpr(32)
"""A program has at most so many tiles, as many as a warp has lanes."""
STEP = gl.constexpr(32)
"""So many keys are multiplied at a time."""
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 4))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, 4))
LANES = gl.constexpr([[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]])
ROW = gl.constexpr(gl.DistributedLinearLayout([[8, 0], [16, 0]], LANES, [], [], [32, 4]))
"""In this layout of [STEP, 4] each lane has the products of one row, or the pairs of scales of the elements that it has."""
CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [16, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [], [], [32, 32]
    )
)
"""In this layout of [STEP, 32] each lane has 16 bytes of a key."""
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0]))
COPIED_SCALES = gl.constexpr(gl.BlockedLayout([1, 2], [32, 1], [1, 1], [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
exists = gluon.jit(key_rows.exists.fn)
scale_pairs = gluon.jit(triton_lanes.scale_pairs.fn)
scaled_codes = gluon.jit(triton_lanes.scaled_codes.fn)
power_of_two = gluon.jit(query_parts.power_of_two.fn)


@gluon.jit
def lane_keys(b_k, b_g):
    """Gives keys as `triton_lanes.lane_keys` has them."""
    b_x = scale_pairs(b_g, True)
    b_x = gl.join(b_x, b_x)
    b_x = gl.convert_layout(gl.join(b_x, b_x).reshape([STEP, 32]), CODES, assert_trivial=True)
    return gl.convert_layout(scaled_codes(b_k, b_x), LEFT, assert_trivial=True)


@gluon.jit
def lane_queries(q, q_start, q_len, i_h, GROUP: gl.constexpr, PRODUCT_TYPE: gl.constexpr):
    """Gives the four rows from query q_start on in every second of eight columns, as `triton_lanes.lane_queries` has them."""
    o_e = gl.arange(0, 128, gl.SliceLayout(1, RIGHT))
    o_e = (o_e & 12) * 8 + (o_e & 16) + (o_e & 3) * 4 + (o_e & 32) // 16 + o_e // 64
    o_c = gl.arange(0, 8, gl.SliceLayout(0, RIGHT))
    o_r = o_c // 2
    m_q = (o_c % 2 == 0) & (o_r // GROUP < q_len)
    p_q = q.data + q_start.to(gl.int64) * q.s_token
    p_q += (o_r // GROUP).to(gl.int64) * q.s_token + (i_h * GROUP + o_r % GROUP) * q.s_head
    b_q = gl.load(p_q[None, :] + o_e[:, None], mask=m_q[None, :], other=0.0).to(PRODUCT_TYPE)
    if b_q.dtype == gl.bfloat16:
        largest = gl.max(gl.abs(b_q.to(gl.float32)), 0)
        exponent = gl.minimum(gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) - 127, -126), 127)
        up = 6 - exponent  # up to 132, so it is multiplied in as two factors
        b_q = b_q.to(gl.float32) * power_of_two(up // 2)[None, :] * power_of_two(up - up // 2)[None, :]
        b_f = power_of_two(exponent)
    else:
        b_f = gl.full([8], 64.0, gl.float32, gl.SliceLayout(0, RIGHT))
    b_f = gl.max(b_f.reshape([4, 2]), 1)  # odd columns are zero and have the least factor there is
    return b_q.to(gl.float16), gl.convert_layout(b_f, gl.SliceLayout(0, ROW))


@gluon.jit
def tile_place(keys, p_keys, p_scales, pages, i, i_row, there, num_pages):
    """Gives the addresses of the keys and scales of a tile, which starts with row i_row of the page that lane i has, and
    whether there is such a page and a tile. p_keys, p_scales: where those of the head start."""
    i_page = gl.sum(gl.gather(pages, gl.full([1], i, gl.int32, pages.type.layout), 0), 0)
    there = there & exists(i_page, num_pages)
    i_page = gl.where(there, i_page, 0).to(gl.int64)
    return p_keys + (i_page * keys.s_page + i_row * 32), p_scales + (i_page * keys.s_scales_page + i_row * 2), there


@gluon.jit
def send(p_k, p_g, there, ring, ring_scales, J: gl.constexpr, SWIZZLED: gl.constexpr):
    """Starts to copy the keys of place J of the ring, zero where there are none."""
    SLOT: gl.constexpr = ring.shape[1]
    o_n = J * SLOT + gl.arange(0, SLOT, gl.SliceLayout(1, COPIED))
    p_k += o_n[:, None] * 32 + gl.arange(0, 32, gl.SliceLayout(0, COPIED))[None, :]
    async_copy.async_copy_global_to_shared(ring.index(J), p_k, mask=there)
    o_n = J * SLOT + gl.arange(0, SLOT, gl.SliceLayout(1, COPIED_SCALES))
    o_p = gl.arange(0, 2, gl.SliceLayout(0, COPIED_SCALES))
    if SWIZZLED:
        p_g += (o_n % 32 * 4 + o_n // 32)[:, None] + o_p[None, :] * 128
    else:
        p_g += o_n[:, None] * 2 + o_p[None, :]
    async_copy.async_copy_global_to_shared(ring_scales.index(J), p_g, mask=there)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=triton_route.RUNTIME_LENGTHS)
def sm90_lane_kernel(
    q, keys, table, bounds, scores, num_blocks, num_pages, capacity, max_keys, tiles_per_split,
    KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr, PAGE_SIZE: gl.constexpr, PRODUCT_TYPE: gl.constexpr,
    FILL: gl.constexpr, PDL: gl.constexpr, SLOT: gl.constexpr,
):  # fmt: skip
    """Scores blocks in a grid of (splits, batch * key heads). tiles_per_split: at most `SHARE`. SLOT: keys that are copied at a
    time. A key is 32 words of 16 bits, its scales two of 32, and neighbours lie side by side; strides of scales from page to
    page and head to head count words in both layouts."""
    if PDL:
        gdc_launch_dependents()
    SLOTS: gl.constexpr = BLOCK // SLOT
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i_split, i_s, i_h = gl.program_id(0), gl.program_id(1) // KEY_HEADS, gl.program_id(1) % KEY_HEADS
    first = i_split * tiles_per_split
    last = gl.minimum(first + tiles_per_split, num_blocks)
    o_key = (first + gl.arange(0, SHARE, LANE)) * BLOCK
    m_page = (o_key < last * BLOCK) & (o_key < capacity)
    pages = gl.load(table.ids + i_s.to(gl.int64) * table.s_sequence + o_key // PAGE_SIZE, mask=m_page, other=-1)
    q_start, q_len, _, k_len, offset = sequence_bounds(bounds, i_s, capacity, max_keys)
    o_r = gl.arange(0, 4, gl.SliceLayout(0, ROW))
    m_row = o_r < q_len * GROUP
    i_last = gl.minimum(offset + o_r // GROUP, k_len - 1)
    i_full = gl.maximum(gl.minimum(offset, k_len - 1) + 1, 0) // BLOCK  # tiles that all rows see whole
    seen_by_any = gl.minimum(offset + gl.minimum(3 // GROUP, q_len - 1), k_len - 1) + 1
    i_end = gl.where(q_len > 0, gl.minimum(gl.cdiv(gl.maximum(seen_by_any, 0), BLOCK), last), first)

    ring = gl.allocate_shared_memory(gl.int16, [SLOTS, SLOT, 32], FLAT)
    ring_words = gl.allocate_shared_memory(gl.int32, [SLOTS, SLOT, 2], FLAT)
    ring_scales = ring_words._reinterpret(gl.int16, [SLOTS, SLOT, 4], FLAT)
    p_keys = keys.data + i_h.to(gl.int64) * keys.s_head
    p_scales = keys.scales + i_h.to(gl.int64) * keys.s_scales_head
    p_k, p_g, there = tile_place(keys, p_keys, p_scales, pages, 0, first * BLOCK % PAGE_SIZE, first < i_end, num_pages)
    for j in gl.static_range(SLOTS):
        send(p_k, p_g, there, ring, ring_words, j, FORM.swizzled)

    if scores.visible is not None:
        sees = gl.maximum(i_last + BLOCK, 0) // BLOCK
        gl.store(scores.visible + q_start + o_r // GROUP, sees, mask=m_row & (o_r % GROUP == 0) & (i_split + i_h == 0))
    b_q, b_f = lane_queries(q, q_start, q_len, i_h, GROUP, PRODUCT_TYPE)
    b_x = row_factors(q, keys, o_r, i_h, FORM, GROUP)
    if b_x is not None:
        b_f *= b_x
    o_s = (i_h * GROUP + o_r % GROUP).to(gl.int64) * scores.s_head
    p_s = scores.maxima + (o_s + (q_start + o_r // GROUP).to(gl.int64) * scores.s_token)
    o_k = gl.arange(0, STEP, gl.SliceLayout(1, ROW))
    nothing = gl.zeros([STEP, 8], gl.float32, PRODUCT)
    for i_t in range(first, i_end):
        i_next = i_t + 1
        p_k, p_g, there = tile_place(
            keys, p_keys, p_scales, pages, i_next - first, i_next * BLOCK % PAGE_SIZE, i_next < i_end, num_pages
        )  # fmt: skip
        best = gl.full([STEP, 4], float("-inf"), gl.float32, ROW)
        for j in gl.static_range(SLOTS):
            async_copy.wait_group(SLOTS - 1)
            codes, groups = (), ()
            for i in gl.static_range(SLOT // STEP):
                codes += (ring.index(j).slice(i * STEP, STEP, 0).load(CODES),)
                groups += (ring_scales.index(j).slice(i * STEP, STEP, 0).load(ROW),)
            send(p_k, p_g, there, ring, ring_words, j, FORM.swizzled)
            for i in gl.static_range(SLOT // STEP):
                s = mma_v2(lane_keys(codes[i], groups[i]), b_q, nothing)
                s = gl.convert_layout(s.reshape([STEP, 4, 2]).split()[0], ROW, assert_trivial=True)
                if i_t >= i_full:
                    s = gl.where((i_t * BLOCK + (j * SLOT + i * STEP) + o_k)[:, None] <= i_last[None, :], s, float("-inf"))
                best = gl.maximum(best, s)
        m = gl.max(best, 0) * 256.0 * b_f  # see `openmsa.primitives.query_parts.raised`
        m = gl.where(m > float("-inf"), m, float("-inf"))
        gl.store(p_s + i_t.to(gl.int64) * scores.s_block, m, mask=m_row, eviction_policy="evict_last")
    async_copy.wait_group(0)
    if FILL:
        unseen = gl.full([4], float("-inf"), gl.float32, gl.SliceLayout(0, ROW))
        for i_b in range(gl.maximum(first, i_end), last):
            gl.store(p_s + i_b.to(gl.int64) * scores.s_block, unseen, mask=m_row)


RING = BLOCK.value * (64 + 8)  # bytes of a program's ring: codes and scales


@dataclass(frozen=True)
class Config:
    """The kernel runs with these numbers. slot: keys that are copied at a time; max_registers: of a thread; resident: programs
    that a multiprocessor holds; share: tiles of a program at most."""

    slot: int
    max_registers: int
    resident: int
    share: int


CONFIG = Config(slot=32, max_registers=128, resident=16, share=8)
"""A quarter of a multiprocessor has registers for four warps of 128. Programs are twice as many as are resident, so that they
do not all start at once."""


def serves(device: Device, keys: KeyTiles, queries: QueryRows, tile: Tile, rows: int, lanes: bool) -> bool:
    """Says whether the kernel serves so many rows a sequence and key head: keys that `triton_lanes` reads (lanes), in pages of
    whole blocks of 128, keys and scales contiguous in a page, at addresses that 16 bytes are copied from."""
    if device.arch != 90 or not lanes or rows > 4 or keys.paging.mode != PAGE or tile.block != BLOCK.value:
        return False
    own, form = keys.view.rows, keys.view.form
    words, row = words_a_stride(own, form), 1 if form.swizzled else 2
    close = (own.s_row, own.s_dim, own.s_scales_row * words) == (32, 1, row) and queries.s_dim == 1
    even = (own.s_page | own.s_head | own.s_scales_page * words | own.s_scales_head * words) % 16 == 0
    assert own.scales is not None
    return close and even and own.data.data_ptr() % 16 == 0 and own.scales.data_ptr() % 16 == 0


def cut(programs: int, tiles: int, num_sms: int) -> int:
    """Says how many tiles a program has, where `programs` of them would walk `tiles` each if contexts were not cut."""
    parts = splits(programs, tiles, CONFIG.resident * num_sms, 1)
    return min(ceil_div(tiles, parts), CONFIG.share)


def launch(
    queries: QueryRows,
    keys: KeyTiles,
    product: Any,
    lengths: Lengths,
    scores: Scores,
    num_blocks: int,
    device: Device,
    pdl: bool = False,
) -> None:
    """Does what `triton_route.launch` does. product: the Triton dtype of factors elsewhere, through which queries pass here
    too."""
    view = keys.view
    programs = lengths.batch * view.heads
    share = cut(programs, num_blocks, device.num_sms)
    rows = in_words(view.rows, view.form)
    if view.form.swizzled:  # strides of swizzled scales count rows of two words
        rows = rows._replace(s_scales_page=2 * rows.s_scales_page, s_scales_head=2 * rows.s_scales_head)
    launch_kernel(
        sm90_lane_kernel,
        (ceil_div(num_blocks, share), programs),
        queries,
        rows,
        view.table,
        lengths.bounds,
        scores,
        num_blocks,
        view.num_pages,
        view.capacity,
        lengths.max_seqlen_k,
        share,
        KEY_HEADS=view.heads,
        GROUP=queries.data.shape[1] // view.heads,
        FORM=view.form,
        PAGE_SIZE=view.page_size,
        PRODUCT_TYPE=product,
        FILL=scores.visible is None,
        PDL=pdl,
        SLOT=CONFIG.slot,
        num_warps=1,
        maxnreg=CONFIG.max_registers,
    )
