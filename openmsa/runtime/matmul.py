# SPDX-License-Identifier: MIT
"""These are matrix products: the fastest in float32 that PyTorch offers on this CPU, and one in which 0 times NaN is 0."""

from __future__ import annotations

import functools
import math
import platform
import threading
from pathlib import Path

import torch
from torch import Tensor

ONEDNN_ROWS = 8  # From so many rows on oneDNN takes less time than MKL on AMD cores.
FEW_ROWS_STEP = 32  # MKL's products of few rows with the first such multiple of keys do not depend on where a key stands.
ONE_HEAD_STEP = 128  # oneDNN compiles a kernel for each number of keys that it multiplies, so this is a multiple of so many
PART_ELEMENTS = 1 << 17  # Fewer elements of a head's keys are multiplied on one thread in less time than on several.
KEYS_LEFT_ROWS = 4  # With more rows keys as the left factor gain nothing.
KEYS_LEFT_FROM = 1 << 22  # Fewer elements of keys come from caches, where keys as the right factor take less time.
CONVERTED_ELEMENTS = 3 << 18  # Narrow keys are converted so many elements at a time.


@functools.cache
def has_onednn_linear() -> bool:
    """Says whether this build exposes oneDNN's inner product, which is faster than MKL's sgemm on AVX-512 AMD cores."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._linear_pointwise(torch.ones(2, 2, device="cpu"), torch.ones(2, 2, device="cpu"), None, "none", [], "")
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


def products_few(q: Tensor, k: Tensor, ties: int | None = None) -> Tensor:
    """Computes dot products ``[heads, rows, n]`` of few rows q ``[heads, rows, dim]`` with keys ``[heads, n, dim]`` of q's type
    or a narrower one on a CPU. Those of equal keys are equal among the first `ties` keys (None: all), which may take a second
    product."""
    alone = is_alone(q)
    n = k.shape[1]
    step = ONE_HEAD_STEP if alone else FEW_ROWS_STEP
    whole = n // step * step
    at_once = whole == n or (not alone and ties is not None and ties <= whole)
    if k.dtype != q.dtype or (alone and not k.is_contiguous()):  # Whether keys have gaps must not change a bit of a product.
        return _products_converted(q, k, at_once)
    if at_once:
        return _dot_products(q, k)
    # The last product has as many keys as a step, too: some that were multiplied before come again.
    last = k[:, -step:] if whole else torch.nn.functional.pad(k, (0, 0, step - n, 0))
    left = _dot_products(q, last)[..., whole - n :]
    return torch.cat((_dot_products(q, k[:, :whole]), left), 2) if whole else left


def is_alone(a: Tensor) -> bool:
    """Says whether oneDNN multiplies the rows a ``[heads, rows, dim]`` in less time than MKL: those of one head."""
    heads, rows, _ = a.shape
    return heads == 1 and rows >= ONEDNN_ROWS and a.dtype == torch.float32 and has_onednn_linear()


@functools.cache
def _is_amd() -> bool:
    """Says whether the processor is AMD's."""
    try:
        found = Path("/proc/cpuinfo").read_text()
    except OSError:
        found = platform.processor()
    return "AuthenticAMD" in found


def keys_go_left(q: Tensor, k: Tensor, n: int) -> bool:
    """Says whether `products_keys_left` multiplies the rows q ``[heads, rows, dim]`` with the n keys of a call, stored like k,
    in less time than `products_few`: up to 4 rows of one head on AMD's processors, where keys come from memory."""
    heads, rows, dim = q.shape
    few = heads == 1 and rows <= KEYS_LEFT_ROWS and n * dim >= KEYS_LEFT_FROM
    return few and q.dtype == k.dtype == torch.float32 and torch.backends.mkl.is_available() and _is_amd()


def products_keys_left(q: Tensor, k: Tensor) -> Tensor:
    """Computes dot products ``[1, rows, n]`` of two rows or more q ``[1, rows, dim]`` with keys ``[1, n, dim]``, both of
    float32, on a CPU, with keys as the left factor, so that the products of a key lie together. By MKL's code for AMD those of
    equal keys are equal, wherever they stand. (Those of one row, by another function, are not, and take longer.)"""
    k = k if k.is_contiguous() else converted(k, q.dtype)  # Rows that are aligned otherwise would be summed otherwise.
    return torch.mm(k[0], q[0].t()).t()[None]


