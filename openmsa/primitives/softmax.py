# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Softmax over keys that come a tile at a time has its parts here: the online step, what a program leaves that has read a part
of the keys, and how a finished row is written.

Logits are multiplied by a scale that contains log2(e) and is not negative, so that weights are powers of two. A row's state is
the sum of its weighted values, the greatest logit so far (before the scale) and the sum of weights relative to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.runtime.launch import zeros

LEAST = tl.constexpr(-1e30)
"""The greatest logit of a row that has read nothing is finite, so that differences of two such are 0, not NaN."""
LN_2 = tl.constexpr(0.6931471805599453)


class Partials(NamedTuple):
    """Programs that have read a part of a row's keys leave these: softmax over that part. All are None where no row is split.

    rows:     the results, contiguous, dim elements each, rounded as the writer likes.
    lse:      float32, the base-2 logarithm of each row's sum of exponentials.
    arrived:  int32, how many programs of each tile have come, where the last one to come merges; 0 before and after a launch.
    """

    rows: Tensor | None
    lse: Tensor | None
    arrived: Tensor | None = None

    @classmethod
    def allocate(cls, tiles: int, partials: int, rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Partials:
        """Makes room. tiles: groups of programs that merge, of `rows` rows each. partials: tiles x splits of a launch that
        splits, or 0."""
        results = torch.empty(partials * rows * dim, dtype=dtype, device=device)
        lse = torch.empty(partials * rows, dtype=torch.float32, device=device)
        return cls(results, lse, zeros(tiles if partials else 0, torch.int32, device))


UNSPLIT = Partials(None, None, None)


class Result(NamedTuple):
    """Attention writes these, both contiguous. rows: ``[total_q, heads, dim]``. lse: float32 ``[total_q, heads]``, the natural
    logarithm of each row's sum of exponentials."""

    rows: Tensor
    lse: Tensor


@triton.jit
def nothing_read(ROWS: tl.constexpr, DIM_PAD: tl.constexpr):
    """Gives the state of rows that have read no key: sums of values [ROWS, DIM_PAD], greatest logits, sums of weights."""
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    return acc, tl.full([ROWS], LEAST, tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def online_step(s, m_i, l_i, scale, s_scale, m_member):
    """Gives the weights [rows, keys] of logits s, the new greatest logits and sums of weights, and by what earlier sums shrink.

    scale: one number, or one a row; s_scale: the same number, or [rows, 1]. m_member: the rows that count these keys, None: all
    rows. An infinite offset makes every weight of the other rows exactly 0, at no cost an element.
    """
    largest = tl.max(s, 1)
    if m_member is None:
        m_new = tl.maximum(m_i, largest)
        p = tl.exp2(s * s_scale - (m_new * scale)[:, None])
    else:
        m_new = tl.maximum(m_i, tl.where(m_member, largest, LEAST))
        offset = tl.where(m_member, m_new * scale, float("inf"))
        p = tl.exp2(s * s_scale - offset[:, None])
    shrink = tl.exp2((m_i - m_new) * scale)
    return p, m_new, l_i * shrink + tl.sum(p, 1), shrink


@triton.jit
def inverse_sums(l_i):
    """Gives what makes results of sums of weighted values: 1 over the sums of weights, 0 where nothing was read."""
    m_any = l_i > 0
    return tl.where(m_any, 1.0 / tl.where(m_any, l_i, 1.0), 0.0)


@triton.jit
def in_order(rows):
    """Brings rows into order that are in quads: of 32 numbers, those at 8 * i + 2 * j and behind it belong to 8 * j + 2 * i."""
    quads = tl.reshape(rows, [rows.shape[0], rows.shape[1] // 32, 4, 4, 2])
    return tl.reshape(tl.permute(quads, (0, 1, 3, 2, 4)), rows.shape)


@triton.jit
def store_result(result, o_row, acc, inverse, m_i, l_i, scale, m_row, DIM: tl.constexpr, IN_QUADS: tl.constexpr = False):
    """Writes finished rows to a `Result`: 0 and -inf where nothing was read; the lse of a row with NaN is NaN.

    o_row: numbers of rows, token * heads + head. acc, m_i, l_i: their state. inverse: `inverse_sums`, times the factor of the
    values. scale: of logits, as of `online_step`. IN_QUADS: whether the numbers of acc are in quads (`in_order`).
    """
    o_d = tl.arange(0, acc.shape[1])
    b_out = (acc * inverse[:, None]).to(result.rows.dtype.element_ty)
    if IN_QUADS:
        b_out = in_order(b_out)
    tl.store(result.rows + o_row[:, None] * DIM + o_d[None, :], b_out, mask=m_row[:, None] & (o_d < DIM)[None, :])
    m_any = l_i > 0
    b_lse = (m_i * scale + tl.log2(tl.where(m_any, l_i, 1.0))) * LN_2
    tl.store(result.lse + o_row, tl.where(m_any, b_lse, l_i - float("inf")), mask=m_row)
