# SPDX-License-Identifier: MIT
"""On a CPU a `DecodePlan` runs the stages with their own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from openmsa.block_topk import select_blocks
from openmsa.decode.cpu_step import Counts
from openmsa.decode.cpu_token import DTYPES, attend, most_keys
from openmsa.kv_cache import E4M3, PagedIndexKeys, PagedKV
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.sparse_attention import sparse_attention
from openmsa.types import Sequences

if TYPE_CHECKING:
    from openmsa.decode.plan import DecodePlan


def run_stages(
    plan: DecodePlan, q: Tensor | E4M3, kv: PagedKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys, out: Tensor
) -> None:
    """Does what `DecodePlan.run` says for checked arguments."""
    if isinstance(q, Tensor) and out.data_ptr() == q.data_ptr():
        q = q.clone()  # The stages may have to take over when some results were written.
    if _run_tokens(plan, q, kv, index_q, index_keys, out):
        return
    seqs, blocks = select(plan, index_q, index_keys)
    scale = plan.softmax_scale
    result, lse = sparse_attention(q, kv, None, blocks, seqs, block_size=plan.block_size, softmax_scale=scale, return_lse=True)
    for buffer, value in ((plan.blocks, blocks), (out, result), (plan.lse, lse)):
        buffer.copy_(value)


def _run_tokens(
    plan: DecodePlan, q: Tensor | E4M3, kv: PagedKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys, out: Tensor
) -> bool:
    """Runs a step of one new token for each sequence; returns False where the stages must run it."""
    if plan.new_tokens != 1 or not (type(q) is type(index_q) is Tensor) or q.dtype not in DTYPES:
        return False
    if index_keys.format == "certified":
        return False
    lengths = kv.seq_lens.tolist()
    most = min(kv.capacity, index_keys.capacity, most_keys(q, kv.k, kv.v, index_q, index_keys.keys, plan.block_size))
    if not all(0 < n <= most for n in lengths):
        return False
    for cache in (kv, index_keys):
        for n, pages in zip(lengths, cache.page_table, strict=True):
            low, high = map(int, pages[: -(-n // cache.page_size)].aminmax())
            if low < 0 or high >= cache.num_pages:
                return False  # The stages refuse it.
    counts = Counts(plan.topk, plan.block_size, plan.init_blocks, plan.local_blocks)
    scale = plan.head_dim**-0.5 if plan.softmax_scale is None else plan.softmax_scale
    for b, n in enumerate(lengths):
        keys, values, index_rows = (
            Rows(pool, 0, pages[b])
            for pool, pages in ((kv.k, kv.page_table), (kv.v, kv.page_table), (index_keys.keys, index_keys.page_table))
        )
        one = slice(b, b + 1)
        results = (plan.blocks[one], out[one], plan.lse[one])
        if not attend(q[one], keys, values, index_q[one], index_rows, n, counts, scale, *results):
            return False
    return True


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
