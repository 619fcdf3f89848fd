# SPDX-License-Identifier: MIT
"""A tape says, in order, what host code did on a GPU: launches, memory set to 0, and computations of PyTorch.

Host code of the stages computes with PyTorch in few places; each says so by `computes`, so that launches which would not repeat
it are not taken for the whole call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor


class Launched(NamedTuple):
    """A launch as it was made. variant: the `openmsa.runtime.launch.Variant`, None where Triton chose for itself."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    variant: Any


class Zeroed(NamedTuple):
    """Memory that was set to 0 in the order of launches."""

    memory: Tensor


class Computed(NamedTuple):
    """A computation of PyTorch, by its name in a sentence."""

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
