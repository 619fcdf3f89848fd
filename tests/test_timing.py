# SPDX-License-Identifier: MIT
"""A measurement starts only when the device is calm: its reads are as fast as the fastest so far."""

import itertools
import math
import time

import pytest

from openmsa.testing.timing import CALM, settle, until_calm, wall_seconds

SOON = 60.0


def reads(*seconds):
    """Returns a function that gives these seconds one after the other, then the last for ever, and the list of those it
    gave."""
    taken = []

    def read():
        taken.append(seconds[min(len(taken), len(seconds) - 1)])
        return taken[-1]

    return read, taken


def test_a_quiet_device_is_left_at_once():
    read, taken = reads(1.0, 1.01, 0.99, 1.0)
    assert until_calm(read, math.inf, time.perf_counter() + SOON) == 0.99
    assert len(taken) == CALM


def test_slow_reads_are_waited_for():
    """Reads slower than ever before are waited for, also between fast ones; a run of fast ones starts anew."""
    read, taken = reads(*[1.12] * 50, *[1.0, 1.2] * 20, 1.0)
    assert until_calm(read, 1.0, time.perf_counter() + SOON) == 1.0
    assert len(taken) == 90 + CALM


def test_a_faster_device_than_ever_sets_the_bar():
    """Slow reads count as calm until a fast one shows that they were not."""
    read, taken = reads(1.2, 1.2, 1.0, 1.2, 1.0)
    assert until_calm(read, math.inf, time.perf_counter() + SOON) == 1.0
    assert len(taken) == 4 + CALM


def test_patience_ends():
    ever_slower = itertools.count(1)
    before = time.perf_counter()
    assert until_calm(lambda: float(next(ever_slower)), 0.5, before + 0.02) == 0.5
    assert time.perf_counter() - before < SOON


def test_nothing_to_wait_for_on_a_cpu(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits {seconds} s"))
    settle(wall_seconds)
