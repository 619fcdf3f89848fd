# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Softmax over keys that come a tile at a time has its parts here: the online step, and what a program leaves that has read a
part of the keys.

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
