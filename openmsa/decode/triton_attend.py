# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""One launch selects the blocks of a decode step from their scores and attends to them, so that scoring and this launch run a
layer of any number of sequences.

It is decode attention (`openmsa.sparse_attention.triton_decode`) whose programs make the selection that they read: all programs
of a row find the same blocks, by the rule of `openmsa.block_topk.triton_topk`. Lengths, queries and the page table, which the
scoring kernel does not write, are read while that kernel still runs. Where a row sees at most `NEAR` blocks each warp selects
for itself, and no barrier is met. Where it sees more the program selects as one, and reads the ids from memory again.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.block_topk.triton_ids import LANES, chosen_ids, select
from openmsa.block_topk.triton_topk import write_selection
from openmsa.decode.scored import operands
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_layer import Step
from openmsa.primitives.results import finish
from openmsa.primitives.softmax import UNSPLIT, Partials
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two
from openmsa.sparse_attention import triton_decode
from openmsa.sparse_attention.triton_decode_walk import Shape, fetch_pages, first_keys, padded_dim, row_tiles, walk

NEAR = 256
"""Each warp of a program holds so many scores of a row, those of 32K keys in blocks of 128."""
MOST_PAGES = 1024
"""A program loads so many entries of a row of the page table before it waits."""


class Choice(NamedTuple):
    """Says how blocks are selected; it is a constant of the kernel. reps: scores of a row that a lane of each warp holds.
    far: scores of a row that a thread of the whole program holds, 0 where no row has more than `NEAR` blocks. pages: entries of
    the page table that are loaded before the wait, 0 where the blocks of `reps` lie in more than `MOST_PAGES`."""

    index_heads: int
    topk_pad: int
    init_blocks: int
    local_blocks: int
    reps: int
    far: int
    threads: int
    pages: int


@triton.jit
def row_words(p_row, num_blocks, REPS: tl.constexpr):
    """Loads the scores of a row as the words that `select` takes. What lies behind the last block that the row sees is read and
    not used, so that no load waits for a condition."""
    words = ()
    for r in tl.static_range(REPS):
        x = tl.load(p_row + tl.minimum(r * LANES + tl.arange(0, LANES), num_blocks - 1))
        words = words + (x.to(tl.int32, bitcast=True).to(tl.int64),)
    return words


