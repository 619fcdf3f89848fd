# SPDX-License-Identifier: MIT
"""Recorded launches are made again on other tensors; the driver is given what they take."""

import ctypes
import struct
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from openmsa.runtime import cuda_driver, driver_calls, replay, variants  # noqa: E402
from openmsa.runtime.addresses import Prepared, PreparedLaunch, PreparedZero, Sized  # noqa: E402
from openmsa.runtime.driver_calls import KernelCall, Words, ZeroCall  # noqa: E402
from openmsa.runtime.memory import Memory  # noqa: E402
from openmsa.runtime.parameters import Given, rank_of  # noqa: E402
from openmsa.runtime.variants import Variant  # noqa: E402
from tests.runtime.uninterpreted import passes  # noqa: E402


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="launches are recorded with triton 3.6")
def test_launches_fit_other_tensors():
    """See `tests.runtime.replayed`, in a process whose kernels are not interpreted."""
    passes("tests.runtime.replayed")


class Driver:
    """Keeps what it is told."""

    def __init__(self, formats=()):
        self.formats, self.launches, self.zeroed, self.replaced = formats, [], [], []

    def cuLaunchKernelEx(self, configuration, function, parameters, extra):
        words = struct.unpack_from("<7I4xQQI", ctypes.string_at(configuration.value, 56))
        grid, block, (shared, stream, attributes, count) = words[:3], words[3:6], words[6:]
        places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.string_at(places[i], struct.calcsize(f)) for i, f in enumerate(self.formats)]
        chosen = [struct.unpack_from("<i4xi", ctypes.string_at(attributes + 72 * i, 72)) for i in range(count)]
        numbers = [x if f == "128s" else struct.unpack(f, x)[0] for f, x in zip(self.formats, values, strict=True)]
        self.launches.append((function.value, grid, block, shared, stream, chosen, numbers))
        return 0

    def cuMemsetD8Async(self, *arguments):
        self.zeroed.append(arguments)
        return 0

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
    """Stands for a driver that runs nothing."""
    made = Driver(("Q", "i", "q", "f", "128s", "i", "i", "q", "q", "B", "Q", "Q", "Q"))
    monkeypatch.setattr(cuda_driver, "library", lambda: made)
    monkeypatch.setattr(driver_calls, "bytes_of_map", lambda encoded: encoded)
    return made


SIGNATURE_OF_TWO = ("*fp16", "tensordesc<bf16[1, 64]>")
SIGNATURE = ("*fp16", ("i32", "constexpr", ("i64",)), "fp32", "tensordesc<bf16[1, 64]>", "u1", "*i32")


def variant(pdl=False, cooperative=False, num_ctas=1, signature=SIGNATURE):
    kernel = SimpleNamespace(__name__="kernel")
    return Variant(kernel, print, 77, cooperative, pdl, (4, num_ctas, 1000), (), ((3, None),), {}, signature)


def test_a_launch_is_one_call_of_the_driver(driver):
    words = Words(3)
    given = Given((), (-5, 1 << 40, 0.5, 6, 64, 1 << 36, 1, True), (bytes(range(128)),))
    call = KernelCall(variant(pdl=True, cooperative=True), (3, 2), given, [1, 0, 2], (), words)
    assert not call.empty
    for start in (1000, 1 << 45):
        words.values[0], words.values[1], words.values[2] = start, start + 8, start + 16
        call.on(9)
        call.describe()
        assert call.launch() == 0
        function, grid, block, shared, stream, attributes, values = driver.launches[-1]
        assert (function, grid, block, shared, stream) == (77, (3, 2, 1), (128, 1, 1), 1000, 9)
        assert sorted(attributes) == [(2, 1), (6, 1)]
        described = struct.pack("Q", start + 16) + bytes(range(8, 128))
        expected = [start + 8, -5, 1 << 40, 0.5, described, 6, 64, 1 << 36, 1, 1, start, 0, 0]
        assert values == expected, "no scratch memory comes last"
        call.describe()
    assert driver.replaced == [1016, (1 << 45) + 16], "a descriptor is written where its address changes"


