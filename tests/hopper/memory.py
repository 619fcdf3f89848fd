# SPDX-License-Identifier: MIT
"""The memory of tensors, in which no address outside them is read or written, and shared memory with its layouts."""

from __future__ import annotations

import bisect
import ctypes
import functools
import math

import numpy as np
from triton.experimental.gluon import language as gl

from tests.hopper.machine import current
from tests.hopper.values import BITS, Value, bits_of, from_bits, is_pointer, item_bytes, stored


class Memory:
    """The storages of the tensors that a kernel was given."""

    def __init__(self):
        self.storages = {}

    def add(self, tensor):
        """Lets a kernel use the storage of a tensor."""
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage
        self.starts = sorted(self.storages)

    def _elements(self, places, dtype):
        """Returns the elements of the storage in which all these addresses lie, and which of them they are."""
        size, least = item_bytes(dtype), int(places.min())
        at = bisect.bisect_right(self.starts, least) - 1
        start = self.starts[at] if at >= 0 else 0
        length = self.storages[start].nbytes() if at >= 0 else 0
        if not start <= least <= int(places.max()) <= start + length - size:
            raise IndexError(f"addresses from {least - start} to {int(places.max()) - start} of a storage of {length} bytes")
        offsets = places - start
        if (offsets % size).any():
            raise IndexError(f"an address is not a multiple of {size}")
        raw = (ctypes.c_uint8 * (length // size * size)).from_address(start)
        return np.frombuffer(raw, BITS[size]), offsets // size

    def load(self, places, dtype, mask, other):
        """Loads numbers of a type; where the mask is False they are `other`."""
        found = np.full(places.shape, 0xAB, BITS[item_bytes(dtype)]) if other is None else bits_of(other, dtype)
        found = np.array(np.broadcast_to(found, places.shape))
        if mask.any():
            elements, which = self._elements(places[mask], dtype)
            found[mask] = elements[which]
        return from_bits(found, dtype)

    def store(self, places, data, dtype, mask):
        """Stores numbers of a type where the mask is True."""
        if mask.any():
            elements, which = self._elements(places[mask], dtype)
            elements[which] = bits_of(np.broadcast_to(data, places.shape)[mask], dtype)


def _all(mask, shape):
    return np.broadcast_to(np.bool_(True) if mask is None else np.asarray(getattr(mask, "data", mask), bool), shape)


def load(pointer, mask=None, other=None, **hints):
    """Loads the numbers at addresses; those that are masked out are `other`, or arbitrary."""
    shape = np.broadcast_shapes(pointer.shape, () if mask is None else mask.shape)
    dtype = pointer.dtype.element_ty
    assert not is_pointer(dtype)
    other = None if other is None else stored(getattr(other, "data", other), dtype)
    places = np.broadcast_to(pointer.data, shape)
    return Value(current().memory.load(places, dtype, _all(mask, shape), other), dtype)


def store(pointer, value, mask=None, **hints):
    """Stores numbers at addresses."""
    dtype = pointer.dtype.element_ty
    data = stored(getattr(value, "data", value), dtype)
    current().has_stored = True
    current().memory.store(pointer.data, data, dtype, _all(mask, pointer.shape))


def atomic_add(pointer, value, mask=None, sem=None):
    """Adds to numbers in memory and returns what they were. Unless it is relaxed, other programs then see what was stored."""
    missing = sem != "relaxed" and current().has_stored
    assert not missing, "one thread says that others have stored, who may still do so: a thread barrier is missing"
    old, mask = load(pointer, mask), _all(mask, pointer.shape)
    values = np.broadcast_to(getattr(value, "data", value), pointer.shape)
    for one in filter(lambda i: mask[i], np.ndindex(pointer.shape)):
        place = Value(pointer.data[one], pointer.dtype)
        before = load(place)
        old.data[one] = before.data
        store(place, before + Value(values[one], pointer.dtype.element_ty))
    return old


@functools.lru_cache(maxsize=256)
def _swizzled(shape, width, size):
    """Returns where elements of `size` bytes lie in panels of `width` bytes, whose 16-byte chunks the row permutes."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    panel, within = column // (width // size), column % (width // size)
    chunk = 16 // size
    phase = row // (128 // width) % (width // 16)
    within = (within // chunk ^ phase) * chunk + within % chunk
    return ((panel * rows + row) * (width // size) + within).reshape(shape)


def places_of(shape, layout, size):
    """Returns where the elements of shared memory lie, counted in elements."""
    rank = layout.rank if isinstance(layout, gl.NVMMASharedLayout) else len(layout.order)
    first, tile = shape[: len(shape) - rank], shape[len(shape) - rank :]
    assert not getattr(layout, "transposed", False)
    width = getattr(layout, "swizzle_byte_width", 0)
    one = _swizzled(tile, width, size) if width else np.arange(math.prod(tile)).reshape(tile)
    count = math.prod(first)
    return (np.arange(count).reshape(*first, *[1] * rank) * math.prod(tile) + one).reshape(shape)


class Shared:
    """A view of shared memory: a buffer of bytes, and where in it the elements lie."""

    def __init__(self, buffer, dtype, places):
        self.buffer, self.dtype, self.places = buffer, dtype, places

    @classmethod
    def allocate(cls, dtype, shape, layout):
        """Allocates shared memory of the program. It holds NaN where it holds floating-point numbers."""
        places = places_of(tuple(shape), layout, item_bytes(dtype))
        buffer = Buffer(places.size * item_bytes(dtype))
        current().program.buffers.append(buffer)
        return cls(buffer, dtype, places)

    @property
    def shape(self):
        return self.places.shape

    def _view(self, places):
        return Shared(self.buffer, self.dtype, places)

    def index(self, i):
        assert 0 <= int(i) < len(self.places), f"place {int(i)} of {len(self.places)}"
        return self._view(self.places[int(i)])

    def slice(self, start, length, dim=0):
        assert 0 <= start <= start + length <= self.shape[dim]
        return self._view(self.places.take(range(start, start + length), dim))

    def reshape(self, shape):
        return self._view(self.places.reshape(shape))

    def permute(self, order):
        return self._view(self.places.transpose(order))

    def _reinterpret(self, dtype, shape, layout):
        old, new = item_bytes(self.dtype), item_bytes(dtype)
        places = places_of(tuple(shape), layout, new)
        assert places.size * new <= self.places.size * old
        start = int(self.places.min()) * old
        assert start % new == 0
        return Shared(self.buffer, dtype, places + start // new)

    @property
    def bits(self):
        return self.buffer.bytes.view(BITS[item_bytes(self.dtype)]).take(self.places)

    @property
    def data(self):
        return from_bits(self.bits, self.dtype)

    def write(self, bits):
        self.buffer.bytes.view(BITS[item_bytes(self.dtype)])[self.places] = bits

    def load(self, layout=None):
        current().has_read = True
        return Value(self.data, self.dtype)

    @property
    def marks(self):
        return self.buffer.marks.reshape(-1, item_bytes(self.dtype))[self.places]

    def mark(self, marks):
        self.buffer.marks.reshape(-1, item_bytes(self.dtype))[self.places] = marks
        self.buffer.is_marked = True

    def is_fenced(self):
        """Says whether a fence follows all that threads wrote here."""
        return not self.buffer.is_marked or not self.marks.any()

    def overlaps(self, other):
        """Says whether another view, or None, has bytes of this one."""
        if other is None or other.buffer is not self.buffer:
            return False
        mine, its = (np.arange(item_bytes(x.dtype)) + x.places[..., None] * item_bytes(x.dtype) for x in (self, other))
        apart = mine.max() < its.min() or its.max() < mine.min()
        return not apart and bool(np.intersect1d(mine, its).size)

    def store(self, value):
        assert value.shape == self.shape, f"{value.shape} is stored to {self.shape}"
        agent, bits = current(), bits_of(stored(value.data, self.dtype), self.dtype)
        unfenced = (bits != self.bits)[..., None] | (self.marks != 0)
        self.mark(np.where(unfenced, agent.number, 0))
        self.write(bits)
        agent.has_written = True


class Buffer:
    """Bytes of shared memory. `marks` says for each which group of warps wrote it without a fence since, 0 for none; where
    `is_marked` is False, none has."""

    def __init__(self, count):
        self.bytes = np.full(count, 0xFF, np.uint8)
        self.marks = np.zeros(count, np.int8)
        self.barriers, self.is_marked = {}, False

    def fence(self, number):
        """Lets the copy engine and the matrix unit see what a group of warps wrote."""
        if self.is_marked:
            self.marks[self.marks == number] = 0
            self.is_marked = bool(self.marks.any())
