# SPDX-License-Identifier: MIT
"""This module serves prefill of short contexts on CPUs whose fused kernel is far faster than products in float32. It reads all
visible keys, and masks those of blocks that a query has not selected."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from openmsa.kv_cache.sequence_rows import Rows

MASKED_BLOCKS = 3  # Up to so many visible blocks for a selected one, the mask is faster than KV-outer where it serves at all.
QUERIES = 256  # Masks are made for so many queries at a time, and stay small.


@functools.cache
def has_tiles() -> bool:
    """Says whether this CPU multiplies tiles of bfloat16 (AMX), with which PyTorch's fused kernel runs at several times the
    rate of float32."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return supported is not None and bool(supported())


def masked_queries(last_key: Tensor, topk: int, block_size: int, dtype: torch.dtype, scale: float) -> int:
    """Returns how many of a sequence's queries, the first ones, `attend_masked` should serve. last_key: ``[q_len]``, ascending,
    the last key that each sees."""
    if dtype != torch.bfloat16 or not has_tiles() or scale <= 0 or not len(last_key) or int(last_key[0]) < 0:
        return 0
    return int((last_key < MASKED_BLOCKS * topk * block_size).sum())


def attend_masked(
    q: Tensor,
    ids: Tensor,
    last_key: Tensor,
    keys: Rows,
    values: Rows,
    block_size: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> bool:
    """Attends with the queries of one sequence, q ``[q_len, num_q_heads, dim]``, to the blocks ``ids [q_len, kv_heads or 1,
    topk]``, -1 for none. Returns whether they can be used: infinite and NaN ones may come from values that a query does not
    read, and the kernel says 0 for the lse where all logits are -inf."""
    kv_heads = keys.rows.shape[1]
    k, v = (rows.heads(0, int(last_key[-1]) + 1)[:, None] for rows in (keys, values))  # [kv_heads, 1, keys, dim]
    group, usable = q.shape[1] // kv_heads, True
    for start in range(0, q.shape[0], QUERIES):
        rows = slice(start, min(start + QUERIES, q.shape[0]))
        seen = last_key[rows]
        first, end = int(seen[0]) + 1, int(seen[-1]) + 1  # Some queries do not see keys from the first of these on.
        blocks = -(-end // block_size)
        of_block = torch.full((ids.shape[1], len(seen), blocks + 1), -torch.inf, dtype=q.dtype, device="cpu")
        chosen = ids[rows].transpose(0, 1).long()
        reads = (chosen >= 0) & (chosen * block_size <= seen[:, None])  # [heads, queries, topk]
        of_block.scatter_(2, torch.where(reads, chosen, blocks), 0.0)
        hidden = of_block[..., :blocks, None].expand(-1, -1, -1, block_size).flatten(2)[..., :end].contiguous()
        if first < end:  # hidden is [index heads, queries, keys] in memory of its own, as it is written to
            hidden[..., first:].masked_fill_(torch.arange(first, end, device="cpu") > seen[:, None], -torch.inf)
        queries = q[rows].unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)  # [kv_heads, group, queries, dim]
        queries = queries if queries.stride(3) == 1 else queries.contiguous()
        read = [x[:, :, :end].expand(-1, group, -1, -1) for x in (k, v)]
        read = [x if x.stride(3) == 1 else x.contiguous() for x in read]
        mask = hidden[:, None].expand(kv_heads, -1, -1, -1)
        found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, *read, 0.0, False, attn_mask=mask, scale=scale
        )
        out[rows] = found.permute(2, 0, 1, 3).flatten(1, 2)
        nothing = ~reads.any(2)[:, None]
        usable &= bool((sums.isfinite() & (sums != 0) | nothing).all())
        sums.masked_fill_(nothing, -torch.inf)
        lse[rows] = sums.permute(2, 0, 1).flatten(1, 2)
    return usable and bool(out.isfinite().all())
