# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""Programs in Gluon that share the blocks of a row leave `Partials`, and the last one to come merges them, as those in Triton
do with `openmsa.primitives.merging`. All partials of a row are asked for before any is waited for."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def partial_at(i_p, ROWS: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Says where the results [ROWS, DIM] and the lse of a partial lie."""
    o_r = i_p * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return o_r[:, None] * DIM + gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))[None, :], o_r


@gluon.jit
def leave(partials, i_p, b_out, lse, LAYOUT: gl.constexpr):
    """Stores partial i_p: results [ROWS, DIM] and their lse in base 2."""
    o_out, o_lse = partial_at(i_p, b_out.shape[0], b_out.shape[1], LAYOUT)
    gl.store(partials.rows + o_out, b_out)
    gl.store(partials.lse + o_lse, lse)


@gluon.jit
def merge(partials, i_p, SPLITS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Gives results [ROWS, DIM] from so many partials, from i_p on, and their lse in base 2; 0 and -inf where nothing was
    read."""
    most = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    lses, parts = (), ()
    for j in gl.static_range(SPLITS):
        o_out, o_lse = partial_at(i_p + j, ROWS, DIM, LAYOUT)
        lses = lses + (gl.load(partials.lse + o_lse, cache_modifier=".cg"),)
        parts = parts + (gl.load(partials.rows + o_out, cache_modifier=".cg"),)
        most = gl.maximum(most, lses[j])
    safe = gl.where(most == -float("inf"), 0.0, most)
    sums, acc = gl.zeros_like(most), gl.zeros([ROWS, DIM], gl.float32, LAYOUT)
    for j in gl.static_range(SPLITS):
        weight = gl.exp2(lses[j] - safe)
        acc += weight[:, None] * parts[j].to(gl.float32)
        sums += weight
    acc = acc / gl.where(sums == 0, 1.0, sums)[:, None]
    return acc.to(partials.rows.dtype.element_ty), safe + gl.log2(sums)
