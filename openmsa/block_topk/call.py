# SPDX-License-Identifier: MIT
"""The checked arguments of a selection."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.block_scores import check_scoring
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys, Stored
from openmsa.runtime import checks
from openmsa.types import Layout, Sequences, layout


class Call(NamedTuple):
    """The checked arguments of `select_blocks`. In a certified selection, index_k are the certified keys whole."""

    index_q: Tensor | Stored
    index_k: Tensor | Stored | PagedIndexKeys
    seqs: Layout
    block_size: int
    topk: int
    init_blocks: int
    local_blocks: int


class ScoresCall(NamedTuple):
    """The checked arguments of `select_blocks_from_scores`; visible_blocks is int32 ``[total_q]``."""

    scores: Tensor
    topk: int
    visible_blocks: Tensor
    init_blocks: int
    local_blocks: int


def check_selection(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    topk: int,
    seqs: Sequences | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    certified: bool,
    rescored: Tensor | None,
    check: bool,
) -> Call:
    """Checks the arguments of `select_blocks`."""
    checks.flag("certified", certified)
    _check_counts(topk, block_size, init_blocks, local_blocks)
    scoring = check_scoring(index_q, index_k, seqs, block_size, check)
    call = Call(*scoring, topk, init_blocks, local_blocks)
    if certified:
        _check_certified(call, index_k, rescored)
        return call._replace(index_k=index_k)
    if rescored is not None:
        raise ValueError(f"rescored must be None unless certified is True, got {type(rescored).__name__}")
    return call


def _check_certified(call: Call, index_k: Tensor | Stored | PagedIndexKeys, rescored: Tensor | None) -> None:
    keys = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    if not isinstance(keys, CertifiedKeys):
        got = type(keys).__name__
        raise ValueError(f"index_k must be CertifiedKeys (or pages of them) for certified=True, got {got}")
    if rescored is not None:
        checks.tensor("rescored", rescored, "[total_q, index_heads]", (torch.int32,))
        checks.alike("rescored", rescored, "index_q", call.index_q, dtype=False)
        for dimension, what in enumerate(("total_q", "index_heads")):
            checks.size("rescored", rescored, dimension, call.index_q.shape[dimension], f"{what} of index_q")


def _check_counts(topk: int, block_size: int, init_blocks: int, local_blocks: int) -> None:
    checks.integer("topk", topk, 1, 64)
    checks.integer("block_size", block_size, 16, 256)
    checks.integer("init_blocks", init_blocks, 0)
    checks.integer("local_blocks", local_blocks, 0)
    if init_blocks + local_blocks > topk:
        raise ValueError(f"init_blocks + local_blocks must be at most topk ({topk}), got {init_blocks} + {local_blocks}")


def check_scores(
    scores: Tensor,
    topk: int,
    seqs: Sequences | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    visible_blocks: Tensor | None,
) -> ScoresCall:
    """Checks the arguments of `select_blocks_from_scores`."""
    _check_counts(topk, block_size, init_blocks, local_blocks)
    checks.tensor("scores", scores, "[index_heads, total_q, num_blocks]")
    _, total_q, num_blocks = scores.shape
    if visible_blocks is None:
        lengths = _lengths_of_scores(scores, seqs, block_size)
        visible_blocks = lengths.visible_blocks(total_q, block_size)
    elif seqs is not None:
        raise ValueError("seqs must be None when visible_blocks is given, got both")
    else:
        checks.tensor("visible_blocks", visible_blocks, "[total_q]", (torch.int32,))
        checks.size("visible_blocks", visible_blocks, 0, total_q, "one entry a query")
        checks.alike("visible_blocks", visible_blocks, "scores", scores, dtype=False)
        visible_blocks = visible_blocks.clamp(0, num_blocks)
    return ScoresCall(scores, topk, visible_blocks, init_blocks, local_blocks)


def _lengths_of_scores(scores: Tensor, seqs: Sequences | None, block_size: int) -> Layout:
    _, total_q, num_blocks = scores.shape
    if seqs is not None and isinstance(seqs, Sequences) and seqs.cu_seqlens_k is not None:
        total_k = None  # any number of keys: their lengths are given
    else:
        total_k = num_blocks * block_size
    lengths = layout(seqs, total_q, total_k, scores.device)
    if lengths.num_blocks(block_size) > num_blocks:
        raise ValueError(
            f"scores.shape[2] must cover the longest sequence ({lengths.num_blocks(block_size)} blocks), got {num_blocks}"
        )
    return lengths
