# SPDX-License-Identifier: MIT
"""Times calls on a GPU and counts the operations of attention, as benchmarks written for the public package do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openmsa.runtime import checks
from openmsa.testing.timing import Clock, ColdCudaClock, wall_seconds

ESTIMATES = 5
"""So many calls say how long one takes."""


def bench_gpu_time(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    input_args: Sequence[Any] = (),
    input_kwargs: dict[str, Any] | None = None,
    cold_l2_cache: bool = True,
) -> list[float]:
    """Returns the milliseconds of single calls ``fn(*input_args, **input_kwargs)``, by CUDA events around each one.

    dry_run_iters, repeat_iters:  calls in front of the measured ones, and measured ones, 1 or more each; None: as many as take
                   about dry_run_time_ms and repeat_time_ms, judged by a few calls.
    cold_l2_cache: whether the L2 cache is filled with other lines before each call.

    Without a GPU the clock is that of the host. Wrong arguments raise ValueError or TypeError.
    """
    for name, count in (("dry_run_iters", dry_run_iters), ("repeat_iters", repeat_iters)):
        if count is not None:
            checks.integer(name, count, 1)
    for name, time in (("dry_run_time_ms", dry_run_time_ms), ("repeat_time_ms", repeat_time_ms)):
        if checks.scale(name, time) <= 0:
            raise ValueError(f"{name} must be more than 0, got {time}")
    checks.flag("cold_l2_cache", cold_l2_cache)

    def run() -> Any:
        return fn(*input_args, **(input_kwargs or {}))

    run()
    clock: Clock = (ColdCudaClock() if cold_l2_cache else _warm_seconds) if torch.cuda.is_available() else wall_seconds
    estimate = max(sum(clock(run) for _ in range(ESTIMATES)) / ESTIMATES * 1e3, 1e-6)
    for _ in range(dry_run_iters or max(int(dry_run_time_ms / estimate), 1)):
        clock(run)
    return [clock(run) * 1e3 for _ in range(repeat_iters or max(int(repeat_time_ms / estimate), 1))]


def _warm_seconds(run: Callable[[], Any]) -> float:
    """Returns the seconds between two CUDA events around one call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def attention_tflops(
    qo_lens: Tensor, kv_lens: Tensor, head_dim_qk: int, head_dim_vo: int, num_qo_heads: int, causal: bool, time_ms: float
) -> float:
    """Returns tera operations a second of attention over requests ``[batch]`` of so many queries and keys in time_ms.

    A multiplication and an addition are two operations, for each head and each visible pair of a query and a key. causal: the
    queries are the last positions of their keys and see those up to their own.
    """
    for name, lens in (("qo_lens", qo_lens), ("kv_lens", kv_lens)):
        checks.tensor(name, lens, "[batch]", (torch.int32, torch.int64))
    checks.size("kv_lens", kv_lens, 0, qo_lens.numel(), "the batch of qo_lens")
    q, k = qo_lens.to("cpu", torch.float64), kv_lens.to("cpu", torch.float64)
    pairs = q * k
    if causal:  # the first max(q - k, 0) queries see nothing, and those behind them one key more each
        seen = torch.minimum(q, k)
        pairs = seen * k - seen * (seen - 1) / 2
    return float(pairs.sum()) * num_qo_heads * 2 * (head_dim_qk + head_dim_vo) / time_ms / 1e9
