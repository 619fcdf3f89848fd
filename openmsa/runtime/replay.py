# SPDX-License-Identifier: MIT
"""A `Replay` makes launches that tapes say (kinds.py) again, on other tensors of like shapes, in little time of the host: as
one launch of a CUDA graph (launch_graph.py), or one by one.

What a launch takes are numbers and addresses. Numbers stay, but for the rows of tensors that TMA descriptors describe where
these may differ from run to run. Addresses are of three kinds: those of the inputs, which a replay is given anew; those of
memory that the recorded code allocated, which lies in one workspace; and those of memory that is kept, such as a plan's
counters.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from openmsa.runtime import variants
from openmsa.runtime.addresses import AmbiguousError, Places, Prepared, PreparedLaunch, PreparedZero, Sized
from openmsa.runtime.cuda_driver import checked
from openmsa.runtime.driver_calls import KernelCall, Words, ZeroCall
from openmsa.runtime.kinds import Launched, Zeroed
from openmsa.runtime.launch_graph import EVERY_WORD, LaunchGraph, form_of, graph_for
from openmsa.runtime.parameters import Given


class Preparation:
    """Finds what each address of some tapes belongs to, one tape after the other, which may use the same workspace.

    inputs:  tensors whose addresses differ from run to run.
    own, rows, by_row:  as in `openmsa.runtime.kinds.record`.
    """

    def __init__(self, inputs: list[Tensor], own: bool, rows: int = 0, by_row: int = 0) -> None:
        self._places, self._rows, self._by_row = Places(inputs, own), rows, by_row
        self._calls: list[PreparedLaunch | PreparedZero] = []
        self._workspace = 0

    def add(self, tape: list[Any]) -> str | None:
        """Adds what a tape says. Returns why no address can take the place of another, a sentence, or None."""
        places = self._places
        places.forget_own()
        try:
            self._calls.extend(map(self._prepared, tape))
        except AmbiguousError as error:
            return str(error)
        self._workspace = max(self._workspace, places.size)
        return None

    def _prepared(self, event: Launched | Zeroed) -> PreparedLaunch | PreparedZero:
        word = self._places.word
        if isinstance(event, Zeroed):
            return PreparedZero(word(event.memory), event.memory.numel() * event.memory.element_size())
        given = event.variant.parameters.given(event.arguments, partial(variants.encoded, event.variant))
        words = [word(x) for x in given.tensors]
        without = given._replace(tensors=())  # Their memory is free for later steps.
        return PreparedLaunch(event.variant, event.grid, without, words, self._sized(event, given, words))

    def _sized(self, event: Launched, given: Given, words: list[int]) -> tuple[Sized, ...]:
        """Finds the descriptors that end where an input by row does."""
        parameters, found = event.variant.parameters, []
        for i, place in enumerate(parameters.map_places):
            word = words[parameters.num_tensors + i]
            kind, at, offset = self._places.words[word]
            if kind == "input" and at < self._by_row:
                x, descriptor = self._places.inputs[at], event.arguments[place]
                shape, first = tuple(descriptor.shape), offset // max(x.stride(0) * x.itemsize, 1)
                dim = len(shape) - x.dim()
                if dim < 0 or shape[dim + 1 :] != x.shape[1:]:
                    raise AmbiguousError(f"a TMA descriptor of queries has sizes {shape}, and they have {tuple(x.shape)}")
                if first + shape[dim] == self._rows:
                    sizes = shape, tuple(descriptor.strides), descriptor.padding
                    found.append(Sized(i, place, word, dim, first, parameters.map_numbers[i] + dim, *sizes))
        return tuple(found)

    def made(self) -> Prepared:
        """Returns all of them in numbers and addresses."""
        return Prepared(self._places.words, self._calls, self._workspace, [*self._places.kept.values()], self._rows)

    def replay(self, device: int) -> Replay:
        """Returns what makes them again."""
        return Replay(self.made(), device)


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
        self._rows, self._sized = prepared.rows, [x for x in self._calls if isinstance(x, KernelCall) and x.sized]
        self._described = [call for call in self._calls if isinstance(call, KernelCall) and call.maps]
        self._launches = [call.launch for call in self._calls]
        self._lock = threading.Lock()
        self._at = self._stream = -1
        self._form, self._changed = form_of(self._calls), 0
        self._graph: LaunchGraph | None = None  # The last that launched knows all addresses but those that changed since.

    def run(self, addresses: list[int], workspace: int = 0, rows: int = 0) -> None:
        """Launches on the current stream of the device, which need not be current itself. addresses: of the inputs, in their
        order. workspace: where it begins. rows: of those by row."""
        if self.device not in (driver.active.get_current_device(), -1):
            with torch.cuda.device(self.device):
                self.run(addresses, workspace, rows)
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
            if rows != self._rows:
                for sized in self._sized:
                    changed |= sized.resize(rows)
                self._rows = rows
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
