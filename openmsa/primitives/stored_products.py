# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="index"
"""Rows of queries are multiplied here with a tile of keys that are stored in a format, whose codes become factors first."""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.primitives.codes import e2m1_parts, e4m3_numbers, fp4_unit, group_numbers, int8_parts
from openmsa.primitives.query_parts import side_by_side
from openmsa.primitives.rows import times


@triton.jit
def stored_products(b_q, b_k, b_g, ROWS: tl.constexpr, FORM: tl.constexpr, TILE: tl.constexpr, PRODUCT: tl.constexpr):
    """Gives products of rows b_q, as `openmsa.primitives.scoring.query_factors` makes them, and the codes b_k of TILE keys,
    scales b_g of groups included: [rows, keys], or with PRODUCT.swap [keys, rows]."""
    FORMAT: tl.constexpr = FORM.format
    SWAP: tl.constexpr = PRODUCT.swap
    TYPE: tl.constexpr = PRODUCT.dtype
    if FORMAT == 1:
        s = times(b_q, e4m3_numbers(b_k, TYPE), None, SWAP)
    elif FORMAT == 2:
        s = None
        parts = int8_parts(b_k, TYPE)
        if SWAP and len(parts) == 2:
            s = times(side_by_side(b_q), side_by_side(parts), None, True)
        else:
            for i in tl.static_range(len(parts)):
                s = times(b_q[i], parts[i], s, SWAP)
    elif PRODUCT.grouped:  # b_q has `grouped_parts`
        parts = e2m1_parts(b_k, tl.float16)
        s = times(side_by_side(b_q), side_by_side(parts), None, True)
        b_x = group_numbers(b_g, FORMAT, FORM.native)
        GROUPS_PAD: tl.constexpr = b_x.shape[1]
        PAIR: tl.constexpr = 2 if GROUPS_PAD > 1 else 1
        s = s.reshape(TILE, GROUPS_PAD // PAIR, ROWS, PAIR).permute(0, 2, 1, 3).reshape(TILE, ROWS, GROUPS_PAD)
        s = tl.sum(s * b_x[:, None, :], 2)
    else:
        parts = e2m1_parts(b_k, TYPE)
        unit, b_x = fp4_unit(b_k, b_g, FORMAT, TYPE, FORM.native)
        s = None
        for i in tl.static_range(len(parts)):
            s = times(b_q[i], parts[i] * unit * b_x, s, SWAP)
    return s
