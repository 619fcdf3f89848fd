# SPDX-License-Identifier: MIT
"""Scoring and selection of a decode step in two launches, of certified keys in four, with buffers that the caller owns."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.block_scores.triton_route import launch
from openmsa.block_topk.triton_certified import Selection, Workspace
from openmsa.block_topk.triton_topk import launch_topk
from openmsa.kv_cache import CertifiedKeys, Stored
from openmsa.primitives.rows import KeyTiles, Tile
from openmsa.primitives.scoring import Lengths
from openmsa.runtime.devices import facts, has_pdl


def decode_select_workspace(total_q: int, index_heads: int, max_seqlen_k: int, block_size: int) -> int:
    """How many float32 elements of workspace `decode_select` needs for calls up to this size."""
    return total_q * index_heads * -(-max_seqlen_k // block_size) + total_q


def decode_select(
    index_q: Tensor | Stored,
    keys: Tensor | Stored,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    workspace: Tensor,
    certified: Workspace | None = None,
    out: Tensor,
) -> None:
    """Selects the blocks that each new token reads; the arguments are taken as checked. Never allocates, never syncs, can be
    captured in a CUDA graph; all lengths are read on the device when it runs.

    index_q:       ``[total_q, index_heads, index_dim]``, float16, bfloat16 or `E4M3`, any strides.
    keys:          pool ``[num_pages, index_key_heads, page_size, index_dim]`` of the same dtype or in a format, any strides. Of
                   `CertifiedKeys` the exact ones count, of the dtype of plain queries.
    page_table:    int32 ``[batch, max_pages]``, last dimension contiguous.
    seq_lens:      int32 ``[batch]``: keys of each sequence, the new tokens' own included; the queries are the last positions.
    cu_seqlens_q:  int32 ``[batch + 1]``: where each sequence's new tokens start; all arange when every sequence has one.
    max_seqlen_q:  at least the longest number of new tokens of a sequence (times heads per key head: at most 64 rows).
    max_seqlen_k:  at least the longest seq_lens (the page table's capacity is always enough).
    workspace:     float32, contiguous, at least `decode_select_workspace` elements; its content after the call is undefined.
    certified:     workspace with which `CertifiedKeys` are read as bounds first, for the same selection; `workspace` is then
                   left alone.
    out:           int32 ``[total_q, index_heads, topk]``, contiguous; filled as `openmsa.select_blocks` returns it.
    """
    total_q, heads, _ = index_q.shape
    num_blocks = -(-max_seqlen_k // block_size)
    if total_q == 0 or num_blocks == 0:
        out.fill_(-1)
        return
    lengths = Lengths(cu_seqlens_q, None, seq_lens, None, max_seqlen_q, max_seqlen_k)
    if certified is not None and isinstance(keys, CertifiedKeys):
        assert isinstance(index_q, Tensor)
        Selection(index_q, keys, page_table, lengths, block_size, certified).run(init_blocks, local_blocks, out)
        return
    held = total_q * heads * num_blocks
    scores = workspace[:held].view(total_q, heads, num_blocks).transpose(0, 1)
    visible = workspace[held : held + total_q].view(torch.int32)
    device = facts(index_q.device)
    tile = Tile.of(block_size)
    pdl = has_pdl(index_q.device)
    launch(index_q, KeyTiles.of_pool(keys, page_table, tile, device), tile, lengths, scores, visible, device, pdl=pdl)
    launch_topk(scores, visible, init_blocks, local_blocks, out, pdl=pdl)
