# SPDX-License-Identifier: MIT
"""These are matrix products: the fastest in float32 that PyTorch offers on this CPU, and one in which 0 times NaN is 0."""

from __future__ import annotations

import math
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


def pad_few(q: Tensor) -> Tensor:
    """Returns few rows ``[heads, rows, dim]`` with rows of zeros behind them where MKL is faster on so many: on 4 than on 2 or
    3."""
    rows = q.shape[1]
    return torch.nn.functional.pad(q, (0, 0, 0, -rows % 4)) if rows > 1 and rows % 4 else q


def softmax_few(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the softmax weights of few rows on a CPU in the memory of their logits ``[heads, rows, n]``, n at least 1, and
    the natural logarithm of each denominator ``[heads, rows]``. Logits of -inf have weights of 0."""
    largest = logits.amax(2)
    if math.isfinite(largest.sum().item()):
        weights = torch.softmax(logits, 2, out=logits)  # It is faster than its parts, exponentials of -inf above all.
        return weights, largest.sub_(weights.amax(2).log_())  # The greatest weight is 1 / denominator.
    finite = torch.finfo(logits.dtype)
    largest = largest.clamp_(finite.min, finite.max)[..., None]
    weights = logits.sub_(largest).exp_()
    total = weights.sum(2, keepdim=True)
    return weights.div_(total), (total.log() + largest)[..., 0]


def attend_few(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Computes softmax attention of few rows, all of which read all keys, on a CPU: q ``[heads, rows, dim]``, scaled; keys and
    values ``[heads, n, dim]``, n at least 1, any strides, of q's dtype. Returns out ``[heads, rows, dim]`` and the natural
    logarithm of the softmax denominator ``[heads, rows]``."""
    weights, lse = softmax_few(torch.bmm(pad_few(q), keys.transpose(1, 2)))
    return torch.bmm(weights, values)[:, : q.shape[1]], lse[:, : q.shape[1]]


def weighted_sum(weights: Tensor, values: Tensor, reads: Tensor) -> Tensor:
    """Computes ``out[q, h] = sum over the k that q reads of weights[q, h, k] * values[k, h]``; the others may be NaN or inf.

    weights ``[q, h, k]``, 0 where ``reads`` (the same shape or one that broadcasts) is False; values ``[k, h, dim]``.
    """
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    out = torch.einsum("qhk,khd->qhd", weights, finite)
    for key in (values != finite).flatten(1).any(1).nonzero().flatten().tolist():
        out = out + torch.where(reads[..., key, None], values[key] - finite[key], 0.0)  # adds 0, NaN or inf
    return out
