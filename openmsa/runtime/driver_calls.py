# SPDX-License-Identifier: MIT
"""A launch is one call of the CUDA driver here: its configuration and its parameters lie in memory that is made once.

The driver's C interface (`cuLaunchKernelEx`, `cuMemsetD8Async`, `cuTensorMapReplaceAddress`) is called through ctypes. The
driver reads a parameter that is an address from a word of an array, so that to write the word is to change the address in every
launch that takes it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from typing import Any, NamedTuple

from openmsa.runtime.launch import Variant

_COOPERATIVE, _SERIALIZED = 2, 6  # numbers of launch attributes
_FLOATS = {"fp32": "<f", "f32": "<f", "fp64": "<d", "f64": "<d"}
_INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
MAP_BYTES = 128
"""A TMA descriptor takes so many bytes, at a multiple of 64."""


class Address(NamedTuple):
    """The word of this number holds the parameter."""

    word: int


class Descriptor(NamedTuple):
    """A TMA descriptor as Triton's launcher takes it, for memory whose address is in the word of this number."""

    encoded: Any
    word: int


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Configuration(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemsetD8Async.argtypes = (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    driver.cuTensorMapReplaceAddress.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    return driver


def _checked(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown error').decode()} (CUDA driver error {status})")


class Words:
    """Addresses that launches read, one word each. They never move."""

    def __init__(self, count: int) -> None:
        self.values = array("Q", bytes(8 * count))
        self.start = self.values.buffer_info()[0]


class KernelCall:
    """One launch of a compiled kernel. parameters: numbers, `Address` and `Descriptor`, with Triton's type of each."""

    def __init__(self, variant: Variant, grid: tuple[int, ...], parameters: list[tuple[str, Any]], words: Words) -> None:
        num_warps, num_ctas, shared = variant.metadata[:3]
        if num_ctas != 1:
            raise ValueError(f"a kernel must run without clusters to be launched directly, got {num_ctas} in one")
        self.variant, self.words = variant, words  # kept alive
        maps = [x for _, x in parameters if isinstance(x, Descriptor)]
        self._numbers = array("Q", bytes(8 * (len(parameters) + 1)))  # the last one stays 0: there is no scratch memory
        self._maps = ctypes.create_string_buffer(MAP_BYTES * (len(maps) + 1)) if maps else None
        next_map = 0 if self._maps is None else ctypes.addressof(self._maps) + -ctypes.addressof(self._maps) % MAP_BYTES
        self.maps: list[list[int]] = []  # of each descriptor where it lies, the word of its address, and the address it has
        numbers, start = self._numbers, self._numbers.buffer_info()[0]
        places = array("Q", [start + 8 * len(parameters)] * (len(parameters) + 2))
        for i, (kind, x) in enumerate(parameters):
            if isinstance(x, Address):
                places[i] = words.start + 8 * x.word
            elif isinstance(x, Descriptor):
                ctypes.memmove(next_map, bytes_of_map(x.encoded), MAP_BYTES)
                self.maps.append([next_map, x.word, 0])
                places[i] = next_map
                next_map += MAP_BYTES
            else:
                numbers[i] = bits(kind, x)
                places[i] = start + 8 * i
        self._places = places
        chosen = [_SERIALIZED] * bool(variant.pdl) + [_COOPERATIVE] * bool(variant.cooperative)
        self._attributes = (_Attribute * 2)(*(_Attribute(id=number, value=1) for number in chosen))
        grid = (*grid, 1, 1)[:3]
        self.configuration = _Configuration(*grid, 32 * num_warps, 1, 1, shared, None, self._attributes, len(chosen))
        self.empty = 0 in grid
        self._arguments = (
            ctypes.byref(self.configuration),
            ctypes.c_void_p(variant.function),
            ctypes.c_void_p(places.buffer_info()[0]),
            ctypes.c_void_p(None),
        )
        self._launch = _driver().cuLaunchKernelEx

    def __call__(self) -> None:
        """Launches on the stream of `configuration` with the addresses that the words hold."""
        for map_ in self.maps:
            address = self.words.values[map_[1]]
            if address != map_[2]:
                _checked(_driver().cuTensorMapReplaceAddress(map_[0], address), "cuTensorMapReplaceAddress")
                map_[2] = address
        status = self._launch(*self._arguments)
        if status:
            _checked(status, f"the launch of {self.variant.kernel.__name__}")


class ZeroCall:
    """Sets the memory whose address is in a word to 0."""

    def __init__(self, word: int, size: int, words: Words) -> None:
        self.word, self.size, self.words = word, size, words
        self.configuration = _Configuration()
        self.empty = size == 0
        self._memset = _driver().cuMemsetD8Async

    def __call__(self) -> None:
        status = self._memset(self.words.values[self.word], 0, self.size, self.configuration.stream)
        if status:
            _checked(status, "cuMemsetD8Async")


def bits(kind: str, number: float) -> int:
    """Returns a number of Triton's type `kind` as the low bytes of a word of 64 bits."""
    if kind in _FLOATS:
        return int.from_bytes(struct.pack(_FLOATS[kind], number), "little")
    if kind not in _INTEGERS:
        raise TypeError(f"a parameter must be an integer or a float of Triton, got {kind}")
    return int(number) & 0xFFFFFFFFFFFFFFFF


def bytes_of_map(encoded: Any) -> bytes:
    """Returns the bytes of a TMA descriptor of Triton 3.6, an object whose second half, at a multiple of 128, is the
    descriptor."""
    if type(encoded).__basicsize__ != 2 * MAP_BYTES or id(encoded) % MAP_BYTES:
        raise TypeError(f"a TMA descriptor must be an object of Triton 3.6, got {type(encoded).__name__}")
    return ctypes.string_at(id(encoded) + MAP_BYTES, MAP_BYTES)
