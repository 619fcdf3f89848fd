# SPDX-License-Identifier: MIT
"""In decode on a CPU the queries of one token attend to the keys that were selected for them."""

from __future__ import annotations

import math
from array import array

import torch
from torch import Tensor

from openmsa.kv_cache.sequence_rows import Rows
from openmsa.runtime.matmul import pad_few, products_few, softmax_few, softmax_finite, sums_few

GATHERED_BYTES = 2 << 20  # Copied keys of some heads, which stay in cache.
READ_ANYWAY = 2  # Copies cost more than reading all visible blocks where they are at most so many times the selected ones.


def attend_token(
    q: Tensor, ids: list[list[int]], last_key: int, keys: Rows, values: Rows, block_size: int
) -> tuple[Tensor, Tensor]:
    """Attends with the queries of one token, scaled, ``[kv_heads, group, dim]``, to all keys of the blocks that each KV head
    selected, in any order, of which those that are not visible are skipped. Returns results of q's leading dimensions."""
    visible = last_key // block_size + 1
    chosen = [sorted({i for i in of_head if 0 <= i < visible}) for of_head in ids]
    chosen = chosen * q.shape[0] if len(chosen) == 1 else chosen
    if keys.pages is None and isinstance(keys.rows, Tensor) and reads_all(chosen, visible):
        logits = products_few(pad_few(q), keys.heads(0, last_key + 1), ties=0)
        if (found := attend_all(logits, chosen, values.heads(0, last_key + 1), block_size)) is not None:
            out, lse = found
            return out[:, : q.shape[1]], lse[:, : q.shape[1]]
    return _gather_keys(q, chosen, last_key, keys, values, block_size)


def reads_all(chosen: list[list[int]], visible: int) -> bool:
    """Says whether it is faster to read all visible blocks where they lie than copies of those that each KV head chose."""
    fewest = min(map(len, chosen))
    return bool(fewest) and visible <= READ_ANYWAY * fewest


def attend_all(logits: Tensor, chosen: list[list[int]], values: Tensor, block_size: int) -> tuple[Tensor, Tensor] | None:
    """Returns out ``[kv_heads, rows, dim]`` and lse ``[kv_heads, rows]`` of the rows whose products with all visible keys are
    `logits` ``[kv_heads, rows, keys]``, which are overwritten. Those of blocks that a KV head has not chosen get weights of 0,
    which let in NaN and inf of their values. Returns None where a result is not finite."""
    full, left = divmod(logits.shape[2], block_size)
    visible = full + bool(left)
    if any(len(of) < visible for of in chosen):
        hidden = array("f", (0.0 if i in of else -math.inf for of in map(set, chosen) for i in range(visible)))
        of_block = torch.frombuffer(hidden, dtype=torch.float32).view(-1, 1, visible)
        logits[..., : full * block_size].unflatten(2, (full, block_size)).add_(of_block[..., :full, None])
        if left:
            logits[..., full * block_size :].add_(of_block[..., full:])
    weights, lse = softmax_finite(logits, logits.amax(2))
    out = sums_few(weights, values)
    return (out, lse) if math.isfinite(out.sum().item()) else None


def _gather_keys(
    q: Tensor, chosen: list[list[int]], last_key: int, keys: Rows, values: Rows, block_size: int
) -> tuple[Tensor, Tensor]:
    """Reads copies of the chosen blocks, ids of which ascend."""
    kv_heads, group, dim = q.shape
    rows = pad_few(q)
    counts = [
        min(len(of) * block_size, len(of) * block_size + last_key + 1 - (of[-1] + 1) * block_size) if of else 0 for of in chosen
    ]
    parts: list[tuple[Tensor, Tensor]] = []
    first = 0
    while first < kv_heads:  # Heads that read as many keys are served together, as far as their keys fit into caches.
        count = counts[first]
        most = max(1, GATHERED_BYTES // max(1, count * dim * q.dtype.itemsize))
        stop = first + 1
        while stop < kv_heads and counts[stop] == count and stop - first < most:
            stop += 1
        heads = range(first, stop)
        if not count:
            parts.append((q.new_zeros(len(heads), group, dim), q.new_full((len(heads), group), -torch.inf)))
        else:
            where = (chosen[first:stop], heads, block_size, count)
            # The copied keys are dropped before values are copied, which then come into their memory.
            weights, lse = softmax_few(products_few(rows[first:stop], keys.blocks(*where)))
            out = sums_few(weights, values.blocks(*where))
            parts.append((out[:, :group], lse[:, :group]))
        first = stop
    return parts[0] if len(parts) == 1 else (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]))
