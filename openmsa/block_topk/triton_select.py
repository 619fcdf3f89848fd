# SPDX-License-Identifier: MIT
"""`select_blocks` on the GPU: one fused kernel for many queries, scores and top-k in turn for few."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.block_scores.triton_route import launch_scores, score_rows
from openmsa.block_topk.triton_fused import MAX_FREE, launch_fused
from openmsa.block_topk.triton_topk import MAX_BLOCKS, launch_topk
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.kv_cache.stored import format_of
from openmsa.runtime.devices import Device, facts
from openmsa.types import Layout

WORKSPACE = 256 * 2**20
"""So many bytes of scores are held at a time."""


def refuse(seqs: Layout, block_size: int, topk: int, init_blocks: int, local_blocks: int) -> str | None:
    """Why these kernels cannot select so many of so many blocks, or None."""
    if seqs.num_blocks(block_size) > MAX_BLOCKS and not 0 < topk - init_blocks - local_blocks <= MAX_FREE:
        return (
            f"with more than {MAX_BLOCKS} blocks it needs topk - init_blocks - local_blocks from 1 to {MAX_FREE}, "
            f"got {topk} - {init_blocks} - {local_blocks} for {seqs.num_blocks(block_size)} blocks"
        )
    return None


def fuses(rows: int, num_blocks: int, free: int, device: Device, narrow: bool = False) -> bool:
    """Whether one kernel that keeps a list a thread is the faster way. rows: (query, head) rows in all. narrow: e4m3 by
    e4m3.

    It runs at the rate of the scoring kernel, and top-k is saved; but it cannot cut the context, so it needs rows for most
    multiprocessors. Products of e4m3 take half the time, too short to hide the lists. Where a row of scores is too long to
    hold, there is no other way."""
    if not 0 < free <= MAX_FREE:
        return False
    return num_blocks > MAX_BLOCKS or (rows >= 2 * 128 * device.num_sms * 3 // 4 and not narrow)


def select_blocks(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
) -> Tensor:
    """See `openmsa.block_topk.select_blocks`."""
    total_q, heads, _ = index_q.shape
    num_blocks = seqs.num_blocks(block_size)
    out = torch.empty(total_q, heads, topk, dtype=torch.int32, device=index_q.device)
    if out.numel() == 0 or num_blocks == 0:
        return out.fill_(-1)
    keys = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    narrow = format_of(index_q) == format_of(keys) == "e4m3"
    if fuses(total_q * heads, num_blocks, topk - init_blocks - local_blocks, facts(index_q.device), narrow):
        launch_fused(index_q, index_k, seqs, block_size, init_blocks, local_blocks, out)
    else:
        score_then_select(index_q, index_k, seqs, block_size, init_blocks, local_blocks, out)
    return out


def score_then_select(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
) -> None:
    """Two kernels for as many queries at a time as `WORKSPACE` holds scores of. They do not overlap: programs of the second
    that are resident early take more from the first than the gap between the two costs."""
    total_q, heads, _ = index_q.shape
    num_blocks = seqs.num_blocks(block_size)
    most = max(WORKSPACE // (4 * heads * num_blocks), 16)
    chunk = -(-total_q // -(-total_q // most))  # equal parts
    scores = torch.empty(chunk, heads, score_rows(num_blocks), dtype=torch.float32, device=index_q.device)[..., :num_blocks]
    visible = torch.empty(chunk, dtype=torch.int32, device=index_q.device)
    for start in range(0, total_q, chunk):
        stop = min(start + chunk, total_q)
        part = seqs if chunk == total_q else seqs.query_chunk(start, stop)
        held = scores[: stop - start].transpose(0, 1)
        launch_scores(index_q[start:stop], index_k, part, block_size, held, visible)
        launch_topk(held, visible, init_blocks, local_blocks, out[start:stop])
