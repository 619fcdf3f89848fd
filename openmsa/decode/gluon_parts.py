# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Programs in Gluon that share the blocks of a row leave `Partials`, and the last one to come merges them, as those in Triton
do with `openmsa.primitives.merging`. All partials of a row are asked for before any is waited for."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


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
def merge(partials, i_p, splits, parts, lses, LAYOUT: gl.constexpr):
    """Merges so many partials, from i_p on: gives their weighted sum [ROWS, DIM], the greatest lse in base 2, 0 where nothing
    was read, and the sums of weights relative to it. parts [.., ROWS, DIM], lses [.., ROWS]: shared memory for them."""
    ROWS: gl.constexpr = parts.shape[1]
    DIM: gl.constexpr = parts.shape[2]
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])  # Copies of 16 bytes do not look into the L1 cache.
    for j in range(splits):
        async_copy.async_copy_global_to_shared(parts.index(j), partials.rows + partial_at(i_p + j, ROWS, DIM, LAYOUT)[0])
        o_lse = (i_p + j) * ROWS + gl.arange(0, ROWS, LINE)
        async_copy.async_copy_global_to_shared(lses.index(j), partials.lse + o_lse)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    most = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    for j in range(splits):
        most = gl.maximum(most, lses.index(j).load(gl.SliceLayout(1, LAYOUT)))
    safe = gl.where(most == -float("inf"), 0.0, most)
    sums, acc = gl.zeros_like(most), gl.zeros([ROWS, DIM], gl.float32, LAYOUT)
    for j in range(splits):
        weight = gl.exp2(lses.index(j).load(gl.SliceLayout(1, LAYOUT)) - safe)
        acc += weight[:, None] * parts.index(j).load(LAYOUT).to(gl.float32)
        sums += weight
    return acc, safe, sums
