# SPDX-License-Identifier: MIT
"""`LayerSizes` holds a rank's share of a sparse layer of an engine, and makes the plans that serve it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa import AttentionPlan, DecodePlan
from openmsa.decode.sizes import MAX_INDEX_ROWS, MAX_NEW_TOKENS


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Holds a rank's share of a sparse layer, in the terms of `openmsa.DecodePlan`."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    topk: int
    block_size: int
    init_blocks: int
    local_blocks: int
    softmax_scale: float

    @property
    def most_drafts(self) -> int:
        """Returns how many drafted tokens of a request a decode plan verifies, its last accepted token apart."""
        return min(MAX_NEW_TOKENS, MAX_INDEX_ROWS // self.index_heads) - 1

    def prompts(
        self,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        *,
        longest_q: int,
        longest_k: int,
        total_q: int,
        page: int,
    ) -> AttentionPlan:
        """Makes the plan of one step's prompts.

        cu_seqlens_q, seq_lens, page_table:  as in `AttentionPlan`, for ``requests`` sequences.
        longest_q, longest_k, total_q, page: the most new tokens of a request, a bound on its keys, all new tokens, and the
                                             keys of a page.
        """
        return AttentionPlan(
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            page_table=page_table,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_k,
            total_q=total_q,
            page_size=page,
            topk=self.topk,
            block_size=self.block_size,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
            softmax_scale=self.softmax_scale,
        )

    def decode(
        self, *, most: int, new_tokens: int, max_pages: int, page: int, dtype: torch.dtype, device: torch.device
    ) -> DecodePlan:
        """Makes a plan of decode rows that lives as long as the engine.

        most, new_tokens: requests of the largest step, and the new tokens of each. max_pages, page: as in `prompts`.
        """
        return DecodePlan(
            max_batch=most,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page,
            max_pages=max_pages,
            new_tokens=new_tokens,
            index_heads=self.index_heads,
            index_dim=self.index_dim,
            topk=self.topk,
            block_size=self.block_size,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
            softmax_scale=self.softmax_scale,
            certified_keys=False,  # Engines hold no such caches, so that no memory is held for their bounds.
            dtype=dtype,
            device=device,
        )
