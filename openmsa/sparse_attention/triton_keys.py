# SPDX-License-Identifier: MIT
"""Where keys lie: offsets of key rows in packed tensors and in paged pools, for the prefill kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_offsets(
    position,  # int32 [n]: keys of one sequence
    m_key,
    first_row,  # packed row of the sequence's first key
    table_row,  # the sequence's row of the page table
    num_pages,
    stride_table_p,
    stride_page,
    stride_row,
    PAGE_SIZE: tl.constexpr,  # 0: packed keys
):
    """int64 [n]; a page id outside the pool is replaced by one inside."""
    if PAGE_SIZE > 0:
        page = tl.load(table_row + position // PAGE_SIZE * stride_table_p, mask=m_key, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        offsets = page.to(tl.int64) * stride_page + (position % PAGE_SIZE).to(tl.int64) * stride_row
    else:
        offsets = (first_row + position).to(tl.int64) * stride_row
    return offsets


@triton.jit
def row_offset(row, stride_page, stride_row, PAGE_SIZE: tl.constexpr):
    """int64 offset of a key by its row in the packed tensor, or in the pool seen as num_pages * PAGE_SIZE rows."""
    if PAGE_SIZE > 0:
        offset = (row // PAGE_SIZE).to(tl.int64) * stride_page + (row % PAGE_SIZE).to(tl.int64) * stride_row
    else:
        offset = row.to(tl.int64) * stride_row
    return offset
