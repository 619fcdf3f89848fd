# SPDX-License-Identifier: MIT
"""Where the machine has a C compiler, a CPU scores, selects and attends for one new token in one call, which runs the kernels
of the three stages one after the other. Python between them would take as long as the attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.block_scores import cpu_products
from openmsa.block_scores.cpu import MIN_ROWS
from openmsa.block_topk import cpu_choose
from openmsa.inputs import AttentionInputs, SelectionCall
from openmsa.kv_cache import PagedIndexKeys, PagedKV, Stored
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.primitives import cpu_blocks
from openmsa.primitives.cpu_rows import Span, reads
from openmsa.runtime import c_library


class Counts(NamedTuple):
    """Says how many blocks a query selects, how many of them are forced, and their size."""

    topk: int
    block_size: int
    init_blocks: int
    local_blocks: int

    def valid(self) -> bool:
        """Says whether `openmsa.inputs.check_counts` raises nothing."""
        topk, size, init, local = self
        whole = type(topk) is type(size) is type(init) is type(local) is int
        return whole and init + local <= topk and 1 <= topk <= 64 and 16 <= size <= 256 and init >= 0 and local >= 0


def compiled() -> bool:
    """Says whether the kernels can be compiled."""
    sources = (cpu_products.SOURCE, cpu_choose.SOURCE, cpu_blocks.SOURCE)
    return all(c_library.library(source).functions is not None for source in sources)


def serves(q: Tensor, keys: Tensor | Stored, values: Tensor | Stored, index_q: Tensor, index_keys: Tensor | Stored) -> bool:
    """Says whether the kernels of few rows read these queries and caches."""
    few = index_q.shape[1] // index_keys.shape[1] < MIN_ROWS
    return few and reads(cpu_products.SOURCE, index_q, index_keys) and reads(cpu_blocks.SOURCE, q, keys, values)


def attend(
    q: Tensor,
    keys: Rows,
    values: Rows,
    index_q: Tensor,
    index_keys: Rows,
    length: int,
    counts: Counts,
    scale: float,
    blocks: Tensor,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Does what `openmsa.decode.cpu_token.attend` says where `serves` is true."""
    block_size = counts.block_size
    num_blocks = -(-length // block_size)
    scored = min(length, max(0, num_blocks - counts.local_blocks) * block_size)  # The last blocks are forced.
    scores = torch.empty(index_q.shape[1], 1, num_blocks, dtype=torch.float32, device="cpu")
    visible = torch.full((1,), num_blocks, dtype=torch.int32, device="cpu")
    of_index = Span(0, 1, scored - 1, index_keys, scored)
    span = cpu_blocks.AttentionSpan(0, 1, length - 1, keys, length, values)
    c_library.run(
        *([cpu_products.task(index_q, [of_index], block_size, scores, few=True)] if scored else []),
        cpu_choose.task(scores, visible, counts.init_blocks, counts.local_blocks, blocks),
        cpu_blocks.task(q, blocks, [span], block_size, scale, out, lse),
    )


def attend_tokens(impl: str, selection: SelectionCall, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
    """Does what `msa_attention` does for at most one query of each sequence, packed or in pages, of checked arguments. Returns
    out and lse, or None where the stages must serve the call."""
    (q, k, v, seqs, scale), index_q, index_k = inputs, selection.index_q, selection.index_k
    if impl not in ("auto", "cpu") or not (type(q) is type(index_q) is Tensor) or not q.is_cpu or seqs.longest_q > 1:
        return None
    keys, values, pages = (k.k, k.v, k.page_table) if isinstance(k, PagedKV) else (k, v, None)
    index_keys, index_pages = (index_k.keys, index_k.page_table) if isinstance(index_k, PagedIndexKeys) else (index_k, None)
    assert values is not None
    if not compiled() or not serves(q, keys, values, index_q, index_keys):
        return None
    counts = Counts(selection.topk, selection.block_size, selection.init_blocks, selection.local_blocks)
    out, lse = torch.zeros(q.shape, dtype=q.dtype, device="cpu"), torch.full(q.shape[:2], -torch.inf, device="cpu")
    blocks = torch.empty(1, index_q.shape[1], counts.topk, dtype=torch.int32, device="cpu")
    for b, (first, stop, k0, k_len, offset) in enumerate(seqs.on_host()):
        length, one = min(offset + 1, k_len), slice(first, stop)
        if first < stop and length > 0:
            of_keys, of_values = (Rows(x, k0, None if pages is None else pages[b]) for x in (keys, values))
            of_index = Rows(index_keys, k0, None if index_pages is None else index_pages[b])
            results = (blocks, out[one], lse[one])
            attend(q[one], of_keys, of_values, index_q[one], of_index, length, counts, scale, *results)
    return out, lse
