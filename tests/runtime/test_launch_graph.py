# SPDX-License-Identifier: MIT
"""Launches that follow each other are one launch of a graph, whose nodes are given the addresses that changed."""

import ctypes
import gc
import struct
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from openmsa.runtime import cuda_driver, launch_graph, replay  # noqa: E402
from openmsa.runtime.addresses import Prepared, PreparedLaunch, PreparedZero  # noqa: E402
from openmsa.runtime.parameters import Given  # noqa: E402
from openmsa.runtime.variants import Variant  # noqa: E402


def pointed(at, size):
    return ctypes.string_at(at.value, size)


class Driver:
    """Builds graphs of kernels that take an address and an int. launched: the stream of each call, and what it was given."""

    def __init__(self):
        self.launched, self.updates, self.destroyed, self.fails = [], [], [], None
        self.nodes, self.edges, self.attributes = {}, [], []

    def said(self, name):
        return 719 if self.fails == name else 0

    def kernel(self, function, grid, places):
        places = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))
        return (
            function,
            grid,
            struct.unpack("Q", ctypes.string_at(places[0], 8))[0],
            struct.unpack("i", ctypes.string_at(places[1], 4))[0],
        )

    def cuLaunchKernelEx(self, configuration, function, places, extra):
        words = struct.unpack_from("<7I4xQ", pointed(configuration, 40))
        self.launched.append((words[7], self.kernel(function.value, words[:3], places)))
        return 0

    def cuMemsetD8Async(self, address, value, size, stream):
        self.launched.append((stream, (address, value, size)))
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"too bad"
        return 0

    def cuCtxGetCurrent(self, context):
        context._obj.value = 55
        return 0

    def cuGraphCreate(self, graph, flags):
        graph._obj.value, self.nodes = 1000, {}
        return self.said("cuGraphCreate")

    def cuGraphDestroy(self, graph):
        self.destroyed.append(graph.value)

    def cuGraphExecDestroy(self, exec_):
        self.destroyed.append(exec_.value)

    def read_kernel(self, parameters):
        function, *sizes = struct.unpack("<Q7I", pointed(parameters, 36))
        places, extra, kernel, context = struct.unpack("<4Q", pointed(parameters, 72)[40:])
        assert (extra, kernel, context, sizes[3:6]) == (0, 0, 0, [128, 1, 1]), "no other way of naming a kernel is used"
        return self.kernel(function, tuple(sizes[:3]), ctypes.c_void_p(places))

    def read_zero(self, parameters, context):
        address, pitch, value, size, width, height = struct.unpack("<QQIIQQ", pointed(parameters, 40))
        assert (pitch, size, height, context.value) == (0, 1, 1, 55)
        return address, value, width

    def added(self, node, behind, count, what):
        node._obj.value = 100 + len(self.nodes)
        self.nodes[node._obj.value] = what
        self.edges.extend((behind[i], node._obj.value, "whole") for i in range(count.value))

    def cuGraphAddKernelNode_v2(self, node, graph, behind, count, parameters):
        self.added(node, behind, count, self.read_kernel(parameters))
        return self.said("cuGraphAddKernelNode")

    def cuGraphAddMemsetNode(self, node, graph, behind, count, parameters, context):
        self.added(node, behind, count, self.read_zero(parameters, context))
        return self.said("cuGraphAddMemsetNode")

    def cuGraphAddDependencies_v2(self, graph, front, behind, data, count):
        assert (data, count.value) == (bytes([1, 0, 1, 0, 0, 0, 0, 0]), 1)
        self.edges.append((front._obj.value, behind._obj.value, "early"))
        return self.said("cuGraphAddDependencies")

    def cuGraphKernelNodeSetAttribute(self, node, name, value):
        self.attributes.append((node.value, name, value[0]))
        return 0

    def cuGraphInstantiateWithFlags(self, exec_, graph, flags):
        exec_._obj.value, self.exec_ = 2000, dict(self.nodes)
        return self.said("cuGraphInstantiate")

    def cuGraphExecKernelNodeSetParams_v2(self, exec_, node, parameters):
        self.updates.append(node.value)
        self.exec_[node.value] = self.read_kernel(parameters)
        return self.said("update")

    def cuGraphExecMemsetNodeSetParams(self, exec_, node, parameters, context):
        self.updates.append(node.value)
        self.exec_[node.value] = self.read_zero(parameters, context)
        return self.said("update")

    def cuGraphLaunch(self, exec_, stream):
        assert exec_.value == 2000
        self.launched.append((stream.value or 0, "graph"))
        self.launched.extend((stream.value or 0, what) for what in self.exec_.values())
        return self.said("cuGraphLaunch")


