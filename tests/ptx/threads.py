# SPDX-License-Identifier: MIT
"""The threads of a program, what each of them holds, and which of them come to an instruction."""

from __future__ import annotations

import numpy as np

LANES, WARPS = 32, 4
THREADS = WARPS * LANES
LANE, WARP = np.arange(THREADS) % LANES, np.arange(THREADS) // LANES


def everywhere(number, bits):
    """Returns a number as each thread has it, of which registers of this type hold the lowest bits."""
    return np.full(THREADS, number != 0 if bits is np.bool_ else number % (1 << 8 * np.dtype(bits).itemsize), bits)


def together(active, what):
    """Checks that all threads come to what they do together."""
    assert active.all(), f"some threads do not come to a {what}"


def in_warps(active):
    """Checks that all threads of a warp come together."""
    lanes = active.reshape(WARPS, LANES)
    assert (lanes.all(1) == lanes.any(1)).all(), "some threads of a warp are elsewhere"


def aligned(addresses, size):
    """Returns addresses that are multiples of this size."""
    assert not (addresses % size).any(), "an address is not aligned"
    return addresses
