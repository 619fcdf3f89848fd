# SPDX-License-Identifier: MIT
"""This module lets a trained byte model attend in other ways than it was trained in: to all keys, to more or fewer blocks, to a
window, to keys in low precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from openmsa import E4M3, MXFP4, NVFP4, Int8, dense_attention, select_blocks, select_blocks_from_scores, sparse_attention
from openmsa.modules import IndexBranch, MSAConfig, index_branches, set_stage
from openmsa.tiny import ByteModel
from openmsa.types import Sequences

Way = Callable[[int, IndexBranch, Tensor, Tensor, Tensor, Tensor, Tensor, "Sequences | None"], Tensor]
"""Attends in a layer: its number, its index branch, q, k, v, index_q, index_k and the lengths give the output."""

INDEX_FORMATS: dict[str, Callable[[Tensor], Any]] = {
    "e4m3": lambda x: E4M3.quantize(x, per="tensor"),
    "int8": Int8.quantize,
    "mxfp4": MXFP4.quantize,
    "nvfp4": NVFP4.quantize,
}
KV_FORMATS: dict[str, Callable[[Tensor], Any]] = {"e4m3": lambda x: E4M3.quantize(x, per="head"), "nvfp4": NVFP4.quantize}


@contextmanager
def attending(model: ByteModel, way: Way) -> Iterator[None]:
    """Makes every layer attend in the given way inside the context. Nothing is recorded for gradients."""
    branches = index_branches(model)
    stages = [branch.stage for branch in branches]
    set_stage(model, "sparse")  # so that index queries and keys are computed

    def hook(layer: int, branch: IndexBranch) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, seqs: Any, **_: Any) -> Tensor:
            return way(layer, branch, q, k, v, index_q, index_k, seqs)

        return attend

    try:
        for layer, branch in enumerate(branches):
            branch.attend = hook(layer, branch)  # type: ignore[method-assign]
        with torch.no_grad():
            yield
    finally:
        for branch, stage in zip(branches, stages, strict=True):
            del branch.attend
            branch.stage = stage


def selected(config: MSAConfig, index_q: Tensor, index_k: Any, seqs: Sequences | None, topk: int) -> Tensor:
    """Returns the selection of a layer with `topk` blocks."""
    return select_blocks(
        index_q,
        index_k,
        topk,
        seqs,
        block_size=config.index_block_size,
        init_blocks=config.index_init_blocks,
        local_blocks=config.index_local_blocks,
    )


def dense(layer: int, branch: IndexBranch, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Attends to every visible key."""
    return dense_attention(q, k, v, rest[-1])


def sparse(topk: int, index: str | None = None, kv: str | None = None, agreement: dict[int, list[Tensor]] | None = None) -> Way:
    """Returns the way that reads the `topk` blocks that the index branch selects.

    index, kv:  formats of index keys, and of keys and values; None: as the model computes them.
    agreement:  receives, of each layer, the mean share of blocks that both formats of index keys select.
    """

    def way(
        layer: int, branch: IndexBranch, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, seqs: Any
    ) -> Tensor:
        stored = index_k if index is None else INDEX_FORMATS[index](index_k)
        blocks = selected(branch.config, index_q, stored, seqs, topk)
        if agreement is not None:
            agreement.setdefault(layer, []).append(shared(selected(branch.config, index_q, index_k, seqs, topk), blocks))
        keys, values = (x if kv is None else KV_FORMATS[kv](x) for x in (k, v))
        return sparse_attention(q, keys, values, blocks, seqs, block_size=branch.config.index_block_size).to(q.dtype)

    return way


def window(topk: int) -> Way:
    """Returns the way that reads the first block and the last ``topk - 1``."""

    def way(layer: int, branch: IndexBranch, q: Tensor, k: Tensor, v: Tensor, index_q: Any, index_k: Any, seqs: Any) -> Tensor:
        size = branch.config.index_block_size
        longest = k.shape[0] if seqs is None else seqs.max_seqlen_k
        scores = q.new_zeros(1, q.shape[0], -(-longest // size), dtype=torch.float32)
        blocks = select_blocks_from_scores(scores, topk, seqs, block_size=size, init_blocks=1, local_blocks=topk - 1)
        return sparse_attention(q, k, v, blocks, seqs, block_size=size)

    return way


def shared(first: Tensor, second: Tensor) -> Tensor:
    """Returns which share of the blocks of `first` is in `second`, the mean over rows that have any, float32 ``[]``. Both are
    selections of the same rows, ``[..., topk]``."""
    both = ((first[..., None] == second[..., None, :]) & (first >= 0)[..., None]).any(-1).sum(-1)
    count = (first >= 0).sum(-1)
    return (both[count > 0] / count[count > 0]).mean()
