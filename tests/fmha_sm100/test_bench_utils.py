# SPDX-License-Identifier: MIT
"""What benchmarks of the public package import is here: a clock and a count of operations."""

import pytest
import torch

from fmha_sm100.bench_utils import attention_tflops, bench_gpu_time


@pytest.mark.parametrize("cold", [True, False])
def test_times_of_single_calls(cold):
    calls = []
    times = bench_gpu_time(lambda x, y: calls.append((x, y)), 3, 7, input_args=(1,), input_kwargs={"y": 2}, cold_l2_cache=cold)
    assert len(times) == 7
    assert min(times) >= 0
    assert set(calls) == {(1, 2)}
    assert len(calls) == 1 + 5 + 3 + 7
    x = torch.ones(64, device="cuda" if torch.cuda.is_available() else "cpu")
    assert bench_gpu_time(lambda: x.sum(), dry_run_time_ms=0.5, repeat_time_ms=1.0)


def test_operations():
    """Counted pair by pair; queries are the last positions of their keys."""
    q_lens, k_lens = torch.tensor([3, 5, 1, 0]), torch.tensor([7, 2, 1, 4], dtype=torch.int32)
    for causal in (True, False):
        pairs = sum(
            1
            for n, m in zip(q_lens.tolist(), k_lens.tolist(), strict=True)
            for i in range(n)
            for j in range(m)
            if not causal or j <= m - n + i
        )
        found = attention_tflops(q_lens, k_lens, 64, 32, 4, causal, 2.0)
        assert found == pytest.approx(pairs * 4 * 2 * (64 + 32) / 2e-3 / 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"repeat_iters": 0}, ValueError, "repeat_iters must be at least 1, got 0"),
        ({"dry_run_iters": 1.5}, TypeError, "dry_run_iters must be an int"),
        ({"repeat_time_ms": 0}, ValueError, "repeat_time_ms must be more than 0, got 0"),
        ({"cold_l2_cache": "no"}, TypeError, "cold_l2_cache must be True or False"),
    ],
)
def test_misuse(options, error, match):
    with pytest.raises(error, match=match):
        bench_gpu_time(lambda: None, **options)
    with pytest.raises(ValueError, match=r"kv_lens.shape\[0\] must be 1"):
        attention_tflops(torch.tensor([3]), torch.tensor([3, 4]), 64, 64, 1, True, 1.0)
