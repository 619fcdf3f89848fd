# SPDX-License-Identifier: MIT
"""Launches are recorded without a GPU: ``python -m tests.runtime.recorded``. Triton must not be in interpreter mode."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import openmsa
from openmsa import DecodePlan, PagedIndexKeys, PagedKV, explain, select_blocks, sparse_attention
from openmsa.kv_cache import E4M3
from openmsa.runtime import devices
from openmsa.runtime.launch import launch_kernel
from openmsa.runtime.recording import GPU, Launch, recording

ARCHS = (80, 90, 100, 120)


class Rows(NamedTuple):
    """This argument has several fields."""

    pool: Any
    scale: Any
    stride: int


class Cut(NamedTuple):
    """This constexpr has several fields."""

    tile: int
    whole: bool


@triton.jit(do_not_specialize=["n"])
def copy(rows, out, d, n, m, scale, flag, CUT: tl.constexpr, B: tl.constexpr):
    o = tl.arange(0, CUT.tile)
    x = tl.load(rows.pool + o * rows.stride)
    if rows.scale is not None:
        x *= tl.load(rows.scale)
    tl.store(out + o + n, x * scale)


def launches_are_those_of_triton(arch: int) -> None:
    """Types, values and attributes agree, parameter by parameter."""
    backend, cut = CUDABackend(GPUTarget("cuda", arch, 32)), Cut(64, True)
    with recording(arch) as launches:
        x = torch.empty(4096, dtype=torch.bfloat16, device="cuda")
        described = TensorDescriptor(x, [64, 64], [64, 1], [16, 64])
        for pool, scale, stride, n, m in ((x, None, 1, 1, 1), (x[1:], x, 48, 16, 2**40), (x.float(), None, 3, 3, 16)):
            arguments = (Rows(pool, scale, stride), x, described, n, m, 0.5, True)
            launch_kernel(copy, (3, 2), *arguments, CUT=cut, B=7, num_warps=2, num_stages=5, maxnreg=64)
            launch = launches[-1]
            told = [native_specialize_impl(backend, a, False, i != 3, True) for i, a in enumerate(arguments)]
            assert list(launch.signature.values()) == [kind for kind, _ in told] + ["constexpr"] * 2
            assert (launch.kernel, launch.arch, launch.grid) == (copy, arch, (3, 2))
            expected = {(7,): cut, (8,): 7} | ({(0, 1): None} if scale is None else {}) | ({(0, 2): 1} if stride == 1 else {})
            assert launch.constexprs == expected | ({(4,): 1} if m == 1 else {}), launch.constexprs
            divisible = [["tt.divisibility", 16]]
            assert (launch.attributes[0, 0] == divisible) == (pool.data_ptr() % 16 == 0)
            assert launch.attributes[1,] == divisible
            assert (launch.attributes.get((0, 2)) == divisible) == (stride == 48)
            assert (launch.attributes.get((4,)) == divisible) == (m % 16 == 0)
            assert (launch.options.num_warps, launch.options.num_stages, launch.options.maxnreg) == (2, 5, 64)
        launch_kernel(copy, (1,), *arguments, CUT=cut, B=7, num_warps=2, num_stages=5, maxnreg=64)
        assert launches[-1].variant == launches[-2].variant != launches[0].variant


def calls_return_what_they_return_on_a_gpu(arch: int) -> None:
    """Shapes, dtypes and the device are right; memory is the CPU's; the kernels are the architecture's."""
    with recording(arch) as launches:
        assert devices.facts(GPU) == devices.COMPILE_TARGETS[arch]
        q = torch.empty(300, 32, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (E4M3(torch.empty(4000, 2, 128, dtype=torch.uint8, device=GPU)) for _ in range(2))
        index_q, index_k = q[:, :2], torch.empty(4000, 1, 128, dtype=torch.bfloat16, device="cuda")
        blocks = select_blocks(index_q, index_k, 4)
        out, lse = sparse_attention(q, k, v, blocks, return_lse=True)
        for x, shape in ((blocks, (300, 2, 4)), (out, q.shape), (lse, (300, 32))):
            assert (x.device, x.is_cuda, tuple(x.shape)) == (GPU, True, tuple(shape))
            assert x.untyped_storage().device.type == "cpu"
        assert explain(select_blocks, index_q, index_k, 4).chosen == "triton"
        assert q.cpu().device == torch.zeros(1).device == torch.device("cpu")
        assert q.cpu().to("cuda").device == q.to(torch.float32).device == torch.zeros_like(q).device == GPU
        table, lens = torch.zeros(2, 8, dtype=torch.int32, device=GPU), torch.full((2,), 900, device=GPU).int()
        pool = torch.empty(8, 2, 128, 128, dtype=torch.bfloat16, device=GPU)
        plan = DecodePlan(max_batch=2, num_q_heads=32, num_kv_heads=2, head_dim=128, page_size=128, max_pages=8)
        plan.run(q[:2], PagedKV(pool, pool, table, lens), index_q[:2], PagedIndexKeys(pool[:, :1], table, lens))
    names = [launch.name for launch in launches]
    assert {"score_kernel", "tile_lists"} <= set(names), names
    assert ("sm90_union_kernel" in names) == (arch == 90), names
    assert not torch.cuda.is_available() or torch.cuda.memory_allocated() == 0


def kernels_call_nothing_that_programs_replace() -> None:
    """SGLang puts a plain function in place of Triton's `next_power_of_2`, which a kernel that names it then cannot call. A
    kernel's key is made of all that it names; none may have been made before."""
    kernels = []
    with mock.patch.object(triton, "next_power_of_2", lambda n: n), mock.patch.object(triton, "cdiv", lambda n, m: n):
        for found in pkgutil.walk_packages(openmsa.__path__, "openmsa."):
            if found.name.rpartition(".")[2].startswith(("triton_", "gluon_")) or found.name.startswith("openmsa.primitives."):
                module = importlib.import_module(found.name)
                kernels += [x for x in vars(module).values() if isinstance(x, JITFunction)]
        assert len(kernels) > 200, len(kernels)
        for kernel in kernels:
            assert kernel.cache_key, kernel


def nothing_is_left_behind() -> None:
    """Everything is restored, also where a call raises."""
    before = JITFunction.run, JITFunction._do_compile, driver._active, devices._read, torch.cuda.current_device
    with pytest.raises(ZeroDivisionError), recording(90):
        raise ZeroDivisionError
    assert before == (JITFunction.run, JITFunction._do_compile, driver._active, devices._read, torch.cuda.current_device)
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.empty(1, device="cuda")
    with pytest.raises(ValueError, match=r"arch must be one of \[80, 90, 100, 120\], got 70"), recording(70):
        pass


def a_recorded_launch_compiles() -> None:
    """A recorded launch compiles without a driver."""
    with recording(80) as launches:
        x = torch.empty(64, dtype=torch.float32, device="cuda")
        launch_kernel(copy, (1,), Rows(x, None, 1), x, None, 0, 1, 0.5, False, CUT=Cut(16, False), B=1, num_warps=1)
    launch: Launch = launches[0]
    assert b"copy" in launch.compile().asm["cubin"]


def main() -> None:
    kernels_call_nothing_that_programs_replace()
    for arch in ARCHS:
        launches_are_those_of_triton(arch)
        calls_return_what_they_return_on_a_gpu(arch)
    nothing_is_left_behind()
    a_recorded_launch_compiles()


if __name__ == "__main__":
    main()
