# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""One launch says where packed sequences start, or which of their queries a chunk has; PyTorch takes five to seven."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.runtime.launch import ceil_div, launch_kernel

AT_A_TIME = 256


@triton.jit
def starts_kernel(lengths, starts, batch, stride, most, AT_A_TIME: tl.constexpr):
    """Adds lengths up, so many at a time, in one program."""
    here, total = tl.arange(0, AT_A_TIME), tl.zeros([], tl.int32)
    tl.store(starts, total)
    for first in range(0, batch, AT_A_TIME):
        some = first + here < batch
        length = tl.load(lengths + (first + here) * stride, some, other=0)
        length = tl.minimum(tl.maximum(length, 0), most)
        tl.store(starts + 1 + first + here, total + tl.cumsum(length, 0), some)
        total += tl.sum(length, 0)


def starts_of(lengths: Tensor, most: int) -> Tensor:
    """Returns int32 ``[batch + 1]``, where sequences start that follow each other and end.

    lengths:  int32 [batch] on a GPU. One below 0 counts as 0, one above `most` as `most`.
    """
    starts = torch.empty(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    sizes = lengths.shape[0], lengths.stride(0), most
    launch_kernel(starts_kernel, (1,), lengths, starts, *sizes, AT_A_TIME=AT_A_TIME, num_warps=1)
    return starts


@triton.jit(do_not_specialize=["batch", "start", "stop"])
def chunk_kernel(cu_q, cu_k, q_offset, chunk_starts, chunk_offsets, batch, start, stop, AT_A_TIME: tl.constexpr):
    """Cuts a chunk out of packed queries, so many sequences a program."""
    i = tl.program_id(0) * AT_A_TIME + tl.arange(0, AT_A_TIME)
    m_start, m_sequence = i <= batch, i < batch
    begin, end = tl.load(cu_q + i, m_start, other=0), tl.load(cu_q + i + 1, m_sequence, other=0)
    tl.store(chunk_starts + i, tl.minimum(tl.maximum(begin, start), stop) - start, m_start)
    if q_offset is None:
        first = tl.load(cu_k + i + 1, m_sequence, other=0) - tl.load(cu_k + i, m_sequence, other=0) - (end - begin)
    else:
        first = tl.load(q_offset + i, m_sequence, other=0)
    tl.store(chunk_offsets + i, first + tl.minimum(tl.maximum(start - begin, 0), end - begin), m_sequence)


def chunk_of(cu_q: Tensor, cu_k: Tensor, q_offset: Tensor | None, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Does what `openmsa.runtime.lengths.chunk_of` says, on a GPU."""
    batch = cu_q.shape[0] - 1
    starts, offsets = cu_q.new_empty(batch + 1), cu_q.new_empty(batch)
    arguments = cu_q, cu_k, q_offset, starts, offsets, batch, start, stop
    launch_kernel(chunk_kernel, (ceil_div(batch + 1, AT_A_TIME),), *arguments, AT_A_TIME=AT_A_TIME, num_warps=1)
    return starts, offsets
