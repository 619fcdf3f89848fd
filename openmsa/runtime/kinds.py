# SPDX-License-Identifier: MIT
"""`Kinds` keeps the launches of calls by kind: calls of one kind differ in nothing but where their tensors lie.

A tape says, in order, what host code did on a GPU: launches, memory set to 0, and computations of PyTorch. Host code of the
stages computes with PyTorch in few places; each says so by `computes`, so that launches which would not repeat it are not taken
for the whole call. This module loads no kernel; what makes launches again (replay.py) is imported when a call is recorded.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from openmsa.runtime.memory import Memory
    from openmsa.runtime.replay import Preparation, Replay

MOST_KINDS = 1024
"""So many kinds are kept at a time; past that the oldest is forgotten, and recorded again."""
PLAIN = (type(None), bool, int, float, str)
"""Values of these types, and of their subclasses, belong to a kind with their type, as 1, 1.0 and True are equal."""

Steps = list[Callable[[], None]]
"""What a call runs, one function after the other; each may use the same memory."""


class Launched(NamedTuple):
    """Records a launch as it was made. variant: the `openmsa.runtime.variants.Variant`, None where Triton chose for itself."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    variant: Any


class Zeroed(NamedTuple):
    """Records that memory was set to 0, in the order of launches."""

    memory: Tensor


class Computed(NamedTuple):
    """Records a computation of PyTorch, by its name in a sentence."""

    what: str


Tape = list[Launched | Zeroed | Computed]


class _Listening(threading.local):
    """In each thread, `tape` is a list to which events are appended, or None."""

    tape: Tape | None = None


listening = _Listening()


@contextmanager
def taping(tape: Tape) -> Iterator[None]:
    """Within this context, events are appended to `tape`."""
    outer, listening.tape = listening.tape, tape
    try:
        yield
    finally:
        listening.tape = outer


def computes(what: str) -> None:
    """Tells the tape that host code computes this with PyTorch."""
    if listening.tape is not None:
        listening.tape.append(Computed(what))


