# SPDX-License-Identifier: MIT
"""On a CPU a `DecodePlan` runs the stages with their own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from openmsa.block_topk import select_blocks
from openmsa.kv_cache import E4M3, PagedIndexKeys, PagedKV
from openmsa.sparse_attention import sparse_attention
from openmsa.types import Sequences

if TYPE_CHECKING:
    from openmsa.decode.plan import DecodePlan


def run_stages(
    plan: DecodePlan, q: Tensor | E4M3, kv: PagedKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys, out: Tensor
) -> None:
    """Does what `DecodePlan.run` says for checked arguments."""
    seqs, blocks = select(plan, index_q, index_keys)
    scale = plan.softmax_scale
    result, lse = sparse_attention(q, kv, None, blocks, seqs, block_size=plan.block_size, softmax_scale=scale, return_lse=True)
    for buffer, value in ((plan.blocks, blocks), (out, result), (plan.lse, lse)):
        buffer.copy_(value)


def select(plan: DecodePlan, index_q: Tensor | E4M3, index_keys: PagedIndexKeys) -> tuple[Sequences, Tensor]:
    """Returns the lengths of a step's queries and the blocks that they read."""
    seqs = Sequences(cu_seqlens_q=plan.starts[: index_keys.batch + 1], max_seqlen_q=plan.new_tokens)
    return seqs, select_blocks(
        index_q,
        index_keys,
        plan.topk,
        seqs,
        block_size=plan.block_size,
        init_blocks=plan.init_blocks,
        local_blocks=plan.local_blocks,
        certified=index_keys.format == "certified",
    )
