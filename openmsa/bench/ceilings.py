# SPDX-License-Identifier: MIT
"""The ceilings of a run are the fastest matrix product, copy and read that PyTorch offers on the device."""

from __future__ import annotations

from functools import partial

import torch

from openmsa.bench.cost import Ceilings
from openmsa.runtime.matmul import matmul_nt
from openmsa.testing.timing import Clock, Run, captured

GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
BUFFER_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}  # well beyond any cache
ROUNDS = 7


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, clock: Clock, gemm_size: int | None = None, buffer_bytes: int | None = None
) -> Ceilings:
    """Takes the best of several measurements each; gemm_size and buffer_bytes None: large enough for the full rate."""
    n = gemm_size or GEMM_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    products: list[Run] = [partial(torch.mm, a, b.t())]
    if device.type == "cpu":
        products.append(partial(matmul_nt, a, b))
    gemm = 2 * n**3 / min(_best(product, clock) for product in products)
    gemm_fp8 = None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        gemm_fp8 = 2 * n**3 / _best(_fp8_product(a, b), clock)
    del a, b, products

    count = (buffer_bytes or BUFFER_BYTES[device.type]) // 4
    source = torch.zeros(count, device=device).fill_(1.0)
    target = torch.zeros_like(source)
    copy = 2 * 4 * count / _best(lambda: target.copy_(source), clock)
    read = 4 * count / _best(lambda: source.sum(), clock)
    one = torch.ones(1, device=device)
    smallest: Run = partial(one.mul_, 1.0)
    launch = _best(captured(smallest) if device.type == "cuda" else smallest, clock)
    return Ceilings(gemm, copy, read, launch, gemm_fp8)


def best_of(a: Ceilings, b: Ceilings) -> Ceilings:
    """Returns, of two measurements, the higher rates and the shorter launch."""
    fp8 = max(a.gemm_fp8 or 0, b.gemm_fp8 or 0) or None
    return Ceilings(max(a.gemm, b.gemm), max(a.copy, b.copy), max(a.read, b.read), min(a.launch, b.launch), fp8)


def _fp8_product(a: torch.Tensor, b: torch.Tensor) -> Run:
    one = torch.ones((), device=a.device)
    x, y = (m.to(torch.float8_e4m3fn) for m in (a, b))
    return partial(torch._scaled_mm, x, y.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _best(run: Run, clock: Clock) -> float:
    run()
    return min(clock(run) for _ in range(ROUNDS))
