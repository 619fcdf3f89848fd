# SPDX-License-Identifier: MIT
"""This file holds the checked call of `sparse_attention`, and its checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.inputs import check_qkv
from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.results import check_places
from openmsa.runtime import checks, value_checks
from openmsa.runtime.kinds import tensors_in
from openmsa.types import Layout, Sequences


class SparseCall(NamedTuple):
    """Holds the checked arguments of `sparse_attention`. out, lse: contiguous tensors that the results are written to, and that
    the implementation returns; None: new ones."""

    q: Tensor | Stored
    k: Tensor | Stored | PagedKV
    v: Tensor | Stored | None
    blocks: Tensor
    seqs: Layout
    block_size: int
    softmax_scale: float
    return_lse: bool
    out: Tensor | None = None
    lse: Tensor | None = None

    def writing(self, out: Tensor | None, lse: Tensor | None) -> SparseCall:
        """Returns the call with the places of its results, which are checked."""
        check_places(self.q, list(tensors_in(self.q, self.k, self.v, self.blocks)), out, lse)
        return self._replace(out=out, lse=lse)


def check_sparse(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    blocks: Tensor,
    seqs: Sequences | Layout | None,
    block_size: int,
    softmax_scale: float | None,
    return_lse: bool,
    check: bool,
) -> SparseCall:
    """Checks the arguments of `sparse_attention`."""
    checks.integer("block_size", block_size, 16, 256)
    checks.flag("return_lse", return_lse)
    inputs = check_qkv(q, k, v, seqs, softmax_scale, check)
    num_kv_heads = k.num_heads if isinstance(k, PagedKV) else k.shape[1]
    checks.tensor("blocks", blocks, "[total_q, num_kv_heads, topk]", (torch.int32,))
    checks.alike("blocks", blocks, "q", q, dtype=False)
    checks.size("blocks", blocks, 0, q.shape[0], "one row a query")
    if blocks.shape[1] not in (1, num_kv_heads):
        raise ValueError(f"blocks.shape[1] must be num_kv_heads ({num_kv_heads}) or 1, got {blocks.shape[1]}")
    checks.integer("blocks.shape[2] (topk)", blocks.shape[2], 1, 64)
    if check or q.device.type == "cpu":
        num_blocks = inputs.seqs.num_blocks(block_size)
        if check:
            value_checks.in_range("blocks", blocks, -1, num_blocks)
        _check_distinct(blocks, num_blocks)
    return SparseCall(*inputs[:3], blocks, inputs.seqs, block_size, inputs.softmax_scale, return_lse)


def _check_distinct(blocks: Tensor, num_blocks: int) -> None:
    ordered = blocks.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0) & (ordered[..., 1:] < num_blocks)
    if bool(twice.any()):
        row, head, slot = twice.nonzero()[0].tolist()
        raise ValueError(
            f"blocks must hold distinct ids in a row, got {int(ordered[row, head, slot])} twice at row {row}, head {head}"
        )
