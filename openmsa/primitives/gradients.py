# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Gradients of attention have these parts in common. With weights p = exp(s - lse) of logits s = scale * q . k, and with the
gradient g of the output, the gradient of a logit is p * (g . v - delta), where delta = g . out - (gradient of lse) belongs to
the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.primitives.rows import query_rows
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two

LOG2_E = tl.constexpr(1.4426950408889634)
DELTA_ROWS = 32  # (query, head) rows of a program


class RowTerms(NamedTuple):
    """Holds what gradients need of each row, float32 ``[total_q, num_q_heads]``.

    lse:    the base-2 logarithm of the softmax denominator, +inf where a row reads nothing, so that its weights are 0.
    delta:  what is taken from the gradient of every weight.
    """

    lse: Tensor
    delta: Tensor

    @classmethod
    def of(cls, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> RowTerms:
        """Computes the terms with one launch."""
        total_q, heads, dim = out.shape
        terms = cls(*(torch.empty((total_q, heads), dtype=torch.float32, device=out.device) for _ in range(2)))
        if total_q:
            launch_kernel(
                row_terms_kernel,
                (ceil_div(total_q * heads, DELTA_ROWS),),
                query_rows(out, True),
                query_rows(grad_out, True),
                LseRows(lse, *lse.stride()),
                LseRows(None, 0, 0) if grad_lse is None else LseRows(grad_lse, *grad_lse.stride()),
                terms,
                total_q,
                heads,
                ROWS=DELTA_ROWS,
                DIM=dim,
                DIM_PAD=next_power_of_two(dim),
                num_warps=4,
            )
        return terms


class LseRows(NamedTuple):
    """These are float32 numbers of each row ``[total_q, heads]``, None where there are none."""

    data: Tensor | None
    s_token: int
    s_head: int


@triton.jit(do_not_specialize=["total_q"])
def row_terms_kernel(
    out,  # QueryRows
    grad_out,
    lse,  # LseRows
    grad_lse,
    terms,  # RowTerms, written
    total_q,
    num_heads,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Writes the terms of ROWS rows a program."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, DIM_PAD)
    token, head = o_r // num_heads, o_r % num_heads
    m_r = token < total_q
    m = m_r[:, None] & (o_d < DIM)[None, :]
    p_out = out.data + (token * out.s_token + head * out.s_head)[:, None] + o_d[None, :] * out.s_dim
    p_grad = grad_out.data + (token * grad_out.s_token + head * grad_out.s_head)[:, None] + o_d[None, :] * grad_out.s_dim
    b_out, b_grad = tl.load(p_out, mask=m, other=0.0), tl.load(p_grad, mask=m, other=0.0)
    b_delta = tl.sum(b_out.to(tl.float32) * b_grad.to(tl.float32), 1)
    if grad_lse.data is not None:
        b_delta -= tl.load(grad_lse.data + token * grad_lse.s_token + head * grad_lse.s_head, mask=m_r, other=0.0)
    b_lse = tl.load(lse.data + token * lse.s_token + head * lse.s_head, mask=m_r, other=0.0)
    tl.store(terms.lse + o_r, tl.where(b_lse == -float("inf"), float("inf"), b_lse * LOG2_E), mask=m_r)
    tl.store(terms.delta + o_r, b_delta, mask=m_r)


@triton.jit
def weights_and_slopes(b_left, b_right, b_left_value, b_right_value, b_lse, b_delta, m_seen, scale, PRECISION: tl.constexpr):
    """Returns the weights p and their logits' gradients [left, right], both float32.

    left, right: keys and queries, or queries and keys, [left, dim] and [right, dim]; the values beside keys, the gradients of
    the output beside queries. b_lse, b_delta: of queries, shaped to broadcast. m_seen: the pairs that count. scale: of logits,
    times log2(e).
    """
    b_s = tl.dot(b_left, tl.trans(b_right), input_precision=PRECISION)
    b_p = tl.where(m_seen, tl.exp2(b_s * scale - b_lse), 0.0)
    b_dp = tl.dot(b_left_value, tl.trans(b_right_value), input_precision=PRECISION)
    return b_p, b_p * (b_dp - b_delta)
