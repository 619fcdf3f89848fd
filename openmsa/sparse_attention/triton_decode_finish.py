# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""Programs of decode attention end here: they store their output, or a partial, which the last program of a token and head
merges with the others. Here stands as well how rows of a tile are padded.

The constexprs SHAPE and CUT are a `Shape` of `openmsa.sparse_attention.triton_decode_walk` and a `Config` of
`openmsa.sparse_attention.triton_decode`. BM is the rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.runtime.launch import ceil_div, next_power_of_two


def row_tiles(group: int, head_dim: int) -> tuple[int, int]:
    """Returns the rows of a program, heads of one group padded for the matrix unit, and the programs of a group."""
    rows = min(max(16, next_power_of_two(group)), 64 if head_dim <= 128 else 32)
    return rows, ceil_div(group, rows)


def padded_dim(head_dim: int, form: int) -> int:
    """Returns the padded elements of a row, the field `dim_pad` of `Shape`: a matrix instruction takes 16 words or more."""
    return max(next_power_of_two(head_dim), {0: 16, 1: 32, 3: 64}[form])


@triton.jit
def partial(partials, i_p, i_s, n_s, o_d, D: tl.constexpr, BM: tl.constexpr):
    """Loads the partial [BM, DIM_PAD] of split i_s and its lse [BM], which are zeros and -inf from split n_s on."""
    o_s = (i_p * n_s + i_s) * BM + tl.arange(0, BM)
    m_s = tl.full([BM], 1, tl.int1) & (i_s < n_s)
    b_lse = tl.load(partials.lse + o_s, mask=m_s, other=-float("inf"), cache_modifier=".cg")
    p_part = partials.rows + o_s[:, None].to(tl.int64) * D + o_d[None, :]
    b_part = tl.load(p_part, mask=(o_d < D)[None, :] & (i_s < n_s), other=0.0, cache_modifier=".cg")
    return b_lse, b_part


@triton.jit
def merge(partials, i_p, n_s, o_d, SHAPE: tl.constexpr, CUT: tl.constexpr):
    """Returns the weighted sum [BM, DIM_PAD] of the n_s partials of row tile i_p, their greatest lse and the sum of weights
    [BM]. As many partials as registers hold are read at once."""
    BM: tl.constexpr = CUT.rows
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    AHEAD: tl.constexpr = min(8, max(1, 16384 // (BM * DIM_PAD)))
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DIM_PAD], tl.float32)
    for i_s in tl.range(0, n_s, AHEAD, num_stages=1):
        b_new = b_m
        lses, parts = (), ()
        for j in tl.static_range(AHEAD):
            b_lse, b_part = partial(partials, i_p, i_s + j, n_s, o_d, SHAPE.dim, BM)
            lses, parts = lses + (b_lse,), parts + (b_part,)
            b_new = tl.maximum(b_new, b_lse)
        b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_old = tl.exp2(b_m - b_safe)
        b_z *= b_old
        b_acc *= b_old[:, None]
        for j in tl.static_range(AHEAD):
            b_w = tl.exp2(lses[j] - b_safe)
            b_z += b_w
            b_acc += b_w[:, None] * parts[j].to(tl.float32)
        b_m = b_new
    return b_acc, b_m, b_z


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
        o_s = (i_p * CUT.splits + i_s) * CUT.rows + tl.arange(0, CUT.rows)
        b_part = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
        p_part = partials.rows + o_s[:, None].to(tl.int64) * D + o_d[None, :]
        tl.store(p_part, b_part.to(partials.rows.dtype.element_ty), mask=o_d[None, :] < D)
        tl.store(partials.lse + o_s, b_m + tl.log2(b_z))
        tl.debug_barrier()  # Every thread's partial is written before one thread publishes it.
        if tl.atomic_add(partials.arrived + i_p, 1, sem="acq_rel") == CUT.splits - 1:
            b_acc, b_m, b_z = merge(partials, i_p, tl.num_programs(2), o_d, SHAPE, CUT)
            store_rows(out, p_out, p_lse, b_acc, b_m, b_z, o_r, o_d, m_r, D)
            tl.store(partials.arrived + i_p, 0)