@pytest.fixture
def driver(monkeypatch):
    """Stands for a driver that runs nothing. A graph makes calls from their second run in a row on. stream: the current one.
    capturing: whether a graph captures it."""
    made = Driver()
    made.stream, made.capturing = 3, False
    active = SimpleNamespace(get_current_stream=lambda device: made.stream, get_current_device=lambda: 0)
    monkeypatch.setattr(cuda_driver, "library", lambda: made)
    monkeypatch.setattr(launch_graph, "_graphs", {})
    monkeypatch.setattr(launch_graph, "RUNS_BEFORE", 1)
    monkeypatch.setattr(replay, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


def replayed(first=7, early=True, zeroed=64):
    """Returns a replay, and what it launches at some addresses: a kernel that reads input 0, memory that is set to 0, a kernel
    that reads it, and one that is cooperative, starts early and reads input 1. Another kernel has no programs.

    first: the number of the first kernel; the others have those that follow."""
    kernel = SimpleNamespace(__name__="kernel")
    plain, middle, last = (
        Variant(kernel, print, first + n, n == 2, early and n > 0, (4, 1, 0), (), (), {}, ("*fp16", "i32")) for n in range(3)
    )
    calls = [
        PreparedLaunch(plain, (2,), Given((), (first,), ()), [0]),
        PreparedLaunch(plain, (0,), Given((), (1,), ()), [0]),
        PreparedZero(1, zeroed),
        PreparedLaunch(middle, (3, 4), Given((), (1,), ()), [1]),
        PreparedLaunch(last, (5, 6, 7), Given((), (0,), ()), [2]),
    ]

    def given(addresses, workspace):
        return [
            (first, (2, 1, 1), addresses[0] + 32, first),
            (workspace + 512, 0, zeroed),
            (first + 1, (3, 4, 1), workspace + 512, 1),
            (first + 2, (5, 6, 7), addresses[1], 0),
        ]

    return replay.Replay(Prepared([("input", 0, 32), ("own", 512, 0), ("input", 1, 0)], calls, 1024, []), 0), given


def ran(driver, made, addresses, workspace):
    """Runs once, compares what was launched, and says whether a graph was."""
    again, given = made
    driver.launched.clear()
    driver.updates.clear()
    again.run(addresses, workspace)
    assert {stream for stream, _ in driver.launched} == {driver.stream}
    what = [what for _, what in driver.launched]
    assert [x for x in what if x != "graph"] == given(addresses, workspace)
    return "graph" in what


HERE, ALL = ([4096, 1 << 40], 1 << 20), [100, 101, 102, 103]


def test_a_graph_makes_the_launches_of_a_form(driver):
    first, second = replayed(), replayed(20, zeroed=4096)
    order = (first, first, first, second, second, second, first)
    assert [ran(driver, x, *HERE) for x in order] == [False, True, True, False, True, True, False]
    assert driver.edges == [(100, 101, "whole"), (101, 102, "whole"), (102, 103, "early")], (
        "memory is no kernel that ends early"
    )
    assert driver.attributes == [(103, 2, 1)]
    assert len(launch_graph._graphs) == 1


def test_calls_in_turns_do_not_take_a_graph_from_each_other(driver):
    first, second = replayed(), replayed(20)
    ran(driver, first, *HERE)
    for i in range(6):
        assert ran(driver, first, [i, 1], 2)
        assert driver.updates == (ALL if i == 0 else [100])
        assert not ran(driver, second, *HERE)


def test_another_form_has_its_own_graph(driver):
    first, second = replayed(), replayed(early=False)
    assert [ran(driver, x, *HERE) for x in (first, first, second, second)] == [False, True, False, True]
    assert driver.edges[3:] == [(100, 101, "whole"), (101, 102, "whole"), (102, 103, "whole")]


def test_nodes_whose_addresses_changed_are_given_them(driver):
    again = replayed()
    ran(driver, again, *HERE)
    nodes = []
    for x in (HERE, ([8192, 7], 1 << 20), ([8192, 7], 1 << 20), ([64, 7], 1 << 20), ([64, 7], 1 << 30), ([0, 0], 0)):
        assert ran(driver, again, *x)
        nodes.append(list(driver.updates))
    assert nodes == [ALL, [100, 103], [], [100], [101, 102], ALL]
    for other in (replayed(20), again):
        assert [ran(driver, other, [0, 0], 0) for _ in range(2)] == [False, True]
        assert driver.updates == ALL, "other kernels"


def test_launches_one_by_one_leave_no_node_behind(driver):
    """A graph is told later what launches that it did not make were given."""
    again = replayed()
    assert [ran(driver, again, *HERE) for _ in range(2)] == [False, True]
    driver.capturing = True
    assert not ran(driver, again, [4096, 2], 1 << 20)
    driver.capturing = False
    assert ran(driver, again, [4096, 2], 1 << 20)
    assert driver.updates == [103]


def test_each_stream_has_a_graph(driver):
    """Launches of one graph wait for each other."""
    again = replayed()
    for i in range(10):
        driver.stream = i % 2
        assert ran(driver, again, [i // 4, 2], 3) == (i > 1)
        assert driver.updates == ([] if i < 2 else ALL), "the other graph has launched in between"


def test_graphs_are_forgotten_past_some(driver, monkeypatch):
    monkeypatch.setattr(launch_graph, "MOST_GRAPHS", 3)
    again = replayed()
    for i in range(20):
        driver.stream = i // 4
        ran(driver, again, *HERE)
    assert len(launch_graph._graphs) <= 3
    gc.collect()
    assert sorted(driver.destroyed) == [1000] * 3 + [2000] * 3


def test_a_driver_without_such_graphs_launches_one_by_one(driver, monkeypatch):
    monkeypatch.delattr(Driver, "cuGraphAddDependencies_v2")
    again = replayed()
    assert not any(ran(driver, again, *HERE) for _ in range(4))


def test_few_launches_are_no_graph(driver):
    plain = Variant(SimpleNamespace(__name__="kernel"), print, 7, False, False, (4, 1, 0), (), (), {}, ("*fp16", "i32"))
    calls = [PreparedLaunch(plain, (2,), Given((), (n,), ()), [0]) for n in (8, 9)]
    again = replay.Replay(Prepared([("input", 0, 0)], calls, 0, []), 0)
    both = again, lambda addresses, _: [(7, (2, 1, 1), addresses[0], n) for n in (8, 9)]
    assert not any(ran(driver, both, [i], 0) for i in range(4))
    nothing = replay.Replay(Prepared([("input", 0, 0)], [], 0, []), 0)
    nothing.run([5])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *[(name, name) for name in ("cuGraphCreate", "cuGraphAddMemsetNode", "cuGraphAddKernelNode", "cuGraphAddDependencies")],
        *[(name, name) for name in ("cuGraphInstantiate", "cuGraphLaunch")],
        ("update", "the launch of kernel"),
    ],
)
def test_what_the_driver_refuses_is_said(name, what, driver):
    again = replayed()
    for _ in range(2 if name == "update" else 1):
        ran(driver, again, *HERE)
    driver.fails = name
    with pytest.raises(RuntimeError, match=rf"{what} failed: too bad \(CUDA driver error 719\)"):
        again[0].run([8, 9], 10)
    driver.fails = None
    assert all(ran(driver, again, *x) for x in (([8, 9], 10), HERE, HERE)), "what could not be done is done again"
