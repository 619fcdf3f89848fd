# SPDX-License-Identifier: MIT
"""The fuzz runs in the suites: seconds on CPU tensors, a few small cases in Triton's interpreter, minutes on CUDA tensors.

Every run draws other cases. A failure prints its seed, the smallest case that hypothesis found and the command that runs it
again. The environment variables FUZZ_SEED, of an earlier run, and FUZZ_SECONDS, how long each test draws, change both.
"""

import importlib.util
import os
import random
import time

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.cases import Case, draw_case
from tests.fuzz.checks import check_case, interpreter

SEED = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(10**6)))
CUDA = torch.cuda.is_available()
INTERPRETED = {"products": 500, "longest": 60, "dims": (16, 32, 48)}


def fuzz(number, device, seconds, interpreted=False, **sizes):
    """Checks cases until the time is over, at least one; after a failure, as many as hypothesis needs for a smaller one."""
    seconds, checked, failed = float(os.environ.get("FUZZ_SECONDS", seconds)), [], []
    end = time.perf_counter() + seconds

    @seed(SEED + number)
    @settings(
        max_examples=max(int(seconds * 10), 1), phases=(Phase.generate, Phase.shrink), deadline=None, database=None,
        print_blob=True, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.randoms(use_true_random=False))
    def draw(source):
        case = draw_case(source, device, **sizes)
        if checked and not failed and time.perf_counter() > end:
            return
        checked.append(case)
        try:
            check_case(case, device, interpreted)
        except Exception as error:
            failed.append(case)
            again = f"python -m tests.fuzz --device {device}{' --interpret' * interpreted} --case {str(case)!r}"
            raise AssertionError(f"{error}\n  {again}\n  FUZZ_SEED={SEED}") from error

    print(f"FUZZ_SEED={SEED}")
    draw()


def test_on_the_cpu():
    fuzz(0, "cpu", 18, products=20_000, longest=600)


@pytest.mark.skipif(CUDA or importlib.util.find_spec("triton") is None, reason="needs Triton's interpreter")
def test_in_the_interpreter():
    with interpreter():
        fuzz(1, "cpu", 10, interpreted=True, **INTERPRETED)


@pytest.mark.skipif(CUDA or importlib.util.find_spec("triton") is None, reason="needs Triton's interpreter")
def test_every_stage_is_reached_in_the_interpreter():
    with interpreter():
        compared = check_case(Case(dtype="float16", q_lens=(3, 1), k_lens=(40, 17)), "cpu", interpreted=True)
    assert {function for function, _ in compared} == {
        "block_scores", "select_blocks", "select_blocks_from_scores", "dense_attention", "sparse_attention"
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("number", range(2, 8))
def test_on_a_gpu(number):
    fuzz(number, "cuda", 30)
