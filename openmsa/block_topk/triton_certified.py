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
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.block_scores import exact_keys
from openmsa.block_topk import triton_select
from openmsa.block_topk.triton_topk import MAX_BLOCKS, as_words, bit_of, goal_reached, launch_topk, num_warps, popcount
from openmsa.index_branch.triton_bounds import launch_bounds
from openmsa.index_branch.triton_launch import score_rows
from openmsa.index_branch.triton_products import block_maxima
from openmsa.index_branch.triton_sources import KeySource
from openmsa.index_branch.triton_tiles import (
    FLAT,
    PAGE,
    PAGES,
    Lengths,
    Tile,
    load_keys,
    load_rows,
    sequence_bounds,
    tile_start,
)
from openmsa.index_branch.triton_variants import Operands
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys
from openmsa.runtime.devices import COMPILE_TARGETS, Device, facts
from openmsa.runtime.integers import ceil_div, next_power_of_two
from openmsa.runtime.launch import launch_kernel
from openmsa.runtime.variants import Variant
from openmsa.types import Layout

MAX_ROWS = 64
"""(query, head) rows a sequence has for a key head."""


def certifies(rows: int, num_blocks: int, free: int, all_rows: int) -> bool:
    """Whether bounds come first. rows: the most that a sequence has for a key head. free: places that are not forced.
    all_rows: queries times heads."""
    bounds_fit = 8 * all_rows * score_rows(num_blocks) <= triton_select.WORKSPACE
    return rows <= MAX_ROWS and 0 < free < num_blocks <= MAX_BLOCKS and bounds_fit


@dataclass(frozen=True)
class Workspace:
    """What the kernels of one selection at a time hand on; a smaller one takes the front of each tensor."""

    bounds: Tensor  # float32 [2 * total_q * heads * score_rows(num_blocks)]: lower and upper ones, then scores and upper ones
    open_words: Tensor  # int32 [total_q * heads * columns of settle_kernel]
    units: Tensor  # int32 [batch * key heads * tiles]
    visible: Tensor  # int32 [total_q]
    rescored: Tensor  # int32 [total_q * heads]

    @classmethod
    def allocate(
        cls, total_q: int, heads: int, walks: int, num_blocks: int, block_size: int, device: torch.device
    ) -> Workspace:
        """walks: sequences times key heads."""
        rows = total_q * heads
        bounds = torch.empty(2 * rows * score_rows(num_blocks), dtype=torch.float32, device=device)
        units = walks * ceil_div(num_blocks, Tile.of(block_size).sub)
        counts = (rows * columns(num_blocks), units, total_q, rows)
        return cls(bounds, *(torch.empty(n, dtype=torch.int32, device=device) for n in counts))

    def bounds_of(self, total_q: int, heads: int, num_blocks: int) -> Tensor:
        """``[2, heads, total_q, num_blocks]``."""
        width = score_rows(num_blocks)
        held = self.bounds[: 2 * total_q * heads * width].view(2, total_q, heads, width)
        return held[..., :num_blocks].transpose(1, 2)

    def open_words_of(self, rows: int, num_blocks: int) -> Tensor:
        """``[rows, columns]``."""
        return self.open_words[: rows * columns(num_blocks)].view(rows, -1)


def columns(num_blocks: int) -> int:
    """Words of open blocks that a row has."""
    return 32 * num_warps(num_blocks)


@triton.jit
def reached_by(x, REPS: tl.constexpr, COLS: tl.constexpr, GOAL: tl.constexpr):
    """A threshold that at least GOAL of x [REPS, COLS] reach, and how many do: GOAL, or more when the GOAL-th largest has
    equals. With fewer than GOAL above -inf: -inf and 0."""
    low, count, _ = goal_reached(x, REPS, COLS, GOAL)
    if count < GOAL:
        low, count = float("-inf"), 0
    return low, count


