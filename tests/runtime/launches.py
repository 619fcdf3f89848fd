# SPDX-License-Identifier: MIT
"""Random arguments are launched through `launch_kernel` and through Triton, over a driver and a compiler that do nothing:
``python -m tests.runtime.launches SEED``. Triton must not be in interpreter mode.

Each variant that Triton would compile gets a number of its own, and the launcher in C writes down what it is called with.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.runtime import launch, variants
from openmsa.runtime.launch import launch_kernel

CALLS: list[tuple[Any, ...]] = []


class Launcher:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = False

    def __init__(self, signature: dict[str, Any], layouts: list[Any], options: Any) -> None:
        self.launch_pdl = options.launch_pdl
        self.launch = wrap_handle_tensordesc(lambda *call: CALLS.append(call), signature, layouts)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, *rest)


def compiled(self: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attrs: Any, warmup: bool) -> Any:
    """Stands in the place of Triton's compiler."""
    kernel = CompiledKernel.__new__(CompiledKernel)
    layout = {"swizzle": 0, "elem_size": 2, "elem_type": 0, "block_size": [1], "fp4_padded": False}
    layouts = [layout for kind in signature.values() if str(kind).startswith("tensordesc")]
    kernel.metadata = SimpleNamespace(tensordesc_meta=layouts)
    kernel._run, kernel.packed_metadata = Launcher(signature, layouts, options), (options.num_warps, 1, 0)
    kernel.name, kernel.src, kernel.module = self.__name__, SimpleNamespace(signature=signature), 1
    cache = self.device_caches[device][0]
    kernel.function = 1000 * (1 + KERNELS.index(self)) + len(cache)
    cache[key] = kernel
    return kernel


class Driver:
    """This is the driver of an H100 that is not there."""

    utils = SimpleNamespace(fill_tma_descriptor=lambda *what: ("map", *(tuple(x) if isinstance(x, list) else x for x in what)))
    current = 0

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 77 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit(do_not_specialize=["n", "m"])
def plain(p, q, r, a, b, n, m, scale, flag, A: tl.constexpr, B: tl.constexpr):
    pass


@triton.jit
def described(p, d, a, e, b, A: tl.constexpr):
    pass


class Pages(NamedTuple):
    """This is an argument inside of an argument."""

    table: Any
    stride: int


class Rows(NamedTuple):
    """This argument has several fields."""

    pool: Any
    scales: Any
    pages: Pages | None
    stride: int
    last: bool | None
    scale: float


class Keys(NamedTuple):
    """These fields have the types of those of `Pages`."""

    pool: Any
    stride: int


class Cut(NamedTuple):
    """This constexpr has several fields."""

    tile: int
    whole: bool


@triton.jit(do_not_specialize=["n"])
def bundled(rows, p, d, keys, n, A: tl.constexpr):
    pass


@gluon.jit
def bundled_gluon(rows, keys, a, A: gl.constexpr, B: gl.constexpr):
    pass


KERNELS = [plain, described, bundled, bundled_gluon]
MEMORY = torch.zeros(4096, dtype=torch.uint8)
INTEGERS = (0, 1, 2, 15, 16, 17, 48, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**63 - 16, 2**63, 2**64 - 16, 2**64 - 1)
INTEGERS += (-1, -16, -17, -(2**31), -(2**31) - 1, -(2**31) - 16, -(2**63))
DTYPES = (torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.int64)


def tensor() -> torch.Tensor | None:
    """Makes a tensor of some dtype, at 16 bytes, beside them, or empty; or None."""
    dtype = random.choice(DTYPES)
    start = 16 * random.randrange(8) + random.choice((0, 0, dtype.itemsize, 8))
    stop = start if random.random() < 0.1 else start + 64
    return None if random.random() < 0.1 else MEMORY[start:stop].view(dtype)


def descriptor() -> TensorDescriptor:
    base = torch.zeros(64 * 64, dtype=torch.bfloat16)[64 * random.randrange(2) :]
    rows = random.choice((1, 16, 32))
    return TensorDescriptor(base, [rows, 64], [64, 1], [random.choice((8, 16)), 64], random.choice(("zero", "nan")))


def integer() -> int:
    return random.choice(INTEGERS)


def scale() -> float:
    return random.choice((0.5, -1.0, 2.0))


def flag() -> bool | None:
    return random.choice((True, False, None))


def pages() -> Pages:
    return Pages(tensor(), integer())


def rows() -> Rows:
    return Rows(tensor(), tensor(), random.choice((None, pages())), integer(), flag(), scale())


def keys() -> Pages | Keys | Rows:
    return random.choice((pages, rows, lambda: Keys(*pages())))()


MAKERS = {
    plain: (tensor, tensor, tensor, integer, integer, integer, integer, scale, flag),
    described: (tensor, descriptor, integer, descriptor, integer),
    bundled: (rows, tensor, descriptor, keys, integer),
    bundled_gluon: (rows, keys, integer),
}
OPTIONS = ({}, {"launch_pdl": True}, {"num_stages": 3}, {"num_warps": 2})


def options_of(kernel: Any) -> dict[str, Any]:
    options = {
        "A": random.choice((1, 2, None, True, tl.float16, tl.bfloat16, Cut(16, True), Cut(16, False))),
        **random.choice(OPTIONS),
    }
    return options | ({"B": random.choice((0, 16))} if kernel in (plain, bundled_gluon) else {})


