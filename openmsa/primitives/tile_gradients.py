# SPDX-License-Identifier: MIT
"""On a CPU, gradients of attention are sums over tiles of queries and keys; a tile's share is computed here."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.runtime.matmul import matmul_nt

SUMMED = 32  # A careful product adds up so many elements of a row at a time, and then these sums.


class RowGradients(NamedTuple):
    """Holds query rows of one KV head with what their gradients need, all of the dtype of the computation.

    q, grad:     ``[rows, dim]``, queries times the softmax scale, and the gradient of their output.
    lse, delta:  ``[rows]``, the log of each row's softmax denominator, and what is taken from the gradient of every weight.
    grad_lse:    ``[rows]``, the part of -delta that is the gradient of the lse.
    """

    q: Tensor
    grad: Tensor
    lse: Tensor
    delta: Tensor
    grad_lse: Tensor

    @classmethod
    def of(
        cls, q: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, scale: float, dtype: torch.dtype
    ) -> RowGradients:
        """Converts queries, results and gradients ``[tokens, heads, dim]`` (lse ``[tokens, heads]``) to rows. A row that read
        nothing gets lse +inf, so that its weights are 0."""
        wide = grad_out.to(dtype)
        delta = (wide * out.to(dtype)).sum(-1)
        of_lse = torch.zeros_like(delta) if grad_lse is None else grad_lse.to(dtype)
        lse = lse.to(dtype).masked_fill(lse == -torch.inf, torch.inf)
        return cls((q.to(dtype) * scale).flatten(0, 1), wide.flatten(0, 1), *map(torch.flatten, (lse, delta - of_lse, of_lse)))

    def take(self, rows: Tensor | slice) -> RowGradients:
        """Returns some of the rows."""
        return RowGradients(*(x[rows] for x in self))


def tile_gradients(
    rows: RowGradients, keys: Tensor, values: Tensor, hidden: Tensor | None, alone: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what these keys add to dq ``[rows, dim]``, before it is multiplied by the softmax scale, and what these rows add
    to dk and dv ``[keys, dim]``.

    hidden:  bool ``[rows, keys]``, the keys that a row does not see; None: each sees all.
    alone:   the rows see no other keys. Then weights are divided by their own sums, and delta is made of them. An error of the
             logits cancels in part, while it adds to that of an lse which came from other products of the same factors.
    """
    logits = _careful_products(rows.q, keys) if alone else matmul_nt(rows.q, keys)
    if hidden is not None:
        logits.masked_fill_(hidden, -torch.inf)
    # By its own largest logit no row underflows, however far its lse, which came from other products, is off.
    peak = torch.where(rows.lse == torch.inf, rows.lse, logits.amax(1)) if alone else rows.lse
    weights = logits.sub_(peak[:, None]).exp_()
    slopes, delta = matmul_nt(rows.grad, values), rows.delta
    if alone:
        total = weights.sum(1)
        weights.div_(total.masked_fill_(total == 0, 1)[:, None])  # The sum is 0 where a row sees nothing.
        delta = (weights * slopes).sum(1) - rows.grad_lse
    slopes.sub_(delta[:, None]).mul_(weights)
    return torch.mm(slopes, keys), torch.mm(slopes.t(), rows.q), torch.mm(weights.t(), rows.grad)


def _careful_products(q: Tensor, keys: Tensor) -> Tensor:
    """Computes ``q [rows, dim] @ keys [n, dim].T``. In float32 the error is half that of libraries, which add up a whole row
    element by element, and takes a tenth more time."""
    if q.dtype == torch.float64:
        return matmul_nt(q, keys)
    products = torch.mm(q[:, :SUMMED], keys[:, :SUMMED].t())
    for first in range(SUMMED, q.shape[1], SUMMED):
        part = slice(first, first + SUMMED)
        products.addmm_(q[:, part], keys[:, part].t())
    return products