def _dot_products(a: Tensor, b: Tensor) -> Tensor:
    """Computes ``a [heads, m, dim] @ b [heads, n, dim].T -> [heads, m, n]``."""
    if is_alone(a):
        return matmul_nt(a[0], b[0])[None]
    (heads, n, dim), threads = b.shape, torch.get_num_threads()
    if heads >= threads or n * dim < 2 * PART_ELEMENTS:
        return torch.bmm(a, b.transpose(1, 2))
    # MKL multiplies few rows with the keys of a head on one thread. Parts of these keys are heads to it.
    most = min(threads, n * dim // PART_ELEMENTS)
    parts = next((x for x in range(most, heads, -1) if n % (x * FEW_ROWS_STEP) == 0), 1)
    if parts == 1:
        return torch.bmm(a, b.transpose(1, 2))
    found = [
        torch.bmm(rows.expand(parts, -1, -1), keys.unflatten(0, (parts, -1)).transpose(1, 2)).transpose(0, 1).flatten(1)
        for rows, keys in zip(a, b, strict=True)
    ]
    return found[0][None] if heads == 1 else torch.stack(found)


class _Room(threading.local):
    """Each thread converts into memory of its own, again and again: new memory comes in pages that the system clears first,
    which takes longer than the conversion."""

    held: Tensor | None = None


_room = _Room()


def converted(x: Tensor, dtype: torch.dtype, n: int | None = None) -> Tensor:
    """Converts rows ``[heads, keys, dim]`` and adds rows of zeros up to `n` keys. Up to `CONVERTED_ELEMENTS` float32 elements
    come in memory that the thread's next call writes again. Their order is that of x, as conversion in another order takes
    several times as long."""
    heads, keys, dim = x.shape
    n = keys if n is None else n
    elements = heads * n * dim
    if dtype != torch.float32 or elements > CONVERTED_ELEMENTS:
        room = torch.empty(elements, dtype=dtype, device=x.device)
    else:
        if _room.held is None:
            with torch.inference_mode(False):  # Memory that was made in inference mode could not be written outside of it.
                _room.held = torch.empty(CONVERTED_ELEMENTS, dtype=torch.float32, device="cpu")  # whatever the defaults
        room = _room.held[:elements]
    tokens_first = x.transpose(0, 1).is_contiguous()
    wide = room.view(n, heads, dim).transpose(0, 1) if tokens_first else room.view(heads, n, dim)
    if n > keys:
        wide[:, keys:] = 0
    (wide[:, :keys] if n > keys else wide).copy_(x.detach())
    return wide


def _products_converted(q: Tensor, k: Tensor, at_once: bool) -> Tensor:
    """Does what `products_few` does for keys of a narrower type than q's or with gaps, which are converted a tile at a time.
    Rows of zeros follow them unless `at_once` says that ties need none."""
    heads, n, dim = k.shape
    tile = max(1, CONVERTED_ELEMENTS // (heads * dim * ONE_HEAD_STEP)) * ONE_HEAD_STEP
    if n > tile:
        return torch.cat([_products_converted(q, k[:, first : first + tile], at_once) for first in range(0, n, tile)], 2)
    if at_once and heads > 1:
        return _dot_products(q, converted(k, q.dtype))
    step = ONE_HEAD_STEP if heads == 1 else FEW_ROWS_STEP
    return _dot_products(q, converted(k, q.dtype, n + -n % step))[..., :n]


def sums_few(weights: Tensor, values: Tensor) -> Tensor:
    """Computes ``weights [heads, rows, n] @ values [heads, n, dim] -> [heads, rows, dim]`` on a CPU for few rows and for values
    of the weights' type or a narrower one, n at least 1."""
    if values.dtype == weights.dtype:
        return _sums(weights, values)
    heads, n, dim = values.shape
    tile = max(1, CONVERTED_ELEMENTS // (heads * dim))
    if n <= tile:
        return _sums(weights, converted(values, weights.dtype))
    parts = (slice(first, first + tile) for first in range(0, n, tile))
    return functools.reduce(torch.add, (sums_few(weights[..., part], values[:, part]) for part in parts))


def _sums(weights: Tensor, values: Tensor) -> Tensor:
    """Computes ``weights [heads, rows, n] @ values [heads, n, dim]``, both of one type."""
    whole = values.shape[1] // ONE_HEAD_STEP * ONE_HEAD_STEP
    if not whole or not is_alone(weights) or not values.is_contiguous():
        return torch.bmm(weights, values)
    sums = matmul_nt(weights[0, :, :whole], values[0, :whole].t())[None]
    return sums if whole == values.shape[1] else sums.baddbmm_(weights[..., whole:], values[:, whole:])


def softmax_few(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the softmax weights of few rows on a CPU in the memory of their logits ``[heads, rows, n]``, n at least 1, and
    the natural logarithm of each denominator ``[heads, rows]``. Logits of -inf have weights of 0."""
    largest = logits.amax(2)
    if math.isfinite(largest.sum().item()):
        weights = softmax_finite(logits)
        return weights, log_totals(largest, weights)
    finite = torch.finfo(logits.dtype)
    largest = largest.clamp_(finite.min, finite.max)[..., None]
    weights = logits.sub_(largest).exp_()
    total = weights.sum(2, keepdim=True)
    lse = (total.log() + largest)[..., 0]
    return weights.div_(total.masked_fill_(total == 0, 1)), lse  # Where all logits are -inf, so are all weights 0.


def softmax_finite(logits: Tensor) -> Tensor:
    """Computes the weights of `softmax_few` where the greatest logit of each row is finite."""
    # It is faster than its parts, exponentials of -inf above all.
    return torch.softmax(logits, 2, out=logits if logits.is_contiguous() else None)


def log_totals(largest: Tensor, weights: Tensor) -> Tensor:
    """Computes the natural logarithm of each softmax denominator in the memory of the greatest logits `largest` ``[heads,
    rows]``, which are finite."""
    return largest.sub_(weights.amax(2).log_())  # The greatest weight is 1 / denominator.


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