def calls() -> Iterator[tuple[Any, tuple[int, ...], list[Any], dict[str, Any]]]:
    """Yields calls, each an earlier one but for an argument or two, or a field of one, or the options."""
    earlier = [(kernel, [make() for make in MAKERS[kernel]], options_of(kernel)) for kernel in KERNELS for _ in range(4)]
    while True:
        kernel, arguments, options = random.choice(earlier)
        arguments = list(arguments)
        for i in random.sample(range(len(arguments)), random.randrange(3)):
            fresh, old = MAKERS[kernel][i](), arguments[i]
            if type(fresh) is type(old) is Rows:
                name = random.choice(Rows._fields)
                fresh = old._replace(**{name: getattr(fresh, name)})
            arguments[i] = fresh
        options = options if random.random() < 0.8 else options_of(kernel)
        yield kernel, tuple(random.randint(1, 9) for _ in range(random.randint(1, 3))), arguments, options


def addresses(values: tuple[Any, ...]) -> list[Any]:
    """Returns what the launcher reads; of tuples it reads the elements."""
    return [addresses(x) if isinstance(x, tuple) else x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values]


def flat(values: Any) -> Iterator[Any]:
    for x in values:
        yield from flat(x) if isinstance(x, tuple) else (x,)


def compare(trials: int) -> int:
    """Counts launches that did not go through Triton."""
    direct = 0
    for kernel, grid, arguments, options in itertools.islice(calls(), trials):
        Driver.current = random.randrange(2)
        kernel[grid](*arguments, **options)
        expected = CALLS.pop()
        known = len(launch._variants)
        launch_kernel(kernel, grid, *arguments, **options)
        remembered, found = len(launch._variants) == known, CALLS.pop()
        direct += remembered
        assert not remembered or not any(isinstance(x, torch.Tensor) for x in flat(found)), found
        first = len(arguments) + sum(isinstance(x, TensorDescriptor) for x in arguments) * 4
        assert not CALLS
        # Both have grid, stream, function, how to launch, no scratch and warps. Then come hooks, of which Triton passes empty
        # chains.
        assert found[:10] == expected[:10], (found[:10], expected[:10], arguments, options)
        assert addresses(found[13 : 13 + first]) == addresses(expected[13 : 13 + first]), (found, expected)
        assert len(found) == len(expected)
    return direct


def main() -> None:
    random.seed(int(sys.argv[1]))
    JITFunction._do_compile = compiled
    driver.set_active(Driver())
    assert launch.why_not_remembered(plain) is None
    direct = compare(12000)
    compiled_for = {d: sum(len(kernel.device_caches[d][0]) for kernel in KERNELS) for d in (0, 1)}
    print(f"direct {direct} of 12000, variants {compiled_for}")
    assert direct > 2000
    the_device_of_tensors_is_current()
    launch.MOST_VARIANTS = variants.MOST_DESCRIPTORS = 3
    compare(500)
    assert len(launch._variants) <= 3
    triton.knobs.runtime.launch_enter_hook.add(heard := [].append)
    launch._variants.clear()
    kernel, grid, arguments, options = next(calls())
    launch_kernel(kernel, grid, *arguments, **options)
    assert not launch._variants, "a launch that is listened to goes through Triton"
    triton.knobs.runtime.launch_enter_hook.remove(heard)
    refuses((1,) * 10, "plain must be given every run-time argument by position and every constexpr by name")
    refuses((1,) * 8, "plain must be given every run-time argument by position and every constexpr by name")
    refuses(
        ("text",) * 9, "argument 0 must be a tensor, a TMA descriptor, an int, a float, a bool, None or a NamedTuple, got .*str"
    )
    refuses(
        (Pages("text", 1),) * 9,
        "element 0 of a tuple must be a tensor, an int, a float, a bool, None or a NamedTuple, got .*str",
    )
    refuses((Pages(descriptor(), 1),) * 9, "element 0 of a tuple must be a tensor, an int, .*, got .*TensorDescriptor")


class Elsewhere(torch.Tensor):
    """This is a tensor that says that it lies on GPU 1."""

    def get_device(self) -> int:
        return 1


@contextlib.contextmanager
def device(number: int) -> Iterator[None]:
    """Stands in the place of `torch.cuda.device`."""
    before, Driver.current = Driver.current, number
    yield
    Driver.current = before


def the_device_of_tensors_is_current() -> None:
    """Kernels are launched on the stream of the GPU where their tensors lie, whichever is current."""
    torch.cuda.device = device
    there = torch.zeros(16, dtype=torch.float16).as_subclass(Elsewhere)
    described_there = TensorDescriptor(
        torch.zeros(64, 64, dtype=torch.float16).as_subclass(Elsewhere), [16, 64], [64, 1], [8, 64]
    )
    given = [
        (plain, (None, there, None, 1, 1, 1, 1, 1.0, True), {"A": 1, "B": 0}),
        (described, (None, described_there, 1, descriptor(), 1), {"A": 1}),
        (bundled_gluon, (Rows(None, None, Pages(there, 1), 1, True, 1.0), Keys(None, 1), 1), {"A": 1, "B": 0}),
    ]
    for hook in (None, [].append):
        if hook is not None:
            triton.knobs.runtime.launch_enter_hook.add(hook)
        for Driver.current in (0, 1):
            for kernel, arguments, options in given * 2:
                current = Driver.current
                launch_kernel(kernel, (1,), *arguments, **options)
                assert CALLS.pop()[3] == 78
                assert Driver.current == current
    triton.knobs.runtime.launch_enter_hook.remove(hook)


def refuses(arguments: tuple[Any, ...], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        launch_kernel(plain, (1,), *arguments, A=1, B=2)


if __name__ == "__main__":
    main()
