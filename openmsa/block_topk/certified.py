# SPDX-License-Identifier: MIT
"""Certified selection: `select_blocks` of exact index keys that reads most of them in int8 only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.block_scores import STAGE as SCORING
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys
from openmsa.runtime import checks, refusals
from openmsa.runtime.dispatch import Implementation, Stage


def check_certified(selection: dict[str, Any], index_k: Any, rescored: Tensor | None = None) -> dict[str, Any]:
    """The arguments of `select_blocks`, checked for the exact keys; a certified selection takes them with `index_k` whole."""
    index_q = selection["index_q"]
    keys = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    if not isinstance(keys, CertifiedKeys):
        got = type(keys).__name__
        raise ValueError(f"index_k must be CertifiedKeys (or pages of them) for certified=True, got {got}")
    if rescored is not None:
        checks.tensor("rescored", rescored, "[total_q, index_heads]", (torch.int32,))
        checks.alike("rescored", rescored, "index_q", index_q, dtype=False)
        for dimension, what in enumerate(("total_q", "index_heads")):
            checks.size("rescored", rescored, dimension, index_q.shape[dimension], f"{what} of index_q")
    return selection | {"index_k": index_k}


def _refuse_triton(index_q: Any, index_k: Any, **arguments: Any) -> str | None:
    reason = refusals.unless_reads({"index_q": ("plain",), "index_k": ("certified",)}, index_q=index_q, index_k=index_k)
    reason = reason or refusals.unless_cuda_inference(index_q, index_k)
    if reason is None:
        from openmsa.block_topk import triton_certified

        reason = triton_certified.refuse(index_q, index_k, **arguments)
    return reason


STAGE = Stage(
    "select_blocks(certified=True)",
    SCORING.check,
    (
        Implementation("triton", "openmsa.block_topk.triton_certified:select_blocks", _refuse_triton),
        Implementation(
            "cpu",
            "openmsa.block_topk.cpu_certified:select_blocks",
            lambda index_q, index_k, **_: refusals.unless_cpu_inference(index_q, index_k),
        ),
        Implementation(
            "reference",
            "openmsa.block_topk.reference:select_certified",
            lambda **_: None,
            lambda index_q, **_: refusals.on_gpu_by_name_only(index_q),
        ),
    ),
)
