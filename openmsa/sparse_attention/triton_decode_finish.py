# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Programs of decode attention end here: they store their output, or a partial, which the last program of a token and head
merges with the others. Here stands as well how rows of a tile are padded.

The constexprs SHAPE and CUT are a `Shape` of `openmsa.sparse_attention.triton_decode_walk` and a `Config` of
`openmsa.sparse_attention.triton_decode`. BM is the rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.primitives.merging import leave_partial, merge
from openmsa.runtime.launch import ceil_div, next_power_of_two


def row_tiles(group: int, head_dim: int) -> tuple[int, int]:
    """Returns the rows of a program, heads of one group padded for the matrix unit, and the programs of a group."""
    rows = min(max(16, next_power_of_two(group)), 64 if head_dim <= 128 else 32)
    return rows, ceil_div(group, rows)


def padded_dim(head_dim: int, form: int) -> int:
    """Returns the padded elements of a row, the field `dim_pad` of `Shape`: a matrix instruction takes 16 words or more."""
    return max(next_power_of_two(head_dim), {0: 16, 1: 32, 3: 64}[form])


@triton.jit
def store_rows(out, p_out, p_lse, b_acc, b_m, b_z, o_r, o_d, m_r, D: tl.constexpr):
    """Stores acc / z and its natural-log lse; 0 and -inf where nothing was read. p_out and p_lse point at the first head of the
    group, of a token of `out`."""
    b_out = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
    p_rows = p_out + o_r[:, None] * out.s_head + o_d[None, :] * out.s_dim
    tl.store(p_rows, b_out.to(out.rows.dtype.element_ty), mask=m_r[:, None] & (o_d[None, :] < D))
    if out.lse is not None:
        tl.store(p_lse + o_r * out.s_lse_head, (b_m + tl.log2(b_z)) * 0.6931471805599453, mask=m_r)


@triton.jit
def finish(out, partials, b_acc, b_m, b_z, i_t, i_h, i_p, i_s, o_r, o_d, m_r, SHAPE: tl.constexpr, CUT: tl.constexpr):
    """Stores the output of token i_t and the heads o_r of KV head i_h, or the partial of split i_s, which the last of row tile
    i_p to come merges with the others. It has all splits of a row tile in the third dimension of the grid."""
    G: tl.constexpr = SHAPE.group
    D: tl.constexpr = SHAPE.dim
    p_out = out.rows + (i_t.to(tl.int64) * out.s_token + i_h * G * out.s_head)
    p_lse = out.lse
    if out.lse is not None:
        p_lse = out.lse + (i_t.to(tl.int64) * out.s_lse_token + i_h * G * out.s_lse_head)
    if CUT.splits == 1:
        store_rows(out, p_out, p_lse, b_acc, b_m, b_z, o_r, o_d, m_r, D)
    else:
        before = leave_partial(partials, i_p, i_s, CUT.splits, b_acc, b_m, b_z, o_d, CUT.rows, D, True)
        if before == CUT.splits - 1:
            n_s = tl.num_programs(2)
            b_acc, b_m, b_z = merge(partials, i_p, n_s, n_s, o_d, CUT.rows, D, SHAPE.dim_pad, True)
            store_rows(out, p_out, p_lse, b_acc, b_m, b_z, o_r, o_d, m_r, D)
            tl.store(partials.arrived + i_p, 0)
