# SPDX-License-Identifier: MIT
"""`sparse_topk_select`: the best tiles of every query, exactly and the same in every run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha_sm100.operands import check_out
from openmsa import select_blocks_from_scores
from openmsa.runtime import checks

LAYOUTS = {"HKT": (0, 2, 1), "THK": (1, 0, 2)}


def sparse_topk_select(
    max_score: Tensor,
    topk: int,
    num_valid_pages: int | Tensor | None = None,
    output: Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    max_score_layout: str = "HKT",
) -> Tensor:
    """The `topk` tiles of the highest score for each query and head.

    max_score:        float32 ``[heads, max_k_tiles, total_q]`` ("HKT") or ``[total_q, heads, max_k_tiles]`` ("THK"); any
                      strides.
    topk:             1 to 64.
    num_valid_pages:  leading tiles that may be selected: an int for all queries, int32 or int64 ``[total_q]``, or None: all.
    output:           int32 ``[total_q, heads, topk]`` to write into, any strides.
    force_begin_blocks, force_end_blocks:  so many first and last of the valid tiles are always selected, within topk.

    Returns int32 ``[total_q, heads, topk]``, `output` if given: tile numbers, ascending, then -1. Equal scores: the lower
    number wins. A tile whose score is -inf or NaN is selected only where it is forced, so that no query of a mixed batch is
    given a tile that it cannot see.

    The same as the public function: names, order, defaults, shapes, order of the result, forced tiles. Better: topk from 1 to
    64; both layouts with any strides; num_valid_pages for each query; ties decided; no workspace; any device.
    """
    checks.tensor("max_score", max_score, "[heads, max_k_tiles, total_q]", (torch.float32,))
    checks.integer("topk", topk, 1, 64)
    if max_score_layout not in LAYOUTS:
        raise ValueError(f"max_score_layout must be 'HKT' or 'THK', got {max_score_layout!r}")
    scores = max_score.permute(LAYOUTS[max_score_layout])  # [heads, total_q, max_k_tiles]
    heads, total_q, tiles = scores.shape
    for name, count in (("force_begin_blocks", force_begin_blocks), ("force_end_blocks", force_end_blocks)):
        checks.integer(name, count, 0)
    if force_begin_blocks + force_end_blocks > topk:
        raise ValueError(
            f"force_begin_blocks + force_end_blocks must be at most topk ({topk}), "
            f"got {force_begin_blocks} + {force_end_blocks}"
        )
    if output is not None:
        check_out("output", output, (total_q, heads, topk), torch.int32, max_score.device)
    visible = _valid(num_valid_pages, total_q, tiles, max_score.device)
    if tiles == 0:
        blocks = torch.full((total_q, heads, topk), -1, dtype=torch.int32, device=max_score.device)
    else:
        blocks = select_blocks_from_scores(
            scores,
            topk,
            init_blocks=force_begin_blocks,
            local_blocks=force_end_blocks,
            visible_blocks=visible,
        )
    return blocks if output is None else output.copy_(blocks)


def _valid(value: Any, total_q: int, tiles: int, device: torch.device) -> Tensor:
    """int32 ``[total_q]``."""
    if isinstance(value, Tensor):
        checks.tensor("num_valid_pages", value, "[total_q]", (torch.int32, torch.int64))
        checks.size("num_valid_pages", value, 0, total_q, "one entry a query")
        if value.device != device:
            raise ValueError(f"num_valid_pages must be on the device of max_score ({device}), got {value.device}")
        return value.clamp(0, tiles).to(torch.int32)
    count = tiles if value is None else min(checks.integer("num_valid_pages", value, 0), tiles)
    return torch.full((total_q,), count, dtype=torch.int32, device=device)
