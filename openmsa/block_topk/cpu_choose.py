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
PIECES_A_THREAD = 4


class _Call(ctypes.Structure):
    """This is `Call` of cpu_choose.c."""

    _fields_ = tuple(
        sizes(
            *("scores", "score_head", "score_token", "visible", "blocks", "tokens", "at_a_time"),
            *("heads", "num_blocks", "topk", "init_blocks", "local_blocks"),
        )
    )


def choose(scores: Tensor, topk: int, visible_blocks: Tensor, init_blocks: int, local_blocks: int) -> Tensor | None:
    """Does what `openmsa.block_topk.select_blocks_from_scores` says; visible_blocks int32 ``[total_q]``, contiguous. Returns
    None where the kernel does not read the scores or cannot be compiled."""
    heads, total_q, _ = scores.shape
    readable = scores.dtype == torch.float32 and scores.stride(2) == 1 and visible_blocks.is_contiguous()
    if not readable or c_library.library(SOURCE).functions is None:
        return None
    blocks = torch.empty(total_q, heads, topk, dtype=torch.int32, device="cpu")
    c_library.run(task(scores, visible_blocks, init_blocks, local_blocks, blocks))
    return blocks


def task(scores: Tensor, visible_blocks: Tensor, init_blocks: int, local_blocks: int, blocks: Tensor) -> c_library.Task:
    """Returns the task that writes blocks, int32 ``[total_q, heads, topk]``, contiguous."""
    functions = c_library.library(SOURCE).functions
    assert functions is not None
    (heads, total_q, num_blocks), topk = scores.shape, blocks.shape[2]
    threads = c_library.threads_for(16 * scores.numel())  # Some sixteen operations a score.
    size = max(1, -(-total_q // (threads * PIECES_A_THREAD)))
    call = _Call(
        scores=scores.data_ptr(),
        score_head=scores.stride(0),
        score_token=scores.stride(1),
        visible=visible_blocks.data_ptr(),
        blocks=blocks.data_ptr(),
        tokens=total_q,
        at_a_time=size,
        heads=heads,
        num_blocks=num_blocks,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )
    return c_library.Task(functions, "choose", [call], -(-total_q // size), threads, (scores, visible_blocks, blocks))
