# SPDX-License-Identifier: MIT
"""These are matrix products: the fastest in float32 that PyTorch offers on this CPU, and one in which 0 times NaN is 0."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

FEW_ROWS_STEP = 32  # MKL's products of few rows with so many keys, and multiples, do not depend on where a key stands
CONVERTED_ELEMENTS = 3 << 16  # Narrow keys are converted so many elements at a time: narrow and wide ones share 2 MB of L2.


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
    """Returns few rows ``[heads, rows, dim]``, with rows of zeros after them where MKL is faster with these: on 4 rows than on
    2 or 3."""
    rows = q.shape[1]
    return torch.nn.functional.pad(q, (0, 0, 0, -rows % 4)) if rows > 1 and rows % 4 else q


def products_few(q: Tensor, k: Tensor, block_size: int = 1, ties: bool = True) -> Tensor:
    """Computes dot products ``[heads, rows, n]`` of few rows q ``[heads, rows, dim]`` with keys ``[heads, n, dim]`` of q's type
    or a narrower one on a CPU, and -inf behind them for the keys that the last block lacks. With `ties`, those of equal keys
    are equal, which may take a second product."""
    n = k.shape[1]
    if k.dtype != q.dtype and k.numel() >= 2 * CONVERTED_ELEMENTS:
        return _products_converted(q, k, n + -n % block_size)
    k = k.to(q.dtype)
    whole = n // FEW_ROWS_STEP * FEW_ROWS_STEP if ties else n
    parts = [torch.bmm(q, k[:, :whole].transpose(1, 2))] if whole else []
    if left := n - whole:
        # The last product has as many keys as a step, too: some that were multiplied before come again.
        last = k[:, -FEW_ROWS_STEP:] if whole else torch.nn.functional.pad(k, (0, 0, FEW_ROWS_STEP - left, 0))
        parts.append(torch.bmm(q, last.transpose(1, 2))[..., -left:])
    if lacking := -n % block_size:
        parts.append(q.new_full((*q.shape[:2], lacking), -torch.inf))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def room_for(k: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Returns memory ``[heads, keys, dim]`` into which so many of the keys k ``[heads, n, dim]`` are converted at a time. Its
    elements have the order of theirs, as conversion in another order takes several times as long."""
    heads, _, dim = k.shape
    if k.transpose(0, 1).is_contiguous():
        return torch.empty(keys, heads, dim, dtype=dtype).transpose(0, 1)
    return torch.empty(heads, keys, dim, dtype=dtype)


def _products_converted(q: Tensor, k: Tensor, columns: int) -> Tensor:
    """Does what `products_few` does, with -inf up to so many columns. Keys are converted a tile at a time into memory that
    stays in cache."""
    (heads, rows, dim), n = q.shape, k.shape[1]
    tile = max(1, CONVERTED_ELEMENTS // (heads * dim * FEW_ROWS_STEP)) * FEW_ROWS_STEP
    whole = -(-n // FEW_ROWS_STEP) * FEW_ROWS_STEP
    held = room_for(k, min(tile, whole), q.dtype)
    products = torch.empty(heads, rows, max(columns, whole), dtype=q.dtype)
    for first in range(0, n, tile):
        part, stop = k[:, first : first + tile], min(first + tile, whole)
        held[:, : part.shape[1]].copy_(part)
        held[:, part.shape[1] : stop - first] = 0
        products[..., first:stop] = torch.bmm(q, held[:, : stop - first].transpose(1, 2))
    products[..., n:] = -torch.inf
    return products[..., :columns]


def sums_few(weights: Tensor, values: Tensor) -> Tensor:
    """Computes ``weights [heads, rows, n] @ values [heads, n, dim] -> [heads, rows, dim]`` on a CPU for few rows and for values
    of the weights' type or a narrower one."""
    if values.dtype == weights.dtype:
        return torch.bmm(weights, values)
    if values.numel() < 2 * CONVERTED_ELEMENTS:
        return torch.bmm(weights, values.to(weights.dtype))
    heads, n, dim = values.shape
    tile = max(1, CONVERTED_ELEMENTS // (heads * dim))
    held = room_for(values, min(tile, n), weights.dtype)
    sums = torch.zeros(heads, weights.shape[1], dim, dtype=weights.dtype)
    for first in range(0, n, tile):
        wide = held[:, : min(tile, n - first)].copy_(values[:, first : first + tile])
        sums.baddbmm_(weights[..., first : first + tile], wide)
    return sums


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
    lse = (total.log() + largest)[..., 0]
    return weights.div_(total.masked_fill_(total == 0, 1)), lse  # Where all logits are -inf, so are all weights 0.


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
