# SPDX-License-Identifier: MIT
"""`covering` chooses a part of the variants of a kernel in which everything occurs that sets any of them apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from openmsa.runtime.recording import Launch


def facts(launch: Launch) -> Iterator[tuple[Any, ...]]:
    """Yields what sets a variant apart from others of its kernel, fact by fact: the value of each constant, the type of each
    other parameter and what is known of it (1, divisible by 16), each option. Fields of a NamedTuple count one by one."""
    for place, kind in enumerate(launch.signature.values()):
        yield from ((path, kind, str(launch.attributes.get(path))) for path, kind in _leaves(kind, (place,)))
    for path, value in launch.constexprs.items():
        fields = value._asdict() if hasattr(value, "_asdict") else {"": value}
        yield from ((path, name, str(field)) for name, field in fields.items())
    yield from ((name, str(value)) for name, value in launch.options.__dict__.items())


def _leaves(kind: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yields the path and the type of a parameter, or of each field of it."""
    if not isinstance(kind, tuple):
        yield path, kind
        return
    for place, field in enumerate(kind):
        yield from _leaves(field, (*path, place))


def covering(launches: Sequence[Launch]) -> list[int]:
    """Returns places of launches of one kernel in which every fact of all of them occurs. Each is one that adds the most facts,
    and of these one that adds the most pairs of facts; in the end those go whose facts the others have too. Facts that the same
    launches have count once."""
    having: dict[Any, set[int]] = defaultdict(set)
    for place, launch in enumerate(launches):
        for fact in facts(launch):
            having[fact].add(place)
    groups = list(dict.fromkeys(map(frozenset, having.values())))
    singles = [{i for i, places in enumerate(groups) if place in places} for place in range(len(launches))]
    pairs = [set(combinations(sorted(found), 2)) for found in singles]
    missing, unpaired = set(range(len(groups))), set[tuple[int, int]]().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(launches)), key=lambda i: (len(missing & singles[i]), len(unpaired & pairs[i]), -i))
        chosen.append(best)
        missing -= singles[best]
        unpaired -= pairs[best]
    for place in tuple(chosen):
        others = set[int]().union(*(singles[other] for other in chosen if other != place))
        if singles[place] <= others:
            chosen.remove(place)
    return chosen
