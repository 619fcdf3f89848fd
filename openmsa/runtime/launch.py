# SPDX-License-Identifier: MIT
"""`launch_kernel` launches kernels in little time of the host; the roundings here are the host's, since Triton's are made for
kernels and are slow."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from openmsa.runtime.devices import facts
from openmsa.runtime.kinds import Launched, Zeroed, listening
from openmsa.runtime.parameters import Parameters


def ceil_div(value: int, by: int) -> int:
    """Returns value / by, rounded up."""
    return -(-value // by)


def next_power_of_two(value: int) -> int:
    """Returns the smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


MOST_VARIANTS = 4096
MOST_DESCRIPTORS = 256
"""So many variants, and descriptors of each, are remembered at a time; past that all are forgotten, and made again."""


@dataclass(eq=False)
class Variant:
    """A variant is a compiled kernel as it is launched."""

    kernel: Any  # kept alive, because its id is in the key
    launch: Callable[..., None]  # Triton's launcher, in C, for kernels with these arguments
    function: int
    cooperative: bool
    pdl: bool
    metadata: tuple[int, ...]
    constexprs: tuple[None, ...]  # the launcher counts them and does not read them
    descriptors: tuple[tuple[int, Any], ...]  # place and layout of each TMA descriptor, last ones first
    encoded: dict[Any, list[Any]]  # what the launcher takes in their places
    signature: tuple[Any, ...]  # Triton's type of each argument, a tuple of types for a NamedTuple
    frame: Any = None  # how `openmsa.runtime.driver_calls` launches it, once it has

    @functools.cached_property
    def parameters(self) -> Parameters:
        """Says how the kernel takes its parameters."""
        return Parameters(self.signature, [place for place, _ in self.descriptors])


_variants: dict[Any, Variant] = {}


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns so many zeros. Memory that kernels count in is made here, so that a tape knows that it is set to 0 first."""
    if listening.tape is None:
        return torch.zeros(count, dtype=dtype, device=device)
    memory = torch.empty(count, dtype=dtype, device=device)
    listening.tape.append(Zeroed(memory))
    return memory.zero_()


def why_not_remembered(kernel: Any) -> str | None:
    """Says why Triton chooses at every launch of `kernel`, a sentence; None where variants are remembered."""
    if not isinstance(kernel, JITFunction):
        return "the kernel runs in Triton's interpreter"
    if not _is_triton_3_6():
        return f"variants are remembered with triton 3.6, got {triton.__version__}"
    backend = driver.active.get_current_target().backend
    return None if backend == "cuda" else f"variants are remembered on CUDA, got {backend}"


def runs_hopper_kernels(device: torch.device) -> bool:
    """Says whether kernels written for Hopper in Gluon run there: the interpreter knows no Gluon, and Gluon's names change
    between versions."""
    return device.type == "cuda" and facts(device).arch == 90 and _is_triton_3_6()


def _is_triton_3_6() -> bool:
    return triton.__version__.split(".")[:2] == ["3", "6"]


def launch_kernel(kernel: Any, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> None:
    """Does what ``kernel[grid](*arguments, **constants)`` does, in less time of the host.

    arguments:  the parameters of the kernel that are no constexprs, all of them, in order. Tensors lie on the current device.
                A NamedTuple is one parameter, whose fields the kernel reads by name: tensors, numbers, bools, None or
                NamedTuples of these. Triton takes TMA descriptors as parameters of their own alone, and specialises every
                integer of a NamedTuple.
    constants:  constexprs and options, such as num_warps. A constexpr may be a NamedTuple of numbers.

    Where launches are observed (hooks of a profiler, debug mode), they go through Triton.
    """
    tape = listening.tape
    if not isinstance(kernel, JITFunction) or _observed(kernel):
        with _without_compile_hooks():
            kernel[grid](*arguments, **constants)
        if tape is not None:
            tape.append(Launched(kernel, grid, arguments, None))
        return
    types = tuple(map(type, arguments))
    chosen_by, values = _reader(types)(*arguments)
    device = driver.active.get_current_device()
    key = (id(kernel), device, types, chosen_by, *constants, *constants.values())
    variant = _variants.get(key)
    if variant is None:
        _launch_first(key, kernel, grid, arguments, constants)
        if tape is not None:
            tape.append(Launched(kernel, grid, arguments, _variants.get(key)))
        return
    if tape is not None:
        tape.append(Launched(kernel, grid, arguments, variant))
    for place, _ in variant.descriptors:
        values = (*values[:place], *encoded(variant, place, values[place]), *values[place + 1 :])
    variant.launch(
        *(*grid, 1, 1)[:3],
        driver.active.get_current_stream(device),
        variant.function,
        variant.cooperative,
        variant.pdl,
        None,  # there is no scratch memory
        None,
        variant.metadata,
        None,  # there are no hooks
        None,
        None,
        *values,
        *variant.constexprs,
    )


@contextmanager
def _without_compile_hooks() -> Iterator[None]:
    """Within this context, Triton tells nobody what it compiles: it would write the constants as JSON, which knows no dtypes in
    tuples. Engines such as vLLM set hooks that count compilations."""
    runtime = knobs.runtime
    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = hooks


def _observed(kernel: JITFunction[Any]) -> bool:
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    hooks = kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    return bool(hooks or runtime.debug)


@functools.cache
def _reader(types: tuple[type, ...], inside: bool = False) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Makes a function of arguments of these types that returns what the choice of a variant depends on, and what is launched
    with: addresses in the place of tensors. Its text is generated for these types, because it runs at every launch. inside: the
    arguments are fields of a tuple."""
    names = [f"a{i}" for i in range(len(types))]
    lines, chosen_by, values = [], [], list(names)
    for i, (name, kind) in enumerate(zip(names, types, strict=True)):
        if issubclass(kind, Tensor):
            values[i] = f"p{i}"
            lines.append(f"    p{i} = {name}.data_ptr()")
            chosen_by += [f"{name}.dtype", f"p{i} & 15 == 0"]
        elif kind is int:
            chosen_by.append(f"{name} if {name} < 2 else ({name} & 15 == 0, {name} >> 31)")
        elif fields := getattr(kind, "_fields", None):
            values[i] = f"p{i}"
            elements = [f"{name}_{j}" for j in range(len(fields))]
            lines.append(f"    {', '.join([*elements, ''])} = {name}")
            lines.append(f"    t{i} = ({', '.join([*(f'type({element})' for element in elements), ''])})")
            lines.append(f"    c{i}, p{i} = reader(t{i}, True)({', '.join(elements)})")
            chosen_by += [f"t{i}", f"c{i}"]
        elif kind.__name__ == "TensorDescriptor" and not inside:
            chosen_by.append(f"compiled_in({name})")
        elif kind not in (float, bool, type(None)):  # whose types say all
            numbers = "an int, a float, a bool, None or a NamedTuple"
            known = f"a tensor, {numbers}" if inside else f"a tensor, a TMA descriptor, {numbers}"
            raise TypeError(f"{'element' if inside else 'argument'} {i}{' of a tuple' * inside} must be {known}, got {kind}")
    lines += [f"    return ({', '.join([*chosen_by, ''])}), ({', '.join([*values, ''])})"]
    space: dict[str, Any] = {"compiled_in": _compiled_in, "reader": _reader}
    exec("\n".join([f"def read({', '.join(names)}):", *lines]), space)
    read: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]] = space["read"]
    return read


