# SPDX-License-Identifier: MIT
"""Where the machine has a C compiler, cpu_choose.c takes the top-k of given scores on a CPU: it reads them once."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from openmsa.primitives.cpu_rows import sizes
from openmsa.runtime import c_library

SOURCE = Path(__file__).with_suffix(".c")
CALLS_A_THREAD = 4


class _Call(ctypes.Structure):
    """This is `Call` of cpu_choose.c."""

    _fields_ = tuple(
        sizes(
            *("scores", "score_head", "score_token", "visible", "blocks", "first", "stop"),
            *("heads", "num_blocks", "topk", "init_blocks", "local_blocks"),
        )
    )


def choose(scores: Tensor, topk: int, visible_blocks: Tensor, init_blocks: int, local_blocks: int) -> Tensor | None:
    """Does what `openmsa.block_topk.select_blocks_from_scores` says; visible_blocks int32 ``[total_q]``, contiguous. Returns
    None where the kernel does not read the scores or cannot be compiled."""
    heads, total_q, num_blocks = scores.shape
    functions = c_library.library(SOURCE).functions
    if functions is None or scores.dtype != torch.float32 or scores.stride(2) != 1 or not visible_blocks.is_contiguous():
        return None
    blocks = torch.empty(total_q, heads, topk, dtype=torch.int32, device="cpu")
    threads = c_library.threads_for(16 * scores.numel())  # Some sixteen operations a score.
    size = max(1, -(-total_q // (threads * CALLS_A_THREAD)))
    calls = [
        _Call(
            scores=scores.data_ptr(),
            score_head=scores.stride(0),
            score_token=scores.stride(1),
            visible=visible_blocks.data_ptr(),
            blocks=blocks.data_ptr(),
            first=first,
            stop=min(first + size, total_q),
            heads=heads,
            num_blocks=num_blocks,
            topk=topk,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
        )
        for first in range(0, total_q, size)
    ]
    c_library.run(functions, "choose", calls, threads)
    return blocks
