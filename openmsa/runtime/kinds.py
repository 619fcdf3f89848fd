# SPDX-License-Identifier: MIT
"""`Kinds` keeps the launches of calls by kind: calls of one kind differ in nothing but where their tensors lie.

This module loads no kernel; what records and replays (replay.py) is imported when the first call is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from openmsa.runtime.replay import Replay

MOST_KINDS = 64
"""So many kinds are kept at a time; past that all are forgotten, and recorded again."""


def described(value: Any, addresses: list[int]) -> Any:
    """Returns what launches depend on of a tensor, or of an object that holds tensors, beside its addresses, which are appended
    in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        address = value.data_ptr()
        addresses.append(address)
        return value.dtype, value.shape, value.stride(), value.get_device(), value.requires_grad, address & 15
    if hasattr(type(value), "__dataclass_fields__"):
        return type(value), *[described(x, addresses) for x in vars(value).values()]
    return value if value is None or isinstance(value, (int, float, str)) else type(value)


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Gives the tensors of tensors, and of objects that hold tensors, such as caches and rows in a format."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif hasattr(type(value), "__dataclass_fields__"):
            yield from tensors_in(*vars(value).values())


class Call(NamedTuple):
    """A call, its kind, the addresses of its tensors and, where the kind is known, its launches."""

    kind: Any
    addresses: list[int]
    replays: list[Replay] | None


class Kinds:
    """Runs calls, each kind for the first time by host code, which is recorded, and then by its launches alone.

    shared:   whether calls may overlap, on several streams or threads, so that each allocates its memory; otherwise they
              follow each other and share memory that lives as long as this object.
    reasons:  sentences that say why the launches of some kinds could not be recorded; host code runs these each time.
    """

    def __init__(self, shared: bool = False) -> None:
        self.reasons: dict[str, None] = {}
        self._shared = shared
        self._replays: dict[Any, list[Replay]] = {}
        self._memory: Tensor | None = None
        self._at = 0

    def look(self, *values: Any) -> Call:
        """Looks up the kind of a call on these values."""
        addresses: list[int] = []
        kind = (torch.is_grad_enabled(), *[described(x, addresses) for x in values])
        if len(set(addresses)) < len(addresses):  # Tensors of one address are of one kind with others that share theirs.
            kind = (*kind, *map(addresses.index, addresses))
        return Call(kind, addresses, self._replays.get(kind))

    def again(self, call: Call) -> None:
        """Launches a call of a known kind."""
        assert call.replays is not None
        for replay in call.replays:
            if self._shared and replay.workspace:
                memory = torch.empty(replay.workspace, dtype=torch.uint8, device=replay.device)
                replay.run(call.addresses, memory.data_ptr())
            else:
                replay.run(call.addresses, self._at)

    def first(
        self, call: Call, steps: Sequence[Callable[[], object]], values: Iterable[Any], lasting: Iterable[Any] | None = None
    ) -> None:
        """Runs a call of a kind that is not known, in steps whose memory may be the same, and records it.

        values:   what holds the tensors of the call, in the order of its addresses.
        lasting:  what the steps use beside `values` and what they allocate, and lives as long as this object; None: all that
                  the steps use is kept.
        """
        from openmsa.runtime.replay import record

        tensors = list(tensors_in(*values))
        kept = None if lasting is None else list(tensors_in(*lasting))
        recorded = [record(step, tensors, kept) for step in steps]
        if reasons := [x.reason for x in recorded if x.reason is not None]:
            self.reasons[reasons[0]] = None
            return
        replays = [x.replay for x in recorded if x.replay is not None]
        need = max((replay.workspace for replay in replays), default=0)
        if not self._shared and need and (self._memory is None or self._memory.numel() < need):
            self._memory = torch.empty(need, dtype=torch.uint8, device=tensors[0].device)
            self._at = self._memory.data_ptr()
        if len(self._replays) >= MOST_KINDS:
            self._replays.clear()
        self._replays[call.kind] = replays
