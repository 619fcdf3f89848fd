# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"
"""On Hopper a program selects the blocks of a row, best first, and attends to each as it comes, in Gluon.

A row is a token and KV head, and rows are more than multiprocessors. Its home block, where that is always selected, is on its
way before the scores are there. Each further block is the best one that is left, taken while others are multiplied, so that the
selection takes no time of its own. A program has one tile of keys and one of values in shared memory, and asks for the next of
either as soon as a product has read it. A multiprocessor holds two programs, which hide each other's waits; with a third memory
is no faster, and the last round of programs leaves more of it idle.

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

from openmsa.block_scores.gluon_sm90_few import BLOCK, add, exists
from openmsa.block_topk import triton_ids
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_attend import operands
from openmsa.decode.triton_layer import Step
from openmsa.runtime.launch import launch_kernel, next_power_of_two
from openmsa.sparse_attention.triton_decode_walk import Shape

HEADS = gl.constexpr(16)
"""A product has so many columns."""
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
HEAD = gl.constexpr(gl.SliceLayout(0, PRODUCT))
THREAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LAST_ID = gl.constexpr(0x7FFFFFFF)
FORCED = gl.constexpr(0x7FFFFFFF)
"""The score of a forced block, as an integer of the same order, is above all others."""
NOTHING = gl.constexpr(-(1 << 63) + 1)
TAKEN = gl.constexpr(-(1 << 63))
ordered = gluon.jit(triton_ids.ordered.fn)
free_range = gluon.jit(triton_ids.free_range.fn)


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


@gluon.jit
def factor(ROWS: gl.constexpr, COLUMNS: gl.constexpr, ELEMENT: gl.constexpr):
    """Allocates a factor of a product in shared memory, [ROWS, COLUMNS]."""
    LINES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], ELEMENT)
    return gl.allocate_shared_memory(ELEMENT, [ROWS, COLUMNS], LINES)


@gluon.jit
def block_at(i_block, p_table, table, n_k, num_pages, PAGE_SIZE: gl.constexpr):
    """Looks up a block; i_block is -1 where there is none."""
    first = i_block * BLOCK
    there = (i_block >= 0) & (first < n_k)
    page = gl.load(p_table + first // PAGE_SIZE * table.s_page, mask=there, other=-1)
    keys = gl.where(there & exists(page, num_pages), gl.minimum(n_k - first, BLOCK), 0)
    return Block(first, page, gl.where(i_block >= 0, keys, -1))


@gluon.jit
def send(rows, i_h, block, place, PAGE_SIZE: gl.constexpr, ROW: gl.constexpr):
    """Starts to copy keys or values of a block, which lie ROW elements apart, to shared memory, zero where there are none."""
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
def places(ring):
    """Gives the places of keys and of values in the ring. The compiler does not know that they are always the same: it would
    hold what describes them to the matrix unit in a hundred registers all the time."""
    at = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)
    return ring.index(at), ring.index(at + 1)


@gluon.jit
def arrived():
    """Waits for the older of two copies, and lets the matrix unit read it and what was stored before."""
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def words_of(p_row, seen, INIT: gl.constexpr, LOCAL: gl.constexpr, BLOCKS: gl.constexpr):
    """Gives a word for each block of a row, whose order is that in which blocks are taken: the score in the upper half, forced
    blocks above all others, and in the lower half a number that is greater for lower ids. Blocks that are never taken are
    NOTHING."""
    o_b = gl.arange(0, BLOCKS, THREAD)
    x = gl.load(p_row + o_b, mask=o_b < seen, other=float("-inf"))
    n_init, i_local = free_range(seen, INIT, LOCAL)
    forced = (o_b < n_init) | (o_b >= i_local)
    key = gl.where(forced, FORCED, ordered((x + 0.0).to(gl.int32, bitcast=True)))  # Both zeros become one.
    word = (key.to(gl.int64) << 32) | (LAST_ID - o_b).to(gl.int64)
    return gl.where((o_b < seen) & (forced | (x > float("-inf"))), word, NOTHING)


@gluon.jit
def take(words, left):
    """Takes the best block, if so many as `left` may be taken: gives it, -1 where none is left, and what remains of both."""
    best = gl.max(words, 0)
    found = (best > NOTHING) & (left > 0)
    i_block = gl.where(found, LAST_ID - (best & 0x7FFFFFFF).to(gl.int32), -1)
    return i_block, gl.where(found & (words == best), TAKEN, words), left - found.to(gl.int32)


@gluon.jit
def store_ids(p_ids, words, TOPK: gl.constexpr, TOPK_PAD: gl.constexpr):
    """Stores the ids of blocks that have been TAKEN, in ascending order, and -1 behind them."""
    taken = (words == TAKEN).to(gl.int32)
    count = gl.associative_scan(taken, 0, add)
    gl.store(p_ids + count - 1, gl.arange(0, words.shape[0], THREAD), mask=taken != 0)
    o_k = gl.arange(0, TOPK_PAD, THREAD)
    gl.store(p_ids + o_k, gl.zeros_like(o_k) - 1, mask=(o_k >= gl.max(count, 0)) & (o_k < TOPK))


@gluon.jit(do_not_specialize=["queries", "num_blocks", "index_capacity", "num_pages", "capacity"])
def sm90_best_kernel(
    q, k, v, rows, table, seq_lens, out, scale, queries, num_blocks, index_capacity, num_pages, capacity,
    SHAPE: gl.constexpr, CONSTANTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Selects and attends in a grid of (sequences * queries, KV heads). CONSTANTS are `Constants`; the other arguments are
    those of `triton_attend.select_and_attend_kernel`."""
    G: gl.constexpr = SHAPE.group
    DIM: gl.constexpr = SHAPE.dim
    TOPK: gl.constexpr = SHAPE.topk
    PAGE_SIZE: gl.constexpr = SHAPE.page
    LOCAL: gl.constexpr = CONSTANTS.local_blocks
    ELEMENT: gl.constexpr = k.data.dtype.element_ty
    # 1. The program finds its token and head, and how many keys and scores the token sees.
    if PDL:
        gdc_launch_dependents()
    i_t, i_h = gl.program_id(0), gl.program_id(1)
    i_b, i_q = i_t // queries, i_t % queries
    length, scored = gl.load(seq_lens + i_b), gl.load(rows.seq_lens + i_b)
    n_k = gl.minimum(gl.minimum(length, capacity), length - queries + i_q + 1)
    seen = gl.minimum(gl.minimum(scored, index_capacity), scored - queries + i_q + 1)
    seen = gl.minimum(gl.cdiv(gl.maximum(seen, 0), BLOCK), num_blocks)

    # 2. Its home block goes out first, then queries are loaded, and at last scores.
    p_table = table.ids + i_b.to(gl.int64) * table.s_sequence
    LINES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], ELEMENT)
    ring = gl.allocate_shared_memory(ELEMENT, [2, BLOCK, DIM], LINES)
    i_block = seen - 1 if LOCAL > 0 else seen * 0 - 1
    left = TOPK - (i_block >= 0).to(gl.int32)
    if LOCAL > 0:
        block = block_at(i_block, p_table, table, n_k, num_pages, PAGE_SIZE)
        send(k, i_h, block, ring.index(0), PAGE_SIZE, CONSTANTS.k_row)
        send(v, i_h, block, ring.index(1), PAGE_SIZE, CONSTANTS.v_row)
    o_r = gl.arange(0, HEADS, gl.SliceLayout(1, copied(DIM)))
    o_d = gl.arange(0, DIM, gl.SliceLayout(0, copied(DIM)))
    p_q = q.data + i_t.to(gl.int64) * q.s_token + (i_h * G + o_r) * q.s_head
    m_q = (o_r < G)[:, None] & (o_d < DIM)[None, :]
    s_q, s_p = factor(HEADS, DIM, ELEMENT), factor(BLOCK, HEADS, ELEMENT)
    s_q.store(gl.load(p_q[:, None] + (o_d * q.s_dim)[None, :], mask=m_q, other=0.0))
    if PDL:
        gdc_wait()  # Only scores come from the kernel in front.
    i_row = i_t * CONSTANTS.index_heads + (i_h if CONSTANTS.index_heads > 1 else 0)
    words = words_of(rows.scores + i_row.to(gl.int64) * num_blocks, seen, CONSTANTS.init_blocks, LOCAL, CONSTANTS.blocks)
    words = gl.where(gl.arange(0, CONSTANTS.blocks, THREAD) == i_block, TAKEN, words)
    if LOCAL == 0:
        i_block, words, left = take(words, left)
        block = block_at(i_block, p_table, table, n_k, num_pages, PAGE_SIZE)
        send(k, i_h, block, ring.index(0), PAGE_SIZE, CONSTANTS.k_row)
        send(v, i_h, block, ring.index(1), PAGE_SIZE, CONSTANTS.v_row)
    i_block, words, left = take(words, left)
    following = block_at(i_block, p_table, table, n_k, num_pages, PAGE_SIZE)

    # 3. It attends to block after block, and takes the one behind the next while values are multiplied.
    zero = gl.zeros([BLOCK, HEADS], gl.float32, PRODUCT)
    acc = gl.zeros([DIM, HEADS], gl.float32, PRODUCT)
    z = gl.zeros([BLOCK, HEADS], gl.float32, PRODUCT)
    m = gl.full([HEADS], -float("inf"), gl.float32, HEAD)
    o_n = gl.arange(0, BLOCK, gl.SliceLayout(1, PRODUCT))
    while block.keys >= 0:
        b_k, b_v = places(ring)
        arrived()
        s = warpgroup_mma(b_k, s_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        gl.thread_barrier()
        send(k, i_h, following, b_k, PAGE_SIZE, CONSTANTS.k_row)
        s = gl.where((o_n < block.keys)[:, None], s * (scale * 1.4426950408889634), -float("inf"))
        m_new = gl.maximum(m, gl.max(s, 0))
        safe = gl.where(m_new == -float("inf"), 0.0, m_new)
        p = gl.exp2(s - safe[None, :])
        alpha = gl.exp2(m - safe)
        s_p.store(p.to(ELEMENT))
        z = z * alpha[None, :] + p
        m = m_new
        arrived()
        acc = warpgroup_mma(b_v.permute((1, 0)), s_p, acc * alpha[None, :], is_async=True)
        i_block, words, left = take(words, left)
        behind = block_at(i_block, p_table, table, n_k, num_pages, PAGE_SIZE)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        gl.thread_barrier()
        send(v, i_h, following, b_v, PAGE_SIZE, CONSTANTS.v_row)
        block, following = following, behind
    async_copy.wait_group(0)

    # 4. It stores the results, and one program of a row the selection.
    sums = gl.sum(z, 0)
    token = i_t.to(gl.int64)
    if out.lse is not None:
        o_h = gl.arange(0, HEADS, HEAD)
        p_lse = out.lse + token * out.s_lse_token + (i_h * G + o_h) * out.s_lse_head
        gl.store(p_lse, (m + gl.log2(sums)) * 0.6931471805599453, mask=o_h < G)
    acc = acc / gl.where(sums == 0, 1.0, sums)[None, :]
    b_out = gl.convert_layout(acc.to(out.rows.dtype.element_ty).permute((1, 0)), copied(DIM))
    p_out = out.rows + token * out.s_token + (i_h * G + o_r) * out.s_head
    gl.store(p_out[:, None] + o_d[None, :] * out.s_dim, b_out, mask=(o_r < G)[:, None] & (o_d < DIM)[None, :])
    if i_h < CONSTANTS.index_heads:
        store_ids(rows.blocks + i_row.to(gl.int64) * TOPK, words, TOPK, CONSTANTS.topk_pad)


class Constants(NamedTuple):
    """Says how blocks are selected and keys lie; it is a constant of the kernel. topk_pad, blocks: ids and scores of a row,
    padded to what threads hold. k_row, v_row: strides of keys and of values."""

    index_heads: int
    topk_pad: int
    init_blocks: int
    local_blocks: int
    blocks: int
    k_row: int
    v_row: int


def reads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Says whether the kernel reads these, of sizes for which `openmsa.decode.memory.takes_best_first` holds: 16-bit numbers of
    one type, and rows of keys and of values that are contiguous and begin at addresses that 16 bytes are copied from."""
    even = all(not (x.stride(0) | x.stride(1) | 2 * x.stride(2) | x.data_ptr()) % 16 for x in (k, v))
    close = all(x.stride(3) == 1 and x.stride(2) < 1 << 24 for x in (k, v))
    return even and close and q.dtype == k.dtype == v.dtype and q.itemsize == 2


def launch(sizes: Sizes, scores: Tensor, step: Step, pdl: bool = False) -> bool:
    """Does what `triton_attend.launch` does where the kernel `reads` such numbers, and says whether it does."""
    q, k, v = step.q, step.kv.k, step.kv.v
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and reads(q, k, v)):
        return False
    group, (tensors, numbers) = sizes.num_q_heads // sizes.num_kv_heads, operands(sizes, scores, step)
    launch_kernel(
        sm90_best_kernel,
        (q.shape[0], sizes.num_kv_heads),
        *tensors,
        step.softmax_scale,
        *numbers,
        SHAPE=Shape(group, sizes.head_dim, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size),
        CONSTANTS=Constants(
            sizes.index_heads, next_power_of_two(sizes.topk), sizes.init_blocks, sizes.local_blocks,
            max(next_power_of_two(sizes.num_blocks), 128), k.stride(2), v.stride(2),
        ),
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return True
