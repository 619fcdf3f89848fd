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

from torch import Tensor
from triton.runtime import driver

from openmsa.runtime import launch
from openmsa.runtime.addresses import AmbiguousError, Prepared, PreparedZero, prepare
from openmsa.runtime.driver_calls import KernelCall, Words, ZeroCall, checked
from openmsa.runtime.tape import Computed, Launched, Tape, taping


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
    except AmbiguousError as error:
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


class Replay:
    """Makes recorded launches again. Threads take turns.

    workspace:  bytes of memory that a run needs, at a multiple of `addresses.ALIGNED`; 0 where all memory is kept.
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
        words = self._words
        calls = [ZeroCall(*x, words) if isinstance(x, PreparedZero) else KernelCall(*x, words) for x in prepared.calls]
        self._calls = [call for call in calls if not call.empty]
        self._described = [call for call in self._calls if isinstance(call, KernelCall) and call.maps]
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
