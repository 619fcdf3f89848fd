# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""`select_blocks` on the GPU runs one fused kernel for many queries, and scores and top-k in turn for few.

A program of the fused kernel walks the keys of a tile of (query, head) rows as the scoring kernel does, and the scores of a
tile never leave the multiprocessor. Each thread keeps the best scores of one row so far, with their block ids, in registers in
descending order, and inserts the maximum of each new block: five instructions a slot, without a branch or a shuffle, under the
shadow of the other resident program's products. Blocks come in ascending order and displace only smaller scores, so ties stay
with the lower id. Forced blocks are never scored: the last one is the only block that a query sees in part, so the walk needs a
mask over keys only when it is not forced.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.block_scores.triton_route import launch_scores, score_rows
from openmsa.block_topk.triton_topk import MAX_BLOCKS, launch_topk
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.primitives.operands import Bounds
from openmsa.primitives.rows import KeyTiles, Tile, padded, query_rows, tile_start
from openmsa.primitives.scoring import Product, kind_of, product_type, query_factors, row_factors, score_tile, sequence_bounds
from openmsa.primitives.walks import Config, Kind, tall_rows, walk
from openmsa.runtime import checks
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.kinds import computes, rounded
from openmsa.runtime.launch import ceil_div, launch_kernel
from openmsa.types import Layout

MAX_FREE = 16  # slots of the list a thread can hold beside the products
_NONE = tl.constexpr(0x7FFFFFFF)  # larger than any block id


@functools.lru_cache(256)
def config(device: Device, kind: Kind) -> Config:
    """Chooses as many rows as threads where registers allow it, so that a list belongs to one thread and is kept once. Hopper
    holds the rows in registers too, which leaves shared memory to the keys, and two programs a multiprocessor."""
    swap = kind.must_group
    rows, hold = (16, False) if swap else tall_rows(device, kind)
    held = rows * kind.factor_bytes * max(1, kind.groups * swap)
    return Config(rows, swap, hold, 4, *walk(device, 0 if hold else held, kind, swap), swap)


