# SPDX-License-Identifier: MIT
"""Global memory, which has bounds, and the shared memory of a program, which tells races between its warps.

Warps meet at barriers alone: what one of them writes between two barriers, no other one may read or write there, and what it
reads no other one may write. The matrix unit reads what a fence and then a barrier follow, and nobody writes what it reads
until the product is waited for. Bytes of a copy are poison until the copy is waited for, and then they are as written by the
warp that asked for them.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from tests.ptx.threads import WARPS

UNIT = 2
"""What has happened is known of so many bytes together, an element of two bytes."""
POISON = 0x7F


class Global:
    """The memory of tensors, by their addresses."""

    def __init__(self, tensors):
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.numel()}
        self.starts = np.array(sorted(storages))
        self.regions = [torch.empty(0, dtype=torch.uint8).set_(storages[int(x)]).numpy() for x in self.starts]

    def _places(self, addresses, size):
        """Yields each region that addresses lie in, which of the addresses these are, and where their bytes lie."""
        which = np.searchsorted(self.starts, addresses, "right") - 1
        assert (which >= 0).all(), "an address lies outside the tensors"
        for i in np.unique(which):
            inside = which == i
            places = (addresses[inside] - self.starts[i])[:, None] + np.arange(size)
            assert places.max() < self.regions[i].size, "an address lies outside the tensors"
            yield self.regions[i], inside, places

    def read(self, addresses, size):
        """Returns the bytes [addresses, size] there."""
        result = np.empty((len(addresses), size), np.uint8)
        for region, inside, places in self._places(addresses, size):
            result[inside] = region[places]
        return result

    def write(self, addresses, data):
        """Writes bytes [addresses, size] there."""
        for region, inside, places in self._places(addresses, data.shape[1]):
            region[places] = data[inside]


class Shared:
    """Shared memory. races: how often each race was seen, by its kind and the instruction that the machine says it executes."""

    def __init__(self, size):
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.races, self.instruction = Counter(), ""
        units = size // UNIT
        # Barriers count periods, and everything else counts moments.
        self.period, self.moment = 1, 0
        self.written_in, self.written_at = np.zeros(units, int), np.zeros(units, int)
        self.writer, self.read_in = np.zeros(units, int), np.zeros((WARPS, units), int)
        self.arriving, self.multiplied = np.zeros(units, bool), np.zeros(units, int)
        self.fenced_at = self.fenced_for_all_at = 0

    def barrier(self):
        """All warps meet: what was written and fenced before is there for the matrix unit."""
        self.period += 1
        self.fenced_for_all_at = self.fenced_at

    def fence(self):
        """All threads let the matrix unit see what they have written, or what has arrived for them, until now."""
        self.fenced_at = self.moment

    def read(self, addresses, size, warps):
        """Returns the bytes [addresses, size] that threads of these warps read."""
        units, warps = _units(addresses, size, warps)
        self._tell("read after a write", (self.written_in[units] == self.period) & (self.writer[units] != warps))
        self._tell("read of what has not arrived", self.arriving[units])
        self.read_in[warps, units] = self.period
        return self.bytes[_places(addresses, size)]

    def write(self, addresses, data, warps):
        """Writes bytes [addresses, size] of threads of these warps. Warps may write the same bytes."""
        places = _places(addresses, data.shape[1])
        same = (self.bytes[places] == data).reshape(len(data), -1, UNIT).all(2).ravel()
        units, warps = self._claim(addresses, data.shape[1], warps, same)
        self._mark(units, warps)
        self.bytes[places] = data
        self._tell("two values of one store", (self.bytes[places] != data).any(1))

    def begin_copy(self, addresses, size, warps):
        """What is copied there for threads of these warps is on its way."""
        units, _ = self._claim(addresses, size, warps, False)
        self.arriving[units] = True
        self.bytes[_places(addresses, size)] = POISON

    def end_copy(self, addresses, data, warps):
        """Threads of these warps have waited for their copies, which bring bytes [addresses, size]."""
        units, warps = _units(addresses, data.shape[1], warps)
        self.arriving[units] = False
        self._mark(units, warps)
        self.bytes[_places(addresses, data.shape[1])] = data

    def begin_product(self, addresses):
        """The matrix unit begins to read elements at these addresses."""
        units = addresses.ravel() // UNIT
        self._tell("product after a write", self.written_in[units] == self.period)
        self._tell("product of what has not arrived", self.arriving[units])
        self._tell("product without a fence", self.written_at[units] > self.fenced_for_all_at)
        self.multiplied[units] += 1

    def end_product(self, addresses):
        """Each warp has waited for its part of the product, but not for those of others."""
        units = addresses.ravel() // UNIT
        self.multiplied[units] -= 1
        self.read_in[:, units] = self.period

    def _claim(self, addresses, size, warps, same):
        """Tells the races of a write; those of the `same` bytes as before are none between writes."""
        units, warps = _units(addresses, size, warps)
        others_wrote = (self.written_in[units] == self.period) & (self.writer[units] != warps)
        self._tell("write after a write", others_wrote & ~np.bool_(same))
        others = np.arange(WARPS)[:, None] != warps
        self._tell("write after a read", (self.read_in[:, units] == self.period) & others)
        self._tell("write of what has not arrived", self.arriving[units])
        self._tell("write under a product", self.multiplied[units] > 0)
        return units, warps

    def _mark(self, units, warps):
        self.written_in[units], self.written_at[units], self.writer[units] = self.period, self.moment, warps

    def _tell(self, kind, found):
        if found.any():
            self.races[kind, self.instruction] += 1


def _places(addresses, size):
    return addresses[:, None] + np.arange(size)


def _units(addresses, size, warps):
    """Returns the units of bytes [addresses, size], and the warp of each."""
    count = size // UNIT
    return (addresses[:, None] // UNIT + np.arange(count)).ravel(), np.repeat(warps, count)
