# SPDX-License-Identifier: MIT
# ruff: noqa: RUF005 (kernels know no unpacking)
"""What programs that share the keys of a tile leave behind, and how the last one merges it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partial(part, part_lse, i_p, i_s, n_s, splits, o_d, D: tl.constexpr, BM: tl.constexpr, OUT: tl.constexpr):
    """One partial [BM, BD] and its lse [BM]; past the last one zeros and -inf."""
    o_s = (i_p * splits + i_s) * BM + tl.arange(0, BM)
    b_lse = tl.load(part_lse + o_s, mask=tl.full([BM], 1, tl.int1) & (i_s < n_s), other=-float("inf"), cache_modifier=".cg")
    b_part = b_lse
    if OUT:
        p_part = part + o_s[:, None].to(tl.int64) * D + o_d[None, :]
        b_part = tl.load(p_part, mask=(o_d < D)[None, :] & (i_s < n_s), other=0.0, cache_modifier=".cg")
    return b_lse, b_part


@triton.jit
def merge(part, part_lse, i_p, n_s, splits, o_d, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, OUT: tl.constexpr):
    """Sum of the first n_s partials, weighted, [BM, BD], the greatest lse and the sum of weights [BM]. As many as registers
    hold are read at once."""
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BD], tl.float32)
    AHEAD: tl.constexpr = min(8, max(1, 16384 // (BM * BD)))
    for i_s in tl.range(0, n_s, AHEAD, num_stages=1):
        b_new = b_m
        lses, parts = (), ()
        for j in tl.static_range(AHEAD):
            b_lse, b_part = partial(part, part_lse, i_p, i_s + j, n_s, splits, o_d, D, BM, OUT)
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


@triton.jit
def store_rows(out, lse, b_acc, b_m, b_z, o_out, o_lse, o_d, m_r, D: tl.constexpr):
    """out = acc / z and the natural-log lse; 0 and -inf where nothing was read."""
    if out is not None:
        b_out = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
        tl.store(out + o_out[:, None] + o_d[None, :], b_out.to(out.dtype.element_ty), mask=m_r[:, None] & (o_d[None, :] < D))
    if lse is not None:
        tl.store(lse + o_lse, (b_m + tl.log2(b_z)) * 0.6931471805599453, mask=m_r)
