# SPDX-License-Identifier: MIT
"""Scoring and selection of a decode step in two launches, with buffers that the caller owns."""

from __future__ import annotations

from torch import Tensor


def decode_select_workspace(total_q: int, index_heads: int, max_seqlen_k: int, block_size: int) -> int:
    """How many float32 elements of workspace `decode_select` needs for calls up to this size."""
    return total_q * index_heads * -(-max_seqlen_k // block_size) + total_q


def decode_select(
    index_q: Tensor,
    keys: Tensor,
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
    out: Tensor,
) -> None:
    """Selects the blocks that each new token reads; the arguments are taken as checked. Never allocates, never syncs, can be
    captured in a CUDA graph; all lengths are read on the device when it runs.

    index_q:       ``[total_q, index_heads, index_dim]``, float16 or bfloat16, any strides.
    keys:          pool ``[num_pages, index_key_heads, page_size, index_dim]`` of the same dtype, any strides.
    page_table:    int32 ``[batch, max_pages]``, last dimension contiguous.
    seq_lens:      int32 ``[batch]``: keys of each sequence, the new tokens' own included; the queries are the last positions.
    cu_seqlens_q:  int32 ``[batch + 1]``: where each sequence's new tokens start; all arange when every sequence has one.
    max_seqlen_q:  at least the longest number of new tokens of a sequence (times heads per key head: at most 64 rows).
    max_seqlen_k:  at least the longest seq_lens (the page table's capacity is always enough).
    workspace:     float32, contiguous, at least `decode_select_workspace` elements; its content after the call is undefined.
    out:           int32 ``[total_q, index_heads, topk]``, contiguous; filled as `openmsa.select_blocks` returns it.
    """
    raise NotImplementedError("decode_select is being written")
