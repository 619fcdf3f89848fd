# SPDX-License-Identifier: MIT
"""On a CPU, gradients of attention are sums over tiles of queries and keys; a tile's share is computed here."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.runtime.matmul import matmul_nt


class RowGradients(NamedTuple):
    """Holds query rows of one KV head with what their gradients need, all of the dtype of the computation.

    q, grad:     ``[rows, dim]``, queries times the softmax scale, and the gradient of their output.
    lse, delta:  ``[rows]``, the log of each row's softmax denominator, and what is taken from the gradient of every weight.
    """

    q: Tensor
    grad: Tensor
    lse: Tensor
    delta: Tensor

    @classmethod
    def of(
        cls, q: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, scale: float, dtype: torch.dtype
    ) -> RowGradients:
        """Converts queries, results and gradients ``[tokens, heads, dim]`` (lse ``[tokens, heads]``) to rows. A row that read
        nothing gets lse +inf, so that its weights are 0."""
        wide = grad_out.to(dtype)
        delta = (wide * out.to(dtype)).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse.to(dtype)
        lse = lse.to(dtype).masked_fill(lse == -torch.inf, torch.inf)
        return cls((q.to(dtype) * scale).flatten(0, 1), wide.flatten(0, 1), lse.flatten(), delta.flatten())

    def take(self, rows: Tensor | slice) -> RowGradients:
        """Returns some of the rows."""
        return RowGradients(*(x[rows] for x in self))


def tile_gradients(rows: RowGradients, keys: Tensor, values: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what these keys add to dq ``[rows, dim]``, before it is multiplied by the softmax scale, and what these rows add
    to dk and dv ``[keys, dim]``.

    hidden: bool ``[rows, keys]``, the keys that a row does not see; None: each sees all.
    """
    logits = matmul_nt(rows.q, keys)
    if hidden is not None:
        logits.masked_fill_(hidden, -torch.inf)
    weights = logits.sub_(rows.lse[:, None]).exp_()
    slopes = matmul_nt(rows.grad, values).sub_(rows.delta[:, None]).mul_(weights)
    return torch.mm(slopes, keys), torch.mm(slopes.t(), rows.q), torch.mm(weights.t(), rows.grad)
