# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"
"""On Hopper a program selects the blocks of a row, best first, and attends to each as it comes, in Gluon.

A row is a token and KV head. Its home block, where that is always selected, is on its way before the scores are there. Each
further block is the best one that is left, taken while others are multiplied, so that the selection takes no time of its own.

Scores are handed on where `openmsa.block_scores.gluon_sm90_few` makes them: a program begins when those of its own row are
there, beside programs that still score other rows. It leaves the words of its row as it wants to find them, `ABSENT`.

A program has a tile of keys and one of values in shared memory, and asks for the next of either as soon as a product has read
it. Where rows are more than multiprocessors, two programs of a multiprocessor hide each other's waits; a third gains nothing.
Where rows are fewer, a program has two tiles of each. Where they are at most half as many, several programs can share a row:
each selects all of its blocks and attends to every second, or eighth, and the last one to come merges what all have found.

Between two layers an engine runs other kernels, so that each layer fetches this code anew, which takes longer than to execute
it. So what is done twice is a loop, even of two turns, and where there is no block the code that would copy it is passed by.

Both products have keys or elements as the rows of the matrix unit and the heads of a group, padded to sixteen, as columns: with
the heads as rows they would be padded to sixty-four. The ids are stored in the end, in ascending order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.block_scores.gluon_sm90_few import ABSENT, BLOCK, add, exists
from openmsa.decode.gluon_parts import leave, merge
from openmsa.decode.scored import operands
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_layer import Step
from openmsa.primitives.softmax import UNSPLIT, Partials
from openmsa.runtime.launch import launch_kernel, next_power_of_two
from openmsa.sparse_attention.triton_decode_walk import Shape

HEADS = gl.constexpr(16)
"""A product has so many columns."""
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
HEAD = gl.constexpr(gl.SliceLayout(0, PRODUCT))
THREAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
NO_ID = gl.constexpr(0x7FFFFFFF)
FORCED = gl.constexpr(0x7FFFFFFF)
"""The score of a forced block, as an integer of the same order, is above all others."""
NEAR = gl.constexpr(256)
"""Programs of rows that see at most so many blocks, those of 32K keys, hold fewer words, and look through them sooner."""
LOOKS = gl.constexpr(1024)
"""A program looks so many times for the scores of its row, for a millisecond or so, before it waits for the kernel in front."""
NOTHING = gl.constexpr(-(1 << 31) + 1)
TAKEN = gl.constexpr(-(1 << 31))


class Row(NamedTuple):
    """A token and KV `head`. seen, keys: scores and keys that it sees; pages, s_page: its row of the page table, and how far
    apart entries lie; near: pages of `NEAR` blocks; num_pages: of the pool; scores, ids: its scores, and where its ids go."""

    head: Any
    seen: Any
    keys: Any
    pages: Any
    s_page: Any
    near: Any
    num_pages: Any
    scores: Any
    ids: Any


class Block(NamedTuple):
    """A block to attend to. first, page: its first key, and its page; keys: how many of its keys the row sees, 0 where it sees
    none or the page is absent, -1 where there is no block."""

    first: Any
    page: Any
    keys: Any


@gluon.constexpr_function
def copied(dim):
    """Returns the layout in which four warps hold rows of so many elements, eight neighbouring ones a thread."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def words_held(blocks):
    """Returns the layout of the words of so many blocks. Few are held by each warp, which looks through them by itself."""
    alone = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1]))
    return alone if blocks <= NEAR else THREAD


@gluon.jit
def factor(ROWS: gl.constexpr, COLUMNS: gl.constexpr, ELEMENT: gl.constexpr):
    """Allocates a factor of a product in shared memory, [ROWS, COLUMNS]."""
    LINES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], ELEMENT)
    return gl.allocate_shared_memory(ELEMENT, [ROWS, COLUMNS], LINES)