def rounded(bound: int) -> int:
    """Returns a bound rounded up by at most a sixteenth, so that calls of growing lengths are of few kinds."""
    unit = 1 << max(bound.bit_length() - 5, 0)
    return -(-bound // unit) * unit


def described(value: Any, addresses: list[int], rows: int = -1) -> Any:
    """Returns what launches depend on of a tensor, or of an object that holds tensors, beside its addresses, which are appended
    in the order of `tensors_in`. rows: a first size that they do not depend on."""
    if isinstance(value, Tensor):
        address, shape = value.data_ptr(), value.shape
        addresses.append(address)
        shape = shape[1:] if shape[:1] == (rows,) else shape
        return value.dtype, shape, value.stride(), value.get_device(), value.requires_grad, address & 15
    if hasattr(type(value), "__dataclass_fields__"):
        return type(value), *[described(x, addresses, rows) for x in vars(value).values()]
    return (type(value), value) if isinstance(value, PLAIN) else type(value)


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Gives the tensors of tensors, and of objects that hold tensors, such as caches and rows in a format."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif hasattr(type(value), "__dataclass_fields__"):
            yield from tensors_in(*vars(value).values())


class Call(NamedTuple):
    """Holds a call, its kind, the addresses of its tensors and, where the kind is known, its launches. The first `by_row` of
    its tensors have `rows` rows, which do not belong to the kind."""

    kind: Any
    addresses: list[int]
    replay: Replay | None
    rows: int = 0
    by_row: int = 0


def record(steps: Steps, inputs: list[Tensor], own: bool = True, rows: int = 0, by_row: int = 0) -> Replay | str:
    """Runs one step or more, which launch on `inputs` and on other memory, and returns their launches, or a sentence that says
    why they cannot be replayed. They can if host code computes nothing with PyTorch and reads no values. own: whether the other
    memory belongs to each step alone: a replay then takes it from a workspace. Otherwise it is kept. The first `by_row` inputs
    have `rows` rows here, and may have other numbers of them when the launches are made again."""
    reason, made = None, None
    for step in steps:
        tape: Tape = []
        with taping(tape):
            step()
        reason = reason or _unreplayable(tape)
        if reason is None:
            from openmsa.runtime.replay import Preparation

            made = made or Preparation(inputs, own, rows, by_row)
            reason = made.add(tape)
    return reason or cast("Preparation", made).replay(inputs[0].get_device())


def _unreplayable(tape: Tape) -> str | None:
    """Says why launches alone would not repeat what is on the tape, a sentence; None where they would."""
    from openmsa.runtime.launch import why_not_remembered

    for event in tape:
        if isinstance(event, Computed):
            return f"its host code computes {event.what} with PyTorch"
        if isinstance(event, Launched):
            name = event.kernel.__name__
            if event.variant is None:
                return why_not_remembered(event.kernel) or f"Triton itself launches {name}"
            if event.variant.metadata[1] != 1:
                return f"{name} runs in clusters"
    return None


class Kinds:
    """Runs calls, each kind for the first time by host code, which is recorded, and then by its launches alone. A kind whose
    launches cannot be recorded is run by host code each time."""

    def __init__(self) -> None:
        self._replays: dict[Any, Replay] = {}
        self._numbers: dict[Any, int] = {}
        self._next = itertools.count()

    def number(self, kind: Any) -> int:
        """Returns a number for a kind, the same for equal ones, that is quicker to look up."""
        if kind not in self._numbers and len(self._numbers) >= MOST_KINDS:
            self._numbers.pop(next(iter(self._numbers.copy())), None)  # Where it comes back, it is recorded again.
        return self._numbers.setdefault(kind, next(self._next))

    def look(self, *values: Any, by_row: tuple[Any, ...] = (), rows: int = 0) -> Call:
        """Looks up the kind of a call on these values. by_row: values in front of them, whose tensors have so many rows, which
        do not belong to the kind: its launches serve any number that the caller says by `rows`."""
        addresses: list[int] = []
        kinds: list[Any] = [torch.is_grad_enabled()]
        try:
            for x in by_row:  # This runs for every layer, so what `described` does is written out for tensors and plain values.
                if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows:
                    addresses.append(address := x.data_ptr())
                    kinds.append((x.dtype, x.shape[1:], x.stride(), x.get_device(), x.requires_grad, address & 15))
                else:
                    kinds.append(described(x, addresses, rows))
            count = len(addresses)
            for x in values:
                if isinstance(x, Tensor):
                    addresses.append(address := x.data_ptr())
                    kinds.append((x.dtype, x.shape, x.stride(), x.get_device(), x.requires_grad, address & 15))
                else:
                    kinds.append((type(x), x) if isinstance(x, PLAIN) else described(x, addresses))
        except RuntimeError:  # Sparse and nested tensors have no address or no strides. Checks refuse them.
            return Call(object(), addresses, None)
        if len(set(addresses)) < len(addresses):  # Tensors of one address are of one kind with others that share theirs.
            kinds.extend(map(addresses.index, addresses))
        return Call(kind := tuple(kinds), addresses, self._replays.get(kind), rows, count)

    def again(self, call: Call, memory: Memory) -> None:
        """Launches a call of a known kind."""
        replay = cast("Replay", call.replay)
        replay.run(call.addresses, memory.at(replay.workspace, replay.device), call.rows)

    def first(self, call: Call, steps: Steps, values: Iterable[Any], own: bool = True) -> str | None:
        """Runs a call of a kind that is not known, in steps whose memory may be the same, and records it. Returns why it could
        not be recorded, or None.

        values:  what holds the tensors of the call, in the order of its addresses.
        own:     as in `record`.
        """
        recorded = record(steps, list(tensors_in(*values)), own, call.rows, call.by_row)
        if isinstance(recorded, str):
            return recorded
        if len(self._replays) >= MOST_KINDS:
            self._replays.pop(next(iter(self._replays.copy())), None)
        self._replays[call.kind] = recorded
        return None