@triton.jit
def empty_list(ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """Gives the values and ids of a list that holds nothing."""
    values = (tl.full([ROWS], float("-inf"), tl.float32),)
    ids = (tl.full([ROWS], _NONE, tl.int32),)
    for _ in tl.static_range(SLOTS - 1):
        values = values + (values[0],)
        ids = ids + (ids[0],)
    return values, ids


@triton.jit
def insert(values, ids, x, i_x, SLOTS: tl.constexpr):
    """Puts (x, i_x) into lists sorted by descending value, behind equal values; the last entry drops out. NaN is not put.
    Written from the last slot to the first, each after its last use, so that no entry needs to be copied."""
    x = tl.where(x > float("-inf"), x, float("-inf"))
    here = x > values[SLOTS - 1]
    for j in tl.static_range(SLOTS - 1, -1, -1):
        if j > 0:
            before = x > values[j - 1]
            value = (tl.maximum(values[j], tl.minimum(values[j - 1], x)),)
            id_ = (tl.where(before, ids[j - 1], tl.where(here, i_x, ids[j])),)
            here = before
        else:
            value = (tl.maximum(values[0], x),)
            id_ = (tl.where(here, i_x, ids[0]),)
        if j == SLOTS - 1:
            new_values, new_ids = value, id_
        else:
            new_values, new_ids = value + new_values, id_ + new_ids
    return new_values, new_ids


@triton.jit
def store_ascending(p_o, ids, m_row, COUNT: tl.constexpr):
    """Writes COUNT ids a row in ascending order, `_NONE` as -1 at the end."""
    for j in tl.static_range(COUNT):
        place = tl.zeros_like(ids[0])
        for i in tl.static_range(COUNT):
            if i < j:
                place += (ids[i] <= ids[j]).to(tl.int32)
            elif i > j:
                place += (ids[i] < ids[j]).to(tl.int32)
        tl.store(p_o + place, tl.where(ids[j] == _NONE, -1, ids[j]), mask=m_row)


RUNTIME_LENGTHS = ["num_pages", "capacity", "max_keys"]


@triton.jit(do_not_specialize=RUNTIME_LENGTHS)
def fused_kernel(
    q, keys, tma, table, bounds, out, num_pages, capacity, max_keys,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, PAGING: tl.constexpr, CUT: tl.constexpr,
    PRODUCT: tl.constexpr, TOPK: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, HOLD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Scores and selects in a grid of (row tiles, batch * key heads), latest rows first. HOLD: rows stay in registers."""
    ROWS: tl.constexpr = PRODUCT.rows
    BLOCK: tl.constexpr = CUT.block
    PARTS: tl.constexpr = CUT.parts
    # 1. The program finds its rows and the tiles that they walk: none of blocks that are forced.
    SLOTS: tl.constexpr = TOPK - INIT - LOCAL
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_s, i_h = tl.program_id(1) // KEY_HEADS, tl.program_id(1) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(bounds, i_s, capacity, max_keys)
    if i_m * ROWS >= q_len * GROUP:
        return

    o_r = i_m * ROWS + tl.arange(0, ROWS)
    i_last = tl.minimum(offset + o_r // GROUP, k_len - 1)  # [ROWS] last key each row sees
    first_last = tl.minimum(offset + i_m * ROWS // GROUP, k_len - 1)
    final_last = tl.minimum(offset + tl.minimum((i_m * ROWS + ROWS - 1) // GROUP, q_len - 1), k_len - 1)
    i_full = tl.maximum(first_last + 1, 0) // BLOCK if LOCAL == 0 else tl.maximum(first_last + BLOCK, 0) // BLOCK - LOCAL
    i_end = (tl.maximum(final_last + BLOCK, 0) // BLOCK - LOCAL) * PARTS
    i_full = tl.maximum(tl.minimum(i_full * PARTS, i_end), INIT * PARTS)
    o_own = tl.arange(0, ROWS)  # one row a thread: without it the lists would live in the products' layout, four times over
    own_seen = tl.maximum(tl.minimum(offset + (i_m * ROWS + o_own) // GROUP, k_len - 1) + BLOCK, 0) // BLOCK

    page_row = table.ids
    if PAGING.mode != 0:
        page_row += i_s.to(tl.int64) * table.s_sequence
    # 2. Rows of queries become factors.
    o_f = i_m * ROWS + o_own
    b_q = query_factors(q, q_start, q_len, o_r, i_h, GROUP, FORM, PRODUCT, HOLD)
    b_f = row_factors(q, keys, tl.where(o_f < q_len * GROUP, o_f, 0), i_h, FORM, GROUP)
    if PRODUCT.grouped:
        b_q, b_up = b_q
        b_f = b_up if b_f is None else b_f * b_up

    # 3. Tiles that all rows see whole are scored without a mask over keys.
    values, ids = empty_list(ROWS, SLOTS)
    best = tl.full([ROWS], float("-inf"), tl.float32)  # maxima of the parts of a block so far
    for i_t in tl.range(INIT * PARTS, i_full, num_stages=STAGES):
        i_k = tile_start(i_t, CUT)
        m = score_tile(
            b_q, keys, tma, page_row, i_h, i_k, i_last, k_start, k_len, num_pages, FORM, PAGING, CUT, PRODUCT, False, False
        )  # fmt: skip
        m = tl.gather(m, o_own, 0)
        m = m if b_f is None else m * b_f
        if PARTS == 2:
            m = tl.maximum(best, m)
            best = tl.where(i_t % 2 == 0, m, float("-inf"))
            m = tl.where(i_t % 2 == 0, float("-inf"), m)
        values, ids = insert(values, ids, m, i_t // PARTS, SLOTS)
    # 4. Tiles at the end of what rows see are scored.
    for i_t in tl.range(i_full, i_end, num_stages=1):
        i_k = tile_start(i_t, CUT)
        m = score_tile(
            b_q, keys, tma, page_row, i_h, i_k, i_last, k_start, k_len, num_pages, FORM, PAGING, CUT, PRODUCT, True, LOCAL == 0
        )  # fmt: skip
        m = tl.gather(m, o_own, 0)
        m = m if b_f is None else m * b_f
        m = tl.where(i_t // PARTS < own_seen - LOCAL, m, float("-inf"))
        if PARTS == 2:
            m = tl.maximum(best, m)
            best = tl.where(i_t % 2 == 0, m, float("-inf"))
            m = tl.where(i_t % 2 == 0, float("-inf"), m)
        values, ids = insert(values, ids, m, i_t // PARTS, SLOTS)

    # 5. Forced blocks join, and the ids are written in ascending order.
    o_r = i_m * ROWS + o_own
    for j in tl.static_range(INIT):
        ids = ids + (tl.where(j < own_seen, j, _NONE),)
    for j in tl.static_range(LOCAL):
        ids = ids + (tl.where(own_seen - 1 - j >= INIT, own_seen - 1 - j, _NONE),)
    i_row = (q_start + o_r // GROUP).to(tl.int64) * (KEY_HEADS * GROUP) + i_h * GROUP + o_r % GROUP
    store_ascending(out + i_row * TOPK, ids, o_r < q_len * GROUP, TOPK)


def launch_fused(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
) -> None:
    """Scores and selects. out: int32 ``[total_q, index_heads, topk]``, contiguous; of the k at least one and at most `MAX_FREE`
    are not forced."""
    device = facts(index_q.device)
    tile = Tile.of(block_size, single=True)
    keys = KeyTiles.of(index_k, tile, device)
    view = keys.view
    product = product_type(index_q, view)
    group = index_q.shape[1] // view.heads
    chosen = config(device, kind_of(keys, product, tile))
    numbers = (view.num_pages, view.capacity, seqs.max_seqlen_k)
    launch_kernel(
        fused_kernel,
        (ceil_div(seqs.max_seqlen_q * group, chosen.rows), seqs.batch * view.heads),
        query_rows(index_q, view.form.native),
        view.rows,
        keys.tma,
        view.table,
        Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset),
        out,
        *numbers,
        KEY_HEADS=view.heads,
        GROUP=group,
        FORM=view.form,
        PAGING=keys.paging,
        CUT=tile,
        PRODUCT=Product(product, view.dim, padded(view.dim, view.form.format), chosen.rows, chosen.swap, chosen.grouped),
        TOPK=out.shape[2],
        INIT=init_blocks,
        LOCAL=local_blocks,
        HOLD=chosen.hold,
        STAGES=chosen.num_stages,
        num_warps=chosen.num_warps,
    )


WORKSPACE = 256 * 2**20
"""So many bytes of scores are held at a time."""


def refuse(seqs: Layout, block_size: int, topk: int, init_blocks: int, local_blocks: int) -> str | None:
    """Says why these kernels cannot select so many of so many blocks, or None."""
    if seqs.num_blocks(block_size) > MAX_BLOCKS and not 0 < topk - init_blocks - local_blocks <= MAX_FREE:
        return (
            f"with more than {MAX_BLOCKS} blocks it needs topk - init_blocks - local_blocks from 1 to {MAX_FREE}, "
            f"got {topk} - {init_blocks} - {local_blocks} for {seqs.num_blocks(block_size)} blocks"
        )
    return None


def fuses(rows: int, num_blocks: int, free: int, device: Device, narrow: bool = False) -> bool:
    """Says whether one kernel that keeps a list a thread is the faster way. rows: (query, head) rows in all. narrow: e4m3 by
    e4m3.

    It runs at the rate of the scoring kernel, and top-k is saved; but it cannot cut the context, so it needs rows for most
    multiprocessors. Products of e4m3 take half the time, too short to hide the lists. Where a row of scores is too long to
    hold, there is no other way."""
    if not 0 < free <= MAX_FREE:
        return False
    return num_blocks > MAX_BLOCKS or (rows >= 2 * 128 * device.num_sms * 3 // 4 and not narrow)


def select_blocks(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    blocks: Tensor | None = None,
) -> Tensor:
    """See `openmsa.block_topk.select_blocks`."""
    total_q, heads, _ = index_q.shape
    num_blocks, launched = seqs.num_blocks(block_size), seqs.launched(index_q)
    like_q = rounded(launched)  # Like calls are served by the same kernels.
    room = torch.empty(launched, heads, topk, dtype=torch.int32, device=index_q.device) if blocks is None else blocks
    out = room[:total_q]
    if out.numel() == 0 or num_blocks == 0:
        computes("the selection of queries that see nothing")
        return out.fill_(-1)
    keys = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    narrow = checks.format_of(index_q) == checks.format_of(keys) == "e4m3"
    if fuses(like_q * heads, num_blocks, topk - init_blocks - local_blocks, facts(index_q.device), narrow):
        launch_fused(index_q, index_k, seqs, block_size, init_blocks, local_blocks, out)
    else:
        score_then_select(index_q, index_k, seqs, block_size, init_blocks, local_blocks, out)
    return out


def score_then_select(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
) -> None:
    """Runs two kernels for as many queries at a time as `WORKSPACE` holds scores of. They do not overlap: programs of the
    second that are resident early take more from the first than the gap between the two costs. out: has room for those for
    which launches are made."""
    total_q, heads = seqs.launched(index_q), index_q.shape[1]
    num_blocks = seqs.num_blocks(block_size)
    most = max(WORKSPACE // (4 * heads * num_blocks), 16)
    chunk = -(-total_q // -(-total_q // most))  # parts are equal
    scores = torch.empty(chunk, heads, score_rows(num_blocks), dtype=torch.float32, device=index_q.device)[..., :num_blocks]
    visible = torch.empty(chunk, dtype=torch.int32, device=index_q.device)
    for start in range(0, total_q, chunk):
        stop = min(start + chunk, total_q)
        part = seqs if chunk == total_q else seqs.query_chunk(start, stop)
        held = scores[: stop - start].transpose(0, 1)
        launch_scores(index_q[start:stop], index_k, part, block_size, held, visible)
        launch_topk(held, visible, init_blocks, local_blocks, out[start:stop])
