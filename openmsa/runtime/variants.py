# SPDX-License-Identifier: MIT
"""A variant is a compiled kernel as it is launched. What chooses one among the arguments of a launch, and what takes their
places there, is found once for their types."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg

from openmsa.runtime.parameters import Parameters

MOST_DESCRIPTORS = 256
"""So many descriptors of a variant are remembered at a time; past that all are forgotten, and made again."""


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


def variant_of(kernel: Any, compiled: Any, arguments: tuple[Any, ...], num_constexprs: int) -> Variant | None:
    """Returns what Triton compiled for a launch with these arguments as it is launched again; None where Triton makes memory or
    arguments at every launch."""
    launcher = compiled.run
    places = [i for i, argument in enumerate(arguments) if type(argument).__name__ == "TensorDescriptor"]
    layouts = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(places)
    if launcher.global_scratch_size or launcher.profile_scratch_size or None in layouts:
        return None
    launch = launcher.launch
    if places:  # the launcher in C stands behind a function that makes descriptors
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    return Variant(
        kernel,
        launch,
        compiled.function,
        launcher.launch_cooperative_grid,
        launcher.launch_pdl,
        compiled.packed_metadata,
        (None,) * num_constexprs,
        tuple(zip(places, layouts, strict=True))[::-1],
        {},
        tuple(compiled.src.signature.values())[: len(arguments)],
    )


@functools.cache
def reader(types: tuple[type, ...], inside: bool = False) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...], int]]:
    """Makes a function of arguments of these types that returns what the choice of a variant depends on, what is launched with,
    addresses in the place of tensors, and the number of the GPU on which a tensor of them lies, -1 where none does. Its text is
    generated for these types, because it runs at every launch. inside: the arguments are fields of a tuple."""
    names = [f"a{i}" for i in range(len(types))]
    lines, chosen_by, values = [], [], list(names)
    devices, others = [], ["-1"]  # Texts that give the device of a tensor here, and in a tuple.
    for i, (name, kind) in enumerate(zip(names, types, strict=True)):
        if issubclass(kind, Tensor):
            values[i] = f"p{i}"
            lines.append(f"    p{i} = {name}.data_ptr()")
            devices.append(f"{name}.get_device()")
            chosen_by += [f"{name}.dtype", f"p{i} & 15 == 0"]
        elif kind is int:
            chosen_by.append(f"{name} if {name} < 2 else ({name} & 15 == 0, {name} >> 31)")
        elif fields := getattr(kind, "_fields", None):
            values[i] = f"p{i}"
            elements = [f"{name}_{j}" for j in range(len(fields))]
            lines.append(f"    {', '.join([*elements, ''])} = {name}")
            lines.append(f"    t{i} = ({', '.join([*(f'type({element})' for element in elements), ''])})")
            lines.append(f"    c{i}, p{i}, d{i} = reader(t{i}, True)({', '.join(elements)})")
            others.append(f"d{i}")
            chosen_by += [f"t{i}", f"c{i}"]
        elif kind.__name__ == "TensorDescriptor" and not inside:
            compiled_in = f"{name}.base.dtype, tuple({name}.block_shape), {name}.padding"
            chosen_by += [compiled_in, f"getattr({name}, 'layout', None)"]  # Gluon's descriptors have a layout.
            devices.append(f"{name}.base.get_device()")
        elif kind not in (float, bool, type(None)):  # whose types say all
            numbers = "an int, a float, a bool, None or a NamedTuple"
            known = f"a tensor, {numbers}" if inside else f"a tensor, a TMA descriptor, {numbers}"
            raise TypeError(f"{'element' if inside else 'argument'} {i}{' of a tuple' * inside} must be {known}, got {kind}")
    device = devices[0] if devices else f"max({', '.join([*others, '-1'])})"
    lines += [f"    return ({', '.join([*chosen_by, ''])}), ({', '.join([*values, ''])}), {device}"]
    space: dict[str, Any] = {"reader": reader}
    exec("\n".join([f"def read({', '.join(names)}):", *lines]), space)
    read: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...], int]] = space["read"]
    return read


def encoded(variant: Variant, place: int, descriptor: Any) -> list[Any]:
    """Returns a TMA descriptor as the launcher takes it: an address and sizes, and nothing of what lies there."""
    key = (place, descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides)
    found = variant.encoded.get(key)
    if found is None:
        if len(variant.encoded) >= MOST_DESCRIPTORS:
            variant.encoded.clear()
        found = variant.encoded[key] = make_tensordesc_arg(descriptor, dict(variant.descriptors)[place])
    return found
