# SPDX-License-Identifier: MIT
"""These are matrix products: the fastest in float32 that PyTorch offers on this CPU, and one in which 0 times NaN is 0."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def has_onednn_linear() -> bool:
    """Says whether this build exposes oneDNN's inner product, which is faster than MKL's sgemm on AVX-512 AMD cores."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._linear_pointwise(torch.ones(2, 2), torch.ones(2, 2), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return True


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """Computes ``a [m, d] @ b [n, d].T -> [m, n]`` on a CPU, in float32 or float64.

    oneDNN compiles and keeps a kernel for each shape, so callers with many row counts round them up.
    From 12 rows on in both, a row of the result does not depend on how many rows stand beside it (for head dims 64 to 256), so
    that callers can make results independent of chunk sizes.
    """
    if a.dtype == torch.float32 and a.numel() and b.numel() and has_onednn_linear():
        if not (b.is_contiguous() or b.t().is_contiguous()):
            b = b.contiguous()  # oneDNN is slow on rows with gaps
        return torch.ops.mkldnn._linear_pointwise(a.contiguous(), b, None, "none", [], "")
    return torch.mm(a, b.t())


def weigh_few(q: Tensor, keys: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the softmax weights of few rows, all of which read all keys, on a CPU.

    q ``[heads, rows, dim]``, scaled; keys ``[heads, n, dim]``, n at least 1, any strides, of q's dtype; hidden, which
    broadcasts to ``[heads, rows, n]``, is -inf at keys that are not read and 0 at others. Returns the weights
    ``[heads, padded rows, n]``, their sums ``[heads, padded rows, 1]``, by which results are divided, and the natural logarithm
    of the softmax denominator ``[heads, rows]``.
    """
    rows = q.shape[1]
    if rows > 1 and rows % 4:
        q = torch.nn.functional.pad(q, (0, 0, 0, -rows % 4))  # MKL is faster on 4 rows than on 2 or 3.
    logits = torch.bmm(q, keys.transpose(1, 2))  # [heads, padded rows, n]
    if hidden is not None:
        logits += hidden
    finite = torch.finfo(logits.dtype)
    largest = logits.amax(2, keepdim=True).clamp_(finite.min, finite.max)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(2, keepdim=True)
    return weights, total, (total.log() + largest)[:, :rows, 0]


def attend_few(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Computes softmax attention of few rows, all of which read all keys, on a CPU: out ``[heads, rows, dim]`` and the natural
    logarithm of the softmax denominator ``[heads, rows]``. The arguments are those of `weigh_few`; values are as keys."""
    weights, total, lse = weigh_few(q, keys)
    return torch.bmm(weights, values).div_(total)[:, : q.shape[1]], lse


def weighted_sum(weights: Tensor, values: Tensor, reads: Tensor) -> Tensor:
    """Computes ``out[q, h] = sum over the k that q reads of weights[q, h, k] * values[k, h]``; the others may be NaN or inf.

    weights ``[q, h, k]``, 0 where ``reads`` (the same shape or one that broadcasts) is False; values ``[k, h, dim]``.
    """
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    out = torch.einsum("qhk,khd->qhd", weights, finite)
    for key in (values != finite).flatten(1).any(1).nonzero().flatten().tolist():
        out = out + torch.where(reads[..., key, None], values[key] - finite[key], 0.0)  # adds 0, NaN or inf
    return out
