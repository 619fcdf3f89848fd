# SPDX-License-Identifier: MIT
"""`starts_of` says where packed sequences start."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.runtime.dispatch import has_triton


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
