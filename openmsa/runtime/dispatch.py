# SPDX-License-Identifier: MIT
"""One table of implementations per stage; refusals are sentences; no silent fall-back."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from openmsa.runtime import compiler_key

Refusal = Callable[..., "str | None"]


def _never(**arguments: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to run a stage: a row of the stage's table.

    name:     what ``impl=`` calls it.
    path:     ``"package.module:function"``, imported when first used.
    refuse:   called with the stage's checked arguments; returns None when it can serve them, else the reason, a sentence.
    reserve:  called the same way; a reason why ``impl="auto"`` passes it over although it could run, or None.
    """

    name: str
    path: str
    refuse: Refusal
    reserve: Refusal = _never

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        module, function = _imported(self.path)
        return getattr(module, function)


@functools.cache
def _imported(path: str) -> tuple[ModuleType, str]:
    """The module of a row, and the name of its function there."""
    module, _, function = path.partition(":")
    if ".triton_" in module:
        compiler_key.remember()
    return importlib.import_module(module), function


@dataclass(frozen=True)
class Explanation:
    """Which implementation of a stage serves a call, and why each other one does not."""

    stage: str
    chosen: str | None
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.stage}: {self.chosen or 'no implementation can run'}"]
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


class Stage:
    """A public operation: its name, its table in order of preference, and the function that checks its arguments.

    ``check(*args, **kwargs)`` takes what the public function takes (less ``impl``) and returns the checked keyword
    arguments that every implementation and every ``refuse`` is called with.
    """

    def __init__(self, name: str, check: Callable[..., dict[str, Any]], table: tuple[Implementation, ...]) -> None:
        self.name, self.check, self.table = name, check, table

    def check_name(self, impl: str) -> None:
        """`impl` must be "auto" or stand in the table."""
        names = [row.name for row in self.table]
        if impl != "auto" and impl not in names:
            raise ValueError(f"impl must be 'auto' or one of {names} for {self.name}, got {impl!r}")

    def explain(self, impl: str, arguments: Mapping[str, Any]) -> Explanation:
        """What `run` would choose for these checked arguments, and why."""
        self.check_name(impl)
        chosen, reasons = None, {}
        for row in self.table:
            if impl not in ("auto", row.name):
                reasons[row.name] = f"not asked for: impl={impl!r}"
            elif (reason := row.refuse(**arguments)) is not None:
                reasons[row.name] = reason
            elif impl == "auto" and (reason := row.reserve(**arguments)) is not None:
                reasons[row.name] = reason
            elif chosen is not None:
                reasons[row.name] = f"could run, but {chosen!r} stands before it in the table"
            else:
                chosen, reasons[row.name] = row.name, "chosen"
        return Explanation(self.name, chosen, reasons)

    def run(self, impl: str, arguments: Mapping[str, Any]) -> Any:
        """Calls the first implementation that can serve; NotImplementedError lists every refusal when none can."""
        for row in self.table:
            asked = impl in ("auto", row.name) and row.refuse(**arguments) is None
            if asked and (impl != "auto" or row.reserve(**arguments) is None):
                return row.load()(**arguments)
        explanation = self.explain(impl, arguments)
        raise NotImplementedError(f"impl={impl!r} cannot serve this call of {self.name}:\n{explanation}")
