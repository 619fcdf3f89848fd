# SPDX-License-Identifier: MIT
"""Which blocks does each query read? Exact, deterministic top-k over block scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.block_scores import STAGE as SCORING
from openmsa.block_topk.certified import STAGE as CERTIFIED_STAGE
from openmsa.block_topk.certified import check_certified
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.runtime import checks, refusals
from openmsa.runtime.dispatch import Implementation, Stage
from openmsa.types import Layout, Sequences, layout


def select_blocks(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    topk: int = 16,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    certified: bool = False,
    rescored: Tensor | None = None,
    impl: str = "auto",
    check: bool = False,
) -> Tensor:
    """Scores the key blocks and selects `topk` of them for every query and index head.

    index_q, index_k, seqs, block_size, impl, check: as in `block_scores`.
    topk:          1 to 64.
    init_blocks:   this many first blocks are always selected,
    local_blocks:  and this many last visible blocks, the query's own block among them; both inside the k
                   (init_blocks + local_blocks <= topk).
    certified:     the same selection, bit for bit, for fewer bytes: index_k are `CertifiedKeys` (or pages of them), of which
                   the int8 half bounds every score rigorously and only blocks that the bounds leave open are read exactly.
    rescored:      int32 ``[total_q, index_heads]``, receives how many blocks were scored exactly; only with `certified`.

    Returns int32 ``[total_q, index_heads, topk]``: block ids counted from the start of the query's sequence, ascending, then
    -1. Ties go to the lower id; the result is the same in every run. NaN counts as lowest: a block whose score is NaN or -inf
    is selected only where it is forced. A query that sees fewer than topk blocks gets all of them.
    Memory is bounded: the scores of a few queries at a time.

    Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    Source: paper arXiv 2606.13392, section 3.2.
    """
    options = {"block_size": block_size, "init_blocks": init_blocks, "local_blocks": local_blocks, "check": check}
    stage, arguments = check_selection(index_q, index_k, topk, seqs, certified=certified, rescored=rescored, **options)
    if not certified:
        blocks: Tensor = stage.run(impl, arguments)
        return blocks
    blocks, count = stage.run(impl, arguments)
    if rescored is not None:
        rescored.copy_(count)
    return blocks


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
    """`select_blocks` for given scores ``[index_heads, total_q, num_blocks]`` (any float dtype, any strides).

    seqs:            whose last visible key says which block is the query's own; None: one sequence whose keys fill all
                     num_blocks blocks.
    visible_blocks:  int32 ``[total_q]``, how many leading blocks each query may read, instead of `seqs`; a value past
                     num_blocks means all of them.

    Returns, and treats ties, NaN and forced blocks, as `select_blocks` does; blocks past the visible ones are never selected.
    """
    arguments = _check_scores(
        scores,
        topk,
        seqs,
        block_size=block_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        visible_blocks=visible_blocks,
    )
    return SCORES_STAGE.run(impl, arguments)


def check_selection(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    topk: int = 16,
    seqs: Sequences | None = None,
    *,
    certified: bool = False,
    rescored: Tensor | None = None,
    **options: Any,
) -> tuple[Stage, dict[str, Any]]:
    """The stage that a call of `select_blocks` runs, and its checked arguments. options: the others, as `_check` takes them."""
    checks.flag("certified", certified)
    arguments = _check(index_q, index_k, topk, seqs, **options)
    if certified:
        return CERTIFIED_STAGE, check_certified(arguments, index_k, rescored)
    if rescored is not None:
        raise ValueError(f"rescored must be None unless certified is True, got {type(rescored).__name__}")
    return STAGE, arguments


def _check_counts(topk: int, block_size: int, init_blocks: int, local_blocks: int) -> None:
    checks.integer("topk", topk, 1, 64)
    checks.integer("block_size", block_size, 16, 256)
    checks.integer("init_blocks", init_blocks, 0)
    checks.integer("local_blocks", local_blocks, 0)
    if init_blocks + local_blocks > topk:
        raise ValueError(f"init_blocks + local_blocks must be at most topk ({topk}), got {init_blocks} + {local_blocks}")


def _check(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    topk: int = 16,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    check: bool = False,
) -> dict[str, Any]:
    _check_counts(topk, block_size, init_blocks, local_blocks)
    arguments = SCORING.check(index_q, index_k, seqs, block_size=block_size, check=check)
    return arguments | {"topk": topk, "init_blocks": init_blocks, "local_blocks": local_blocks}


def _check_scores(
    scores: Tensor,
    topk: int = 16,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    visible_blocks: Tensor | None = None,
) -> dict[str, Any]:
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
    return {
        "scores": scores,
        "topk": topk,
        "visible_blocks": visible_blocks,
        "init_blocks": init_blocks,
        "local_blocks": local_blocks,
    }


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


TRITON_READS = {"index_q": ("plain", "e4m3"), "index_k": ("plain", "e4m3", "int8", "nvfp4", "mxfp4")}
"""The formats that the selection's kernels take: a new one is named here."""


def _refuse_triton(index_q: Any, index_k: Any, **arguments: Any) -> str | None:
    reason = refusals.unless_reads(TRITON_READS, index_q=index_q, index_k=index_k)
    reason = reason or refusals.unless_cuda_inference(index_q, index_k)
    if reason is None:
        from openmsa.block_topk import triton_select

        reason = triton_select.refuse(**arguments)
    return reason


def _refuse_triton_scores(scores: Tensor, **_: Any) -> str | None:
    reason = refusals.unless_cuda_inference(scores.detach(), dtypes=(torch.float32, torch.float16, torch.bfloat16))
    if reason is None:
        from openmsa.block_topk import triton_topk

        reason = triton_topk.refuse(scores)
    return reason


STAGE = Stage(
    "select_blocks",
    _check,
    (
        Implementation("triton", "openmsa.block_topk.triton_select:select_blocks", _refuse_triton),
        Implementation(
            "cpu",
            "openmsa.block_topk.cpu:select_blocks",
            lambda index_q, index_k, **_: refusals.unless_cpu_inference(index_q, index_k),
        ),
        Implementation(
            "reference",
            "openmsa.block_topk.reference:select_blocks",
            lambda **_: None,
            lambda index_q, **_: refusals.on_gpu_by_name_only(index_q),
        ),
    ),
)
SCORES_STAGE = Stage(
    "select_blocks_from_scores",
    _check_scores,
    (
        Implementation("triton", "openmsa.block_topk.triton_topk:select_from_scores", _refuse_triton_scores),
        Implementation(
            "cpu",
            "openmsa.block_topk.cpu:select_from_scores",
            lambda scores, **_: refusals.unless_cpu_inference(scores.detach()),
        ),
        Implementation(
            "reference",
            "openmsa.block_topk.reference:select_from_scores",
            lambda **_: None,
            lambda scores, **_: refusals.on_gpu_by_name_only(scores),
        ),
    ),
)
