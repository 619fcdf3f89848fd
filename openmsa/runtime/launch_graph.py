# SPDX-License-Identifier: MIT
"""A `LaunchGraph` makes several launches in one call of the CUDA driver, as a CUDA graph.

Its nodes are given other kernels, sizes and addresses before a launch; a launch that the GPU has not finished keeps those that
it was made with. So one graph serves all launches of one form on a stream: as many, with memory that is set to 0 and kernels
that start early at the same places. To build one takes the host some 0.7 ms, and some 230 KiB of the GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from functools import partial

from openmsa.runtime import cuda_driver
from openmsa.runtime.cuda_driver import checked
from openmsa.runtime.driver_calls import COOPERATIVE, KernelCall, ZeroCall

Calls = Sequence[KernelCall | ZeroCall]

FEWEST_CALLS = 3
"""Fewer calls than these take the host longer as a graph than one by one."""
RUNS_BEFORE = 2
"""A graph is built, and given other calls of its form, after so many runs of them in a row, so that calls in turns do not take
it from each other. Other kernels take the host longer than other addresses: 50 to 110 us."""
EVERY_WORD = -1
MOST_GRAPHS = 64
"""So many graphs are kept at a time; past that all are forgotten, and built again."""
_EARLY = bytes((1, 0, 1, 0, 0, 0, 0, 0))
"""Says of an edge that the kernel behind it may start before the one in front of it ends (its ports and its type)."""

_graphs: dict[tuple[int, int, bytes], Wanted] = {}


def form_of(calls: Calls) -> bytes:
    """Returns what a graph of these calls cannot change, a byte each: 1 for memory that is set to 0; for a kernel the sum of 2
    where it starts before the one in front of it ends and 4 where it is cooperative."""
    form = []
    for i, call in enumerate(calls):
        if isinstance(call, ZeroCall):
            form.append(1)
        else:
            early = call.variant.pdl and i > 0 and isinstance(calls[i - 1], KernelCall)
            form.append(2 * early + 4 * call.variant.cooperative)
    return bytes(form)


def graph_for(device: int, stream: int, form: bytes, calls: Calls) -> LaunchGraph | None:
    """Returns the graph that makes calls of a form on a stream; None where they are made one by one, since they are few, others
    of the form ran there lately, or the driver is older than that of CUDA 12.3."""
    if len(calls) < FEWEST_CALLS or not hasattr(cuda_driver.library(), "cuGraphAddDependencies_v2"):
        return None
    key = device, stream, form
    wanted = _graphs.get(key)
    if wanted is None:
        if len(_graphs) >= MOST_GRAPHS:
            _graphs.clear()
        wanted = _graphs[key] = Wanted()
    if calls is not wanted.calls:
        wanted.calls, wanted.runs = calls, 0
    graph = wanted.graph
    if graph is not None and graph.calls is calls:
        return graph
    wanted.runs += 1
    if wanted.runs <= RUNS_BEFORE:
        return None
    if graph is None:
        graph = wanted.graph = LaunchGraph(form, calls, stream)
    return graph


class Wanted:
    """Says which calls of a form ran last on a stream, how often in a row without the graph, and holds the graph, if it is
    built."""

    def __init__(self) -> None:
        self.calls: Calls | None = None
        self.runs = 0
        self.graph: LaunchGraph | None = None


class LaunchGraph:
    """Makes calls one after the other on a stream. calls: what its nodes were given last."""

    def __init__(self, form: bytes, calls: Calls, stream: int) -> None:
        self._driver, self._stream, self._lock = cuda_driver.library(), c_void_p(stream), threading.Lock()
        self._graph, self._exec, self._context = c_void_p(), c_void_p(), c_void_p()
        checked(self._driver.cuCtxGetCurrent(byref(self._context)), "cuCtxGetCurrent")
        checked(self._driver.cuGraphCreate(byref(self._graph), 0), "cuGraphCreate")
        weakref.finalize(self, self._driver.cuGraphDestroy, self._graph).atexit = False  # Nodes are named while it is there.
        self._nodes: list[c_void_p] = []
        for call, kind in zip(calls, form, strict=True):
            self._nodes.append(self._added(call, self._nodes[-1:], bool(kind & 2)))
        checked(self._driver.cuGraphInstantiateWithFlags(byref(self._exec), self._graph, c_ulonglong(0)), "cuGraphInstantiate")
        weakref.finalize(self, self._driver.cuGraphExecDestroy, self._exec).atexit = False
        self.calls: Calls | None = None
        self._updates: list[tuple[int, Callable[[], int], str]] = []

    def launch(self, calls: Calls, changed: int) -> None:
        """Launches calls of the graph's form. changed: bit i is set where word i of these calls holds another address than when
        they were last launched here."""
        with self._lock:
            if calls is not self.calls:
                self._take(calls)
            elif changed:
                for reads, update, what in self._updates:
                    if reads & changed and (status := update()):
                        self.calls = None
                        checked(status, what)
            checked(self._driver.cuGraphLaunch(self._exec, self._stream), "cuGraphLaunch")

    def _take(self, calls: Calls) -> None:
        """Gives the nodes these calls."""
        self.calls = None
        self._updates = [
            (call.reads, self._update(call, node), call.what) for call, node in zip(calls, self._nodes, strict=True)
        ]
        for _, update, what in self._updates:
            checked(update(), what)
        self.calls = calls

    def _update(self, call: KernelCall | ZeroCall, node: c_void_p) -> Callable[[], int]:
        """Returns what gives a node its parameters anew, and returns what the driver says."""
        if isinstance(call, KernelCall):
            return partial(self._driver.cuGraphExecKernelNodeSetParams_v2, self._exec, node, call.node())
        return lambda: self._driver.cuGraphExecMemsetNodeSetParams(self._exec, node, call.node(), self._context)

    def _added(self, call: KernelCall | ZeroCall, last: list[c_void_p], early: bool) -> c_void_p:
        """Adds a call to the graph behind the node in `last`, which is empty for the first, and returns its node."""
        node, behind = c_void_p(), [] if early else last
        given = byref(node), self._graph, (c_void_p * len(behind))(*behind), c_size_t(len(behind)), call.node()
        if isinstance(call, ZeroCall):
            checked(self._driver.cuGraphAddMemsetNode(*given, self._context), "cuGraphAddMemsetNode")
            return node
        checked(self._driver.cuGraphAddKernelNode_v2(*given), "cuGraphAddKernelNode")
        if early:
            edge = byref(last[0]), byref(node), _EARLY, c_size_t(1)
            checked(self._driver.cuGraphAddDependencies_v2(self._graph, *edge), "cuGraphAddDependencies")
        if call.variant.cooperative:
            value = (c_int * 16)(1)
            checked(self._driver.cuGraphKernelNodeSetAttribute(node, COOPERATIVE, value), "cuGraphKernelNodeSetAttribute")
        return node
