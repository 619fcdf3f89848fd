# SPDX-License-Identifier: MIT
"""Decode on a CPU: the queries of one token attend to the keys that were selected for them."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.kv_cache.sequence_rows import Rows
from openmsa.runtime.matmul import weigh_few

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
    fewest = min(map(len, chosen))
    if fewest and visible <= READ_ANYWAY * fewest and keys.pages is None and isinstance(keys.rows, Tensor):
        out, lse = _mask_keys(q, chosen, last_key, keys, values, block_size)
        if fewest == visible or bool(out.isfinite().all()):  # Weights of 0 let in NaN and inf of values that are not selected.
            return out, lse
    return _gather_keys(q, chosen, last_key, keys, values, block_size)


def _mask_keys(
    q: Tensor, chosen: list[list[int]], last_key: int, keys: Rows, values: Rows, block_size: int
) -> tuple[Tensor, Tensor]:
    """Reads the keys of all visible blocks where they lie; those of blocks that are not chosen have weights of 0."""
    visible, hidden = last_key // block_size + 1, None
    if any(len(of) < visible for of in chosen):
        of_block = [[0.0 if i in of else -torch.inf for i in range(visible)] for of in map(set, chosen)]
        hidden = torch.tensor(of_block, dtype=q.dtype)[..., None].expand(-1, -1, block_size).flatten(1)[:, None, : last_key + 1]
    weights, total, lse = weigh_few(q, keys.heads(0, last_key + 1).to(q.dtype), hidden)
    out = torch.bmm(weights, values.heads(0, last_key + 1).to(q.dtype)).div_(total)
    return out[:, : q.shape[1]], lse


def _gather_keys(
    q: Tensor, chosen: list[list[int]], last_key: int, keys: Rows, values: Rows, block_size: int
) -> tuple[Tensor, Tensor]:
    """Reads copies of the chosen blocks, ids of which ascend."""
    kv_heads, group, dim = q.shape
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
            weights, total, lse = weigh_few(q[first:stop], keys.blocks(*where).to(q.dtype))  # These keys are dropped here, so
            out = torch.bmm(weights, values.blocks(*where).to(q.dtype)).div_(total)  # that the values come into their memory.
            parts.append((out[:, :group], lse))
        first = stop
    return parts[0] if len(parts) == 1 else (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]))
