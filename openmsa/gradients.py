# SPDX-License-Identifier: MIT
"""Both attentions are differentiable: a row of their tables names the function that computes its gradients, and autograd
records the call where an input requires one.

Between forward and backward only q, k, v, the selection, the output and its lse are kept. A row that names no backward (the
reference) is differentiated by PyTorch itself, and is the specification of the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.runtime.derivatives import first_derivative, refuse_transforms
from openmsa.runtime.dispatch import Implementation


def recorded(row: Implementation[Any], call: Any) -> Any:
    """Runs a row of either attention so that autograd can call its backward. The call begins with q, k and v."""
    refuse_transforms()
    out, lse = _Attention.apply(row, call, *call[:3])
    results = tuple(x for x, wanted in ((out, getattr(call, "return_out", True)), (lse, call.return_lse)) if wanted)
    return results[0] if len(results) == 1 else results


class _Attention(torch.autograd.Function):
    """Runs a row, keeps what its backward needs, and calls the backward."""

    @staticmethod
    def forward(ctx: Any, row: Implementation[Any], call: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        wanted = dict.fromkeys({"return_out", "return_lse"} & set(call._fields), True)
        out, lse = row.load()(*call._replace(q=q, k=k, v=v, **wanted))
        kept = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        if "blocks" in call._fields:
            kept["blocks"] = call.blocks
        ctx.save_for_backward(*kept.values())
        ctx.row, ctx.call, ctx.names = row, call._replace(**dict.fromkeys(kept)), tuple(kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call._replace(**dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
        grad_out = torch.zeros_like(call.out) if grad_out is None else grad_out
        with torch.autocast(grad_out.device.type, enabled=False):  # A backward may run inside autocast, too.
            return (None, None, *ctx.row.load_backward()(*call, grad_out, grad_lse))
