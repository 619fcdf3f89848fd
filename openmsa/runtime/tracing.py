# SPDX-License-Identifier: MIT
"""While `torch.compile` or `torch.export` traces a graph, operators take the place of public functions.

Operators take no objects: a number stands for an object that holds memory of its own.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

FUNCTIONS: dict[str, Callable[..., Any]] = {}
TRACED: dict[str, Callable[[dict[str, Any]], Any]] = {}
"""By the names of operators, these are public functions, and what takes the arguments by name while a graph is traced."""


def operator(name: str) -> Callable[[F], F]:
    """Decorates a public function, which is the operator `name`, ``"package::function"``, while `torch.compile` or
    `torch.export` traces a graph: one node there, whatever it reads or launches. Eager calls pass straight through."""

    def decorate(function: F) -> F:
        FUNCTIONS[name] = function
        parameters = inspect.signature(function).parameters.values()
        names = tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(function)
        def public(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() and len(args) <= len(names):
                return TRACED[name](dict(zip(names, args, strict=False)) | kwargs)
            return function(*args, **kwargs)

        return cast(F, public)

    return decorate


def refuse_to_trace(name: str) -> None:
    """Raises NotImplementedError while a graph is traced: the function `name` returns what it reads on the host."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{name} reads lengths on the host: call it outside the traced function and pass its result")


_numbers = itertools.count()
_numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def numbered(owner: Any) -> int:
    """Returns a number that stands for an object in graphs, whose operators take no objects. The object is not kept alive."""
    number = next(_numbers)
    _numbered[number] = owner
    return number


def by_number(kind: str, number: int) -> Any:
    """Returns the object of a number that `numbered` gave in this process; `kind` names what it is in the error."""
    owner = _numbered.get(number)
    if owner is None:
        raise ValueError(
            f"{kind} {number} must live in this process while a graph that was traced with it runs, but it does not: "
            "keep the object, and trace again in a new process"
        )
    return owner
