# SPDX-License-Identifier: MIT
"""A loss that hangs on a layer's output gets its gradient whenever that output does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Attached(torch.autograd.Function):
    """Passes a tensor through, and gives the loss the gradient 1."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss.new_ones(()))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = ctx.saved_tensors
        return grad, one


def attach(out: Tensor, loss: Tensor) -> Tensor:
    """Returns `out`, on which the scalar `loss` hangs: to whatever is differentiated through the result, `loss` is added.

    Nothing but the layer's output has to reach the model's end, so that a layer may be computed again in the backward
    (activation checkpointing), sharded or compiled, and the model's own code never sees the loss.

    The gradient of `loss` is 1 whatever multiplies the model's loss. Where that is divided for gradient accumulation, or scaled
    for float16, multiply `loss` by the same number.
    """
    result: Tensor = _Attached.apply(out, loss)
    return result