@triton.jit(do_not_specialize=["queries", "num_blocks", "index_capacity", "num_pages", "capacity", "tiles"])
def select_and_attend_kernel(
    q, k, v, rows, table, seq_lens, out, partials, scale,
    queries, num_blocks, index_capacity, num_pages, capacity, tiles,
    SHAPE: tl.constexpr, CUT: tl.constexpr, CHOICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Selects, attends, and merges partials, in a grid of (sequences * queries, KV heads * row tiles, splits) programs.

    q is `QueryRows`, k and v `KeyRows`, rows `scored.Rows`, table `PageTable`, out `Output`, partials `Partials`; seq_lens
    int32 [batch] are the lengths of keys, of which `queries` tokens a sequence are the last. num_blocks counts the scores of a
    row; the other numbers are those of `sparse_decode_kernel`. PDL: the kernel may start before the one in front
    has ended, and waits for it."""
    PAGE: tl.constexpr = SHAPE.page
    G: tl.constexpr = SHAPE.group
    D: tl.constexpr = SHAPE.dim
    TOPK: tl.constexpr = SHAPE.topk
    TILES: tl.constexpr = CUT.tiles
    PER: tl.constexpr = SHAPE.block // CUT.keys
    REPS: tl.constexpr = CHOICE.reps
    INIT: tl.constexpr = CHOICE.init_blocks
    LOCAL: tl.constexpr = CHOICE.local_blocks
    ROW_TILES: tl.constexpr = (G + CUT.rows - 1) // CUT.rows
    # 1. The program finds its token, heads and split, and how many keys and scores the token sees.
    if PDL:
        gdc_launch_dependents()
    i_t = tl.program_id(0)
    i_b, i_q = i_t // queries, i_t % queries
    i_h, i_s = tl.program_id(1) // ROW_TILES, tl.program_id(2)
    o_r = (tl.program_id(1) % ROW_TILES) * CUT.rows + tl.arange(0, CUT.rows)  # heads in the group
    m_r = o_r < G
    o_d = tl.arange(0, SHAPE.dim_pad)
    length, scored = tl.load(seq_lens + i_b), tl.load(rows.seq_lens + i_b)
    n_k = tl.minimum(tl.minimum(length, capacity), length - queries + i_q + 1)
    n_blocks = tl.maximum(n_k + SHAPE.block - 1, 0) // SHAPE.block
    seen = tl.minimum(tl.minimum(scored, index_capacity), scored - queries + i_q + 1)
    seen = tl.minimum(tl.maximum(seen + SHAPE.block - 1, 0) // SHAPE.block, num_blocks)

    # 2. Queries are loaded, and the first entries of the page table, so that those of selected blocks come from the L1 cache.
    # A bound of them serves as well as num_pages.
    p_q = q.data + i_t.to(tl.int64) * q.s_token + (i_h * G + o_r) * q.s_head
    b_q = tl.load(p_q[:, None] + o_d[None, :] * q.s_dim, mask=m_r[:, None] & (o_d[None, :] < D), other=0.0)  # [BM, DIM_PAD]
    p_table = table.ids + i_b.to(tl.int64) * table.s_sequence
    end_page = num_pages
    if CHOICE.pages > 0:
        o_p = tl.arange(0, CHOICE.pages)
        b_table = tl.load(p_table + o_p * table.s_page, mask=o_p * PAGE < n_k, other=-1)
        near_pages = tl.max(tl.where(b_table < num_pages, b_table, -1), 0) + 1
        end_page = tl.where(n_k <= CHOICE.pages * PAGE, near_pages, num_pages)
    if PDL:
        if CHOICE.pages == 0:
            fetch_pages(p_table, table.s_page, tl.cdiv(tl.maximum(n_k, 0), PAGE))
        gdc_wait()  # Only scores come from the kernel in front.

    # 3. It selects.
    i_row = i_t * CHOICE.index_heads + (i_h if CHOICE.index_heads > 1 else 0)
    p_row = rows.scores + i_row.to(tl.int64) * num_blocks
    p_ids = rows.blocks + i_row.to(tl.int64) * TOPK
    o_k = tl.arange(0, CHOICE.topk_pad)
    if CHOICE.far == 0:
        b_ids = chosen_ids(select(row_words(p_row, num_blocks, REPS), seen, REPS, TOPK, INIT, LOCAL), o_k, REPS)
    else:
        b_ids = o_k
        if seen <= REPS * LANES:
            b_ids = chosen_ids(select(row_words(p_row, num_blocks, REPS), seen, REPS, TOPK, INIT, LOCAL), o_k, REPS)
        else:  # Every program of the row writes the same ids, and reads what it has written itself.
            write_selection(
                p_row, p_ids, 1, seen, num_blocks, TOPK, CHOICE.topk_pad, INIT, LOCAL, CHOICE.far, CHOICE.threads, False
            )
            tl.debug_barrier()
            b_ids = tl.load(p_ids + o_k, mask=o_k < TOPK, other=-1)

    # 4. It attends to this split's tiles of the selected blocks.
    b_u = i_s * TILES + tl.arange(0, TILES)
    b_id = tl.gather(b_ids, tl.minimum(b_u // PER, CHOICE.topk_pad - 1), 0)
    b_id = tl.where(b_u < TOPK * PER, b_id, -1)
    b_first, b_page = first_keys(b_u, b_id, p_table, table.s_page, n_k, n_blocks, end_page, SHAPE, CUT)
    if TILES > 1:  # After the last tile with keys nothing is read.
        tiles = tl.minimum(tiles, tl.max(tl.where(b_first < n_k, tl.arange(0, TILES) + 1, 0), 0))
    b_acc, b_m, b_z = walk(
        b_q, k, v, i_h, b_first, b_page, p_ids, 1, p_table, table.s_page, i_s, tiles, 0, n_k, n_blocks, num_pages, scale,
        SHAPE, CUT,
    )  # fmt: skip

    # 5. It stores the output, or a partial; one program of a row stores the selection, and nothing waits for it.
    if (i_s == 0) & (i_h < CHOICE.index_heads) & (tl.program_id(1) % ROW_TILES == 0):
        tl.store(p_ids + o_k, b_ids, mask=o_k < TOPK)
    i_p = i_t * tl.num_programs(1) + tl.program_id(1)
    token, head, n_s = i_t.to(tl.int64), i_h * G + o_r, tl.num_programs(2)
    finish(out, partials, token, head, b_acc, b_m, b_z, i_p, i_s, n_s, CUT.splits, m_r, D, CUT.splits > 1)


def launch(
    config: triton_decode.Config,
    partials: Partials,
    sizes: Sizes,
    scores: Tensor,
    step: Step,
    pdl: bool = False,
) -> None:
    """Launches the kernel once, for a step that `scored.takes_two`. scores: as `scored.Rows` says. pdl: whether to start before
    the kernel in front has ended, the one that writes the scores, and to wait for it inside."""
    group = sizes.num_q_heads // sizes.num_kv_heads
    tensors, numbers = operands(sizes, scores, step)
    launch_kernel(
        select_and_attend_kernel,
        (step.q.shape[0], sizes.num_kv_heads * row_tiles(group, sizes.head_dim)[1], config.splits),
        *tensors,
        partials if config.splits > 1 else UNSPLIT,
        step.softmax_scale,
        *numbers,
        config.tiles,
        SHAPE=Shape(group, sizes.head_dim, padded_dim(sizes.head_dim, 0), sizes.topk, sizes.block_size, sizes.page_size),
        CUT=config,
        CHOICE=choice(sizes, config.num_warps),
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )


def choice(sizes: Sizes, num_warps: int) -> Choice:
    """Says how programs of so many warps select; it is a pure function."""
    blocks, threads = next_power_of_two(sizes.num_blocks), num_warps * LANES.value
    near = min(blocks, NEAR)
    pages = next_power_of_two(ceil_div(near * sizes.block_size, sizes.page_size))
    return Choice(
        index_heads=sizes.index_heads,
        topk_pad=next_power_of_two(sizes.topk),
        init_blocks=sizes.init_blocks,
        local_blocks=sizes.local_blocks,
        reps=max(near // LANES.value, 1),
        far=blocks // threads if blocks > NEAR else 0,
        threads=threads,
        pages=pages if pages <= MOST_PAGES else 0,
    )