def test_what_a_launch_gives_is_read_from_its_arguments():
    """Tensors, numbers and TMA descriptors come in the order of their sorts; `order` brings them into that of parameters."""
    x, y, base = (object() for _ in range(3))
    arguments = (x, (-5, None, (1 << 40,)), 0.5, SimpleNamespace(base=base), True, y)
    parameters = variant().parameters
    given = parameters.given(arguments, lambda place, descriptor: ["map", 6, 64, 1 << 36, 1])
    assert given == ((x, y, base), (-5, 1 << 40, 0.5, 6, 64, 1 << 36, 1, True), ("map",))
    every = [*given.numbers, *given.tensors]
    assert [every[i] for i in parameters.order] == [x, -5, 1 << 40, 0.5, base, 6, 64, 1 << 36, 1, True, y]
    assert parameters.formats == "qqf4xqqqqQ"
    with pytest.raises(TypeError, match="must be an address, an integer or a float of Triton, got bf16"):
        _ = variant(signature=("bf16",)).parameters
    assert [rank_of(f"tensordesc<fp16{shape},layout[1, 2]>") for shape in ("[16]", "[1, 1, 64, 128]")] == [1, 4]


@pytest.mark.parametrize(("kind", "number"), [("u64", 2**64 - 1), ("i64", -(2**63)), ("i32", -1), ("u1", True), ("i1", False)])
def test_numbers_are_packed_into_words(kind, number, driver):
    parameters = Variant(None, print, 0, False, False, (), (), (), {}, (kind,)).parameters
    packed = struct.pack("<" + parameters.formats, *parameters.given((number,), None).numbers)
    assert int.from_bytes(packed, "little") == number & (2**64 - 1)


def test_memory_is_set_to_zero(driver):
    words = Words(1)
    words.values[0] = 4096
    call = ZeroCall(0, 12, words)
    call.on(5)
    assert call.launch() == 0
    assert driver.zeroed == [(4096, 0, 12, 5)]
    assert ZeroCall(0, 0, words).empty


def test_no_programs_are_no_launch(driver):
    plain = Variant(SimpleNamespace(__name__="kernel"), print, 77, False, False, (4, 1, 0), (), (), {}, ())
    assert KernelCall(plain, (0, 4), Given((), (), ()), [], (), Words(0)).empty


