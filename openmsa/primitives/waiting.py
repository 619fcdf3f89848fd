# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Memory asked for before it is needed, while a kernel waits for the one in front: it then comes from the L2 cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fetch_ahead(p, mask):
    """Asks for the lines of memory at these addresses, which then come from the L2 cache; nothing is read."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0;}",
        "=r,l,r",
        [p, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_pages(page_row, s_page, num_pages):
    """`fetch_ahead` of the first entries of a row of a page table, s_page apart: every line of 128 bytes where that is 1."""
    o_line = tl.arange(0, 128) * 32
    for i in range(0, num_pages, 4096):
        fetch_ahead(page_row + (i + o_line) * s_page, i + o_line < num_pages)
