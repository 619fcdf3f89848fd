# SPDX-License-Identifier: MIT
"""Measures rows of workloads. Rounds go over all rows of a workload, so that a machine's drift meets all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from openmsa.attention import msa_attention
from openmsa.bench.ceilings import best_of, measure_ceilings
from openmsa.bench.cost import Ceilings, limit_seconds
from openmsa.bench.inputs import Inputs
from openmsa.bench.record import Record, environment
from openmsa.bench.rows import ROWS, Context, with_peers
from openmsa.bench.workloads import LAYER_ROWS, LAYERS, Work, Workload
from openmsa.explain import STAGES, explain
from openmsa.testing.timing import (
    Clock,
    ColdCudaClock,
    captured,
    peak_extra_memory,
    quartiles,
    sample,
    settle,
    wall_seconds,
)

Step = Callable[[str, float], None]
LONG = 1.0  # seconds from which a first call that compiles nothing counts as a measurement
SPEEDS = {"cpu": (1e11, 1e10), "cuda": (2e14, 1e12)}  # FLOP/s and bytes/s that `expected_seconds` counts with
READY = 1.0  # seconds that it counts for the tensors of a step


@dataclass(frozen=True)
class Settings:
    """Settings say how to measure.

    rounds:   passes over the rows of a workload. samples, budget: per row and pass, at most so many measurements, stopping
              when so many seconds are spent, but at least one.
    peers:    folder with the peers' kernels. commit: what to record as the commit; None: that of the checkout.
    """

    device: torch.device
    impl: str = "auto"
    rounds: int = 3
    samples: int = 10
    budget: float = 2.0
    peers: Path = Path(".peers")
    commit: str | None = None
    gemm_size: int | None = None
    buffer_bytes: int | None = None

    @classmethod
    def for_device(cls, device: torch.device, rounds: int | None, **settings: Any) -> Settings:
        """Returns the defaults for a kind of device; rounds None: its default too."""
        if device.type == "cuda":
            return cls(device, rounds=rounds or 1, samples=30, budget=0.5, **settings)
        return cls(device, rounds=rounds or 3, **settings)

    def clock(self) -> Clock:
        return ColdCudaClock(self.device) if self.device.type == "cuda" else wall_seconds


@dataclass
class Task:
    """A task is one row in one mode, and what was found of it so far."""

    row: str
    mode: str
    samples: list[float] = field(default_factory=list)
    memory: int | None = None
    implementation: str | None = None
    error: str | None = None
    form: str | None = None


def run(work: Work, settings: Settings, step: Step = lambda text, seconds: None) -> Iterator[Record]:
    """Measures the rows of each workload and the peers that they are compared with; yields one record a row and mode, as soon
    as it is complete. A KeyboardInterrupt passes through after the records of what has samples by then.

    step: called before each measurement with a short text and the seconds that it may take (see `expected_seconds`).
    """
    clock, shared = settings.clock(), environment(settings.device, settings.commit)
    ceilings: dict[torch.dtype, Ceilings] = {}
    for workload, rows in work:
        step(f"{workload.name}: matrix product, copy and read", READY)
        sizes = settings.gemm_size, settings.buffer_bytes
        now = measure_ceilings(settings.device, workload.dtype, clock, *sizes)
        ceilings[workload.dtype] = best_of(now, ceilings.get(workload.dtype, now))  # noise only lowers what is measured
        tasks = [Task(row, mode) for row in with_peers(rows, workload.rows) for mode in _modes(workload, row, settings)]
        for task in measure(workload, tasks, settings, clock, step):
            yield _record(workload, task, tasks, ceilings[workload.dtype], shared)
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()


def expected_seconds(work: Work, settings: Settings) -> float:
    """Returns the seconds that `run` takes on a machine of `SPEEDS`. Another machine takes a multiple of them, so that what is
    done of them tells how far a run is."""
    tasks = [(w, row) for w, rows in work for row in with_peers(rows, w.rows) for _ in _modes(w, row, settings)]
    return 2 * READY * len(work) + settings.rounds * sum(_expected(w, row, settings) for w, row in tasks)


def _expected(w: Workload, row: str, settings: Settings) -> float:
    """Returns the seconds of one step: a first call, and samples until their number or the budget is reached."""
    flops, bandwidth = SPEEDS[settings.device.type]
    once = ROWS[row].cost(w).flops / flops + ROWS[row].cost(w).bytes / bandwidth
    samples = once if once > LONG else once + min(settings.samples * once, max(settings.budget, once))
    return READY + samples


def _modes(w: Workload, row: str, settings: Settings) -> tuple[str, ...]:
    if settings.device.type != "cuda":
        return ("eager",)
    return tuple(mode for mode in w.modes if mode != "layers" or row in LAYER_ROWS)


def measure(w: Workload, tasks: list[Task], settings: Settings, clock: Clock, step: Step) -> Iterator[Task]:
    """Takes the samples of the tasks of one workload and yields each in its order as soon as it has them all. Peers go first in
    every round, so that a task is compared with all that is known of them."""
    step(f"{w.name}: inputs", READY)
    context = Context(Inputs(w, settings.device), settings.impl, settings.peers, clock)
    waiting, left = list(tasks), dict.fromkeys(range(len(tasks)), settings.rounds)
    order = sorted(left, key=lambda i: bool(ROWS[tasks[i].row].peers))
    try:
        for _ in range(settings.rounds):
            for i in order:
                task = tasks[i]
                step(f"{w.name}: {task.row} {task.mode}", _expected(w, task.row, settings))
                task.error = task.error or ROWS[task.row].absent(context)
                if task.error is None:
                    with torch.no_grad():
                        _one_round(task, context, settings)
                left[i] -= 1
                while waiting and not left[len(tasks) - len(waiting)]:
                    yield waiting.pop(0)
    except KeyboardInterrupt:
        yield from (task for task in waiting if task.samples or task.error)
        raise


def _one_round(task: Task, c: Context, settings: Settings) -> None:
    row = ROWS[task.row]
    try:
        call = row.build(c)
        task.implementation = task.implementation or _implementation(call)
        memory, first = peak_extra_memory(call, settings.device)
        if task.memory is None:
            task.memory = memory
        clock = c.clock
        if task.mode == "graph":
            call = captured(call)
        elif task.mode == "layers":
            calls = [call, *(row.build(c) for _ in range(LAYERS - 1))]
            call = captured(lambda: [layer() for layer in calls])
            clock = partial(_share, c.clock)
        compiled = bool(task.samples) or not row.compiles  # A first call on a new machine compiles kernels, on CPUs, too.
        known = first if first > LONG and task.mode == "eager" and compiled else None
        settle(c.clock)
        task.samples += sample(call, clock, settings.samples, settings.budget, known)
    except Exception as error:  # one row that cannot run must not lose the others
        task.error = f"{type(error).__name__}: {error}"
    task.form = c.x.chosen_forms.get(task.row)


def _share(clock: Clock, layers: Callable[[], Any]) -> float:
    """Returns the seconds of one of `LAYERS` layers."""
    return clock(layers) / LAYERS


def _implementation(call: Callable[[], Any]) -> str | None:
    """Says which implementation serves each stage of a call of ours; None for a peer's."""
    if not isinstance(call, partial) or call.func not in (*STAGES, msa_attention):
        return None
    explanation = explain(call.func, *call.args, **call.keywords)
    parts = explanation if isinstance(explanation, tuple) else (explanation,)
    return ", ".join(f"{part.stage}: {part.chosen}" for part in parts)


