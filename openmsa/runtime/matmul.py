# SPDX-License-Identifier: MIT
"""The fastest float32 matrix product that PyTorch offers on this CPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def has_onednn_linear() -> bool:
    """Whether this build exposes oneDNN's inner product: on AVX-512 AMD cores about twice as fast as MKL's sgemm."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._linear_pointwise(torch.ones(2, 2), torch.ones(2, 2), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return True


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """``a [m, d] @ b [n, d].T -> [m, n]`` on CPU, float32 or float64.

    oneDNN compiles and keeps a kernel for each shape, so callers with many row counts round them up.
    From 12 rows on in both, a row of the result does not depend on how many rows stand beside it (checked over head dims 64 to
    256): what callers rely on to make results independent of chunk sizes.
    """
    if a.dtype == torch.float32 and a.numel() and b.numel() and has_onednn_linear():
        if not (b.is_contiguous() or b.t().is_contiguous()):
            b = b.contiguous()  # on rows with gaps oneDNN falls to a loop that is hundreds of times slower
        return torch.ops.mkldnn._linear_pointwise(a.contiguous(), b, None, "none", [], "")
    return torch.mm(a, b.t())