@gluon.jit
def pages_of(row, i_block, PAGE_SIZE: gl.constexpr):
    """Looks up the pages of blocks of a row, -1 where it sees no keys."""
    there = (i_block >= 0) & (i_block * BLOCK < row.keys)
    return gl.load(row.pages + i_block * BLOCK // PAGE_SIZE * row.s_page, mask=there, other=-1)


@gluon.jit
def block_of(row, i_block, page):
    """Gives a block of a row, which has this page; i_block is -1 where there is none."""
    keys = gl.where(exists(page, row.num_pages), gl.minimum(row.keys - i_block * BLOCK, BLOCK), 0)
    return Block(i_block * BLOCK, page, gl.where(i_block >= 0, keys, -1))


@gluon.jit
def block_at(row, i_block, PAGE_SIZE: gl.constexpr):
    """Looks up a block of a row; i_block is -1 where there is none."""
    return block_of(row, i_block, pages_of(row, i_block, PAGE_SIZE))


@gluon.jit
def opaque(x):
    """Gives the same number, of which the compiler knows nothing. Otherwise it would hold what describes the tiles of each
    number in a hundred registers all the time."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], gl.int32, False, 1)


@gluon.jit
def inverse(sums):
    """Gives 1 over sums of weights by one instruction, some number where they are 0."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [gl.maximum(sums, 1e-30)], gl.float32, True, 1)


@gluon.jit
def send(rows, i_h, block, place, PAGE_SIZE: gl.constexpr, ROW: gl.constexpr):
    """Starts to copy a block of keys or values, ROW elements apart, to shared memory, zero behind its keys; nothing if none."""
    if block.keys >= 0:
        DIM: gl.constexpr = place.shape[1]
        o_n = gl.arange(0, BLOCK, gl.SliceLayout(1, copied(DIM)))
        o_d = gl.arange(0, DIM, gl.SliceLayout(0, copied(DIM)))
        i_page = gl.where(block.keys > 0, block.page, 0)
        p_x = rows.data + i_page.to(gl.int64) * rows.s_page + i_h.to(gl.int64) * rows.s_head
        p_x += (block.first % PAGE_SIZE).to(gl.int64) * ROW
        p_x = p_x + (o_n * ROW)[:, None] + o_d[None, :]
        async_copy.async_copy_global_to_shared(place, p_x, mask=(o_n < block.keys)[:, None])
    async_copy.commit_group()


@gluon.jit
def wait_for_oldest(PAIRS: gl.constexpr):
    """Waits for the oldest copy to the places of the ring, and lets the matrix unit read it and what was stored before."""
    async_copy.wait_group(2 * PAIRS - 1)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def look(p_score, written):
    """Gives the scores of a row that are there, -inf behind those that are `written`, and whether any of these is ABSENT."""
    x = gl.load(p_score, mask=written, other=float("-inf"), volatile=True)
    return x, gl.max((x.to(gl.int32, bitcast=True) == ABSENT).to(gl.int32), 0)


@gluon.jit
def leave_absent(p_score, written):
    """Leaves the scores of a row, as far as they are `written`, as it has found them before they were handed on."""
    words = gl.zeros([written.shape[0]], gl.int32, THREAD) + ABSENT
    gl.store(p_score, words.to(gl.float32, bitcast=True), mask=written)


@gluon.jit
def row_scores(p_score, written, CONSTANTS: gl.constexpr, PDL: gl.constexpr):
    """Gives the scores of a row as far as they are `written`, -inf behind. If they are handed on it waits for them one by one,
    but at last for the kernel in front as a whole. So it never hangs; what is not written then is a NaN, no score. Then it
    leaves them ABSENT, unless others share the row."""
    if not CONSTANTS.handed:
        x = gl.load(p_score, mask=written, other=float("-inf"))
    else:
        x, lacking = look(p_score, written)
        left = lacking * LOOKS
        while left > 0:
            x, lacking = look(p_score, written)
            left = gl.where(lacking > 0, left - 1, 0)
        if lacking > 0:
            if PDL:
                gdc_wait()
            x, lacking = look(p_score, written)
        if CONSTANTS.splits == 1:
            leave_absent(p_score, written)
    return x


@gluon.jit
def words_of(row, BLOCKS: gl.constexpr, CONSTANTS: gl.constexpr, PDL: gl.constexpr):
    """Gives a word for each block of a row, whose order is that of the scores; those of forced blocks are above all others, and
    those of blocks that are never taken are NOTHING."""
    LOCAL: gl.constexpr = CONSTANTS.local_blocks
    o_b = gl.arange(0, BLOCKS, THREAD)
    x = row_scores(row.scores + o_b, o_b < row.seen - LOCAL, CONSTANTS, PDL)
    forced = (o_b < CONSTANTS.init_blocks) | (o_b >= row.seen - LOCAL)
    bits = (x + 0.0).to(gl.int32, bitcast=True)  # Both zeros become one.
    word = gl.where(forced, FORCED, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # as `triton_ids.ordered`
    word = gl.where((o_b < row.seen) & (forced | (x > float("-inf"))), word, NOTHING)
    return gl.convert_layout(word, words_held(BLOCKS))


@gluon.jit
def take(words, may):
    """Takes the best block, the first of several, if it `may`: gives it, -1 where none is left, and the words that are left."""
    o_b = gl.arange(0, words.shape[0], words_held(words.shape[0]))
    best = gl.max(words, 0)
    i_block = gl.min(gl.where(words == best, o_b, NO_ID), 0)
    i_block = gl.where(may & (best > NOTHING), i_block, -1)
    return i_block, gl.where(o_b == i_block, TAKEN, words)


@gluon.jit
def take_next(row, words, taken, i_s, TOPK: gl.constexpr, SPLITS: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Takes blocks, of which so many are `taken` already, until one falls to split i_s, as one of every SPLITS does. Gives that
    block, with -1 keys behind the last one, the words that are left and how many blocks are taken now."""
    if SPLITS == 1:
        i_block, words = take(words, taken < TOPK)
        taken += 1
    else:
        i_block = i_s * 0 - 1
        turn = taken + (i_s - taken % SPLITS + SPLITS) % SPLITS  # the place of the block that falls to this split
        for _ in range(taken, gl.minimum(turn + 1, TOPK)):
            i_block, words = take(words, True)
        i_block = gl.where(turn < TOPK, i_block, -1)
        taken = turn + 1
    if words.shape[0] <= NEAR:
        o_b = gl.arange(0, words.shape[0], words_held(words.shape[0]))
        block = block_of(row, i_block, gl.max(gl.where(o_b == i_block, row.near, -1), 0))
    else:
        block = block_at(row, i_block, PAGE_SIZE)
    return block, words, taken


@gluon.jit
def store_ids(p_ids, words, TOPK: gl.constexpr, TOPK_PAD: gl.constexpr):
    """Stores the ids of blocks that have been TAKEN, in ascending order, and -1 behind them."""
    taken = gl.convert_layout((words == TAKEN).to(gl.int32), THREAD)
    count = gl.associative_scan(taken, 0, add)
    gl.store(p_ids + count - 1, gl.arange(0, words.shape[0], THREAD), mask=taken != 0)
    o_k = gl.arange(0, TOPK_PAD, THREAD)
    gl.store(p_ids + o_k, gl.zeros_like(o_k) - 1, mask=(o_k >= gl.max(count, 0)) & (o_k < TOPK))


@gluon.jit
def attend(
    k, v, row, keys, home, i_s, keeps_ids, s_q, s_p, ring, scale,
    SHAPE: gl.constexpr, CONSTANTS: gl.constexpr, PDL: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Attends to the blocks of split i_s of a row that sees at most BLOCKS: gives acc [DIM, HEADS] before the division, the
    greatest logits [HEADS] in base 2, and the terms of the sums [BLOCK, HEADS]. The home block, with so many `keys` and the id
    `home`, -1 where it is not forced, is on its way to the first pair of places of split 0. keeps_ids: it stores the ids."""
    DIM: gl.constexpr = SHAPE.dim
    PAGE_SIZE: gl.constexpr = SHAPE.page
    PAIRS: gl.constexpr = CONSTANTS.pairs
    SPLITS: gl.constexpr = CONSTANTS.splits
    LOCAL: gl.constexpr = CONSTANTS.local_blocks
    # 1. Scores arrive, and blocks are sent for until all places are taken.
    words = words_of(row, BLOCKS, CONSTANTS, PDL)
    words = gl.where(gl.arange(0, BLOCKS, words_held(BLOCKS)) == home, TAKEN, words)
    taken, i_pair = row.seen * 0, row.seen * 0
    if LOCAL > 0:
        taken += 1
        i_pair = gl.where(i_s == 0, 1, 0) if SPLITS > 1 else i_pair + 1
    oldest = row.seen * 0 - 1
    for i in range(i_pair, PAIRS):
        block, words, taken = take_next(row, words, taken, i_s, SHAPE.topk, SPLITS, PAGE_SIZE)
        send(k, row.head, block, ring.index(2 * i), PAGE_SIZE, CONSTANTS.k_row)
        send(v, row.head, block, ring.index(2 * i + 1), PAGE_SIZE, CONSTANTS.v_row)
        oldest, keys = keys, block.keys
    if PAIRS == 1:
        oldest = keys + 0

    # 2. Block after block is multiplied, and the next one is taken meanwhile.
    zero = gl.zeros([BLOCK, HEADS], gl.float32, PRODUCT)
    acc = gl.zeros([DIM, HEADS], gl.float32, PRODUCT)
    z = gl.zeros([BLOCK, HEADS], gl.float32, PRODUCT)
    m = gl.full([HEADS], -float("inf"), gl.float32, HEAD)
    o_n = gl.arange(0, BLOCK, gl.SliceLayout(1, PRODUCT))
    i_pair = row.seen * 0
    while oldest >= 0:
        i_place = 2 * opaque(i_pair)
        wait_for_oldest(PAIRS)
        s = warpgroup_mma(ring.index(i_place), s_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        block, words, taken = take_next(row, words, taken, i_s, SHAPE.topk, SPLITS, PAGE_SIZE)
        s = warpgroup_mma_wait(0, deps=(s,))
        gl.thread_barrier()
        send(k, row.head, block, ring.index(i_place), PAGE_SIZE, CONSTANTS.k_row)
        s = gl.where((o_n < oldest)[:, None], s * (scale * 1.4426950408889634), -float("inf"))
        m_new = gl.maximum(m, gl.max(s, 0))
        safe = gl.where(m_new == -float("inf"), 0.0, m_new)
        p = gl.exp2(s - safe[None, :])
        alpha = gl.exp2(m - safe)
        s_p.store(p.to(s_p.dtype))
        z = z * alpha[None, :] + p
        m = m_new
        wait_for_oldest(PAIRS)
        acc = warpgroup_mma(ring.index(i_place + 1).permute((1, 0)), s_p, acc * alpha[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        gl.thread_barrier()
        send(v, row.head, block, ring.index(i_place + 1), PAGE_SIZE, CONSTANTS.v_row)
        if PAIRS == 2:
            oldest, keys, i_pair = keys, block.keys, 1 - i_pair
        else:
            oldest = block.keys
    async_copy.wait_group(0)
    if keeps_ids:
        store_ids(row.ids, words, SHAPE.topk, CONSTANTS.topk_pad)
    return acc, m, z


@gluon.jit(do_not_specialize=["queries", "num_blocks", "index_capacity", "num_pages", "capacity"])
def sm90_best_kernel(
    q, k, v, rows, table, seq_lens, out, partials, scale, queries, num_blocks, index_capacity, num_pages, capacity,
    SHAPE: gl.constexpr, CONSTANTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Selects and attends in a grid of (sequences * queries, KV heads, splits). CONSTANTS are `Constants`; the other arguments
    are those of `triton_attend.select_and_attend_kernel`."""
    G: gl.constexpr = SHAPE.group
    DIM: gl.constexpr = SHAPE.dim
    PAGE_SIZE: gl.constexpr = SHAPE.page
    BLOCKS: gl.constexpr = CONSTANTS.blocks
    LEAST: gl.constexpr = min(CONSTANTS.blocks, NEAR)
    ELEMENT: gl.constexpr = k.data.dtype.element_ty
    # 1. The program finds its token and head, and how many keys and scores the token sees.
    if PDL:
        gdc_launch_dependents()
    i_t, i_h, i_s = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_b, i_q = i_t // queries, i_t % queries
    length, scored = gl.load(seq_lens + i_b), gl.load(rows.seq_lens + i_b)
    n_k = gl.minimum(gl.minimum(length, capacity), length - queries + i_q + 1)
    seen = gl.minimum(gl.minimum(scored, index_capacity), scored - queries + i_q + 1)
    seen = gl.minimum(gl.cdiv(gl.maximum(seen, 0), BLOCK), num_blocks)
    i_row = i_t * CONSTANTS.index_heads + (i_h if CONSTANTS.index_heads > 1 else 0)
    p_table, p_score = table.ids + i_b.to(gl.int64) * table.s_sequence, rows.scores + i_row.to(gl.int64) * num_blocks
    p_ids = rows.blocks + i_row.to(gl.int64) * SHAPE.topk
    row = Row(i_h, seen, n_k, p_table, table.s_page, 0, num_pages, p_score, p_ids)

    # 2. Its home block goes out first, then queries are loaded, and pages of blocks that may be chosen.
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], ELEMENT)
    ring = gl.allocate_shared_memory(ELEMENT, [2 * CONSTANTS.pairs, BLOCK, DIM], TILE)
    home = seen - 1 if CONSTANTS.local_blocks > 0 else seen * 0 - 1
    block = block_at(row, home, PAGE_SIZE)
    if CONSTANTS.local_blocks > 0 and (CONSTANTS.splits == 1 or i_s == 0):
        send(k, i_h, block, ring.index(0), PAGE_SIZE, CONSTANTS.k_row)
        send(v, i_h, block, ring.index(1), PAGE_SIZE, CONSTANTS.v_row)
    o_r = gl.arange(0, HEADS, gl.SliceLayout(1, copied(DIM)))
    o_d = gl.arange(0, DIM, gl.SliceLayout(0, copied(DIM)))
    p_q = q.data + i_t.to(gl.int64) * q.s_token + (i_h * G + o_r) * q.s_head
    m_q = (o_r < G)[:, None] & (o_d < DIM)[None, :]
    s_q, s_p = factor(HEADS, DIM, ELEMENT), factor(BLOCK, HEADS, ELEMENT)
    s_q.store(gl.load(p_q[:, None] + (o_d * q.s_dim)[None, :], mask=m_q, other=0.0))
    near = gl.convert_layout(pages_of(row, gl.arange(0, LEAST, THREAD), PAGE_SIZE), words_held(LEAST))
    row = Row(i_h, seen, n_k, p_table, table.s_page, near, num_pages, p_score, p_ids)

    # 3. It selects and attends. Only scores come from the kernel in front.
    if PDL and not CONSTANTS.handed:
        gdc_wait()
    keeps_ids = (i_h < CONSTANTS.index_heads) & (i_s == 0)
    if BLOCKS > LEAST and seen > LEAST:
        acc, m, z = attend(k, v, row, block.keys, home, i_s, keeps_ids, s_q, s_p, ring, scale, SHAPE, CONSTANTS, PDL, BLOCKS)
    else:
        acc, m, z = attend(k, v, row, block.keys, home, i_s, keeps_ids, s_q, s_p, ring, scale, SHAPE, CONSTANTS, PDL, LEAST)

    # 4. It stores the results, or a partial, and the last program of a row to come stores the results of all.
    sums, token = gl.sum(z, 0), i_t.to(gl.int64)
    lse = gl.convert_layout(m + gl.log2(sums), gl.SliceLayout(1, copied(DIM)))
    acc = acc * inverse(sums)[None, :]
    b_out = gl.convert_layout(acc.to(out.rows.dtype.element_ty).permute((1, 0)), copied(DIM))
    if CONSTANTS.splits > 1:
        i_tile = i_t * gl.num_programs(1) + i_h
        leave(partials, i_tile * CONSTANTS.splits + i_s, b_out, lse, copied(DIM))
        gl.thread_barrier()  # The whole partial is there before one thread says so.
        last = gl.atomic_add(partials.arrived + i_tile, 1, sem="acq_rel") == CONSTANTS.splits - 1
        if last:
            lses = gl.allocate_shared_memory(gl.float32, [CONSTANTS.splits, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            parts = ring._reinterpret(ELEMENT, [CONSTANTS.splits, HEADS, DIM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
            whole, most, weights = merge(partials, i_tile * CONSTANTS.splits, gl.num_programs(2), parts, lses, copied(DIM))
            b_out, lse = (whole * inverse(weights)[:, None]).to(b_out.dtype), most + gl.log2(weights)
            gl.store(partials.arrived + i_tile, 0)
            if CONSTANTS.handed:
                o_b = gl.arange(0, BLOCKS, THREAD)
                leave_absent(p_score + o_b, o_b < seen - CONSTANTS.local_blocks)
    if CONSTANTS.splits == 1 or last:
        if out.lse is not None:
            p_lse = out.lse + token * out.s_lse_token + (i_h * G + o_r) * out.s_lse_head
            gl.store(p_lse, lse * 0.6931471805599453, mask=o_r < G)
        p_out = out.rows + token * out.s_token + (i_h * G + o_r) * out.s_head
        gl.store(p_out[:, None] + o_d[None, :] * out.s_dim, b_out, mask=(o_r < G)[:, None] & (o_d < DIM)[None, :])
    if PDL and CONSTANTS.handed:
        gdc_wait()  # What follows this kernel follows the one that scores.


class Constants(NamedTuple):
    """Says how blocks are selected and keys lie; it is a constant of the kernel. topk_pad, blocks: ids and scores of a row,
    padded to what threads hold. k_row, v_row: strides of keys and of values. pairs: a program has so many tiles of each, 1 or
    2. splits: so many programs share a row. handed: whether scores come one by one, as in `row_scores`; then the last
    local_blocks of a row have none."""

    index_heads: int
    topk_pad: int
    init_blocks: int
    local_blocks: int
    blocks: int
    k_row: int
    v_row: int
    pairs: int
    splits: int
    handed: bool


def reads(q: Any, k: Any, v: Any) -> bool:
    """Says whether the kernel reads these, of sizes that have `openmsa.decode.memory.best_pairs`: plain 16-bit numbers of one
    type, and rows of keys and of values that are contiguous and begin at addresses that 16 bytes are copied from."""
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        return False
    even = all(not (x.stride(0) | x.stride(1) | 2 * x.stride(2) | x.data_ptr()) % 16 for x in (k, v))
    close = all(x.stride(3) == 1 and x.stride(2) < 1 << 24 for x in (k, v))
    return even and close and q.dtype == k.dtype == v.dtype and q.itemsize == 2


def launch(
    sizes: Sizes, scores: Tensor, step: Step, pdl: bool, pairs: int, splits: int, partials: Partials, handed: bool
) -> None:
    """Launches the kernel for a step which it `reads`. scores: as `scored.Rows` says; pdl: as in `triton_attend.launch`; pairs,
    splits, handed: as in `Constants`; partials: those of all rows, of HEADS heads, for so many splits."""
    q, k, v = step.q, step.kv.k, step.kv.v
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    assert not handed or sizes.index_heads == sizes.num_kv_heads  # A program makes the scores of its row absent again.
    assert splits <= 16 * pairs <= 16 * sizes.topk  # Partials fit into the tiles of a program, and a block comes to each tile.
    group, (tensors, numbers) = sizes.num_q_heads // sizes.num_kv_heads, operands(sizes, scores, step)
    launch_kernel(
        sm90_best_kernel,
        (q.shape[0], sizes.num_kv_heads, splits),
        *tensors,
        partials if splits > 1 else UNSPLIT,
        step.softmax_scale,
        *numbers,
        SHAPE=Shape(group, sizes.head_dim, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size),
        CONSTANTS=Constants(
            sizes.index_heads, next_power_of_two(sizes.topk), sizes.init_blocks, sizes.local_blocks,
            max(next_power_of_two(sizes.num_blocks), 128), k.stride(2), v.stride(2), pairs, splits, handed,
        ),
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
