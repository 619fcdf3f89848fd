# SPDX-License-Identifier: MIT
"""`explain`: which implementation would serve a call, and why each other one would not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from openmsa.attention import check_path, msa_attention
from openmsa.block_scores import STAGE as SCORES
from openmsa.block_scores import block_scores
from openmsa.block_topk import SCORES_STAGE, check_selection, select_blocks, select_blocks_from_scores
from openmsa.block_topk import STAGE as SELECTION
from openmsa.block_topk.certified import STAGE as CERTIFIED
from openmsa.dense_attention import STAGE as DENSE
from openmsa.dense_attention import dense_attention
from openmsa.runtime.dispatch import Explanation, Stage
from openmsa.sparse_attention import STAGE as SPARSE
from openmsa.sparse_attention import sparse_attention

STAGES: dict[Callable[..., Any], Stage] = {
    block_scores: SCORES,
    select_blocks: SELECTION,
    select_blocks_from_scores: SCORES_STAGE,
    sparse_attention: SPARSE,
    dense_attention: DENSE,
}


class PathExplanation(tuple[Explanation, ...]):
    """One `Explanation` a stage, in the order in which the stages run; prints as their texts."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def explain(function: Callable[..., Any], *args: Any, impl: str = "auto", **kwargs: Any) -> Explanation | PathExplanation:
    """What ``function(*args, impl=impl, **kwargs)`` would run, without running it.

    function: a public operation of openmsa: `block_scores`, `select_blocks`, `select_blocks_from_scores`,
    `sparse_attention`, `dense_attention` or `msa_attention`.
    Returns an `Explanation` (``stage``, ``chosen``, ``reasons`` by implementation; prints as text), for `msa_attention` a tuple
    of them. Raises what the call itself would raise on bad arguments, and ValueError for any other function.
    """
    if function is msa_attention:
        selection, attention, _ = check_path(*args, **kwargs)
        index_q = selection["index_q"]
        blocks = torch.empty((*index_q.shape[:2], selection["topk"]), dtype=torch.int32, device=index_q.device)
        chooser = CERTIFIED if kwargs.get("certified") else SELECTION
        return PathExplanation((chooser.explain(impl, selection), SPARSE.explain(impl, attention | {"blocks": blocks})))
    if function is select_blocks:
        stage, arguments = check_selection(*args, **kwargs)
        return stage.explain(impl, arguments)
    if not callable(function) or function not in STAGES:
        names = ", ".join(f.__name__ for f in (*STAGES, msa_attention))
        raise ValueError(f"function must be one of {names}, got {function!r}")
    stage = STAGES[function]
    return stage.explain(impl, stage.check(*args, **kwargs))
