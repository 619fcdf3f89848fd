# SPDX-License-Identifier: MIT
"""`Parameters` says how a compiled kernel takes its parameters. It is made once for each compiled kernel, so that
recording a launch takes no more than reading its arguments and packing its numbers.

A parameter is the address of a tensor, a number, or a TMA descriptor, whose sizes and strides follow it as numbers. Constants
are no parameters. A word has 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_PACKED = {"fp32": "f4x", "f32": "f4x", "fp64": "d", "f64": "d"}
_PACKED |= {f"i{bits}": "q" for bits in (1, 8, 16, 32, 64)} | {f"u{bits}": "Q" for bits in (1, 8, 16, 32, 64)}
"""How `struct` packs a number of one of Triton's types into a word, of which the driver reads the low bytes."""


class Given(NamedTuple):
    """This is what a launch gives a kernel.

    tensors:  those whose addresses are parameters, in order, and then those that TMA descriptors describe.
    numbers:  all of them in order, sizes and strides of descriptors included.
    maps:     the TMA descriptors as Triton's launcher takes them.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    maps: tuple[Any, ...]


class Parameters:
    """Says how a compiled kernel takes its parameters.

    signature:  Triton's type of each argument that is no constant of the kernel, a tuple of types for a tuple.
    places:     the arguments that are TMA descriptors.

    order:      for each parameter, its place among all numbers, then all tensors, then all TMA descriptors.
    formats:    how `struct` packs the numbers, a word each.
    map_places, map_numbers:  of each TMA descriptor, its place among the arguments, and that of its first size among the
                numbers.

    Raises TypeError where a number is of a type that cannot be packed.
    """

    def __init__(self, signature: Sequence[Any], places: Sequence[int]) -> None:
        tensors: list[str] = []  # Texts that read an argument or a field from the arguments `a`.
        bases: list[str] = []
        self.map_numbers: list[int] = []
        numbers: list[str] = []
        formats: list[str] = []
        order: list[tuple[str, int]] = []  # the sort of each parameter, and its place in that sort

        def number(text: str, kind: str) -> None:
            if kind not in _PACKED:
                raise TypeError(f"a parameter must be an address, an integer or a float of Triton, got {kind}")
            order.append(("number", len(formats)))
            formats.append(_PACKED[kind])
            numbers.append(text)

        def visit(text: str, kind: Any) -> None:
            if isinstance(kind, tuple):
                for i, inner in enumerate(kind):
                    visit(f"{text}[{i}]", inner)
            elif kind[0] == "*":
                order.append(("tensor", len(tensors)))
                tensors.append(text)
            elif kind != "constexpr":
                number(text, kind)

        for i, kind in enumerate(signature):
            if i not in places:
                visit(f"a[{i}]", kind)
                continue
            map_, rank = len(bases), rank_of(kind)
            order.append(("map", map_))
            bases.append(f"a[{i}].base")
            self.map_numbers.append(len(numbers))
            for j in range(2 * rank):
                number(f"e[{map_}][{j + 1}]", "i32" if j < rank else "i64")
        self.map_places = sorted(places)
        first = {"number": 0, "tensor": len(formats), "map": len(formats) + len(tensors)}
        self.num_numbers, self.num_tensors, self.num_maps = len(formats), len(tensors), len(bases)
        self.formats = "".join(formats)
        self.order = [first[sort] + i for sort, i in order]
        read = f"lambda a, e: (({''.join(f'{x}, ' for x in [*tensors, *bases])}), ({''.join(f'{x}, ' for x in numbers)}))"
        self._read: Callable[..., tuple[tuple[Tensor, ...], tuple[float, ...]]] = eval(read, {})

    def given(self, arguments: tuple[Any, ...], encoded: Any) -> Given:
        """Reads what a launch with these arguments gives the kernel. encoded: takes the place of an argument and a TMA
        descriptor, and returns a list of the descriptor as Triton's launcher takes it, its sizes and its strides."""
        maps = [encoded(place, arguments[place]) for place in self.map_places]
        tensors, numbers = self._read(arguments, maps)
        return Given(tensors, numbers, tuple([x[0] for x in maps]))


def rank_of(kind: str) -> int:
    """Returns the dimensions of a TMA descriptor of Triton's type `kind`, such as ``tensordesc<bf16[1, 1, 64, 128]>``."""
    return kind[kind.index("[") : kind.index("]")].count(",") + 1
