# SPDX-License-Identifier: MIT
"""A `LaunchGraph` makes several launches in one call of the CUDA driver, as a CUDA graph that is built once.

Before a launch, the nodes of the graph whose addresses changed are given their parameters anew. A launch that the GPU has not
finished keeps those that it was made with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from functools import partial

from openmsa.runtime import cuda_driver
from openmsa.runtime.cuda_driver import checked
from openmsa.runtime.driver_calls import COOPERATIVE, KernelCall, ZeroCall

_EARLY = bytes((1, 0, 1, 0, 0, 0, 0, 0))
"""Says of an edge that the kernel behind it may start before the one in front of it ends (its ports and its type)."""


def has_launch_graphs() -> bool:
    """Says whether the driver builds such graphs, as that of CUDA 12.3 and later ones do."""
    return hasattr(cuda_driver.library(), "cuGraphAddDependencies_v2")


class LaunchGraph:
    """Makes calls one after the other, on a stream that is given with each launch."""

    def __init__(self, calls: Sequence[KernelCall | ZeroCall]) -> None:
        self._driver, self._calls = cuda_driver.library(), calls
        self._graph, self._exec, self._context = c_void_p(), c_void_p(), c_void_p()
        checked(self._driver.cuCtxGetCurrent(byref(self._context)), "cuCtxGetCurrent")
        checked(self._driver.cuGraphCreate(byref(self._graph), 0), "cuGraphCreate")
        weakref.finalize(self, self._driver.cuGraphDestroy, self._graph).atexit = False  # Nodes are named while it is there.
        nodes: list[c_void_p] = []
        for i, call in enumerate(calls):
            nodes.append(self._added(call, nodes[-1:], isinstance(calls[i - 1], KernelCall)))
        checked(self._driver.cuGraphInstantiateWithFlags(byref(self._exec), self._graph, c_ulonglong(0)), "cuGraphInstantiate")
        weakref.finalize(self, self._driver.cuGraphExecDestroy, self._exec).atexit = False
        self._updates = [(call.reads, self._update(call, node), call.what) for call, node in zip(calls, nodes, strict=True)]

    def launch(self, stream: int, changed: int) -> None:
        """Launches. changed: bit i is set where word i holds another address than at the launch before."""
        if changed:
            for reads, update, what in self._updates:
                if reads & changed and (status := update()):
                    checked(status, what)
        checked(self._driver.cuGraphLaunch(self._exec, c_void_p(stream)), "cuGraphLaunch")

    def _added(self, call: KernelCall | ZeroCall, last: list[c_void_p], last_is_kernel: bool) -> c_void_p:
        """Adds a call to the graph behind the node in `last`, which is empty for the first, and returns its node."""
        early = bool(last) and last_is_kernel and isinstance(call, KernelCall) and call.variant.pdl
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

    def _update(self, call: KernelCall | ZeroCall, node: c_void_p) -> Callable[[], int]:
        """Returns what gives a node its parameters anew, and returns what the driver says."""
        if isinstance(call, KernelCall):
            return partial(self._driver.cuGraphExecKernelNodeSetParams_v2, self._exec, node, call.node())
        set_, exec_, context = self._driver.cuGraphExecMemsetNodeSetParams, self._exec, self._context
        return lambda: set_(exec_, node, call.node(), context)
