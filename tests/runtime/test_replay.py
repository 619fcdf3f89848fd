# SPDX-License-Identifier: MIT
"""Recorded launches are made again on other tensors; the driver is given what they take."""

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

from openmsa.runtime import driver_calls  # noqa: E402
from openmsa.runtime.driver_calls import Address, Descriptor, KernelCall, Words, ZeroCall  # noqa: E402
from openmsa.runtime.launch import Variant  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="launches are recorded with triton 3.6")
def test_launches_fit_other_tensors():
    """See `tests.runtime.replayed`, in a process whose kernels are not interpreted."""
    space = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runtime.replayed"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=space | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


class Driver:
    """Keeps what it is told."""

    def __init__(self, formats=(), status=0):
        self.formats, self.status, self.launches, self.zeroed, self.replaced = formats, status, [], [], []

    def cuLaunchKernelEx(self, configuration, function, parameters, extra):
        c = configuration._obj
        places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.string_at(places[i], struct.calcsize(f)) for i, f in enumerate(self.formats)]
        grid, block = (c.grid_x, c.grid_y, c.grid_z), (c.block_x, c.block_y, c.block_z)
        attributes = [(c.attributes[i].id, c.attributes[i].value) for i in range(c.num_attributes)]
        numbers = [x if f == "128s" else struct.unpack(f, x)[0] for f, x in zip(self.formats, values, strict=True)]
        self.launches.append((function.value, grid, block, c.shared, c.stream, attributes, numbers))
        return self.status

    def cuMemsetD8Async(self, *arguments):
        self.zeroed.append(arguments)
        return self.status

    def cuTensorMapReplaceAddress(self, place, address):
        assert place % 64 == 0
        ctypes.memmove(place, struct.pack("Q", address), 8)
        self.replaced.append(address)
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"too bad"
        return 0


@pytest.fixture
def driver(monkeypatch):
    """A driver that runs nothing."""
    made = Driver(("Q", "i", "q", "f", "128s", "B", "Q", "Q", "Q"))
    monkeypatch.setattr(driver_calls, "_driver", lambda: made)
    monkeypatch.setattr(driver_calls, "bytes_of_map", lambda encoded: encoded)
    return made


def variant(pdl=False, cooperative=False, num_ctas=1):
    kernel = SimpleNamespace(__name__="kernel")
    return Variant(kernel, print, 77, cooperative, pdl, (4, num_ctas, 1000), (), (), {}, ())


def test_a_launch_is_one_call_of_the_driver(driver):
    words = Words(3)
    parameters = [
        ("*fp16", Address(1)), ("i32", -5), ("i64", 1 << 40), ("fp32", 0.5), ("tensordesc", Descriptor(bytes(range(128)), 2)),
        ("u1", True), ("*i32", Address(0)),
    ]  # fmt: skip
    call = KernelCall(variant(pdl=True, cooperative=True), (3, 2), parameters, words)
    assert not call.empty
    for start in (1000, 1 << 45):
        words.values[0], words.values[1], words.values[2] = start, start + 8, start + 16
        call.configuration.stream = 9
        call()
        function, grid, block, shared, stream, attributes, values = driver.launches[-1]
        assert (function, grid, block, shared, stream) == (77, (3, 2, 1), (128, 1, 1), 1000, 9)
        assert sorted(attributes) == [(2, 1), (6, 1)]
        described = struct.pack("Q", start + 16) + bytes(range(8, 128))
        assert values == [start + 8, -5, 1 << 40, 0.5, described, 1, start, 0, 0], "no scratch memory comes last"
        call()
    assert driver.replaced == [1016, (1 << 45) + 16], "a descriptor is written where its address changes"


def test_memory_is_set_to_zero(driver):
    words = Words(1)
    words.values[0] = 4096
    call = ZeroCall(0, 12, words)
    call.configuration.stream = 5
    call()
    assert driver.zeroed == [(4096, 0, 12, 5)]
    assert ZeroCall(0, 0, words).empty


def test_no_programs_are_no_launch(driver):
    assert KernelCall(variant(), (0, 4), [], Words(0)).empty


def test_what_the_driver_refuses_is_said(driver):
    driver.status = 719
    with pytest.raises(RuntimeError, match=r"the launch of kernel failed: too bad \(CUDA driver error 719\)"):
        KernelCall(variant(), (1,), [("*fp16", Address(0))] * 3 + [("i32", 1)] * 4, Words(1))()


def test_clusters_are_not_launched_directly(driver):
    with pytest.raises(ValueError, match="without clusters to be launched directly, got 2"):
        KernelCall(variant(num_ctas=2), (1,), [], Words(0))
