# SPDX-License-Identifier: MIT
"""This module computes the gradients of `sparse_attention` on CPU, key block by key block: the queries that read a block are
gathered, its keys' gradients are their sum, and each query's gradient is added up over its blocks in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.primitives.tile_gradients import RowGradients, tile_gradients
from openmsa.sparse_attention.cpu import TILE_ROWS, by_block
from openmsa.types import Layout, wide_dtype


def sparse_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    return_lse: bool,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, accumulated in float32 (float64 for float64 inputs).

    The first arguments are those of the call, out and lse its results, grad_out and grad_lse their gradients (None: lse was not
    used). `return_lse` says nothing here.
    """
    dtype, kv_heads = wide_dtype(q), k.shape[1]
    group = q.shape[1] // kv_heads
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device="cpu") for x in (q, k, v))
    for q0, q1, k0, k_len, offset in seqs.on_host():
        last_key = (torch.arange(q1 - q0, device="cpu") + offset).clamp_(max=k_len - 1)
        for head in range(kv_heads):
            own, keys = (slice(q0, q1), slice(head * group, (head + 1) * group)), (slice(k0, k0 + k_len), head)
            of_lse = None if grad_lse is None else grad_lse[own]
            rows = RowGradients.of(q[own], out[own], lse[own], grad_out[own], of_lse, softmax_scale, dtype)
            ids = blocks[q0:q1, head if blocks.shape[1] > 1 else 0].long()
            ids = ids.masked_fill(ids > last_key[:, None].div(block_size, rounding_mode="floor"), -1)
            sums = _walk(rows, k[keys], v[keys], dk[keys], dv[keys], ids, last_key, block_size)
            dq[own] = sums.view(q1 - q0, group, q.shape[2]).mul_(softmax_scale)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _walk(
    rows: RowGradients, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, ids: Tensor, last_key: Tensor, block_size: int
) -> Tensor:
    """Adds to dk and dv of one sequence and KV head ``[k_len, dim]``; returns the sums for dq ``[q_len * group, dim]``, not
    scaled. ids: int64 ``[q_len, topk]``, -1 where nothing is read."""
    sums, group = torch.zeros_like(rows.q), rows.q.shape[0] // max(len(ids), 1)
    head_of_group, start = torch.arange(group, device="cpu"), 0
    query, counts, _ = by_block(ids, -(-k.shape[0] // block_size), 0)
    for block, count in enumerate(counts):
        first, stop = block * block_size, min((block + 1) * block_size, k.shape[0])
        keys, values = (x[first:stop].to(sums.dtype) for x in (k, v))
        for chosen in query[start : start + count].split(max(1, TILE_ROWS // group)) if count else ():
            at = (chosen[:, None] * group + head_of_group).flatten()
            hidden = None
            if int(last_key[chosen[0]]) < stop - 1:  # Queries ascend.
                hidden = torch.arange(first, stop, device="cpu") > last_key[chosen].repeat_interleave(group)[:, None]
            to_q, to_k, to_v = tile_gradients(rows.take(at), keys, values, hidden)
            sums.index_add_(0, at, to_q)
            dk[first:stop] += to_k
            dv[first:stop] += to_v
        start += count
    return sums