def _record(w: Workload, task: Task, tasks: list[Task], ceilings: Ceilings, shared: Record) -> Record:
    work = ROWS[task.row].cost(w)
    record: Record = {
        "workload": w.name,
        "kind": w.kind,
        "row": task.row,
        "mode": task.mode,
        **shared,
        "shape": {k: v for k, v in dataclasses.asdict(w).items() if isinstance(v, int)},
        "dtype": str(w.dtype).removeprefix("torch."),
        "implementation": task.implementation,
        "form": task.form,
        "useful_flops": work.flops,
        "useful_bytes": work.bytes,
        "ceilings": dataclasses.asdict(ceilings),
        "error": task.error,
    }
    if task.error is None:
        record |= _figures(task, tasks, *limit_seconds(work, ceilings)) | {
            "flops_per_s": work.flops / quartiles(task.samples)[1],
            "bytes_per_s": work.bytes / quartiles(task.samples)[1],
        }
    return record


def _figures(task: Task, tasks: list[Task], limit: float, bound: str) -> Record:
    low, median, high = quartiles(task.samples)
    measured = {t.row: quartiles(t.samples)[1] for t in tasks if t.mode == task.mode and t.samples and not t.error}
    return {
        "samples": task.samples,
        "median_s": median,
        "lower_quartile_s": low,
        "upper_quartile_s": high,
        "limit_s": limit,
        "bound": bound,
        "percent_of_limit": 100 * limit / median,
        "times_faster_than": {peer: measured[peer] / median for peer in ROWS[task.row].peers if peer in measured},
        "peak_extra_bytes": task.memory,
    }
