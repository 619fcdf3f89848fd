# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""One launch says where packed sequences start; PyTorch takes five."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.runtime.launch import launch_kernel

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
