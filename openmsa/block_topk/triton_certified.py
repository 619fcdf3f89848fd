# SPDX-License-Identifier: MIT
"""`select_blocks(certified=True)` on the GPU, for decode and a few queries a sequence: four kernels.

Int8 keys give a lower and an upper bound of every block's score (rounding of all the arithmetic included). A row that has k
places to give then sorts its blocks: those that must be chosen, those that cannot, and those left open. Only open blocks are
read exactly, by the arithmetic of the scoring kernel, and the usual top-k ends it, so the bits of the scores that decide are
those of the uncertified selection. With more rows than one tile nearly every block is open to some row: then the exact
selection is the faster way and is what runs, every visible block counted as rescored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.block_scores import exact_keys
from openmsa.block_topk import triton_select
from openmsa.block_topk.triton_topk import MAX_BLOCKS, count_true, goal_reached, launch_topk, num_warps
from openmsa.index_branch.triton_config import splits
from openmsa.index_branch.triton_launch import launch_scores, score_rows
from openmsa.index_branch.triton_products import block_maxima
from openmsa.index_branch.triton_queries import query_numbers, row_factors
from openmsa.index_branch.triton_sources import KeySource, QuerySource
from openmsa.index_branch.triton_tiles import FLAT, PAGE, PAGES, Tile, load_keys, load_rows, sequence_bounds, tile_start
from openmsa.index_branch.triton_variants import Operands
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys, Stored
from openmsa.runtime.devices import COMPILE_TARGETS, facts
from openmsa.runtime.variants import Variant
from openmsa.types import Layout

MAX_ROWS = 64
"""(query, head) rows a sequence has for a key head."""


def certifies(rows: int, num_blocks: int, free: int, score_bytes: int) -> bool:
    """Whether bounds come first. rows: the most that a sequence has for a key head. free: places that are not forced."""
    return rows <= MAX_ROWS and free < num_blocks <= MAX_BLOCKS and free > 0 and score_bytes <= triton_select.WORKSPACE


@triton.jit
def reached_by(x, REPS: tl.constexpr, COLS: tl.constexpr, GOAL: tl.constexpr):
    """A threshold that at least GOAL of x [REPS, COLS] reach, and how many do: GOAL, or more when the GOAL-th largest has
    equals. With fewer than GOAL above -inf: -inf and 0."""
    low, count, _ = goal_reached(x, REPS, COLS, GOAL)
    if count < GOAL:
        low, count = float("-inf"), 0
    return low, count


@triton.jit(do_not_specialize=["num_blocks", "s_h", "s_t"])
def settle_kernel(
    lower, upper, visible, rescored, s_h, s_t, num_blocks,
    HEADS: tl.constexpr, FREE: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, REPS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Grid (total_q * heads). Writes over `lower`: +inf where a block must be chosen, NaN where it is open, -inf elsewhere."""
    i_row = tl.program_id(0)
    i_t, i_h = i_row // HEADS, i_row % HEADS
    seen = tl.minimum(tl.load(visible + i_t), num_blocks)
    n_init = tl.minimum(seen, INIT)
    i_local = tl.maximum(seen - LOCAL, n_init)
    o_b = tl.arange(0, REPS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    m_free = (o_b >= n_init) & (o_b < i_local)
    o_s = i_t.to(tl.int64) * s_t + i_h.to(tl.int64) * s_h + o_b
    low = tl.load(lower + o_s, mask=m_free, other=float("-inf"))
    high = tl.load(upper + o_s, mask=m_free, other=float("-inf"))
    low_bar, _ = reached_by(low, REPS, COLS, FREE)
    high_bar, rivals = reached_by(high, REPS, COLS, FREE)
    # Exactly FREE upper bounds reach the bar: all others are below it. More do: the next best may equal it.
    sure = (low > high_bar) | ((low == high_bar) & (rivals == FREE) & (low > float("-inf")))
    is_open = (high >= low_bar) & (high > float("-inf")) & ~sure
    marks = tl.where(sure, float("inf"), tl.where(is_open, float("nan"), float("-inf")))
    tl.store(lower + o_s, marks, mask=o_b < num_blocks)
    tl.store(rescored + i_row, count_true(is_open))


LENGTHS = ["num_blocks", "num_pages", "capacity", "max_keys", "units"]


@triton.jit(do_not_specialize=LENGTHS)
def rescore_kernel(
    q, q_scale, keys, page_table, cu_q, cu_k, q_offset, scores,
    s_qt, s_qh, s_qd, s_qs, s_page, s_head, s_token, s_dim, s_table, s_sh, s_st,
    num_blocks, num_pages, capacity, max_keys, units,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr, PRODUCT: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr, MODE: tl.constexpr, TMA: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (splits, batch * key heads): each program looks at `units` tiles' worth of blocks, at most UNITS, all at once, and
    scores those that hold NaN."""
    i_s, i_h = tl.program_id(1) // KEY_HEADS, tl.program_id(1) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(cu_q, cu_k, None, q_offset, i_s, capacity, max_keys)
    o_r = tl.arange(0, ROWS)
    m_row = o_r < q_len * GROUP
    i_last = tl.minimum(offset + o_r // GROUP, k_len - 1)  # [ROWS] last key each row sees
    seen = tl.max(tl.where(m_row, i_last, -1), 0) + 1
    first = tl.program_id(0) * units
    last = tl.minimum(first + units, tl.cdiv(seen, BLOCK * SUB))
    if first >= last:
        return
    page_row = page_table
    if MODE != 0:
        page_row += i_s.to(tl.int64) * s_table
    p_s = scores + (i_h * GROUP + o_r % GROUP).to(tl.int64) * s_sh + (q_start + o_r // GROUP).to(tl.int64) * s_st
    b_q = load_rows(q + q_start.to(tl.int64) * s_qt, o_r, q_len, i_h * GROUP, s_qt, s_qh, s_qd, GROUP, DIM, DIM_PAD)
    b_q = query_numbers(b_q, PRODUCT)
    b_f = row_factors(q_scale, None, tl.where(m_row, o_r, 0), i_h, s_qs, 0, GROUP)
    o_a = first * SUB + tl.arange(0, UNITS * SUB)
    m_b = o_a < tl.minimum(last * SUB, num_blocks)
    marks = tl.load(p_s[:, None] + o_a[None, :], mask=m_row[:, None] & m_b[None, :], other=0.0)
    is_open = tl.max((marks != marks).to(tl.int32), 0).reshape(UNITS, SUB)
    left = tl.sum(tl.max(is_open, 1) << tl.arange(0, UNITS), 0)  # a bit for each unit with an open block
    while left != 0:
        bit = left & -left
        left ^= bit
        i_u = first + (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # the number of the bit
        o_b = i_u * SUB + tl.arange(0, SUB)
        mark = tl.load(p_s[:, None] + o_b[None, :], mask=m_row[:, None] & (o_b < num_blocks)[None, :], other=0.0)
        best = tl.full([ROWS, SUB], float("-inf"), tl.float32)
        for part in tl.static_range(PARTS):
            i_k = tile_start(i_u * PARTS + part, BLOCK, KEYS, SUB, PARTS)
            b_k = load_keys(
                keys, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token, s_dim,
                MODE, TMA, PAGE_SIZE, TILE, DIM, DIM_PAD, True,
            )  # fmt: skip
            m = block_maxima(tl.dot(b_k, b_q.T), i_k, i_last, TILE, KEYS, SUB, True, True)
            best = tl.maximum(best, m[:, None] if SUB == 1 else m)
        if b_f is not None:
            best *= b_f[:, None]
        best = tl.where(best > float("-inf"), best, float("-inf"))
        tl.store(p_s[:, None] + o_b[None, :], best, mask=mark != mark)


def at_once(blocks: int) -> int:
    """Tiles of so many blocks that a program of `rescore_kernel` looks at: bits of a positive int32, and few registers."""
    return max(16 // blocks, 1)


def refuse(
    index_q: Any, index_k: Any, seqs: Layout, block_size: int, topk: int, init_blocks: int, local_blocks: int
) -> str | None:
    """Why these kernels cannot select, or None."""
    exact = exact_keys(index_k)
    dtype = exact.dtype
    if dtype not in (torch.float16, torch.bfloat16) or dtype != index_q.dtype:
        return f"it needs float16 or bfloat16 exact keys of the queries' dtype, got {dtype} and {index_q.dtype}"
    return triton_select.refuse(seqs, block_size, topk, init_blocks, local_blocks)


def select_blocks(
    index_q: Tensor,
    index_k: CertifiedKeys | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
) -> tuple[Tensor, Tensor]:
    """See `openmsa.block_topk.select_blocks`. Returns the blocks, and int32 ``[total_q, heads]``: how many were rescored."""
    total_q, heads, _ = index_q.shape
    pool = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    assert isinstance(pool, CertifiedKeys)
    rows, num_blocks = seqs.max_seqlen_q * heads // pool.shape[1], seqs.num_blocks(block_size)
    free, width = topk - init_blocks - local_blocks, score_rows(num_blocks)
    if not certifies(rows, num_blocks, free, 8 * total_q * heads * width) or total_q == 0:
        arguments = (seqs, block_size, topk, init_blocks, local_blocks)
        blocks = triton_select.select_blocks(index_q, exact_keys(index_k), *arguments)
        return blocks, seqs.visible_blocks(total_q, block_size)[:, None].expand(-1, heads)
    bounds = torch.empty(2, total_q, heads, width, dtype=torch.float32, device=index_q.device)[..., :num_blocks].transpose(1, 2)
    visible = torch.empty(total_q, dtype=torch.int32, device=index_q.device)
    blocks = torch.empty(total_q, heads, topk, dtype=torch.int32, device=index_q.device)
    rescored = torch.empty(total_q, heads, dtype=torch.int32, device=index_q.device)
    coarse: Stored | PagedIndexKeys = pool.coarse
    if isinstance(index_k, PagedIndexKeys):
        coarse = PagedIndexKeys(pool.coarse, index_k.page_table, index_k.seq_lens)
    scores, upper = bounds  # [heads, total_q, num_blocks]
    launch_scores(index_q, coarse, seqs, block_size, scores, visible, upper=upper)
    settle(scores, upper, visible, rescored, free, init_blocks, local_blocks)
    rescore(index_q, exact_keys(index_k), seqs, block_size, scores)
    launch_topk(scores, visible, init_blocks, local_blocks, blocks)
    return blocks, rescored


def settle(
    scores: Tensor, upper: Tensor, visible: Tensor, rescored: Tensor, free: int, init_blocks: int, local_blocks: int
) -> None:
    """Launches `settle_kernel`. scores: lower bounds, ``[heads, total_q, num_blocks]``, last stride 1, as `upper`."""
    heads, total_q, num_blocks = scores.shape
    warps = num_warps(num_blocks)
    settle_kernel[(total_q * heads,)](
        scores,
        upper,
        visible,
        rescored,
        *scores.stride()[:2],
        num_blocks,
        HEADS=heads,
        FREE=free,
        INIT=init_blocks,
        LOCAL=local_blocks,
        REPS=max(triton.next_power_of_2(num_blocks) // (32 * warps), 1),
        COLS=32 * warps,
        num_warps=warps,
    )


def rescore(index_q: Tensor, exact: Tensor | Stored | PagedIndexKeys, seqs: Layout, block_size: int, scores: Tensor) -> None:
    """Launches `rescore_kernel` over all blocks of ``scores [heads, total_q, num_blocks]``."""
    _, heads, dim = index_q.shape
    device, tile = facts(index_q.device), Tile.of(block_size)
    source = KeySource.of(exact, tile, device)
    queries = QuerySource.of(index_q, source, device)
    group, num_blocks = heads // source.heads, scores.shape[2]
    tiles = -(-num_blocks // tile.sub)
    units = at_once(tile.sub)
    num_splits = max(splits(seqs.batch * source.heads, tiles, 8 * device.num_sms, 1), -(-tiles // units))
    constants = tile.constexprs() | {"MODE": source.mode, "TMA": source.tma, "PAGE_SIZE": source.page_size}
    rescore_kernel[(num_splits, seqs.batch * source.heads)](
        queries.rows,
        queries.scale,
        source.keys,
        source.page_table,
        seqs.cu_seqlens_q,
        seqs.cu_seqlens_k,
        seqs.q_offset,
        scores,
        *queries.rows.stride(),
        queries.scale_stride,
        *source.strides,
        source.table_stride,
        *scores.stride()[:2],
        num_blocks,
        source.num_pages,
        source.capacity,
        seqs.max_seqlen_k,
        -(-tiles // num_splits),
        KEY_HEADS=source.heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        PRODUCT=queries.product,
        ROWS=max(16, triton.next_power_of_2(seqs.max_seqlen_q * group)),
        UNITS=units,
        num_warps=4,
        **constants,
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """Rows from 64 to 8192 blocks; pages and packed keys, odd dims and blocks."""
    settled = {"lower": "*fp32", "upper": "*fp32", "visible": "*i32", "rescored": "*i32"}
    settled |= dict.fromkeys(("s_h", "s_t", "num_blocks"), "i32")
    for num_blocks, free in ((64, 7), (1024, 15), (8192, 15)):
        warps = num_warps(num_blocks)
        constants = {"HEADS": 4, "FREE": free, "INIT": 0, "LOCAL": 1, "REPS": num_blocks // warps // 32, "COLS": warps * 32}
        yield Variant(f"settle {free} of {num_blocks}", settle_kernel, settled, constants, warps)
    device = COMPILE_TARGETS[arch]
    for rows, dim, block_size, mode, tma in (
        (16, 128, 128, PAGE, True),
        (64, 128, 128, FLAT, True),
        (16, 64, 32, PAGES, False),
        (16, 80, 256, PAGE, True),
    ):
        tile = Tile.of(block_size)
        operands = Operands("bf16", "plain", dim, tile, mode, tma and device.has_tma)
        types, constants = operands.arguments(device)
        types |= {"scores": "*fp32", "cu_k": "*i32", "s_sh": "i32", "s_st": "i32"} | dict.fromkeys(LENGTHS, "i32")
        constants |= {"ROWS": rows, "UNITS": at_once(tile.sub)}
        names = set(rescore_kernel.arg_names)
        types = {n: t for n, t in types.items() if n in names and n not in constants}
        constants = {n: c for n, c in constants.items() if n in names}
        slack = 8 if arch == 100 else 0  # one address, read again once
        yield Variant(f"rescore {operands.name} x {rows}", rescore_kernel, types, constants, 4, wgmma=True, may_spill=slack)
