# SPDX-License-Identifier: MIT
"""The one place that launches kernels of Triton and Gluon.

For every launch, ``kernel[grid](...)`` works out anew which compiled variant serves, and that takes the host several times as
long as the launch itself. Here variants are remembered, under all that Triton's choice depends on: the device, the types of the
arguments; of tensors the dtype, and whether the address is a multiple of 16; of integers whether they are 1 or multiples of 16,
and their width; of TMA descriptors what is compiled in; every constexpr and option. What is not remembered yet Triton chooses,
compiles and launches.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MOST_VARIANTS = 4096
"""Remembered at a time; past that all are forgotten, and chosen by Triton again."""


class Places(NamedTuple):
    """Where tensors, integers and TMA descriptors stand among arguments of some types."""

    tensors: tuple[int, ...]
    integers: tuple[int, ...]
    descriptors: tuple[int, ...]

    @classmethod
    def of(cls, types: tuple[type, ...]) -> Places:
        tensors = tuple(i for i, kind in enumerate(types) if issubclass(kind, Tensor))
        descriptors = tuple(i for i, kind in enumerate(types) if kind.__name__ == "TensorDescriptor")
        others = [i for i, kind in enumerate(types) if i not in (*tensors, *descriptors) and kind not in VALUELESS]
        for i in others:
            if types[i] is not int:
                raise TypeError(f"argument {i} must be a tensor, a TMA descriptor, int, float, bool or None, got {types[i]}")
        return cls(tensors, tuple(others), descriptors)


VALUELESS = (float, bool, type(None))
"""Types of which no value is compiled in, None aside."""


class Variant(NamedTuple):
    """A compiled kernel as it is launched; `kernel` is kept because its id is part of the key."""

    kernel: Any
    run: Any
    function: int
    metadata: Any
    constants: tuple[None, ...]  # the launcher counts them, but does not look at them


_places: dict[tuple[type, ...], Places] = {}
_variants: dict[Any, Variant] = {}
_dtype = attrgetter("dtype")


def why_not_direct(kernel: Any) -> str | None:
    """Why launches of `kernel` all go through Triton, a sentence; None where variants are remembered."""
    if not isinstance(kernel, JITFunction):
        return "the kernel runs in Triton's interpreter"
    if triton.__version__.split(".")[:2] != ["3", "6"]:
        return f"variants are remembered with triton 3.6, got {triton.__version__}"
    backend = driver.active.get_current_target().backend
    return None if backend == "cuda" else f"variants are remembered on CUDA, got {backend}"


def launch_kernel(kernel: Any, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)``.

    arguments:  the kernel's parameters that are no constexprs, all of them, in order. Tensors lie on the current device.
    constants:  constexprs and options, such as num_warps.

    Where a launch is observed (hooks of a profiler, debug mode), it goes through Triton.
    """
    runtime = knobs.runtime
    if not isinstance(kernel, JITFunction) or kernel.pre_run_hooks or runtime.debug or _observed(runtime):
        kernel[grid](*arguments, **constants)
        return
    types = tuple(map(type, arguments))
    places = _places.get(types)
    if places is None:
        places = _places[types] = Places.of(types)
    device = driver.active.get_current_device()
    values = list(arguments)
    tensors = [arguments[i] for i in places.tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    integers = [arguments[i] for i in places.integers]
    key = (
        id(kernel),
        device,
        types,
        *map(_dtype, tensors),
        *[address & 15 == 0 for address in addresses],
        *[n if n < 2 else (n & 15 == 0, n >> 31) for n in integers],
        *[_compiled_in(arguments[i]) for i in places.descriptors],
        *constants,
        *constants.values(),
    )
    variant = _variants.get(key)
    if variant is None:
        _first(key, kernel, grid, arguments, constants)
        return
    for i, address in zip(places.tensors, addresses, strict=True):
        values[i] = address
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    variant.run(x, y, z, stream, variant.function, variant.metadata, None, None, None, *values, *variant.constants)


def _observed(runtime: Any) -> bool:
    """Whether anyone wants to hear of launches."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _compiled_in(descriptor: Any) -> tuple[Any, ...]:
    """What a kernel that takes this TMA descriptor is compiled for."""
    layout = getattr(descriptor, "layout", None)  # of Gluon's descriptors
    return (descriptor.base.dtype, tuple(descriptor.block_shape), descriptor.padding, layout)


def _first(key: Any, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """A launch through Triton, and where that can be, its variant is remembered."""
    late, early = kernel.params[len(arguments) :], kernel.params[: len(arguments)]
    if not all(parameter.is_constexpr for parameter in late) or any(parameter.is_constexpr for parameter in early):
        raise TypeError(f"{kernel.__name__} must be given every run-time argument by position, and every constexpr by name")
    compiled = kernel[grid](*arguments, **constants)
    if why_not_direct(kernel) is not None or not isinstance(compiled, CompiledKernel):
        return
    if len(_variants) >= MOST_VARIANTS:
        _variants.clear()
    rest = (None,) * len(late)
    _variants[key] = Variant(kernel, compiled.run, compiled.function, compiled.packed_metadata, rest)
