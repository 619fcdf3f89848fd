# SPDX-License-Identifier: MIT
"""`launch_kernel` launches kernels in little time of the host; the roundings here are the host's, since Triton's are made for
kernels and are slow."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from openmsa.runtime import variants
from openmsa.runtime.devices import facts
from openmsa.runtime.kinds import Launched, Zeroed, listening
from openmsa.runtime.variants import Variant


def ceil_div(value: int, by: int) -> int:
    """Returns value / by, rounded up."""
    return -(-value // by)


def next_power_of_two(value: int) -> int:
    """Returns the smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


MOST_VARIANTS = 4096
"""So many variants are remembered at a time; past that all are forgotten, and made again."""

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

    arguments:  the parameters of the kernel that are no constexprs, all of them, in order. Tensors lie on one device, which
                need not be current. A NamedTuple is one parameter, whose fields the kernel reads by name: tensors, numbers,
                bools, None or NamedTuples of these. Triton takes TMA descriptors as parameters of their own alone, and
                specialises every integer of a NamedTuple.
    constants:  constexprs and options, such as num_warps. A constexpr may be a NamedTuple of numbers.

    Where launches are observed (hooks of a profiler, debug mode), they go through Triton.
    """
    types, variant = tuple(map(type, arguments)), None
    chosen_by, values, lies_on = variants.reader(types)(*arguments)
    if lies_on >= 0 and lies_on != driver.active.get_current_device():
        with torch.cuda.device(lies_on):
            launch_kernel(kernel, grid, *arguments, **constants)
        return
    if not isinstance(kernel, JITFunction) or _observed(kernel):
        _launch_by_triton(kernel, grid, arguments, constants)
    else:
        device = lies_on if lies_on >= 0 else driver.active.get_current_device()
        key = (id(kernel), device, types, chosen_by, *constants, *constants.values())
        variant = _variants.get(key)
        if variant is None:
            variant = _launch_first(key, kernel, grid, arguments, constants)
        else:
            _launch_variant(variant, grid, driver.active.get_current_stream(device), values)
    if listening.tape is not None:
        listening.tape.append(Launched(kernel, grid, arguments, variant))


def _launch_variant(variant: Variant, grid: tuple[int, ...], stream: int, values: tuple[Any, ...]) -> None:
    for place, _ in variant.descriptors:
        values = (*values[:place], *variants.encoded(variant, place, values[place]), *values[place + 1 :])
    variant.launch(
        *(*grid, 1, 1)[:3],
        stream,
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


def _launch_by_triton(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Returns what Triton compiled. It tells nobody that it compiles: it would write the constants as JSON, which knows no
    dtypes in tuples. Engines such as vLLM set hooks that count compilations."""
    runtime = knobs.runtime
    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
    try:
        return kernel[grid](*arguments, **constants)
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = hooks


def _observed(kernel: JITFunction[Any]) -> bool:
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    hooks = kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    return bool(hooks or runtime.debug)


def _launch_first(
    key: Any, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> Variant | None:
    """Launches through Triton and, where it can, remembers the variant, which it returns."""
    late, early = kernel.params[len(arguments) :], kernel.params[: len(arguments)]
    if not all(parameter.is_constexpr for parameter in late) or any(parameter.is_constexpr for parameter in early):
        raise TypeError(f"{kernel.__name__} must be given every run-time argument by position and every constexpr by name")
    compiled = _launch_by_triton(kernel, grid, arguments, constants)
    if why_not_remembered(kernel) is not None or not isinstance(compiled, CompiledKernel):
        return None
    variant = variants.variant_of(kernel, compiled, arguments, len(late))
    if variant is not None:
        if len(_variants) >= MOST_VARIANTS:
            _variants.clear()
        _variants[key] = variant
    return variant
