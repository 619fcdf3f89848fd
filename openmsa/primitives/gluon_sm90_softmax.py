# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""These Gluon functions of Hopper's attention kernels take the softmax of 64 rows, block by block, in registers of four warps.

Four threads hold a row of a product, in the layout of its matrix instruction. Sums of weights stay apart, [ROWS, 4], until the
last block, so that a block costs exchanges for its maxima alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = gl.constexpr(128)
"""A block, and a tile of keys in shared memory, has so many keys."""
ROWS = gl.constexpr(64)
"""Four warps attend with so many rows, one for each token and head."""


@gluon.constexpr_function
def quad_layout():
    """Returns the layout [ROWS, 4] of one number from each of the four threads that hold a row of a product."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def in_threads(x, REDUCE: gl.constexpr):
    """Reduces what each thread holds of each row of a product with 128 columns, to [ROWS, 4]. It goes pair by pair, so that few
    instructions wait for each other. REDUCE: gl.max or gl.sum."""
    x = REDUCE(x.reshape([ROWS, 16, 4, 2]), 3)
    x = REDUCE(x.reshape([ROWS, 2, 8, 4]), 1)
    x = REDUCE(x.reshape([ROWS, 2, 4, 4]), 1)
    x = REDUCE(x.reshape([ROWS, 2, 2, 4]), 1)
    return gl.convert_layout(REDUCE(x, 1), quad_layout(), assert_trivial=True)


@gluon.jit
def seen(s, block, last_key):
    """Replaces logits of keys behind each row's last key by -inf."""
    o_key = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
    return gl.where(o_key[None, :] <= last_key[:, None], s, -float("inf"))


@gluon.jit
def no_rows(LOGITS: gl.constexpr):
    """Returns the greatest logits and the sums of weights before the first block."""
    m_i = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, LOGITS))
    return m_i, gl.zeros([ROWS, 4], gl.float32, quad_layout())


@gluon.jit
def online_step(s, m_i, l_i, scale, m_member, WEIGHTS: gl.constexpr, OUT_ROW: gl.constexpr, NUMBER: gl.constexpr):
    """Returns the weights of logits s as a factor of products with values, the new greatest logits and sums of weights, and by
    what earlier sums of values shrink. scale: one for all, or one for each row. m_member: which rows read the block, None for
    all."""
    ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    QUAD_ROW: gl.constexpr = gl.SliceLayout(1, quad_layout())
    largest = gl.convert_layout(gl.max(in_threads(s, gl.max), 1), ROW, assert_trivial=True)
    if m_member is None:
        m_new = gl.maximum(m_i, largest)
        offset = m_new * scale
    else:
        m_new = gl.maximum(m_i, gl.where(m_member, largest, -1e30))
        # Queries that did not select the block get an infinite offset, which makes every weight of theirs exactly 0.
        offset = gl.where(m_member, m_new * scale, float("inf"))
    wide = scale[:, None] if scale.type.is_block() else scale
    p = gl.exp2(s * wide - offset[:, None])
    alpha = gl.exp2((m_i - m_new) * scale)
    l_i = l_i * gl.convert_layout(alpha, QUAD_ROW, assert_trivial=True)[:, None] + in_threads(p, gl.sum)
    weights = gl.convert_layout(p.to(NUMBER), WEIGHTS, assert_trivial=True)
    return weights, m_new, l_i, gl.convert_layout(alpha, OUT_ROW, assert_trivial=True)


@gluon.jit
def row_results(m_i, l_i, scale):
    """Returns by what each row's sum of values is multiplied, and its lse, behind the last block."""
    l_row = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout, assert_trivial=True)
    m_any = l_row > 0
    inverse = gl.where(m_any, 1.0 / gl.where(m_any, l_row, 1.0), 0.0)
    b_lse = (m_i * scale + gl.log2(gl.where(m_any, l_row, 1.0))) * 0.6931471805599453
    return inverse, gl.where(m_any, b_lse, l_row - float("inf"))  # The lse of a NaN query is NaN.


@gluon.jit
def kept(x):
    """Returns x of 16 bits, computed anew as far as ptxas can see. Without this, ptxas 12.8 gives the registers of the queries,
    behind their last product in the loop, to the weights, and the next round multiplies those."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
