# SPDX-License-Identifier: MIT
"""`explain` says which implementation would serve a call, and why each other one would not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from openmsa.attention import attention_call, check_path, msa_attention
from openmsa.block_scores import STAGE as SCORES
from openmsa.block_scores import block_scores
from openmsa.block_topk import CERTIFIED_STAGE, SCORES_STAGE, select_blocks, select_blocks_from_scores
from openmsa.block_topk import STAGE as SELECTION
from openmsa.dense_attention import STAGE as DENSE
from openmsa.dense_attention import dense_attention
from openmsa.index_loss import STAGE as LOSS
from openmsa.index_loss import index_loss
from openmsa.runtime import explanation
from openmsa.runtime.dispatch import Stage, check_name
from openmsa.runtime.explanation import Explanation, PathExplanation
from openmsa.sparse_attention import STAGE as SPARSE
from openmsa.sparse_attention import sparse_attention

STAGES: dict[Callable[..., Any], Stage[Any]] = {
    block_scores: SCORES,
    select_blocks: SELECTION,
    select_blocks_from_scores: SCORES_STAGE,
    sparse_attention: SPARSE,
    dense_attention: DENSE,
    index_loss: LOSS,
}


def explain(function: Callable[..., Any], *args: Any, impl: str = "auto", **kwargs: Any) -> Explanation | PathExplanation:
    """Says what ``function(*args, impl=impl, **kwargs)`` would run, without running it.

    function: a public operation of openmsa: `block_scores`, `select_blocks`, `select_blocks_from_scores`,
    `sparse_attention`, `dense_attention`, `index_loss` or `msa_attention`.
    Returns an `Explanation` (``stage``, ``chosen``, ``reasons`` by implementation; prints as text), for `msa_attention` a tuple
    of them; ``by_stage`` of either gives the tuple. Raises what the call itself would raise on bad arguments, TypeError with
    the names of missing ones, and ValueError for any other function.
    """
    if function is msa_attention:
        arguments = explanation.arguments(inspect.signature(msa_attention), msa_attention.__name__, args, kwargs)
        selection, inputs, _ = check_path(**arguments)
        index_q = selection.index_q
        blocks = torch.empty((*index_q.shape[:2], selection.topk), dtype=torch.int32, device=index_q.device)
        chooser = CERTIFIED_STAGE if arguments["certified"] else SELECTION
        check_name(impl, chooser, SPARSE)
        attention = attention_call(inputs, blocks, selection.block_size)
        return PathExplanation((chooser.explain(impl, selection), SPARSE.explain(impl, attention)))
    if not callable(function) or function not in STAGES:
        names = ", ".join(f.__name__ for f in (*STAGES, msa_attention))
        raise ValueError(f"function must be one of {names}, got {function!r}")
    stage = STAGES[function]
    call = stage.check(*args, **kwargs)
    return (CERTIFIED_STAGE if stage is SELECTION and kwargs.get("certified") else stage).explain(impl, call)
