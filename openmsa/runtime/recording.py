# SPDX-License-Identifier: MIT
"""`recording` finds what host code would launch on an architecture, without a GPU.

Within `recording`, the machine seems to have one GPU of that architecture. Its tensors are CPU tensors that say that they lie
on "cuda", so that host code runs as it stands and may read them; memory that nothing writes costs nothing. Every launch goes
through Triton's own binder, which says what it would compile for these arguments, and ends there: nothing is compiled, nothing
runs, and outputs hold what their memory held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from openmsa.runtime import devices, dispatch

GPU = torch.device("cuda", 0)


@dataclass(frozen=True)
class Launch:
    """This is a launch as Triton sees it.

    signature:   Triton's type of each parameter by name, a NamedTuple of types for a NamedTuple.
    constexprs:  values of what is compiled in, by path: the place of a parameter, and of a field within.
    attributes:  what is known of the others by path, such as divisibility by 16.
    options:     Triton's options, such as num_warps.
    variant:     Triton's name of all this: launches of one kernel and architecture that share it run the same machine code.
    """

    kernel: Any
    arch: int
    grid: tuple[int, ...]
    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any
    variant: str

    @property
    def name(self) -> str:
        """Returns the name of the kernel."""
        return str(self.kernel.__name__)

    def compile(self) -> CompiledKernel:
        """Compiles the kernel. This needs no driver."""
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = kind(self.kernel, self.signature, self.constexprs, self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=self.options.__dict__)


@contextlib.contextmanager
def recording(arch: int) -> Iterator[list[Launch]]:
    """Within this context, every launch is appended to the list instead of run. arch: 80, 90, 100 or 120, with the facts of
    `COMPILE_TARGETS`.

    Raises RuntimeError where kernels run in Triton's interpreter (TRITON_INTERPRET), which has no launches to record.
    """
    if arch not in devices.COMPILE_TARGETS:
        raise ValueError(f"arch must be one of {sorted(devices.COMPILE_TARGETS)}, got {arch}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError("launches are recorded where TRITON_INTERPRET is not set, got TRITON_INTERPRET=1")
    launches: list[Launch] = []
    grids: list[Any] = []
    run = JITFunction.run

    def started(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        grids[:] = [grid]
        return run(kernel, *arguments, grid=grid, warmup=warmup, **options)

    def recorded(
        kernel: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attributes: Any, warmup: bool
    ) -> None:
        launches.append(Launch(kernel, arch, grids[0], signature, constexprs, attributes, options, key))

    capability, target = divmod(arch, 10), GPUTarget("cuda", arch, 32)
    there = SimpleNamespace(
        get_current_device=lambda: arch,  # a number that no GPU has: Triton keeps binders by it
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    replaced: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", started),
        (JITFunction, "_do_compile", recorded),
        (driver, "_active", there),
        (devices, "_read", lambda index: devices.COMPILE_TARGETS[arch]),
        (dispatch, "_capability", lambda device: capability),
        *((torch.cuda, name, value) for name, value in _CUDA.items()),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_Machine())
        yield launches


class _OnGPU(Tensor):
    """This is a CPU tensor that says that it lies on a GPU; what is computed from it says so too."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


class _Machine(TorchFunctionMode):
    """Tensors that are made on, or moved to, a device "cuda" become `_OnGPU`; tensors moved to the CPU become plain ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.is_pinned:
            return True
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (Tensor.cuda, Tensor.cpu):
            func, args = Tensor.to, (args[0], GPU if func is Tensor.cuda else "cpu")
        named = [*args[:2], kwargs.get("device")] if func is Tensor.to else [kwargs.get("device")]
        found = [device for x in named if (device := _device(x)) is not None]
        if not found:
            return func(*args, **kwargs)
        args = tuple("cpu" if _device(x) is not None else x for x in args)
        kwargs = {name: "cpu" if name == "device" else x for name, x in kwargs.items()}
        result = func(*args, **kwargs)
        kind = _OnGPU if found[0].type == "cuda" else Tensor
        if type(result) is kind or not isinstance(result, Tensor):
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return (result.clone() if func is Tensor.to else result).as_subclass(kind)


def _device(value: Any) -> torch.device | None:
    """Returns the device that an argument names."""
    if isinstance(value, str):
        return torch.device(value)
    return value if isinstance(value, torch.device) else None


class _Ordered:
    """This stands for a stream or an event; its methods do nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.device, self.cuda_stream = GPU, 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


_CUDA: dict[str, Any] = {
    "Event": _Ordered,
    "Stream": _Ordered,
    "current_device": lambda: 0,
    "current_stream": _Ordered,
    "device_count": lambda: 1,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: True,
    "stream": contextlib.nullcontext,
    "synchronize": lambda device=None: None,
}
