# SPDX-License-Identifier: MIT
"""What `launch_kernel` launches is what Triton would launch."""

import pytest
import torch

triton = pytest.importorskip("triton")

from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two, why_not_remembered  # noqa: E402
from tests.runtime.uninterpreted import passes  # noqa: E402


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="variants are remembered with triton 3.6")
@pytest.mark.parametrize("seed", [0, 1])
def test_random_arguments_get_the_variant_that_triton_chooses(seed):
    """Arguments have addresses beside multiples of 16, strides of 1 and 16, numbers past 32 bits, descriptors, tuples, options,
    two devices, and kernels of Triton and of Gluon."""
    passes("tests.runtime.launches", str(seed))


class Kernel:
    """This is a kernel of the interpreter, as far as a launch sees it."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.calls.append((grid, arguments, constants))


def test_the_interpreter_launches_itself():
    kernel, x = Kernel(), torch.zeros(3)
    launch_kernel(kernel, (2, 3), x, 5, None, BLOCK=16, num_warps=4)
    assert kernel.calls == [((2, 3), (x, 5, None), {"BLOCK": 16, "num_warps": 4})]
    assert why_not_remembered(kernel) == "the kernel runs in Triton's interpreter"


def test_whole_numbers():
    for n in (*range(1, 300), 2**31 - 1, 2**31, 2**31 + 1):
        assert next_power_of_two(n) == triton.next_power_of_2(n)
        assert ceil_div(n, 7) == triton.cdiv(n, 7)


def test_hooks_of_an_engine_are_not_told_of_our_kernels(monkeypatch):
    """Triton would fail to tell them constants that are tuples of dtypes; behind the launch they are what they were."""
    told = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: told.append(what))
    hook = triton.knobs.runtime.jit_post_compile_hook

    class Fails(Kernel):
        def __getitem__(self, grid):
            assert triton.knobs.runtime.jit_post_compile_hook is None
            raise RuntimeError("it cannot be compiled")

    with pytest.raises(RuntimeError, match="cannot be compiled"):
        launch_kernel(Fails(), (1,))
    assert triton.knobs.runtime.jit_post_compile_hook is hook
    assert not told
