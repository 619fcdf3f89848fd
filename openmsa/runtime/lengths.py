# SPDX-License-Identifier: MIT
"""`starts_of` says where packed sequences start, and `chunk_of` which of their queries a chunk has."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.runtime.dispatch import has_triton
from openmsa.runtime.kinds import computes


def starts_of(lengths: Tensor, most: int | None = None) -> Tensor:
    """Returns int32 ``[batch + 1]``, where sequences start that follow each other, and end.

    lengths:  int32 or, where `most` is None, int64 [batch].
    most:     a length below 0 counts as 0, one above this as this; None: lengths count as they are.
    """
    if most is not None and lengths.is_cuda and has_triton():
        from openmsa.runtime import triton_starts

        return triton_starts.starts_of(lengths, most)
    if most is not None:
        lengths = lengths.clamp(0, most)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def chunk_of(cu_q: Tensor, cu_k: Tensor, q_offset: Tensor | None, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Returns where each sequence's queries start among the packed ones from `start` up to `stop`, int32 ``[batch + 1]``, and
    the position of the first of them, int32 [batch].

    cu_q, cu_k, q_offset:  as in `Layout`, int32 and contiguous.
    """
    if cu_q.is_cuda and has_triton():
        from openmsa.runtime import triton_starts

        return triton_starts.chunk_of(cu_q, cu_k, q_offset, start, stop)
    computes("the lengths of a chunk")
    first = (cu_k - cu_q).diff() if q_offset is None else q_offset
    skipped = torch.minimum((start - cu_q[:-1]).clamp_(min=0), cu_q.diff())
    return cu_q.clamp(start, stop) - start, first + skipped
