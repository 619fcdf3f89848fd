# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Two kernels work in front of a launch on a GPU: one cuts a page table from the flat one, and one moves selections into one
long sequence. `plan_rows` does the same in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two

COLUMNS = 256
"""A program of `cut_kernel` copies so many pages."""


@triton.jit(do_not_specialize=["total", "width"])
def cut_kernel(flat, first, table, s_flat, total, width, COLUMNS: tl.constexpr):
    """Writes ``table[row, j] = flat[first[row] + j]``, and -1 for entries outside the flat table.

    The grid is (rows, ceil(width / COLUMNS)). All tensors are int32; `table` is contiguous ``[rows, width]``.
    """
    i_row = tl.program_id(0)
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    o_at = tl.load(first + i_row) + o_c
    b_page = tl.load(flat + o_at.to(tl.int64) * s_flat, mask=(o_at >= 0) & (o_at < total), other=-1)
    tl.store(table + i_row.to(tl.int64) * width + o_c, b_page, mask=o_c < width)


@triton.jit(do_not_specialize=["num_pages"])
def shift_kernel(
    blocks,
    first,
    lens,
    offset,
    shifted,
    keys,
    position,
    s_row,
    s_head,
    s_slot,
    num_pages,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    ENTRIES: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Computes `fmha_sm100.plan_rows.one_long_sequence`, a row a program of the grid (rows).

    All tensors are int32. `blocks` ``[rows, HEADS, TOPK]`` has any strides, and `shifted` of that shape is contiguous. ENTRIES
    is HEADS * TOPK rounded up to a power of two, and PAGE the keys of a page.
    """
    i_row = tl.program_id(0)
    i_first = tl.load(first + i_row)
    n_seen = tl.maximum(tl.minimum(tl.load(lens + i_row), tl.load(offset + i_row) + 1), 0)
    n_seen = tl.where((i_first >= 0) & (i_first < num_pages), n_seen, 0)
    n_keys = tl.where(n_seen > 0, i_first * PAGE + n_seen, 0)
    tl.store(keys + i_row, n_keys)
    tl.store(position + i_row, n_keys - 1)
    o_e = tl.arange(0, ENTRIES)
    m_e = o_e < HEADS * TOPK
    p_b = blocks + i_row.to(tl.int64) * s_row + (o_e // TOPK) * s_head + (o_e % TOPK) * s_slot
    b_id = tl.load(p_b, mask=m_e, other=-1)
    b_id = tl.where((b_id >= 0) & (b_id < (n_seen + PAGE - 1) // PAGE), b_id + i_first, -1)
    tl.store(shifted + i_row.to(tl.int64) * (HEADS * TOPK) + o_e, b_id, mask=m_e)


def cut(flat: Tensor, first: Tensor, width: int) -> Tensor:
    """Returns the page table int32 ``[rows, width]``, cut from the flat one at the place of each row's first page, int32
    ``[rows]``."""
    table = torch.empty((first.numel(), width), dtype=torch.int32, device=flat.device)
    if table.numel():
        launch_kernel(
            cut_kernel,
            (first.numel(), ceil_div(width, COLUMNS)),
            flat,
            first,
            table,
            flat.stride(0),
            flat.numel(),
            width,
            COLUMNS=COLUMNS,
            num_warps=2,
        )
    return table


def shift(
    blocks: Tensor, first: Tensor, lens: Tensor, offset: Tensor, num_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `fmha_sm100.plan_rows.one_long_sequence` describes; `first` holds where each row's pages start."""
    rows, heads, topk = blocks.shape
    shifted = torch.empty((rows, heads, topk), dtype=torch.int32, device=blocks.device)
    keys, position = torch.empty((2, rows), dtype=torch.int32, device=blocks.device)
    if rows:
        launch_kernel(
            shift_kernel,
            (rows,),
            *(blocks, first, lens, offset, shifted, keys, position, *blocks.stride(), num_pages),
            HEADS=heads,
            TOPK=topk,
            ENTRIES=next_power_of_two(heads * topk),
            PAGE=page_size,
            num_warps=1,
        )
    return shifted, keys, position
