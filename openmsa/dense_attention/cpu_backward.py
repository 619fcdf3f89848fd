# SPDX-License-Identifier: MIT
"""This module computes the gradients of `dense_attention` on CPU, a tile of queries and a tile of keys at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.primitives.tile_gradients import RowGradients, tile_gradients
from openmsa.types import Layout, wide_dtype

TILE_ROWS = 2048  # (query, head) rows of a tile
TILE_KEYS = 512  # keys of a tile of so many rows; fewer rows have more


def dense_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    return_out: bool,
    return_lse: bool,
    return_max_score: bool,
    out: Tensor,
    lse: Tensor,
    max_score: None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, accumulated in float32 (float64 for float64 inputs).

    The first arguments are those of the call, out and lse its results, grad_out and grad_lse their gradients (None: lse was not
    used). What to return says nothing here, nor do `block_size` and `max_score`.
    """
    dtype, kv_heads = wide_dtype(q), k.shape[1]
    group = q.shape[1] // kv_heads
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device="cpu") for x in (q, k, v))
    tokens = max(1, TILE_ROWS // group)
    for q0, q1, k0, k_len, offset in seqs.on_host():
        for first in range(q0, q1, tokens):
            last = min(first + tokens, q1)
            position = torch.arange(first - q0, last - q0, device="cpu") + offset
            last_key = position.clamp_(max=k_len - 1) if causal else torch.full_like(position, k_len - 1)
            last_key = last_key.repeat_interleave(group)
            for head in range(kv_heads):
                own = (slice(first, last), slice(head * group, (head + 1) * group))
                of_lse = None if grad_lse is None else grad_lse[own]
                rows = RowGradients.of(q[own], out[own], lse[own], grad_out[own], of_lse, softmax_scale, dtype)
                sums, keys = torch.zeros_like(rows.q), int(last_key[-1]) + 1
                tile = max(TILE_KEYS, TILE_ROWS * TILE_KEYS // len(sums))
                for start in range(0, keys, tile):
                    stop = min(start + tile, keys)
                    here = (slice(k0 + start, k0 + stop), head)
                    inside = int(last_key[0]) < stop - 1
                    hidden = torch.arange(start, stop, device="cpu") > last_key[:, None] if inside else None
                    to_q, to_k, to_v = tile_gradients(rows, k[here].to(dtype), v[here].to(dtype), hidden, keys <= tile)
                    sums += to_q
                    dk[here] += to_k
                    dv[here] += to_v
                dq[own] = sums.view(last - first, group, q.shape[2]).mul_(softmax_scale)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
