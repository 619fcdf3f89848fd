# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Programs of attention end here: what they have found becomes results, which are stored."""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.primitives.merging import leave_partial, merge
from openmsa.primitives.softmax import LN_2


@triton.jit
def store_rows(p_rows, b_out, s_dim, m_row, DIM: tl.constexpr):
    """Stores results [ROWS, DIM_PAD] at these places of rows."""
    o_d = tl.arange(0, b_out.shape[1])
    b_out = b_out.to(p_rows.dtype.element_ty)
    tl.store(p_rows[:, None] + o_d[None, :] * s_dim, b_out, mask=m_row[:, None] & (o_d < DIM)[None, :])


@triton.jit
def finish(
    out, partials, token, head, b_acc, b_m, b_z, i_p, i_s, n_s, splits, m_row, DIM: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Stores rows of an `Output`, acc / z, and their natural-log lse; 0 and -inf where nothing was read. With SPLIT it leaves
    the partial of split i_s of row tile i_p, which has n_s of them and room for so many `splits`, and only the last one to come
    stores what all have found. token (int64), head: of each row, or one for all."""
    DIM_PAD: tl.constexpr = b_acc.shape[1]
    ROWS: tl.constexpr = b_acc.shape[0]
    OUT: tl.constexpr = out.rows is not None
    last = True
    if SPLIT:
        o_d = tl.arange(0, DIM_PAD)
        last = leave_partial(partials, i_p, i_s, splits, b_acc, b_m, b_z, o_d, ROWS, DIM, OUT) == n_s - 1
        if last:
            b_acc, b_m, b_z = merge(partials, i_p, n_s, splits, o_d, ROWS, DIM, DIM_PAD, OUT)
            tl.store(partials.arrived + i_p, 0)
    if last:
        if OUT:
            p_rows = out.rows + (token * out.s_token + head * out.s_head)
            store_rows(p_rows, b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None], out.s_dim, m_row, DIM)
        if out.lse is not None:
            p_lse = out.lse + (token * out.s_lse_token + head * out.s_lse_head)
            tl.store(p_lse, (b_m + tl.log2(b_z)) * LN_2, mask=m_row)


@triton.jit
def inverse_sums(l_i):
    """Gives what makes results of sums of weighted values: 1 over the sums of weights, 0 where nothing was read."""
    m_any = l_i > 0
    return tl.where(m_any, 1.0 / tl.where(m_any, l_i, 1.0), 0.0)


@triton.jit
def store_result(result, o_row, acc, inverse, m_i, l_i, scale, m_row, DIM: tl.constexpr):
    """Writes finished rows to a `Result`: 0 and -inf where nothing was read; the lse of a row with NaN is NaN.

    o_row: numbers of rows, token * heads + head. acc, m_i, l_i: their state. inverse: `inverse_sums`, times the factor of the
    values. scale: of logits, as of `online_step`.
    """
    b_out = (acc * inverse[:, None]).to(result.rows.dtype.element_ty)
    store_rows(result.rows + o_row * DIM, b_out, 1, m_row, DIM)
    m_any = l_i > 0
    b_lse = (m_i * scale + tl.log2(tl.where(m_any, l_i, 1.0))) * LN_2
    tl.store(result.lse + o_row, tl.where(m_any, b_lse, l_i - float("inf")), mask=m_row)
