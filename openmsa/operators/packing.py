# SPDX-License-Identifier: MIT
"""Packs the arguments of a public function into what an operator takes, tensors and numbers, and unpacks them again.

Formats, caches, lengths, dicts and tuples are taken apart. What is neither a tensor nor a number stays in a text, the form: a
Python literal in which ``("t", 2)`` stands for the third tensor, "w" for a written one, "i" for an integer, "f" for a float,
and ``("E4M3", ...)`` for an object with these fields. Packing is code that `torch.compile` traces.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmsa.decode import DecodePlan
from openmsa.kv_cache import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8, PagedIndexKeys, PagedKV
from openmsa.plan import AttentionPlan
from openmsa.runtime.tracing import by_number
from openmsa.types import Sequences

CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (Sequences, E4M3, Int8, NVFP4, MXFP4, CertifiedKeys, PagedKV, PagedIndexKeys)
}
"""Objects of these classes are taken apart into their fields."""
FIELDS = {name: tuple(field.name for field in fields(cls)) for name, cls in CLASSES.items()}
NUMBERED: dict[str, type[Any]] = {DecodePlan.__name__: DecodePlan, AttentionPlan.__name__: AttentionPlan}
"""Objects of these classes hold memory of their own: their ``number`` stands for them."""
INTEGERS, FLOATS = (int, torch.SymInt), (float, torch.SymFloat)


class Packed(NamedTuple):
    """These are the arguments of an operator; it writes to the tensors in `written`, each of which stands there once."""

    tensors: list[Tensor]
    written: list[Tensor]
    ints: list[int]
    floats: list[float]
    form: str


def pack(arguments: dict[str, Any], writes: tuple[str, ...] = ()) -> Packed:
    """Packs named arguments. writes: names of arguments whose tensors the function writes to, or of their fields
    (``"self.seq_lens"``)."""
    lists: tuple[list[Tensor], list[Tensor], list[int], list[float]] = ([], [], [], [])
    for own in (True, False):  # a written tensor is known as such wherever else it stands
        items = [f"{name!r}: {_packed(name, value, lists, name, writes, own)}" for name, value in arguments.items()]
    return Packed(*lists, "{" + ", ".join(items) + "}")


def _packed(name: str, value: Any, lists: Any, path: str, writes: tuple[str, ...], only_written: bool) -> str:
    """Appends the tensors and numbers of an argument to the lists and returns its form. only_written: append only tensors that
    are written to."""
    if value is None or isinstance(value, (bool, str)):
        return f"{value!r}"
    if isinstance(value, Tensor):
        if path in writes:
            return f"('w', {_place(lists[1], value)})"
        if only_written:
            return ""
        place = _found(lists[1], value)
        return f"('t', {_place(lists[0], value)})" if place < 0 else f"('w', {place})"
    for kind, numbers, types in (("i", lists[2], INTEGERS), ("f", lists[3], FLOATS)):
        if isinstance(value, types):
            if only_written:
                return ""
            numbers.append(value)
            return f"('{kind}', {len(numbers) - 1})"
    if isinstance(value, torch.dtype):
        return f"('dtype', '{str(value)[6:]}')"
    if isinstance(value, torch.device):
        return f"('device', '{value}')"

    def below(item: Any, key: str) -> str:
        within = path if path in writes else f"{path}.{key}"
        return _packed(name, item, lists, within, writes, only_written)

    if isinstance(value, dict):
        return "{" + ", ".join([f"{key!r}: {below(item, key)}" for key, item in value.items()]) + "}"
    if isinstance(value, (list, tuple)):
        items = "".join([f", {below(item, '')}" for item in value])
        return f"('{'list' if isinstance(value, list) else 'tuple'}'{items})"
    for known, cls in CLASSES.items():
        if isinstance(value, cls):
            items = "".join([f", {below(getattr(value, field), field)}" for field in FIELDS[known]])
            return f"('{known}'{items})"
    for known, cls in NUMBERED.items():
        if isinstance(value, cls):
            return f"('{known}', {below(value.number, 'number')})"
    raise TypeError(f"{name} must be a tensor, a number or an object of openmsa in a traced graph, got {type(value).__name__}")


def _found(tensors: list[Tensor], tensor: Tensor) -> int:
    """Returns where the same tensor stands in a list, -1 where it does not."""
    for place, other in enumerate(tensors):
        if other is tensor:
            return place
    return -1


def _place(tensors: list[Tensor], tensor: Tensor) -> int:
    """Returns a tensor's place in a list, and appends it first where it is new."""
    place = _found(tensors, tensor)
    if place < 0:
        tensors.append(tensor)
        place = len(tensors) - 1
    return place


_literal = functools.lru_cache(maxsize=1024)(ast.literal_eval)


def unpack(
    tensors: Sequence[Tensor], written: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float], form: str
) -> dict[str, Any]:
    """Returns the arguments that `pack` packed. Objects are made as they were, without checking their fields again."""
    lists = {"t": tensors, "w": written, "i": ints, "f": floats}
    return {name: _unpacked(value, lists) for name, value in _literal(form).items()}


def _unpacked(value: Any, lists: dict[str, Sequence[Any]]) -> Any:
    if isinstance(value, dict):
        return {key: _unpacked(item, lists) for key, item in value.items()}
    if not isinstance(value, tuple):
        return value
    kind, *items = value
    if kind in lists:
        return lists[kind][items[0]]
    if kind == "dtype":
        return getattr(torch, items[0])
    if kind == "device":
        return torch.device(items[0])
    made = [_unpacked(item, lists) for item in items]
    if kind in ("list", "tuple"):
        return made if kind == "list" else tuple(made)
    if kind in NUMBERED:
        return by_number(kind, made[0]) if isinstance(made[0], int) else None  # shapes alone: the number is a symbol
    instance = object.__new__(CLASSES[kind])
    vars(instance).update(zip(FIELDS[kind], made, strict=True))
    return instance
