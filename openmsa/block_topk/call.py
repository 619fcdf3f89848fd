# SPDX-License-Identifier: MIT
"""This file runs a call of `select_blocks`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmsa.inputs import SelectionCall, check_selection
from openmsa.known_calls import KnownCalls, bounded, repeats
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.runtime.dispatch import Stage
from openmsa.types import Sequences

CALLS = KnownCalls()


def select(
    stage: Stage[SelectionCall],
    impl: str,
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    topk: int,
    seqs: Sequences | None,
    numbers: tuple[int, int, int],
    check: bool,
) -> Tensor:
    """Checks and runs an exact selection. numbers: block_size, init_blocks, local_blocks."""
    if not repeats(check, index_q, index_k):
        blocks: Tensor = stage.run(impl, check_selection(index_q, index_k, topk, seqs, *numbers, False, None, check))
        return blocks
    seqs = bounded(seqs, index_q.device)

    def places() -> dict[str, Any]:
        return {"blocks": torch.empty(*index_q.shape[:2], topk, dtype=torch.int32, device=index_q.device)}

    checked = partial(check_selection, index_q, index_k, topk, seqs, *numbers, False, None, False)
    return CALLS.run(stage, impl, (index_q, index_k), seqs, (topk, *numbers), checked, places)["blocks"]
