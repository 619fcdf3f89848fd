# SPDX-License-Identifier: MIT
"""Where the elements of matrices lie in shared memory and in registers, and products of them."""

from __future__ import annotations

import numpy as np

from tests.ptx.arithmetic import F32, U16, from_bfloat16
from tests.ptx.threads import LANE, LANES, THREADS, WARP

ROWS, COLUMNS, DEPTH = 64, 16, 16
"""The sizes of a product, of factors [ROWS, DEPTH] and [COLUMNS, DEPTH]."""
SWIZZLES = {1: 7, 2: 3, 3: 1}
"""By the layout that a descriptor names: which bits of the number of a line change the place of a chunk of sixteen bytes."""


def small(rows, count, across):
    """Yields for each of `count` matrices of eight by eight elements, and for each half of the register of a thread that holds
    two of them: the matrix, the half, and the address of the element. rows: the addresses of rows that each thread gives;
    across: threads hold elements of a column, not of a row."""
    for i in range(count):
        for half in range(2):
            row, column = LANE // 4, LANE % 4 * 2 + half
            if across:
                row, column = column, row
            yield i, half, rows[WARP * LANES + 8 * i + row] + 2 * column


def factor(descriptor, rows, across):
    """Returns the addresses [rows, DEPTH] of the elements of a factor that a descriptor of 64 bits describes; rows are
    contiguous or, `across`, columns."""
    start, leading, stride = ((descriptor >> place & 0x3FFF) << 4 for place in (0, 16, 32))
    layout = descriptor >> 62
    line = 256 >> layout
    row, column = np.arange(rows)[:, None], np.arange(DEPTH)[None, :]
    if across:
        width = line // 2
        addresses = row % width * 2 + row // width * leading + column % 8 * line + column // 8 * stride
    else:
        addresses = row % 8 * line + row // 8 * stride + column * 2
    addresses = addresses + start
    return addresses ^ ((addresses >> 7 & SWIZZLES[layout]) << 4)


def multiply(memory, first, second):
    """Returns the product of two factors, whose elements lie at these addresses of a memory, as registers hold it."""
    elements = (memory[addresses[..., None] + np.arange(2)].view(U16)[..., 0] for addresses in (first, second))
    left, right = (from_bfloat16(x).astype(np.float64) for x in elements)
    product = left @ right.T
    places = np.arange(ROWS * COLUMNS // THREADS)[:, None]
    return product[WARP * 16 + LANE // 4 + places // 2 % 2 * 8, places // 4 * 8 + LANE % 4 * 2 + places % 2].astype(F32)
