# SPDX-License-Identifier: MIT
"""Functions of this library have first derivatives only, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the backward of an autograd function whose gradients are constants, and which raises NotImplementedError where
    autograd is asked for derivatives of them (``create_graph=True``)."""
    constant = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("second derivatives are not computed, got create_graph=True")
        return constant(ctx, *grads)

    return checked


def refuse_transforms() -> None:
    """Raises NotImplementedError where a transform of `torch.func` asks for a derivative that autograd alone has."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "torch.func (grad, vjp, jvp, jacrev) is not supported here: call torch.autograd.grad or backward, "
            "or give impl='reference', which PyTorch differentiates by itself"
        )
