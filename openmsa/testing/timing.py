# SPDX-License-Identifier: MIT
"""These clocks measure wall time on a CPU and cold-L2 CUDA events; CUDA graphs and peak memory stand beside them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]
Clock = Callable[[Run], float]  # runs once, returns seconds

MINIMUM_FLUSH = 256 << 20  # bytes
SETTLING, PATIENCE = 0.08, 0.5  # seconds: the least wait, and the most beyond it
CALM, SLACK = 8, 1.03  # reads in a row, and how far above the fastest they may be
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def wall_seconds(run: Run) -> float:
    """Returns the seconds that one call takes on the host."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class ColdCudaClock:
    """Returns the seconds between two CUDA events around one call, after the L2 cache was filled with other, clean lines.

    The flush reads a buffer of four times the cache (at least 256 MiB). Reading leaves no dirty lines whose write-back the
    timed call would pay for, and hides the launch of a short call.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        size = max(MINIMUM_FLUSH, 4 * cache)
        self._buffer = torch.zeros(1024, size // 4096, device=self.device)
        self._rows = torch.empty(1024, device=self.device)
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.fastest_read = math.inf

    def read_seconds(self) -> float:
        """Returns the seconds of the flush alone, a plain read, warm or cold."""
        self._start.record()
        torch.amax(self._buffer, dim=1, out=self._rows)
        self._stop.record()
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) / 1e3

    def __call__(self, run: Run) -> float:
        torch.amax(self._buffer, dim=1, out=self._rows)
        self._start.record()
        run()
        self._stop.record()
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) / 1e3


def settle(clock: Clock) -> None:
    """Waits until a GPU is left alone: after large allocations and frees the driver works on in the background for tens to
    hundreds of milliseconds, in which kernels have less bandwidth. Elsewhere there is nothing to wait for."""
    if isinstance(clock, ColdCudaClock):
        torch.cuda.synchronize(clock.device)
        time.sleep(SETTLING)
        clock.fastest_read = until_calm(clock.read_seconds, clock.fastest_read, time.perf_counter() + PATIENCE)


def until_calm(read: Callable[[], float], fastest: float, deadline: float) -> float:
    """Calls `read` until `CALM` results in a row were within `SLACK` of the fastest, or until the deadline of
    `time.perf_counter`. Returns the least of `fastest` and all results."""
    calm = 0
    while calm < CALM and time.perf_counter() < deadline:
        seconds = read()
        fastest = min(fastest, seconds)
        calm = calm + 1 if seconds <= SLACK * fastest else 0
    return fastest


def captured(run: Run) -> Run:
    """Captures `run` in a CUDA graph; calling the result replays it. The graph and what `run` returned live as long as the
    result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay(_keep: Any = result) -> None:
        graph.replay()

    return replay


def sample(run: Run, clock: Clock, most: int, budget: float, first: float | None = None) -> list[float]:
    """Takes up to `most` measurements of `run`, at least one, stopping when `budget` seconds are spent.

    first: a measurement already taken that counts as one of them; None: there is none.
    """
    samples = [] if first is None else [first]
    while not samples or (len(samples) < most and sum(samples) < budget):
        samples.append(clock(run))
    return samples


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Returns the lower quartile, the median and the upper quartile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def peak_extra_memory(run: Run, device: torch.device | str) -> tuple[int | None, float]:
    """Calls `run` once and returns the bytes held at its peak beyond those held before it, results included, and its seconds on
    the host.

    On a GPU this is what PyTorch's allocator handed out; on a CPU the high-water mark of the resident set, which Linux alone
    can reset: None elsewhere.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, time.perf_counter() - start
    resettable = _reset_resident_peak()
    held = _status_bytes("VmRSS")
    seconds = wall_seconds(run)
    peak = _status_bytes("VmHWM")
    if not resettable or held is None or peak is None:
        return None, seconds
    return max(peak - held, 0), seconds


def _reset_resident_peak() -> bool:
    """Returns freed memory to the system and sets the high-water mark to what is resident now."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError, AttributeError):  # not every libc has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)
