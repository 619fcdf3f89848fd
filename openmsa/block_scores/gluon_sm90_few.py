# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"
"""Paged 16-bit keys are scored for up to sixteen rows a sequence on Hopper, in Gluon, at the rate of memory.

A program is one warp with a ring of one tile, 128 keys, in shared memory. It takes a slot of keys from the ring into registers,
at once sends for those that follow a tile later, and only then multiplies, so that nearly all of the ring is always on its way.
A multiprocessor holds as many programs as rings, and where one begins or ends the others keep memory busy.

The tiles of all sequences are one list, of which each program has a part, so that one long sequence among short ones takes no
longer than its keys. Each program adds up the lengths and finds its tiles, of which a lane holds one.

A decode step may ask that scores be handed on: the kernel behind this one, whose programs run already, then finds each score as
soon as it is there (`openmsa.decode.gluon_sm90_best`), and the blocks that are selected whatever they score are not scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.block_scores.gluon_sm90_scores import sequence_bounds
from openmsa.kv_cache import Stored
from openmsa.primitives import rows as key_rows
from openmsa.primitives.operands import PLAIN, Bounds, QueryRows, Scores
from openmsa.primitives.rows import PAGE, KeyTiles, Tile, query_rows
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import launch_kernel, next_power_of_two

BLOCK = gl.constexpr(128)
"""A block has so many keys, and a tile is one block."""
SHARE = gl.constexpr(32)
"""A program holds so many tiles, one a lane."""
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, 2))
LANE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
RING = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
ABSENT = gl.constexpr(0x7FEDCBA9)
"""These are the bits of a score that has not been handed on yet, a quiet NaN, which no score is."""
STORE = gl.constexpr(
    """{.reg .pred p, first; .reg .b32 lane; .reg .b64 kept;
    createpolicy.fractional.L2::evict_last.b64 kept, 1.0;
    mov.u32 lane, %laneid;
    setp.lt.u32 first, lane, 4;
    setp.ne.and.s32 p, $3, 0, first;
    @p st.relaxed.gpu.global.L2::cache_hint.b32 [$1], $2, kept;
    mov.b32 $0, 0;}"""
)
"""Stores $2 at $1 where $3 is not 0, for other programs that load at the same time, and keeps it in the L2 cache. The first
four lanes do so: they hold what is found of all columns of a PRODUCT."""
exists = gluon.jit(key_rows.exists.fn)


@gluon.constexpr_function
def bits(count):
    """Gives the number of halvings of a power of two."""
    return count.bit_length() - 1


@gluon.jit
def add(x, y):
    """Adds two numbers."""
    return x + y


@gluon.jit
def part(i_p, total, ROUNDS: gl.constexpr):
    """Gives where the part of a program begins in a list of fewer than 2**24 tiles. Where programs are more than tiles, as many
    as are resident have equal parts. Otherwise parts shrink evenly from program to program, so that programs which begin
    together do not end together, and the last ones are short."""
    programs = gl.num_programs(0)
    few = gl.maximum(gl.minimum(programs // ROUNDS, total), 1)
    equal = gl.minimum(i_p, few) * (total // few) + gl.minimum(i_p, total % few)
    left = (programs - i_p).to(gl.float32) / programs.to(gl.float32)  # Quotients are not exact.
    shrinking = gl.where(i_p > 0, total - (left * left * total.to(gl.float32)).to(gl.int32), 0)
    return gl.where(total < programs, equal, shrinking)


@gluon.jit
def tiles_seen(i_b, bounds, capacity, max_keys, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """Gives how many tiles some row of each of these sequences sees."""
    _, q_len, _, k_len, offset = sequence_bounds(bounds, i_b, capacity, max_keys)
    keys = gl.minimum(offset + gl.minimum((ROWS - 1) // GROUP, q_len - 1), k_len - 1) + 1
    return gl.where(q_len > 0, gl.cdiv(gl.maximum(keys, 0), BLOCK), 0)


@gluon.jit
def find_tiles(i_first, i_stop, ends, counts, table, bounds, capacity, max_keys, PAGE_SIZE: gl.constexpr):
    """Gives the tiles i_first to i_stop of the list, one a lane: page, number in the sequence, and the sequence's first query,
    queries, keys and position. counts: tiles of each sequence; ends: where they end in the list."""
    o_t = i_first + gl.arange(0, SHARE, LANE)
    i_b = gl.zeros([SHARE], gl.int32, LANE)
    half = gl.full([], ends.shape[0] // 2, gl.int32)
    for _ in gl.static_range(bits(ends.shape[0])):
        i_b = gl.where(gl.gather(ends, i_b + half - 1, 0) <= o_t, i_b + half, i_b)
        half = half // 2
    i_t = o_t - (gl.gather(ends, i_b, 0) - gl.gather(counts, i_b, 0))
    p_page = table.ids + i_b.to(gl.int64) * table.s_sequence + i_t * BLOCK // PAGE_SIZE
    page = gl.load(p_page, mask=o_t < i_stop, other=-1)
    i_b = gl.where(o_t < i_stop, i_b, 0)
    q_start, q_len, _, k_len, offset = sequence_bounds(bounds, i_b, capacity, max_keys)
    return page, i_t, q_start, q_len, k_len, offset


@gluon.jit
def tile_offset(keys, i_page, i_t, there, PAGE_SIZE: gl.constexpr):
    """Says how far the keys of a tile, if it is there, lie behind the first of their head."""
    i_row = (i_t * BLOCK % PAGE_SIZE).to(gl.int64)
    return gl.where(there, i_page, 0).to(gl.int64) * keys.s_page + i_row * keys.s_row


@gluon.jit
def pick(x, i):
    """Gives what lane i has."""
    return gl.sum(gl.gather(x, gl.full([1], i, gl.int32, x.type.layout), 0), 0)


@gluon.jit
def send(p_k, there, ring, J: gl.constexpr, s_row):
    """Starts to copy the keys of place J of the ring, zero where there are none."""
    SLOT: gl.constexpr = ring.shape[1]
    DIM: gl.constexpr = ring.shape[2]
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [1, 1], [1, 0])
    o_n = J * SLOT + gl.arange(0, SLOT, gl.SliceLayout(1, COPIED))
    p_k += (o_n * s_row)[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, COPIED))[None, :]
    async_copy.async_copy_global_to_shared(ring.index(J), p_k, mask=there)
    async_copy.commit_group()


@gluon.jit
def store_score(p_score, score, mask, HANDED: gl.constexpr):
    """Stores the best of all rows of a PRODUCT. HANDED: for programs that look for them at the same time."""
    if HANDED:
        word = score.to(gl.int32, bitcast=True)
        gl.inline_asm_elementwise(STORE, "=r,l,r,r", [p_score, word, mask.to(gl.int32)], gl.int32, False, 1)
    else:
        gl.store(p_score, score, mask=mask, eviction_policy="evict_last")


@gluon.jit
def few_queries(q, q_start, q_len, i_h, GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr):
    """Gives the rows from query q_start on as columns [DIM, ROWS], zero where there are none."""
    o_e = gl.arange(0, DIM, gl.SliceLayout(1, RIGHT))
    o_r = gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT))
    p_q = q.data + q_start.to(gl.int64) * q.s_token
    p_q += (o_r // GROUP).to(gl.int64) * q.s_token + (i_h * GROUP + o_r % GROUP) * q.s_head
    return gl.load(p_q[None, :] + o_e[:, None], mask=(o_r // GROUP < q_len)[None, :], other=0.0)


@gluon.jit(do_not_specialize=["batch", "num_pages", "capacity", "max_keys"])
def sm90_few_kernel(
    q, keys, table, bounds, scores, batch, num_pages, capacity, max_keys,
    GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, BATCH: gl.constexpr, PAGE_SIZE: gl.constexpr,
    PDL: gl.constexpr, SLOT: gl.constexpr, ROUNDS: gl.constexpr, HANDED: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    """Scores blocks in a grid of (programs, key heads). ROWS: columns of the product, 8 or 16. BATCH: sequences at most. PDL:
    as in `triton_route.score_kernel`. SLOT: keys that are copied at a time. ROUNDS: as in `part`. HANDED: as in `store_score`;
    `visible` is not written then. LOCAL: so many blocks at the end of what a row sees have no score. Scores of blocks that a
    row does not see are not written."""
    if PDL == 2:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    SLOTS: gl.constexpr = BLOCK // SLOT
    ELEMENT: gl.constexpr = keys.data.dtype.element_ty
    # 1. The program finds its part of the list of tiles.
    i_p, i_h = gl.program_id(0), gl.program_id(1)
    o_b = gl.arange(0, BATCH, gl.BlockedLayout([BATCH // 32], [32], [1], [0]))
    counts = tiles_seen(gl.minimum(o_b, batch - 1), bounds, capacity, max_keys, GROUP, ROWS)
    counts = gl.where(o_b < batch, gl.maximum(counts - LOCAL, 0), 0)
    ends = gl.associative_scan(counts, 0, add)
    total = gl.max(ends, 0)
    first, stop = part(i_p, total, ROUNDS), part(i_p + 1, total, ROUNDS)
    o_r = gl.arange(0, ROWS, gl.SliceLayout(0, PRODUCT))
    if not HANDED:
        for i_b in range(gl.where(i_h == 0, i_p, batch), batch, gl.num_programs(0)):
            v_start, v_len, _, v_keys, v_offset = sequence_bounds(bounds, i_b, capacity, max_keys)
            sees = gl.maximum(gl.minimum(v_offset + o_r // GROUP, v_keys - 1) + BLOCK, 0) // BLOCK
            gl.store(scores.visible + v_start + o_r // GROUP, sees, mask=(o_r < v_len * GROUP) & (o_r % GROUP == 0))
    tiles = stop - first
    if tiles <= 0:
        return
    pages, tile, starts, lens, k_lens, offsets = find_tiles(
        first, stop, ends, counts, table, bounds, capacity, max_keys, PAGE_SIZE
    )  # fmt: skip

    # 2. It sends for its first tile, and meanwhile loads that tile's queries.
    ring = gl.allocate_shared_memory(ELEMENT, [SLOTS, SLOT, DIM], RING)
    p_keys = keys.data + i_h.to(gl.int64) * keys.s_head
    i_t, q_start, q_len, k_len, offset = pick(tile, 0), pick(starts, 0), pick(lens, 0), pick(k_lens, 0), pick(offsets, 0)
    i_page = pick(pages, 0)
    there = exists(i_page, num_pages)
    p_k = p_keys + tile_offset(keys, i_page, i_t, there, PAGE_SIZE)
    for j in gl.static_range(SLOTS):
        send(p_k, there, ring, j, keys.s_row)
    b_q = few_queries(q, q_start, q_len, i_h, GROUP, DIM, ROWS)
    o_k = gl.arange(0, SLOT, gl.SliceLayout(1, PRODUCT))
    o_s = scores.maxima + (i_h * GROUP + o_r % GROUP).to(gl.int64) * scores.s_head
    nothing = gl.zeros([SLOT, ROWS], gl.float32, PRODUCT)

    # 3. It scores tile after tile, one ahead of which keys and queries are on their way.
    for i in range(tiles):
        following = i + 1
        if following % SHARE == 0:
            pages, tile, starts, lens, k_lens, offsets = find_tiles(
                first + following, stop, ends, counts, table, bounds, capacity, max_keys, PAGE_SIZE
            )  # fmt: skip
        at, more = following % SHARE, following < tiles
        i_page, n_t, n_start, n_len = pick(pages, at), pick(tile, at), pick(starts, at), pick(lens, at)
        n_k_len, n_offset = pick(k_lens, at), pick(offsets, at)
        there = more & exists(i_page, num_pages)
        p_k = p_keys + tile_offset(keys, i_page, n_t, there, PAGE_SIZE)
        b_next = few_queries(q, n_start, gl.where(more, n_len, 0), i_h, GROUP, DIM, ROWS)
        i_last = gl.minimum(offset + o_r // GROUP, k_len - 1)
        whole = (i_t + 1) * BLOCK <= gl.minimum(offset, k_len - 1) + 1  # whether all rows see all keys
        best = gl.full([SLOT, ROWS], float("-inf"), gl.float32, PRODUCT)
        for j in gl.static_range(SLOTS):
            async_copy.wait_group(SLOTS - 1)
            b_k = ring.index(j).load(LEFT)
            send(p_k, there, ring, j, keys.s_row)
            s = mma_v2(b_k, b_q, nothing)
            if not whole:
                s = gl.where((i_t * BLOCK + j * SLOT + o_k)[:, None] <= i_last[None, :], s, float("-inf"))
            best = gl.maximum(best, s)
        m = gl.max(best, 0)
        m = gl.where(m > float("-inf"), m, float("-inf"))  # NaN is no score
        p_s = o_s + (q_start + o_r // GROUP).to(gl.int64) * scores.s_token + i_t.to(gl.int64) * scores.s_block
        store_score(p_s, m, (o_r < q_len * GROUP) & (i_last >= (i_t + LOCAL) * BLOCK), HANDED)
        b_q, i_t, q_start, q_len, k_len, offset = b_next, n_t, n_start, n_len, n_k_len, n_offset
    async_copy.wait_group(0)


@dataclass(frozen=True)
class Config:
    """The kernel runs with these numbers. slot: keys that are copied at a time; resident: programs that a multiprocessor holds;
    rounds: so many times as many are launched, so that a slow multiprocessor makes fewer."""

    slot: int
    resident: int
    rounds: int


CONFIG = Config(slot=32, resident=6, rounds=3)
MOST_ROWS = 16
LEAST_BATCH = 16
"""Fewer sequences are scored as fast by `triton_route.score_kernel`, whose programs find their tiles sooner."""
MOST_BATCH = 256
"""Each program adds up the lengths of so many sequences at most; with 512 of 1K keys that costs what the kernel gains."""


def serves(
    device: Device, keys: KeyTiles, queries: QueryRows, tile: Tile, rows: int, batch: int, visible: Tensor | None
) -> bool:
    """Says whether the kernel serves so many rows a sequence and key head: plain keys in pages of whole blocks of 128, whose
    rows are contiguous and begin at addresses that 16 bytes are copied from, fewer than 2**24 tiles of them, and a caller that
    asks for `visible` and does not read scores of blocks that a row does not see."""
    own, form, view = keys.view.rows, keys.view.form, keys.view
    if device.arch != 90 or keys.paging.mode != PAGE or tile.block != BLOCK.value or form.format != PLAIN:
        return False
    few = rows <= MOST_ROWS and LEAST_BATCH <= batch <= MOST_BATCH
    plain = own.data.dtype in (torch.float16, torch.bfloat16) and queries.data.dtype == own.data.dtype
    close = own.s_dim == 1 and queries.s_dim == 1 and (own.s_page | own.s_head | own.s_row) % 16 == 0
    even = view.dim in (64, 128) and own.data.data_ptr() % 16 == 0
    counted = own.s_row < 1 << 24 and batch * view.capacity < BLOCK.value << 24
    return few and plain and close and even and counted and visible is not None


def launch(
    index_q: Tensor | Stored,
    keys: KeyTiles,
    tile: Tile,
    bounds: Bounds,
    longest: tuple[int, int],
    scores: Tensor,
    visible: Tensor | None,
    device: Device,
    pdl: int = 0,
    handed: bool = False,
    local: int = 0,
) -> bool:
    """Does what `triton_route.launch` does where the kernel `serves`, and says whether it does. bounds: of queries, and numbers
    of keys; longest: queries and keys of a sequence at most; pdl, handed, local: constants of the kernel."""
    view, group = keys.view, index_q.shape[1] // keys.view.heads
    queries, rows, batch = query_rows(index_q, view.form.native), longest[0] * group, bounds.cu_q.shape[0] - 1
    if not serves(device, keys, queries, tile, rows, batch, visible):
        return False
    s_head, s_token, s_block = scores.stride()
    launch_kernel(
        sm90_few_kernel,
        (max(CONFIG.resident * device.num_sms // view.heads, 1) * CONFIG.rounds, view.heads),
        queries,
        view.rows,
        view.table,
        bounds,
        Scores(scores, s_head, s_token, s_block, visible),
        batch,
        view.num_pages,
        view.capacity,
        longest[1],
        GROUP=group,
        DIM=view.dim,
        ROWS=8 if rows <= 8 else 16,
        BATCH=max(32, next_power_of_two(batch)),
        PAGE_SIZE=view.page_size,
        PDL=pdl,
        SLOT=CONFIG.slot,
        ROUNDS=CONFIG.rounds,
        HANDED=handed,
        LOCAL=local,
        num_warps=1,
        **({"launch_pdl": True} if pdl == 2 else {}),
    )
    return True