def _compiled_in(descriptor: Any) -> tuple[Any, ...]:
    """Returns what a kernel that takes this TMA descriptor is compiled for."""
    layout = getattr(descriptor, "layout", None)  # Gluon's descriptors have one
    return (descriptor.base.dtype, tuple(descriptor.block_shape), descriptor.padding, layout)


def encoded(variant: Variant, place: int, descriptor: Any) -> list[Any]:
    """Returns a TMA descriptor as the launcher takes it: an address and sizes, and nothing of what lies there."""
    key = (place, descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides)
    found = variant.encoded.get(key)
    if found is None:
        if len(variant.encoded) >= MOST_DESCRIPTORS:
            variant.encoded.clear()
        found = variant.encoded[key] = make_tensordesc_arg(descriptor, dict(variant.descriptors)[place])
    return found


def _launch_first(key: Any, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launches through Triton and, where it can, remembers the variant."""
    late, early = kernel.params[len(arguments) :], kernel.params[: len(arguments)]
    if not all(parameter.is_constexpr for parameter in late) or any(parameter.is_constexpr for parameter in early):
        raise TypeError(f"{kernel.__name__} must be given every run-time argument by position and every constexpr by name")
    with _without_compile_hooks():
        compiled = kernel[grid](*arguments, **constants)
    if why_not_remembered(kernel) is not None or not isinstance(compiled, CompiledKernel):
        return
    launcher = compiled.run
    places = [i for i, argument in enumerate(arguments) if type(argument).__name__ == "TensorDescriptor"]
    layouts = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(places)
    if launcher.global_scratch_size or launcher.profile_scratch_size or None in layouts:
        return  # Triton makes memory or arguments at every launch
    launch = launcher.launch
    if places:  # the launcher in C stands behind a function that makes descriptors
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    if len(_variants) >= MOST_VARIANTS:
        _variants.clear()
    _variants[key] = Variant(
        kernel,
        launch,
        compiled.function,
        launcher.launch_cooperative_grid,
        launcher.launch_pdl,
        compiled.packed_metadata,
        (None,) * len(late),
        tuple(zip(places, layouts, strict=True))[::-1],
        {},
        tuple(compiled.src.signature.values())[: len(arguments)],
    )
