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
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime import driver

from openmsa.runtime import launch
from openmsa.runtime.driver_calls import Address, Descriptor, KernelCall, Words, ZeroCall
from openmsa.runtime.kinds import span
from openmsa.runtime.launch import Variant
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
        self.inputs = [(*span(x), x.stride(0) * x.element_size() if x.dim() else 0) for x in inputs]
        self.of_inputs = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
        self.own = own
        self.found: dict[int, int] = {}  # the word of each address
        self.words: dict[tuple[str, int, int], int] = {}
        self.memories: dict[int, tuple[int, Tensor]] = {}  # of each storage its place in the workspace, and a tensor in it
        self.size = 0  # of the workspace in bytes

    def word(self, tensor: Tensor) -> int:
        """Returns the number of the word that holds the address of a tensor."""
        address = tensor.data_ptr()
        word = self.found.get(address)
        if word is None:
            word = self.found[address] = self.words.setdefault(self._place(tensor, address), len(self.words))
        return word

    def _place(self, tensor: Tensor, address: int) -> tuple[str, int, int]:
        inside = [i for i, (first, last, _) in enumerate(self.inputs) if first <= address < last]
        # Host code cuts inputs into slices of their first dimension, so that an address begins at a row of its own input.
        exact = [i for i in inside if self.inputs[i][0] == address]
        inside = exact[:1] or [i for i in inside if self._begins_row(i, address)]
        if len(inside) > 1:
            raise _AmbiguousError(f"an address lies in {len(inside)} of its inputs")
        if inside:
            return "input", inside[0], address - self.inputs[inside[0]][0]
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start in self.of_inputs:
            raise _AmbiguousError("an address lies beside its inputs, in the memory of one")
        if not self.own or not storage.nbytes():
            self.memories.setdefault(start, (-1, tensor))
            return "kept", address, 0
        if start not in self.memories:
            self.memories[start] = (self.size, tensor)
            self.size += storage.nbytes() + -storage.nbytes() % ALIGNED
        return "own", self.memories[start][0] + address - start, 0

    def _begins_row(self, i: int, address: int) -> bool:
        first, _, row = self.inputs[i]
        return row > 0 and (address - first) % row == 0


def parameters(variant: Variant, arguments: tuple[Any, ...], word: Callable[[Tensor], int]) -> list[tuple[str, Any]]:
    """Returns what a kernel takes, in order: Triton's type, and a number, an `Address` or a `Descriptor`."""
    layouts = dict(variant.descriptors)
    found: list[tuple[str, Any]] = []

    def visit(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for inner, x in zip(kind, value, strict=True):
                visit(inner, x)
        elif kind[0] == "*":
            found.append((kind, Address(word(value))))
        elif kind != "constexpr":
            found.append((kind, value))

    for place, (kind, value) in enumerate(zip(variant.signature, arguments, strict=True)):
        if place in layouts:
            encoded, *numbers = launch.encoded(variant, place, layouts[place], value)
            rank = len(numbers) // 2
            found.append((kind, Descriptor(encoded, word(value.base))))
            found += [("i32", n) for n in numbers[:rank]] + [("i64", n) for n in numbers[rank:]]
        else:
            visit(kind, value)
    return found


class Prepared(NamedTuple):
    """What a tape says in numbers and addresses.

    words:      what each word holds: ("input", its number, an offset), ("own", an offset in the workspace, 0) or ("kept", an
                address, 0).
    calls:      for each launch its variant, its grid and its parameters; for memory that is set to 0 its word and its bytes.
    workspace:  bytes, a multiple of `ALIGNED`.
    kept:       tensors whose memory is kept.
    """

    words: list[tuple[str, int, int]]
    calls: list[tuple[Any, ...]]
    workspace: int
    kept: list[Tensor]


def prepare(tape: Tape, inputs: list[Tensor], own: bool) -> Prepared:
    """Finds what each address of a tape belongs to."""
    places, calls = _Places(inputs, own), list[tuple[Any, ...]]()
    for event in tape:
        if isinstance(event, Zeroed):
            calls.append((places.word(event.memory), event.memory.numel() * event.memory.element_size()))
        elif isinstance(event, Launched):
            calls.append((event.variant, event.grid, parameters(event.variant, event.arguments, places.word)))
    held = [tensor for place, tensor in places.memories.values() if place < 0]
    return Prepared(list(places.words), calls, places.size, held)


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
        calls = [(ZeroCall if len(x) == 2 else KernelCall)(*x, self._words) for x in prepared.calls]  # type: ignore[call-arg]
        self._calls = [call for call in calls if not call.empty]
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
                    call.configuration.stream = stream
                self._stream = stream
            for call in self._calls:
                call()
