# SPDX-License-Identifier: MIT
"""An explanation says what serves a call and why nothing else does. A call that is served makes none on its way."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openmsa.runtime.dispatch import Implementation


@dataclass(frozen=True)
class Explanation:
    """An explanation says which implementation of a stage serves a call, and why each other one does not."""

    stage: str
    chosen: str | None
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.stage}: {self.chosen or 'no implementation can run'}"]
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)

    @property
    def by_stage(self) -> tuple[Explanation, ...]:
        """Returns the explanations of the stages that the call runs, here itself alone."""
        return (self,)


class PathExplanation(tuple[Explanation, ...]):
    """A path is explained by one `Explanation` a stage, in the order in which the stages run; it prints as their texts."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    @property
    def by_stage(self) -> tuple[Explanation, ...]:
        """Returns the explanations of the stages that the call runs."""
        return tuple(self)


def of_table(stage: str, table: tuple[Implementation[Any], ...], impl: str, call: Any) -> Explanation:
    """Says which row of a stage's table serves the checked call, and why each other row does not."""
    chosen, reasons = None, {}
    for row in table:
        if impl not in ("auto", row.name):
            reasons[row.name] = f"not asked for: impl={impl!r}"
        elif (reason := row.refuse(call)) is not None:
            reasons[row.name] = reason
        elif impl == "auto" and (reason := row.reserve(call)) is not None:
            reasons[row.name] = reason
        elif chosen is not None:
            reasons[row.name] = f"could run, but {chosen!r} stands before it in the table"
        else:
            chosen, reasons[row.name] = row.name, "chosen"
    return Explanation(stage, chosen, reasons)


def of_names(impl: Any, names: Mapping[str, list[str]]) -> str:
    """Returns the sentence that refuses `impl`: which names it may have. names: those of the implementations of each stage
    that the call runs."""
    first, *others = names.values()
    shared = [name for name in first if all(name in other for other in others)]
    stages = " and ".join(names)
    rule = f"impl must be 'auto' or one of {shared} for {stages}"
    if others:
        rule += f", which run after each other ({'; '.join(f'{stage} has {own}' for stage, own in names.items())})"
    return f"{rule}, got {impl!r}"


def arguments(signature: inspect.Signature, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of the operation `name` but ``impl``, defaults for those left out."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        raise TypeError(_not_bound(signature, name, args, kwargs)) from None
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "impl"}


def _not_bound(signature: inspect.Signature, name: str, args: Any, kwargs: Any) -> str:
    """Says why the arguments make no call of the operation `name`."""
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        return f"{name}: {error}"
    required = [key for key, parameter in signature.parameters.items() if parameter.default is parameter.empty]
    missing = ", ".join(key for key in required if key not in given)
    return f"{name} must be given {missing}: explain takes every argument of the call itself, got {', '.join(given) or 'none'}"
