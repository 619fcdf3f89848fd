# SPDX-License-Identifier: MIT
"""Top-k of given scores is a stage of its own: this file has its public function, its checks and its table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.inputs import check_counts, check_last
from openmsa.runtime import checks, dispatch, references
from openmsa.runtime.dispatch import Implementation, Stage
from openmsa.types import Layout, Sequences, layout


class TopkCall(NamedTuple):
    """These are the checked arguments of `select_blocks_from_scores`; visible_blocks is int32 ``[total_q]``."""

    scores: Tensor
    topk: int
    visible_blocks: Tensor
    init_blocks: int
    local_blocks: int


def check_scores(
    scores: Tensor,
    topk: int,
    seqs: Sequences | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    visible_blocks: Tensor | None,
) -> TopkCall:
    """Checks the arguments of `select_blocks_from_scores`."""
    check_counts(topk, block_size, init_blocks, local_blocks)
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
    return TopkCall(scores, topk, visible_blocks, init_blocks, local_blocks)


def _lengths_of_scores(scores: Tensor, seqs: Sequences | None, block_size: int) -> Layout:
    _, total_q, num_blocks = scores.shape
    if seqs is not None and isinstance(seqs, Sequences) and seqs.cu_seqlens_k is not None:
        total_k = None  # any number of keys: their lengths are given
    else:
        total_k = num_blocks * block_size
    lengths = layout(seqs, total_q, total_k, scores.device)
    check_last("scores.shape[1]", total_q, num_blocks * block_size, seqs)
    if lengths.num_blocks(block_size) > num_blocks:
        raise ValueError(
            f"scores.shape[2] must cover the longest sequence ({lengths.num_blocks(block_size)} blocks), got {num_blocks}"
        )
    return lengths


@dispatch.operator("openmsa::select_blocks_from_scores")
def select_blocks_from_scores(
    scores: Tensor,
    topk: int = 16,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    visible_blocks: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Does what `select_blocks` does for given scores ``[index_heads, total_q, num_blocks]`` (any float dtype, any strides).

    seqs:            lengths whose last visible key says which block is the query's own; None: one sequence whose keys fill all
                     num_blocks blocks.
    visible_blocks:  int32 ``[total_q]``, how many leading blocks each query may read, instead of `seqs`; a value past
                     num_blocks means all of them.

    Returns, and treats ties, NaN and forced blocks, as `select_blocks` does; blocks past the visible ones are never selected.
    """
    call = check_scores(scores, topk, seqs, block_size, init_blocks, local_blocks, visible_blocks)
    return SCORES_STAGE.run(impl, call)


def _refuse_triton_scores(call: TopkCall) -> str | None:
    reason = dispatch.unless_cuda_inference(call.scores.detach(), dtypes=(torch.float32, torch.float16, torch.bfloat16))
    if reason is None:
        from openmsa.block_topk import triton_topk

        reason = triton_topk.refuse(call.scores)
    return reason


SCORES_STAGE = Stage(
    select_blocks_from_scores,
    check_scores,
    (
        Implementation("triton", "openmsa.block_topk.triton_topk:select_from_scores", _refuse_triton_scores),
        Implementation(
            "cpu",
            "openmsa.block_topk.cpu:select_from_scores",
            lambda call: dispatch.unless_cpu_inference(call.scores.detach()),
        ),
        Implementation(
            "reference",
            "openmsa.block_topk.reference:select_from_scores",
            lambda call: references.unless_values(call.scores),
            lambda call: references.on_gpu_by_name_only(call.scores),
        ),
    ),
)
