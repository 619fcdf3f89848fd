# SPDX-License-Identifier: MIT
"""A `Replay` makes launches that a tape says (kinds.py) again, on other tensors of the same shapes, in little time of the host:
as one launch of a CUDA graph (launch_graph.py), or one by one.

What a launch takes are numbers and addresses. Numbers stay. Addresses are of three kinds: those of the inputs, which a replay
is given anew; those of memory that the recorded code allocated, which lies in one workspace; and those of memory that is kept,
such as a plan's counters.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from triton.runtime import driver

from openmsa.runtime.addresses import AmbiguousError, Prepared, PreparedZero, prepare
from openmsa.runtime.cuda_driver import checked
from openmsa.runtime.driver_calls import KernelCall, Words, ZeroCall
from openmsa.runtime.kinds import Tape
from openmsa.runtime.launch_graph import EVERY_WORD, LaunchGraph, form_of, graph_for


def replay_of(tape: Tape, inputs: list[Tensor], own: bool) -> Replay | str:
    """Returns the launches of a tape, or a sentence that says why no address can take the place of another."""
    try:
        return Replay(prepare(tape, inputs, own), inputs[0].get_device())
    except AmbiguousError as error:
        return str(error)


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
        self._form, self._changed = form_of(self._calls), 0
        self._graph: LaunchGraph | None = (
            None  # the last that launched; it knows the addresses of then, but for those that changed
        )

    def run(self, addresses: list[int], workspace: int = 0) -> None:
        """Launches on the current stream of the device, which need not be current itself. addresses: of the inputs, in their
        order. workspace: where it begins."""
        if self.device not in (driver.active.get_current_device(), -1):
            with torch.cuda.device(self.device):
                self.run(addresses, workspace)
            return
        stream = driver.active.get_current_stream(self.device)
        with self._lock:
            values, changed = self._words.values, self._changed
            for word, index, offset in self._inputs:
                address = addresses[index] + offset
                if values[word] != address:
                    values[word] = address
                    changed |= 1 << word
            if workspace != self._at:
                for word, offset in self._own:
                    values[word] = workspace + offset
                    changed |= 1 << word
                self._at = workspace
            self._changed = changed
            for described in self._described:
                described.describe()
            capturing = torch.cuda.is_current_stream_capturing()
            graph = None if capturing else graph_for(self.device, stream, self._form, self._calls)
            if graph is not None:
                graph.launch(self._calls, changed if graph is self._graph else EVERY_WORD)
                self._graph, self._changed = graph, 0
                return
            if stream != self._stream:
                for call in self._calls:
                    call.on(stream)
                self._stream = stream
            for number, launch_ in enumerate(self._launches):
                if status := launch_():
                    checked(status, self._calls[number].what)
