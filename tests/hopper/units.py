# SPDX-License-Identifier: MIT
"""What goes on beside the threads: barriers, the copy engine, asynchronous copies and the matrix unit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from triton.experimental.gluon import language as gl

from tests.hopper.machine import Barrier, current
from tests.hopper.memory import Shared
from tests.hopper.values import Value, bits_of, item_bytes, stored, value_of


def warp_specialize(parts, num_warps, registers):
    """Runs groups of warps, the first of them this one, until all are done."""
    agent = current()
    assert len(parts) == len(num_warps) + 1 == len(registers) + 1
    machine, own = agent.machine, parts[0]
    others = [machine.add(agent.program, lambda part=part: part[0](*part[1])) for part in parts[1:]]
    own[0](*own[1])
    agent.pause(lambda: all(x.is_done for x in others), "waits for the end of others")


def thread_barrier():
    """Lets the threads of the group wait for each other."""
    agent = current()
    agent.has_read = agent.has_written = agent.has_multiplied = agent.has_stored = False


def fence_async_shared():
    """Lets the copy engine and the matrix unit see what the group's threads wrote."""
    agent = current()
    for buffer in agent.program.buffers:
        buffer.fence(agent.number)


def barrier_at(place):
    """Returns the barrier of a place in shared memory."""
    assert place.places.size == 1
    return place.buffer.barriers[int(place.places.reshape(()))]


def init(place, count):
    assert place.places.size == 1
    place.buffer.barriers[int(place.places.reshape(()))] = Barrier(count)


def _speak_for_others(read=True):
    """Lets one thread say what all threads of the group have done."""
    agent = current()
    missing = agent.has_written or (read and agent.has_read)
    assert not missing, "one thread goes on for others that may still read or write: a thread barrier is missing"


def expect(place, count, pred=True):
    if pred:
        _speak_for_others(read=False)
        barrier_at(place).expect(int(count))
        current().pause()


def arrive(place, count=1, pred=True):
    if pred:
        _speak_for_others()
        barrier_at(place).arrive(int(count))
        current().pause()


def wait(place, phase, pred=True):
    if pred:
        barrier, parity = barrier_at(place), int(phase)
        assert parity in (0, 1)
        current().pause(lambda: barrier.has_passed(parity), f"waits for parity {parity} of a barrier in phase {barrier.phase}")


class Boxes:
    """A descriptor of the copy engine."""

    def __init__(self, given, memory, dtype):
        self.dtype, self.layout, self.box = dtype, given.layout, list(given.block_shape)
        self.memory, self.start, self.shape, self.strides = memory, given.base.data_ptr(), given.shape, given.strides
        self.block_type = SimpleNamespace(nbytes=int(np.prod(self.box)) * item_bytes(dtype))

    def bits(self, corner):
        """Returns the bits of a box, 0 outside of the tensor."""
        places, inside = np.int64(self.start), np.bool_(True)
        for at, count, size, stride in zip(corner, self.box, self.shape, self.strides, strict=True):
            index = at + np.arange(count, dtype=np.int64)
            places = places[..., None] + index * stride * item_bytes(self.dtype)
            inside = inside[..., None] & (index >= 0) & (index < size)
        found = self.memory.load(places, self.dtype, inside, stored(0, self.dtype))
        return bits_of(found, self.dtype)


def copy_box(boxes, corner, barrier, result, pred=True):
    """Lets the copy engine bring a box to shared memory and tell a barrier."""
    if not pred:
        return
    _speak_for_others()
    corner, barrier, agent = [int(value_of(x)) for x in corner], barrier_at(barrier), current()
    assert result.shape == tuple(boxes.box)
    assert result.dtype == boxes.dtype

    def arrives():
        result.write(boxes.bits(corner))
        if result.buffer.is_marked:
            result.mark(0)
        barrier.receive(boxes.block_type.nbytes)

    agent.machine.copies.append(arrives)
    agent.pause()


def copy_elements(shared, pointer, mask=None):
    """Starts to copy elements to shared memory, which arrive at any time until they are waited for; those that are masked out
    become 0."""
    agent = current()
    assert not agent.has_multiplied, (
        "a copy overwrites what products of other warps may still read: a thread barrier is missing"
    )

    for other in agent.machine.copies:
        assert not shared.overlaps(getattr(other, "target", None)), "two copies on their way write the same place"

    def arrives():
        dtype = pointer.dtype.element_ty
        used = np.broadcast_to(np.bool_(True) if mask is None else value_of(mask).data, pointer.shape)
        found = agent.memory.load(pointer.data, dtype, used, stored(0, dtype))
        shared.write(bits_of(found, dtype))

    arrives.target = shared
    agent.copies[-1].append(arrives)
    agent.machine.copies.append(arrives)


def commit_group():
    current().copies.append([])


def wait_group(count=0):
    """Waits until so many groups of copies are left."""
    agent = current()
    while len(agent.copies) > count + 1:
        for arrives in agent.copies.pop(0):
            if arrives in agent.machine.copies:
                agent.machine.copies.remove(arrives)
                arrives()
    agent.has_written = True


class Product(Value):
    """A product that the matrix unit makes, whose data nobody may use before it is waited for."""

    def __init__(self, left, right, old):
        self.factors, self.old, self._data, self.dtype = (left, right), old, None, gl.float32
        for factor in self._shared():
            assert factor.is_fenced(), "a product reads what was written without a fence"
        self.before = [factor.bits for factor in self._shared()]
        self._shape = (left.shape[0], right.shape[1])

    def _shared(self):
        return [x for x in self.factors if isinstance(x, Shared)]

    def finish(self):
        for factor, before in zip(self._shared(), self.before, strict=True):
            assert (factor.bits == before).all(), "shared memory has changed while a product read it"
        left, right = (x.data.astype(np.float64) for x in self.factors)
        with np.errstate(all="ignore"):
            made = (left @ right).astype(np.float32)
            self._data = made if self.old is None else made + self.old.data
        self.factors = ()

    @property
    def data(self):
        assert self._data is not None, "a product is read before it is waited for"
        return self._data

    @property
    def shape(self):
        return self._shape


def warpgroup_mma(left, right, old, *, use_acc=True, is_async=False):
    """Starts a product."""
    assert is_async
    assert isinstance(right, Shared)
    agent = current()
    product = Product(left, right, old if use_acc else None)
    agent.products.append(product)
    agent.pause()
    return product


def warpgroup_mma_wait(count=0, deps=None):
    """Waits until so many products are left."""
    agent = current()
    while len(agent.products) > count:
        agent.products.pop(0).finish()
        agent.has_read = agent.has_multiplied = True
    return deps[0] if len(deps) == 1 else tuple(deps)


def mma_v2(left, right, old):
    """Makes a product."""
    return Value((left.data.astype(np.float64) @ right.data.astype(np.float64)).astype(np.float32) + old.data, gl.float32)
