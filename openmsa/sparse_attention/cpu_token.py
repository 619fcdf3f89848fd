# SPDX-License-Identifier: MIT
"""In decode on a CPU the queries of one token attend to the keys that were selected for them."""

from __future__ import annotations

import math
from array import array

import torch
from torch import Tensor

from openmsa.kv_cache.sequence_rows import Rows
from openmsa.runtime.matmul import log_totals, pad_few, products_few, softmax_few, softmax_finite, sums_few

GATHERED_BYTES = 2 << 20  # Copied keys of some heads, which stay in cache.
READ_ANYWAY = 2  # Copies cost more than reading all visible blocks where they are at most so many times the selected ones.


def attend_token(
    q: Tensor,
    ids: list[list[int]],
    last_key: int,
    keys: Rows,
    values: Rows,
    block_size: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attends with the queries of one token, scaled, ``[kv_heads, group, dim]``, to all keys of the blocks that each KV head
    selected, in any order, of which those that are not visible are skipped. Writes out ``[..., num_q_heads, dim]`` and, unless
    it is None, lse ``[..., num_q_heads]``."""
    visible = last_key // block_size + 1
    chosen = [sorted({i for i in of_head if 0 <= i < visible}) for of_head in ids]
    chosen = chosen * q.shape[0] if len(chosen) == 1 else chosen
    if keys.pages is None and isinstance(keys.rows, Tensor) and reads_all(chosen, visible):
        logits = products_few(pad_few(q), keys.heads(0, last_key + 1), ties=0)
        if attend_all(logits, chosen, values.heads(0, last_key + 1), block_size, out, lse):
            return
    _gather_keys(q, chosen, last_key, keys, values, block_size, out, lse)


def reads_all(chosen: list[list[int]], visible: int) -> bool:
    """Says whether it is faster to read all visible blocks where they lie than copies of those that each KV head chose."""
    fewest = min(map(len, chosen))
    return bool(fewest) and visible <= READ_ANYWAY * fewest


def attend_all(
    logits: Tensor, chosen: list[list[int]], values: Tensor, block_size: int, out: Tensor, lse: Tensor | None
) -> bool:
    """Writes what `attend_token` does for the queries whose products with all visible keys are the first rows of `logits`
    ``[kv_heads, rows, keys]``, which are overwritten. Keys of blocks that a KV head has not chosen (ids ascend) get weights of
    0, which let in NaN and inf of their values. Returns False, and writes nothing, where a result is not finite."""
    heads, group = logits.shape[0], out.shape[-2] // logits.shape[0]
    full, left = divmod(logits.shape[2], block_size)
    visible = full + bool(left)
    if any(len(of) < visible for of in chosen):
        hidden = array("f", [-math.inf]) * (heads * visible)
        for head, of in enumerate(chosen):
            for i in of:
                hidden[head * visible + i] = 0.0
        of_block = torch.frombuffer(hidden, dtype=torch.float32).as_strided((heads, 1, full, 1), (visible, 0, 1, 0))
        logits.unfold(2, block_size, block_size).add_(of_block)
        for head, of in enumerate(chosen if left else ()):
            if of[-1] < full:
                logits[head, :, full * block_size :] = -math.inf
    largest = None if lse is None else logits.amax(2)
    weights = softmax_finite(logits)
    sums = sums_few(weights, values)
    if not math.isfinite(sums.sum().item()):
        return False
    out.view(heads, group, -1).copy_(sums[:, :group])
    if lse is not None and largest is not None:
        lse.view(heads, group).copy_(log_totals(largest, weights)[:, :group])
    return True


def _gather_keys(
    q: Tensor,
    chosen: list[list[int]],
    last_key: int,
    keys: Rows,
    values: Rows,
    block_size: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Reads copies of the chosen blocks, ids of which ascend."""
    kv_heads, group, dim = q.shape
    rows = pad_few(q)
    counts = [
        min(len(of) * block_size, len(of) * block_size + last_key + 1 - (of[-1] + 1) * block_size) if of else 0 for of in chosen
    ]
    first = 0
    while first < kv_heads:  # Heads that read as many keys are served together, as far as their keys fit into caches.
        count = counts[first]
        most = max(1, GATHERED_BYTES // max(1, count * dim * q.dtype.itemsize))
        stop = first + 1
        while stop < kv_heads and counts[stop] == count and stop - first < most:
            stop += 1
        heads = range(first, stop)
        if not count:
            sums, logs = q.new_zeros(len(heads), group, dim), q.new_full((len(heads), group), -torch.inf)
        else:
            where = (chosen[first:stop], heads, block_size, count)
            # The copied keys are dropped before values are copied, which then come into their memory.
            weights, logs = softmax_few(products_few(rows[first:stop], keys.blocks(*where)))
            sums = sums_few(weights, values.blocks(*where))
        out.view(q.shape)[first:stop].copy_(sums[:, :group])
        if lse is not None:
            lse.view(kv_heads, group)[first:stop].copy_(logs[:, :group])
        first = stop
