# SPDX-License-Identifier: MIT
"""Autograd learns of the index loss here. A row of the table names as its backward a function that takes the fields of a call
and returns the loss together with the gradients of the sum of divergences by index_q and index_k, not rounded: they follow from
what the loss is computed from, and are only scaled when the backward comes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.index_loss import LossCall, share
from openmsa.runtime.derivatives import first_derivative, refuse_transforms
from openmsa.runtime.dispatch import Implementation


def recorded(row: Implementation[LossCall], call: LossCall) -> Any:
    """Runs a row so that autograd can ask for the gradients of index_q and index_k."""
    refuse_transforms()
    return _Loss.apply(row, call, call.index_q, call.index_k)


class _Loss(torch.autograd.Function):
    """Runs a row with its gradients, keeps these, and scales them in the backward."""

    @staticmethod
    def forward(ctx: Any, row: Implementation[LossCall], call: LossCall, index_q: Tensor, index_k: Tensor) -> Tensor:
        inputs = {name: getattr(call, name).detach() for name in ("q", "k")}
        loss, *gradients = row.load_backward()(*call._replace(index_q=index_q, index_k=index_k, **inputs))
        ctx.save_for_backward(*gradients)
        ctx.share, ctx.dtype = share(index_q, call.coefficient), index_q.dtype
        found: Tensor = loss
        return found

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad * ctx.share
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *((x * factor).to(ctx.dtype) if needed else None for x, needed in wanted))