@triton.jit(do_not_specialize=["num_blocks", "s_side", "s_h", "s_t"])
def settle_kernel(
    bounds, visible, open_words, rescored, s_side, s_h, s_t, num_blocks,
    HEADS: tl.constexpr, FREE: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, REPS: tl.constexpr, COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (total_q * heads). Writes over the lower bounds: +inf where a block must be chosen, NaN where it is open, -inf
    elsewhere. open_words: int32 [total_q * heads, COLS], bit r of word c for open block r * COLS + c."""
    i_row = tl.program_id(0)
    i_t, i_h = i_row // HEADS, i_row % HEADS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = tl.minimum(tl.load(visible + i_t), num_blocks)
    n_init = tl.minimum(seen, INIT)
    i_local = tl.maximum(seen - LOCAL, n_init)
    o_c = tl.arange(0, COLS)
    o_b = tl.arange(0, REPS)[:, None] * COLS + o_c[None, :]
    m_free = (o_b >= n_init) & (o_b < i_local)
    p_b = bounds + i_t.to(tl.int64) * s_t + i_h.to(tl.int64) * s_h + o_b
    low = tl.load(p_b, mask=m_free, other=float("-inf"))
    high = tl.load(p_b + tl.cast(s_side, tl.int64), mask=m_free, other=float("-inf"))
    low_bar, _ = reached_by(low, REPS, COLS, FREE)
    high_bar, rivals = reached_by(high, REPS, COLS, FREE)
    # Exactly FREE upper bounds reach the bar: all others are below it. More do: the next best may equal it.
    sure = (low > high_bar) | ((low == high_bar) & (rivals == FREE) & (low > float("-inf")))
    is_open = (high >= low_bar) & (high > float("-inf")) & ~sure
    marks = tl.where(sure, float("inf"), tl.where(is_open, float("nan"), float("-inf")))
    tl.store(p_b, marks, mask=o_b < num_blocks)
    words = as_words(tl.where(is_open, 1.0, 0.0), REPS, COLS)
    tl.store(open_words + i_row.to(tl.int64) * COLS + o_c, words)
    tl.store(rescored + i_row, tl.sum(popcount(words), 0))


@triton.jit
def either(x, y):
    """Bits of one or the other."""
    return x | y


@triton.jit
def open_units(
    open_words, units, i_h, q_start, n_rows, part, parts,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Which units (tiles' worth of SUB blocks) are open to a row of a sequence's rows, in words [COLS / SUB], those of SUB
    neighbouring blocks together; then an equal part of them, the part-th, is listed in `units`, each at its rank. Returns the
    ranks of the first one listed and of the first one behind."""
    WIDTH: tl.constexpr = COLS // SUB
    words = tl.zeros([WIDTH], tl.int32)
    for i_r in range(0, n_rows, 16):
        o_r = i_r + tl.arange(0, 16)
        i_row = (q_start + o_r // GROUP).to(tl.int64) * (KEY_HEADS * GROUP) + i_h * GROUP + o_r % GROUP
        p_w = open_words + i_row[:, None] * COLS + tl.arange(0, COLS)[None, :]
        b_w = tl.load(p_w, mask=(o_r < n_rows)[:, None], other=0)
        words |= tl.reduce(tl.reduce(b_w.reshape(16, WIDTH, SUB), 2, either), 0, either)
    number = popcount(words)
    rank = tl.cumsum(number, 0) - number
    total = tl.sum(number, 0)
    first, last = (total * part) // parts, (total * (part + 1)) // parts
    o_u = tl.arange(0, WIDTH)
    for _ in range(tl.max(number, 0)):
        lowest = words & -words
        tl.store(units + rank, bit_of(lowest) * WIDTH + o_u, mask=(words != 0) & (rank >= first) & (rank < last))
        words = words ^ lowest
        rank += 1
    tl.debug_barrier()  # other threads read what is listed
    return first, last


LENGTHS = ["num_blocks", "num_pages", "capacity", "max_keys"]


@triton.jit(do_not_specialize=LENGTHS)
def rescore_kernel(
    q, keys, page_table, cu_q, cu_k, seq_lens, q_offset, open_words, units, scores,
    s_qt, s_qh, s_qd, s_page, s_head, s_token, s_dim, s_table, s_sh, s_st, num_blocks, num_pages, capacity, max_keys,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    MODE: tl.constexpr, TMA: tl.constexpr, PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (parts, batch * key heads): each program scores an equal part of the units that are open to a row of a sequence,
    and writes the scores of blocks that hold NaN. units: int32 [batch * key heads, tiles], scratch."""
    i_s, i_h = tl.program_id(1) // KEY_HEADS, tl.program_id(1) % KEY_HEADS
    q_start, q_len, k_start, k_len, offset = sequence_bounds(cu_q, cu_k, seq_lens, q_offset, i_s, capacity, max_keys)
    o_r = tl.arange(0, ROWS)
    m_row = o_r < q_len * GROUP
    i_last = tl.minimum(offset + o_r // GROUP, k_len - 1)  # [ROWS] last key each row sees
    page_row = page_table
    if MODE != 0:
        page_row += i_s.to(tl.int64) * s_table
    p_s = scores + (i_h * GROUP + o_r % GROUP).to(tl.int64) * s_sh + (q_start + o_r // GROUP).to(tl.int64) * s_st
    b_q = load_rows(q + q_start.to(tl.int64) * s_qt, o_r, q_len, i_h * GROUP, s_qt, s_qh, s_qd, GROUP, DIM, DIM_PAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    units += tl.program_id(1).to(tl.int64) * tl.cdiv(num_blocks, SUB)
    first, last = open_units(
        open_words, units, i_h, q_start, q_len * GROUP, tl.program_id(0), tl.num_programs(0), KEY_HEADS, GROUP, SUB, COLS
    )
    best = tl.full([ROWS, SUB], float("-inf"), tl.float32)  # of the parts of a block so far
    for i in tl.range(first * PARTS, last * PARTS, num_stages=STAGES):
        i_t = tl.load(units + i // PARTS) * PARTS + i % PARTS
        o_b = i_t // PARTS * SUB + tl.arange(0, SUB)
        p_b = p_s[:, None] + o_b[None, :]
        mark = tl.load(p_b, mask=m_row[:, None] & (o_b < num_blocks)[None, :], other=0.0)
        i_k = tile_start(i_t, BLOCK, KEYS, SUB, PARTS)
        b_k = load_keys(
            keys, page_row, i_h, i_k, k_start, k_len, num_pages, s_page, s_head, s_token, s_dim,
            MODE, TMA, PAGE_SIZE, TILE, DIM, DIM_PAD, True,
        )  # fmt: skip
        m = block_maxima(tl.dot(b_k, b_q.T), i_k, i_last, TILE, KEYS, SUB, True, True)
        m = m[:, None] if SUB == 1 else m
        if PARTS == 2:
            m = tl.where(i % 2 == 1, tl.maximum(best, m), m)
            best = m
        m = tl.where(m > float("-inf"), m, float("-inf"))
        tl.store(p_b, m, mask=(mark != mark) & (i % PARTS == PARTS - 1))


@dataclass(frozen=True)
class RescoreConfig:
    """num_stages: of the walk over units. resident: programs that one multiprocessor holds at a time."""

    num_stages: int
    resident: int


def rescore_config(device: Device, tile: Tile, dim: int, paged: bool) -> RescoreConfig:
    """Two tiles, one where two do not fit, in as many programs as shared memory holds, up to three. Keys are read one stage
    behind the number of their unit, or of their page, which is read one behind it."""
    tile_bytes = tile.tile * 2 * next_power_of_two(dim)
    for resident, buffers in ((3, 2), (2, 2), (1, 2), (1, 1)):
        if resident * (buffers * tile_bytes + 8192) <= device.shared_bytes:
            break
    asynchronous = device.arch in (90, 100)  # the product reads the buffers itself, so it holds one
    return RescoreConfig(max(buffers - asynchronous, 1) * (2 + paged) + 1, resident)


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
    key_heads, num_blocks = pool.shape[1], seqs.num_blocks(block_size)
    rows, free = seqs.max_seqlen_q * heads // key_heads, topk - init_blocks - local_blocks
    if not certifies(rows, num_blocks, free, total_q * heads) or total_q == 0:
        arguments = (seqs, block_size, topk, init_blocks, local_blocks)
        blocks = triton_select.select_blocks(index_q, exact_keys(index_k), *arguments)
        return blocks, seqs.visible_blocks(total_q, block_size)[:, None].expand(-1, heads)
    workspace = Workspace.allocate(total_q, heads, seqs.batch * key_heads, num_blocks, block_size, index_q.device)
    blocks = torch.empty(total_q, heads, topk, dtype=torch.int32, device=index_q.device)
    page_table = index_k.page_table if isinstance(index_k, PagedIndexKeys) else None
    launch_certified(index_q, pool, page_table, Lengths.of(seqs), block_size, init_blocks, local_blocks, workspace, blocks)
    return blocks, workspace.rescored.view(total_q, heads)


def launch_certified(
    index_q: Tensor,
    keys: CertifiedKeys,
    page_table: Tensor | None,
    lengths: Lengths,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    workspace: Workspace,
    out: Tensor,
) -> None:
    """The four kernels. keys: a pool with a page table, or packed. out: int32 ``[total_q, heads, topk]``, contiguous.
    Allocates nothing; reads lengths on the device."""
    total_q, heads, topk = out.shape
    num_blocks = ceil_div(lengths.max_seqlen_k, block_size)
    bounds, visible = workspace.bounds_of(total_q, heads, num_blocks), workspace.visible[:total_q]
    open_words, free = workspace.open_words_of(total_q * heads, num_blocks), topk - init_blocks - local_blocks
    pdl = index_q.device.type == "cuda" and facts(index_q.device).arch >= 90
    launch_bounds(index_q, keys.coarse, page_table, lengths, block_size, bounds, visible, pdl=pdl)
    settle(bounds, visible, open_words, workspace.rescored, free, init_blocks, local_blocks, pdl)
    rescore(index_q, keys.exact, page_table, lengths, block_size, open_words, workspace.units, bounds[0], pdl)
    launch_topk(bounds[0], visible, init_blocks, local_blocks, out, pdl)


def settle(
    bounds: Tensor,
    visible: Tensor,
    open_words: Tensor,
    rescored: Tensor,
    free: int,
    init_blocks: int,
    local_blocks: int,
    pdl: bool,
) -> None:
    """Launches `settle_kernel`. bounds: ``[2, heads, total_q, num_blocks]``, last stride 1."""
    _, heads, total_q, num_blocks = bounds.shape
    warps = num_warps(num_blocks)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    launch_kernel(
        settle_kernel,
        (total_q * heads,),
        bounds,
        visible,
        open_words,
        rescored,
        *bounds.stride()[:3],
        num_blocks,
        HEADS=heads,
        FREE=free,
        INIT=init_blocks,
        LOCAL=local_blocks,
        REPS=max(next_power_of_two(num_blocks) // (32 * warps), 1),
        COLS=32 * warps,
        PDL=pdl,
        num_warps=warps,
        **options,
    )


def rescore(
    index_q: Tensor,
    exact: Tensor,
    page_table: Tensor | None,
    lengths: Lengths,
    block_size: int,
    open_words: Tensor,
    units: Tensor,
    scores: Tensor,
    pdl: bool,
    chosen: RescoreConfig | None = None,
) -> None:
    """Launches `rescore_kernel`. exact: a pool with a page table, or packed keys. scores: as `settle` leaves them, ``[heads,
    total_q, num_blocks]``."""
    _, heads, dim = index_q.shape
    device, tile = facts(index_q.device), Tile.of(block_size)
    source = KeySource.of_pool(exact, page_table, tile, device)
    chosen = chosen or rescore_config(device, tile, dim, source.mode != FLAT)
    group, num_blocks, programs = heads // source.heads, scores.shape[2], lengths.batch * source.heads
    tiles = ceil_div(num_blocks, tile.sub)
    constants: dict[str, Any] = {"MODE": source.mode, "TMA": source.tma, "PAGE_SIZE": source.page_size} | tile.constexprs()
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    launch_kernel(
        rescore_kernel,
        (min(max(chosen.resident * device.num_sms // programs, 1), tiles), programs),
        index_q,
        source.keys,
        source.page_table,
        *lengths.tensors,
        open_words,
        units,
        scores,
        *index_q.stride(),
        *source.strides,
        source.table_stride,
        *scores.stride()[:2],
        num_blocks,
        source.num_pages,
        source.capacity,
        lengths.max_seqlen_k,
        KEY_HEADS=source.heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=next_power_of_two(dim),
        ROWS=max(16, next_power_of_two(lengths.max_seqlen_q * group)),
        COLS=open_words.shape[1],
        STAGES=chosen.num_stages,
        PDL=pdl,
        num_warps=4,
        **constants,
        **options,
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """Rows from 64 to 8192 blocks; pages and packed keys, odd dims and blocks."""
    device = COMPILE_TARGETS[arch]
    settled = {"bounds": "*fp32"} | dict.fromkeys(("visible", "open_words", "rescored"), "*i32")
    settled |= dict.fromkeys(("s_side", "s_h", "s_t", "num_blocks"), "i32")
    for num_blocks, free in ((64, 7), (1024, 15), (8192, 15)):
        warps = num_warps(num_blocks)
        constants = {"HEADS": 4, "FREE": free, "INIT": 0, "LOCAL": 1, "REPS": num_blocks // warps // 32, "COLS": warps * 32}
        constants["PDL"] = device.has_tma
        yield Variant(f"settle {free} of {num_blocks}", settle_kernel, settled, constants, warps)
    for rows, dim, block_size, mode, tma, words in (
        (16, 128, 128, PAGE, True, 32),
        (64, 128, 128, FLAT, True, 512),
        (16, 64, 32, PAGES, False, 64),
        (16, 80, 256, PAGE, True, 32),
        (64, 256, 64, PAGE, True, 64),
    ):
        tile = Tile.of(block_size)
        operands = Operands("bf16", "plain", dim, tile, mode, tma and device.has_tma)
        types, constants = operands.arguments(device)
        types |= dict.fromkeys(("open_words", "units", "seq_lens"), "*i32") | {"scores": "*fp32"}
        types |= dict.fromkeys(("s_sh", "s_st", *LENGTHS), "i32")
        chosen = rescore_config(device, tile, dim, mode != FLAT)
        constants |= {"ROWS": rows, "COLS": words, "STAGES": chosen.num_stages, "PDL": device.has_tma}
        constants |= operands.absent_lengths
        names = rescore_kernel.arg_names
        types = {n: t for n, t in types.items() if n in names and n not in constants}
        constants = {n: c for n, c in constants.items() if n in names}
        name = f"rescore {operands.name} x {rows}"
        yield Variant(name, rescore_kernel, types, constants, 4, chosen.num_stages, wgmma=True)
