# SPDX-License-Identifier: MIT
"""A launch is one call of the CUDA driver here: its configuration and its parameters lie in memory that is made once.

The driver reads a parameter that is an address from a word of an array, so that to write the word is to change the address in
every launch that takes it. A call can also be a node of a CUDA graph (launch_graph.py).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from operator import itemgetter
from typing import Any

from openmsa.runtime import cuda_driver, variants
from openmsa.runtime.addresses import Sized
from openmsa.runtime.cuda_driver import checked
from openmsa.runtime.parameters import Given
from openmsa.runtime.variants import Variant

COOPERATIVE, _SERIALIZED = 2, 6
"""These are numbers of launch attributes: all blocks run at once; a kernel may start before the one in front of it ends."""
MAP_BYTES = 128
"""A TMA descriptor takes so many bytes, at a multiple of 64."""
_CONFIGURATION = "<7I4xQQI4x"  # grid, block, shared memory, stream, attributes and their number
_ATTRIBUTE = struct.Struct("<i4xi60x")
_STREAM = 4  # the word of a configuration that holds the stream
_WORDS = struct.calcsize(_CONFIGURATION) // 8
_KERNEL_NODE = struct.Struct("<Q28s4x4Q")  # function; grid, block and shared memory as in a configuration; parameters
_ZERO_NODE = struct.Struct("<QQIIQQ")  # address, pitch, value, bytes an element, elements a row, rows


class Words:
    """Holds the addresses that launches read, one word each, in memory that never moves."""

    def __init__(self, count: int) -> None:
        self.values = array("Q", bytes(8 * count))
        self.start = self.values.buffer_info()[0]


class Frame:
    """Lays out launches of a compiled kernel in memory: a configuration, the numbers, a word that stays 0, and the place of
    each parameter. There is no scratch memory: its two places are those of the 0."""

    def __init__(self, variant: Variant) -> None:
        num_warps, num_ctas, shared = variant.metadata[:3]
        if num_ctas != 1:
            raise ValueError(f"a kernel must run without clusters to be launched directly, got {num_ctas} in one")
        parameters = variant.parameters
        self.num_numbers, self.num_tensors = parameters.num_numbers, parameters.num_tensors
        self.zero = _WORDS + parameters.num_numbers  # the word that stays 0
        count = len(parameters.order) + 2
        self.head = struct.Struct(_CONFIGURATION + parameters.formats)
        self.places = struct.Struct(f"{count}Q")
        behind = parameters.num_numbers + parameters.num_tensors + parameters.num_maps
        self.choose = itemgetter(*parameters.order, behind, behind)
        self.blank = bytes(8 * (self.zero + 1 + count))
        self.map_bytes = MAP_BYTES * (parameters.num_maps + 1) if parameters.num_maps else 0
        chosen = [_SERIALIZED] * bool(variant.pdl) + [COOPERATIVE] * bool(variant.cooperative)
        self._attributes = array("B", b"".join(_ATTRIBUTE.pack(number, 1) for number in chosen))
        self.block = (32 * num_warps, 1, 1, shared, 0, self._attributes.buffer_info()[0], len(chosen))
        self.function = ctypes.c_void_p(variant.function)
        self.what = f"the launch of {variant.kernel.__name__}"


class KernelCall:
    """This is one launch of a compiled kernel.

    given:  what the launch gives the kernel.
    at:     for each of its tensors, the word that holds its address.
    sized:  its TMA descriptors whose rows may change.
    """

    def __init__(
        self, variant: Variant, grid: tuple[int, ...], given: Given, at: list[int], sized: tuple[Sized, ...], words: Words
    ) -> None:
        frame = variant.frame
        if frame is None:
            frame = variant.frame = Frame(variant)
        self._memory = memory = array("Q", frame.blank)
        start = memory.buffer_info()[0]
        frame.head.pack_into(memory, 0, *(*grid, 1, 1)[:3], *frame.block, *given.numbers)
        first, zero = start + 8 * _WORDS, start + 8 * frame.zero
        places = [*range(first, zero, 8), *[words.start + 8 * word for word in at[: frame.num_tensors]]]
        self.maps: list[list[int]] = []  # where each descriptor lies, the word of its address, and the address in it
        if frame.map_bytes:
            self._maps = ctypes.create_string_buffer(frame.map_bytes)
            place = ctypes.addressof(self._maps) + -ctypes.addressof(self._maps) % MAP_BYTES
            for encoded, word in zip(given.maps, at[frame.num_tensors :], strict=True):
                ctypes.memmove(place, bytes_of_map(encoded), MAP_BYTES)
                self.maps.append([place, word, 0])
                places.append(place)
                place += MAP_BYTES
        places.append(zero)
        frame.places.pack_into(memory, 8 * (frame.zero + 1), *frame.choose(places))
        self.variant, self.words, self.what = variant, words, frame.what  # kept alive
        self._at, self.sized = at, sized
        self.empty = 0 in grid
        arguments = ctypes.c_void_p(start), frame.function, ctypes.c_void_p(zero + 8), None
        self.launch = functools.partial(cuda_driver.library().cuLaunchKernelEx, *arguments)
        self._parameters, self._node = zero + 8, array("B")

    @functools.cached_property
    def reads(self) -> int:
        """Bit i is set where it reads word i."""
        return sum(1 << word for word in set(self._at))

    def node(self) -> ctypes.c_void_p:
        """Returns where that lies which a node of a CUDA graph is given; the driver reads the addresses as they are then."""
        if not self._node:
            head = self._memory.tobytes()[:28]
            self._node = array("B", _KERNEL_NODE.pack(self.variant.function, head, self._parameters, 0, 0, 0))
        return ctypes.c_void_p(self._node.buffer_info()[0])

    def on(self, stream: int) -> None:
        """Sets the stream of the launches to come."""
        self._memory[_STREAM] = stream

    def resize(self, rows: int) -> int:
        """Writes TMA descriptors anew for inputs of so many rows. Bit i of the result is set where one has the address in word
        i."""
        changed = 0
        for sized in self.sized:
            map_ = self.maps[sized.map]
            map_[2] = self.words.values[sized.word]
            encoded = variants.encoded(self.variant, sized.place, sized.of(rows, map_[2]))
            ctypes.memmove(map_[0], bytes_of_map(encoded[0]), MAP_BYTES)
            self._memory[_WORDS + sized.number] = rows - sized.first
            changed |= 1 << sized.word
        return changed

    def describe(self) -> None:
        """Writes into TMA descriptors the addresses that the words hold."""
        for map_ in self.maps:
            address = self.words.values[map_[1]]
            if address != map_[2]:
                checked(cuda_driver.library().cuTensorMapReplaceAddress(map_[0], address), "cuTensorMapReplaceAddress")
                map_[2] = address


class ZeroCall:
    """Sets the memory whose address is in a word to 0. reads: as in `KernelCall`."""

    what = "cuMemsetD8Async"

    def __init__(self, word: int, size: int, words: Words) -> None:
        self.word, self.size, self.words, self._stream = word, size, words, 0
        self.reads, self.empty = 1 << word, size == 0
        self._node = array("B", bytes(_ZERO_NODE.size))
        self._memset = cuda_driver.library().cuMemsetD8Async

    def node(self) -> ctypes.c_void_p:
        """Returns where that lies which a node of a CUDA graph is given, with the address that the word holds now."""
        _ZERO_NODE.pack_into(self._node, 0, self.words.values[self.word], 0, 0, 1, self.size, 1)
        return ctypes.c_void_p(self._node.buffer_info()[0])

    def on(self, stream: int) -> None:
        """Sets the stream of the calls to come."""
        self._stream = stream

    def launch(self) -> int:
        """Returns what the driver says."""
        status: int = self._memset(self.words.values[self.word], 0, self.size, self._stream)
        return status


def bytes_of_map(encoded: Any) -> bytes:
    """Returns the bytes of a TMA descriptor of Triton 3.6, an object whose second half, at a multiple of 128, is the
    descriptor."""
    if type(encoded).__basicsize__ != 2 * MAP_BYTES or id(encoded) % MAP_BYTES:
        raise TypeError(f"a TMA descriptor must be an object of Triton 3.6, got {type(encoded).__name__}")
    return ctypes.string_at(id(encoded) + MAP_BYTES, MAP_BYTES)