def replayed(monkeypatch, streams=(3,), current=lambda: 0):
    """Returns a replay of one launch of ``("*fp16", "i32")`` on its only input, and of memory that is set to 0 first."""
    stream = iter(streams)
    active = SimpleNamespace(get_current_stream=lambda device: next(stream), get_current_device=current)
    monkeypatch.setattr(replay, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = SimpleNamespace(__name__="kernel")
    taking = Variant(kernel, print, 77, False, False, (4, 1, 0), (), (), {}, ("*fp16", "i32"))
    calls = [PreparedZero(1, 64), PreparedLaunch(taking, (5,), Given((), (7,), ()), [0])]
    return replay.Replay(Prepared([("input", 0, 32), ("own", 512, 0)], calls, 1024, []), 0)


def test_a_replay_launches_on_the_current_stream(driver, monkeypatch):
    driver.formats = ("Q", "i", "Q", "Q")
    again = replayed(monkeypatch, (3, 3, 4))
    for start, workspace in ((4096, 1 << 20), (8192, 1 << 20), (8192, 1 << 21)):
        again.run([start], workspace)
    assert [(x[4], x[6][0]) for x in driver.launches] == [(3, 4128), (3, 8224), (4, 8224)]
    assert driver.zeroed == [((1 << 20) + 512, 0, 64, 3)] * 2 + [((1 << 21) + 512, 0, 64, 4)]


def test_descriptors_end_where_the_rows_of_a_run_do(driver, monkeypatch):
    """A descriptor of an input by row, and its number of rows among the parameters, are written anew where it has others."""
    made = []

    def encoded(variant, place, descriptor):
        made.append((place, descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides, descriptor.padding))
        return [bytes([descriptor.shape[0]]) * 128]

    monkeypatch.setattr(variants, "encoded", encoded)
    driver.formats = ("Q", "128s", "i", "i", "q", "q", "Q", "Q")
    active = SimpleNamespace(get_current_stream=lambda device: 3, get_current_device=lambda: 0)
    monkeypatch.setattr(replay, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    of = Variant(SimpleNamespace(__name__="kernel"), print, 77, False, False, (4, 1, 0), (), ((1, None),), {}, SIGNATURE_OF_TWO)
    assert (of.parameters.map_places, of.parameters.map_numbers) == ([1], [0])
    sized = Sized(0, 1, 1, 0, 10, 0, (30, 64), (64, 1), "zero")
    launch = PreparedLaunch(of, (5,), Given((), (30, 64, 64, 1), (bytes(128),)), [0, 1], (sized,))
    again = replay.Replay(Prepared([("input", 0, 0), ("input", 1, 1280)], [launch], 0, [], 40), 0)
    for rows, start in ((40, 4096), (40, 8192), (17, 4096), (17, 8192), (40, 8192)):
        again.run([start, start + 64], 0, rows)
    taken = [(x[6][0], x[6][1], x[6][2:6]) for x in driver.launches]
    at = [struct.pack("Q", start + 64 + 1280) for start in (4096, 8192, 4096, 8192, 8192)]
    bodies = (bytes(120), bytes(120), bytes([7]) * 128, at[3] + bytes([7]) * 120, bytes([30]) * 128)
    described = [at[0] + bodies[0], at[1] + bodies[1], *bodies[2:]]
    sizes = [[rows - 10, 64, 64, 1] for rows in (40, 40, 17, 17, 40)]
    assert taken == list(zip((4096, 8192, 4096, 8192, 8192), described, sizes, strict=True))
    assert made == [(1, 4096 + 1344, 7, 64, 64, 1, "zero"), (1, 8192 + 1344, 30, 64, 64, 1, "zero")]
    assert driver.replaced == [4096 + 1344, 8192 + 1344, 8192 + 1344], "addresses alone are replaced in place"


def test_a_replay_makes_its_device_current(driver, monkeypatch):
    current = [1]

    @contextmanager
    def device(number):
        before, current[0] = current[0], number
        yield
        current[0] = before

    def zeroed(*arguments):
        seen.append(current[0])
        return 0

    seen = []
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(driver, "cuMemsetD8Async", zeroed)
    driver.formats = ("Q", "i", "Q", "Q")
    replayed(monkeypatch, current=lambda: current[0]).run([4096], 1 << 20)
    assert (len(driver.launches), seen, current) == (1, [0], [1])


@pytest.mark.parametrize(
    ("name", "what"), [("cuLaunchKernelEx", "the launch of kernel"), ("cuMemsetD8Async", "cuMemsetD8Async")]
)
def test_what_the_driver_refuses_is_said(name, what, driver, monkeypatch):
    monkeypatch.setattr(driver, name, lambda *arguments: 719)
    with pytest.raises(RuntimeError, match=rf"{what} failed: too bad \(CUDA driver error 719\)"):
        replayed(monkeypatch).run([4096], 1 << 20)


def test_clusters_are_not_launched_directly(driver):
    with pytest.raises(ValueError, match="without clusters to be launched directly, got 2"):
        KernelCall(variant(num_ctas=2), (1,), Given((), (), ()), [], (), Words(0))


def test_memory_that_a_graph_has_captured_is_kept(monkeypatch):
    """Other memory is dropped where it is too small."""
    made, capturing = [], [False]
    empty = torch.empty

    def on_host(size, dtype, device):
        made.append(weakref.ref(memory := empty(size, dtype=dtype)))
        return memory

    monkeypatch.setattr(torch, "empty", on_host)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    memory = Memory()
    assert memory.at(0, 0) == 0
    first = memory.at(100, 0)
    assert memory.at(90, 0) == first
    second = memory.at(200, 0)
    assert [x() is None for x in made] == [True, False]
    capturing[0] = True
    assert memory.at(200, 0) == second
    capturing[0] = False
    memory.at(300, 0)
    assert [x() is None for x in made] == [True, False, False]
    memory.at(400, 0)
    assert [x() is None for x in made] == [True, False, True, False]
