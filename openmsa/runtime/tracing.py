# SPDX-License-Identifier: MIT
"""While `torch.compile` or `torch.export` traces a graph, operators take the place of public functions.

Operators take no objects: a number stands for an object that holds memory of its own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

FUNCTIONS: dict[str, Callable[..., Any]] = {}
TRACED: dict[str, Callable[[dict[str, Any]], Any]] = {}
"""By the names of operators, these are public functions, and what takes the arguments by name while a graph is traced."""


def refuse_to_trace(name: str) -> None:
    """Raises NotImplementedError while a graph is traced: the function `name` returns what it reads on the host."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{name} reads lengths on the host: call it outside the traced function and pass its result")


def refuse_transforms(name: str, impl: Any) -> None:
    """Raises NotImplementedError inside `torch.jit.trace`, and inside those transforms of `torch.func` under which tensors have
    no values to read; the reference under `torch.func.vmap` is left to PyTorch."""
    if torch._C._is_tracing():
        raise NotImplementedError(
            f"torch.jit.trace cannot record {name}, as lengths that it reads would become constants: "
            "use torch.compile or torch.export, which take it as one node (docs/compile.md)"
        )
    transforms = torch._C._functorch
    active = {interpreter.key() for interpreter in transforms.get_interpreter_stack() or ()}
    if transforms.TransformType.Vmap in active and impl != "reference":
        raise NotImplementedError(
            f"torch.func.vmap is not supported by {name}: pack the sequences of a batch one after another, so that one call "
            "serves all of them"
        )
    if transforms.TransformType.Functionalize in active:
        raise NotImplementedError(f"torch.func.functionalize is not supported by {name}: use torch.compile or torch.export")


_numbers = itertools.count()
_numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def numbered(owner: Any) -> int:
    """Returns a number that stands for an object in graphs, whose operators take no objects. The object is not kept alive."""
    number = next(_numbers)
    _numbered[number] = owner
    return number


class Numbered:
    """A dataclass whose objects graphs know by a number. A copy, or an object that was read from a file, is made anew from its
    fields, so that it has a number, and what launches know of its memory, of its own."""

    def __post_init__(self) -> None:
        """Makes the object from its fields."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()


def by_number(kind: str, number: int) -> Any:
    """Returns the object of a number that `numbered` gave in this process; `kind` names what it is in the error."""
    owner = _numbered.get(number)
    if owner is None:
        raise ValueError(
            f"{kind} {number} must live in this process while a graph that was traced with it runs, but it does not: "
            "keep the object, and trace again in a new process"
        )
    return owner
