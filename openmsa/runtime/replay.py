# SPDX-License-Identifier: MIT
"""`record` runs host code once and keeps its launches; a `Replay` makes the same launches again, on other tensors of the same
shapes, in little time of the host.

What a launch takes are numbers and addresses. Numbers stay. Addresses are of three kinds: those of the inputs, which a replay
is given anew; those of memory that the recorded code allocated, which lies in one workspace; and those of memory that is kept,
such as a plan's counters. Host code can be recorded if it computes nothing with PyTorch and reads no values, so that only
launches have effects; otherwise `record` says why not, and nothing is replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime import driver

from openmsa.runtime import launch
from openmsa.runtime.driver_calls import KernelCall, Words, ZeroCall, checked
from openmsa.runtime.kinds import span
from openmsa.runtime.launch import Variant
from openmsa.runtime.parameters import Given
from openmsa.runtime.tape import Computed, Launched, Zeroed, taping

ALIGNED = 512
"""Each memory of a workspace begins at a multiple of so many bytes, as memory of PyTorch does."""
Tape = list[Launched | Zeroed | Computed]


def record(function: Callable[[], object], inputs: list[Tensor], own: bool = True) -> Replay | str:
    """Runs `function`, which launches on `inputs` and on other memory, and returns its launches, or a sentence that says why
    they cannot be replayed.

    own:  whether the other memory belongs to the call alone: a replay then takes it from a workspace. Otherwise it is kept.
    """
    tape: Tape = []
    with taping(tape):
        function()
    try:
        return _unreplayable(tape) or Replay(prepare(tape, inputs, own), inputs[0].get_device())
    except _AmbiguousError as error:
        return str(error)


def _unreplayable(tape: Tape) -> str | None:
    for event in tape:
        if isinstance(event, Computed):
            return f"its host code computes {event.what} with PyTorch"
        if isinstance(event, Launched):
            name = event.kernel.__name__
            if event.variant is None:
                return launch.why_not_remembered(event.kernel) or f"Triton itself launches {name}"
            if event.variant.metadata[1] != 1:
                return f"{name} runs in clusters"
    return None


class _AmbiguousError(Exception):
    """An address lies in several inputs."""


class _Places:
    """Finds what an address belongs to, and gives it a word."""

    def __init__(self, inputs: list[Tensor], own: bool) -> None:
        self.inputs, self.own = inputs, own
        self.starts: dict[int, int] = {}  # of each address at which inputs begin, the first of these
        self.storages: dict[int, list[int]] = {}  # of the memory of inputs, which inputs lie there
        for i, x in enumerate(inputs):
            if x.numel():
                self.starts.setdefault(x.data_ptr(), i)
                self.storages.setdefault(x.untyped_storage().data_ptr(), []).append(i)
        self.found: dict[int, int] = {}  # the word of each address
        self.words: list[tuple[str, int, int]] = []
        self.memories: dict[int, tuple[int, Tensor]] = {}  # of each storage its place in the workspace, and a tensor in it
        self.size = 0  # of the workspace in bytes

    def word(self, tensor: Tensor) -> int:
        """Returns the number of the word that holds the address of a tensor."""
        address = tensor.data_ptr()
        word = self.found.get(address)
        if word is None:
            word = self.found[address] = len(self.words)
            self.words.append(self._place(tensor, address))
        return word

    def _place(self, tensor: Tensor, address: int) -> tuple[str, int, int]:
        i = self.starts.get(address)
        if i is not None:
            return "input", i, 0
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start in self.storages:
            # Host code cuts inputs into slices of their first dimension, so that an address begins at a row of its own input.
            inside = [i for i in self.storages[start] if self._begins_row(i, address)]
            if len(inside) > 1:
                raise _AmbiguousError(f"an address lies in {len(inside)} of its inputs")
            if not inside:
                raise _AmbiguousError("an address lies beside its inputs, in the memory of one")
            return "input", inside[0], address - self.inputs[inside[0]].data_ptr()
        if not self.own or not storage.nbytes():
            self.memories.setdefault(start, (-1, tensor))
            return "kept", address, 0
        if start not in self.memories:
            self.memories[start] = (self.size, tensor)
            self.size += storage.nbytes() + -storage.nbytes() % ALIGNED
        return "own", self.memories[start][0] + address - start, 0

    def _begins_row(self, i: int, address: int) -> bool:
        x = self.inputs[i]
        first, last = span(x)
        row = x.stride(0) * x.element_size() if x.dim() else 0
        return first <= address < last and row > 0 and (address - first) % row == 0


class Launch(NamedTuple):
    """A launch in numbers and addresses. words: of each of its tensors, the number of the word that holds its address."""

    variant: Variant
    grid: tuple[int, ...]
    given: Given
    words: list[int]


class Zero(NamedTuple):
    """Memory that is set to 0: the word of its address, and its bytes."""

    word: int
    size: int


class Prepared(NamedTuple):
    """What a tape says in numbers and addresses.

    words:      what each word holds: ("input", its number, an offset), ("own", an offset in the workspace, 0) or ("kept", an
                address, 0).
    calls:      launches, and memory that is set to 0, in order.
    workspace:  bytes, a multiple of `ALIGNED`.
    kept:       tensors whose memory is kept.
    """

    words: list[tuple[str, int, int]]
    calls: list[Launch | Zero]
    workspace: int
    kept: list[Tensor]


def prepare(tape: Tape, inputs: list[Tensor], own: bool) -> Prepared:
    """Finds what each address of a tape belongs to."""
    places, calls = _Places(inputs, own), list[Launch | Zero]()
    for event in tape:
        if isinstance(event, Launched):
            given = event.variant.parameters.given(event.arguments, partial(launch.encoded, event.variant))
            calls.append(Launch(event.variant, event.grid, given, [places.word(x) for x in given.tensors]))
        elif isinstance(event, Zeroed):
            calls.append(Zero(places.word(event.memory), event.memory.numel() * event.memory.element_size()))
    held = [tensor for place, tensor in places.memories.values() if place < 0]
    return Prepared(places.words, calls, places.size, held)


class Replay:
    """Makes recorded launches again. Threads take turns.

    workspace:  bytes of memory that a run needs, at a multiple of `ALIGNED`; 0 where all memory is kept.
    device:     the number of the CUDA device.
    """

    def __init__(self, prepared: Prepared, device: int) -> None:
        self.workspace, self._kept, self.device = prepared.workspace, prepared.kept, device
        self._words = Words(len(prepared.words))
        self._inputs: list[tuple[int, int, int]] = []
        self._own: list[tuple[int, int]] = []
        for word, (kind, at, offset) in enumerate(prepared.words):
            if kind == "input":
                self._inputs.append((word, at, offset))
            elif kind == "own":
                self._own.append((word, at))
            else:
                self._words.values[word] = at
        calls = [(ZeroCall if isinstance(x, Zero) else KernelCall)(*x, self._words) for x in prepared.calls]  # type: ignore[arg-type]
        self._calls = [call for call in calls if not call.empty]
        self._described = [call for call in self._calls if call.maps]
        self._launches = [call.launch for call in self._calls]
        self._lock = threading.Lock()
        self._at = self._stream = -1

    def run(self, addresses: list[int], workspace: int = 0) -> None:
        """Launches on the current stream. addresses: of the inputs, in their order. workspace: where it begins."""
        stream = driver.active.get_current_stream(self.device)
        with self._lock:
            values = self._words.values
            for word, index, offset in self._inputs:
                values[word] = addresses[index] + offset
            if workspace != self._at:
                for word, offset in self._own:
                    values[word] = workspace + offset
                self._at = workspace
            if stream != self._stream:
                for call in self._calls:
                    call.on(stream)
                self._stream = stream
            for call in self._described:
                call.describe()
            for number, launch_ in enumerate(self._launches):
                if status := launch_():
                    checked(status, self._calls[number].what)
