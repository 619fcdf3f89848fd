# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""Programs that share a row tile of attention leave `Partials`, and the last one to come merges them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def leave_partial(
    partials, i_p, i_s, splits, b_acc, b_m, b_z, o_d, ROWS: tl.constexpr, DIM: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    """Leaves the partial of split i_s of row tile i_p, and returns how many programs of it came before. A row tile has room for
    so many splits. OUT: whether there are results, or lse alone."""
    o_s = (i_p * splits + i_s) * ROWS + tl.arange(0, ROWS)
    if OUT:
        b_part = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
        p_part = partials.rows + o_s[:, None].to(tl.int64) * DIM + o_d[None, :]
        tl.store(p_part, b_part.to(partials.rows.dtype.element_ty), mask=o_d[None, :] < DIM)
    tl.store(partials.lse + o_s, b_m + tl.log2(b_z))
    tl.debug_barrier()  # Every thread's partial is written before one thread publishes it.
    return tl.atomic_add(partials.arrived + i_p, 1, sem="acq_rel")


@triton.jit
def load_partial(partials, i_p, i_s, n_s, splits, o_d, ROWS: tl.constexpr, DIM: tl.constexpr, OUT: tl.constexpr):
    """Loads the partial [ROWS, DIM_PAD] of split i_s of row tile i_p and its lse [ROWS], which are zeros and -inf from split
    n_s on. A row tile has room for so many splits. OUT: whether there are results; without them lse stands in their place."""
    o_s = (i_p * splits + i_s) * ROWS + tl.arange(0, ROWS)
    m_s = tl.full([ROWS], 1, tl.int1) & (i_s < n_s)
    b_lse = tl.load(partials.lse + o_s, mask=m_s, other=-float("inf"), cache_modifier=".cg")
    b_part = b_lse
    if OUT:
        p_part = partials.rows + o_s[:, None].to(tl.int64) * DIM + o_d[None, :]
        b_part = tl.load(p_part, mask=(o_d < DIM)[None, :] & (i_s < n_s), other=0.0, cache_modifier=".cg")
    return b_lse, b_part


@triton.jit
def merge(
    partials, i_p, n_s, splits, o_d, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    """Returns the weighted sum [ROWS, DIM_PAD] of the first n_s partials of row tile i_p, their greatest lse and the sum of
    weights [ROWS]. As many partials as registers hold are read at once."""
    AHEAD: tl.constexpr = min(8, max(1, 16384 // (ROWS * DIM_PAD)))
    b_m = tl.full([ROWS], -float("inf"), tl.float32)
    b_z = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for i_s in tl.range(0, n_s, AHEAD, num_stages=1):
        b_new = b_m
        lses, parts = (), ()
        for j in tl.static_range(AHEAD):
            b_lse, b_part = load_partial(partials, i_p, i_s + j, n_s, splits, o_d, ROWS, DIM, OUT)
            lses, parts = lses + (b_lse,), parts + (b_part,)
            b_new = tl.maximum(b_new, b_lse)
        b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_old = tl.exp2(b_m - b_safe)
        b_z *= b_old
        b_acc *= b_old[:, None]
        for j in tl.static_range(AHEAD):
            b_w = tl.exp2(lses[j] - b_safe)
            b_z += b_w
            if OUT:
                b_acc += b_w[:, None] * parts[j].to(tl.float32)
        b_m = b_new
    return b_acc, b_m, b_z
