#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures a list of rows in engines that share one GPU, with their own kernels and with ours in turns, in bounded time.

    python -m benchmarks.engine_rows --seconds 400 -o rows.jsonl     # the first four groups of `GROUPS`
    python -m benchmarks.engine_rows --groups rank caches -o rows.jsonl
    python -m benchmarks.engine_rows --groups rank --rows 'rank prefill 4096' --turns 50 -o rows.jsonl

Starting an engine takes most of a minute, a row of figures a second or two. So all engines start at the same time, each in a
process of its own, and run every row once to have its kernels compiled. Then only one of them works at a time, and the
processes of all others are stopped, since a scheduler that waits for requests spins: a row is asked of the engine with its own
kernels and then of the one with ours, and written to the record when it is there. Rows stand in the order of their worth; those
for which no time is left are named at the end. An engine that fails stops no other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import engine as rows
from benchmarks.engine import KERNELS

RANK, HALF = ["--heads", "16", "--kv-heads", "1"], ["--heads", "32", "--kv-heads", "4"]
CAPTURED = ["--capture", "4096"]
E4M3_CACHES = [*RANK, "--kv-dtype", "fp8", "--kv-gib", "5"]
GROUPS: dict[str, dict[str, list[str]]] = {
    "rank": {kernels: [*RANK, "--kv-gib", "7"] for kernels in KERNELS},
    "half": {kernels: [*HALF, "--kv-gib", "20"] for kernels in KERNELS},
    # vLLM's kernels on Hopper read no index cache in E4M3; theirs stays in bf16.
    "caches": {"own": E4M3_CACHES, "openmsa": [*E4M3_CACHES, "--index-dtype", "fp8"]},
    "drafts": {kernels: [*RANK, "--kv-gib", "5", "--speculative", "3", "--prefix-caching"] for kernels in KERNELS},
    "captured": {kernels: [*RANK, "--kv-gib", "7", *CAPTURED] for kernels in KERNELS},
    "captured-half": {kernels: [*HALF, "--kv-gib", "20", *CAPTURED] for kernels in KERNELS},
}
"""The engines' arguments by group and kernels: a rank of four, half as many heads as the whole model, e4m3 caches, verified
drafts with prefix caching, and the first two with steps of 4,096 tokens in CUDA graphs, too (all of them but attention)."""
ROWS: list[tuple[str, str, tuple[int, ...]]] = [
    ("rank", "prefill", (4096,)),
    ("rank", "prefill", (32768,)),
    ("half", "prefill", (32768,)),
    ("rank", "decode", (8, 16384)),
    ("rank", "decode", (128, 8192)),
    ("rank", "prefill", (131072,)),
    ("half", "prefill", (131072,)),
    ("half", "decode", (32, 16384)),
    ("caches", "prefill", (32768,)),
    ("caches", "decode", (32, 16384)),
    ("drafts", "decode", (8, 32768)),
    ("drafts", "prefix", (32768, 512)),
    ("rank", "answers", ()),
    ("half", "answers", ()),
    ("caches", "answers", ()),
    ("half", "prefill", (4096,)),
    ("half", "decode", (8, 16384)),
    ("half", "decode", (128, 8192)),
    ("rank", "decode", (1, 16384)),
    ("rank", "decode", (32, 16384)),
    ("half", "decode", (1, 16384)),
    ("caches", "prefill", (131072,)),
    ("caches", "decode", (128, 8192)),
    ("drafts", "decode", (1, 32768)),
    ("captured", "prefill", (4096,)),
    ("captured-half", "prefill", (4096,)),
]
"""Group, what is measured, and its sizes: tokens of a prompt; requests and tokens of each; tokens cached and new."""


def engine_command(group: str, kernels: str, a: argparse.Namespace, orders: int) -> list[str]:
    """Returns the command of one engine, which takes orders from the pipe `orders`."""
    batches = sorted({row[2][0] for row in ROWS if row[:2] == (group, "decode")})
    return [
        *(sys.executable, "-m", "benchmarks.engine", "--kernels", kernels, "--orders", str(orders)),
        *(*GROUPS[group][kernels], "--gpu-share", "0.03", "--model-dir", f"/tmp/openmsa-m3-{group}-{kernels}"),
        *("--steps", str(a.steps), "--batch", *map(str, batches), *a.more),
    ]


class Engine:
    """Runs one engine in a process of its own, which takes orders over a pipe, whose number `command` puts into its command."""

    def __init__(self, group: str, kernels: str, number: int, command: Callable[[int], list[str]]) -> None:
        self.group, self.kernels = group, kernels
        self.link, far = Pipe()
        self.log = Path(f"/tmp/openmsa-engine-{group}-{kernels}.log")
        # Engines look for free ports at the same time, so each begins its search elsewhere.
        environment = os.environ | {"OMP_NUM_THREADS": "2", "VLLM_PORT": str(21000 + 200 * number)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command(far.fileno()),
                stdout=log,
                stderr=log,
                pass_fds=[far.fileno()],
                env=environment,
                start_new_session=True,
            )
        far.close()

    def ask(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Sends an order and returns its answer. Raises TimeoutError, or RuntimeError where the process ends or refuses."""
        self.send(order)
        return self.take(seconds)

    def send(self, order: dict[str, Any]) -> None:
        """Wakes the processes and sends an order, unless they have ended, which `take` then reports."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGCONT)
            self.link.send(order)

    def take(self, seconds: float) -> dict[str, Any]:
        """Returns the next answer, as `ask` does."""
        if not self.link.poll(max(0.0, seconds)):
            raise TimeoutError(f"{self.group} {self.kernels}: no answer in {seconds:.0f} s")
        try:
            answer: dict[str, Any] = self.link.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"{self.group} {self.kernels}: the engine ended; {_last(self.log)}") from None
        if "failed" in answer:
            raise RuntimeError(f"{self.group} {self.kernels}: {answer['failed']}")
        return answer

    def rest(self) -> None:
        """Stops the processes until the next order, so that they take no time of the host's cores."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        """Ends the process; what it measured has been written."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _last(log: Path) -> str:
    """Returns the last line of a log that names an error, else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or ["an empty log"])[-1][-300:]


def started(a: argparse.Namespace, deadline: float) -> dict[tuple[str, str], Engine]:
    """Starts the engines of all groups together; returns those that got ready and ran their rows once, by group and kernels."""
    engines = [
        Engine(g, k, 2 * i + j, partial(engine_command, g, k, a)) for i, g in enumerate(a.groups) for j, k in enumerate(KERNELS)
    ]
    up = {(e.group, e.kernels): facts for e in engines if (facts := answered(e, deadline))}
    for (group, kernels), facts in up.items():
        write(a.out, {"group": group, "kernels": kernels, "row": "start", **facts})
        print(f"{group} {kernels}: started in {facts['start_s']:.0f} s", flush=True)
    engines = [e for e in engines if (e.group, e.kernels) in up]
    for e in engines:  # All run their rows once at the same time: nothing is timed yet.
        e.send({"do": "warm", "rows": [(what, sizes) for group, what, sizes in chosen(a) if group == e.group]})
    ready = {(e.group, e.kernels): e for e in engines if answered(e, deadline)}
    for e in ready.values():
        e.rest()
    return ready


def answered(engine: Engine, deadline: float) -> dict[str, Any] | None:
    """Returns an engine's next answer; where it fails or none comes in time, ends the engine and returns None."""
    try:
        return engine.take(deadline - time.monotonic())
    except (TimeoutError, RuntimeError) as e:
        print(f"not ready: {e}", flush=True)
        engine.end()
        return None


def write(out: Path, row: dict[str, Any]) -> None:
    """Appends a row to the record."""
    with out.open("a") as f:
        f.write(json.dumps(row) + "\n")


def measure(a: argparse.Namespace) -> list[str]:
    """Measures the rows, each in so many turns of all kernels; returns those that were left out, with the reason."""
    begun, left = time.monotonic(), []
    deadline = begun + a.seconds
    ready = started(a, begun + a.start_seconds)
    print(f"{len(ready)} engines ready after {time.monotonic() - begun:.0f} s", flush=True)
    turns = [(*row, kernels) for row in chosen(a) for _ in range(a.turns) for kernels in KERNELS]
    try:
        for group, what, sizes, kernels in turns:
            engine = ready.get((group, kernels))
            late = time.monotonic() > deadline
            reason = "no engine" if engine is None else "no time" if late else asked(engine, what, sizes, a.out, deadline + 20)
            if reason:
                left.append(f"{named(group, what, sizes)}, {kernels}: {reason}")
            if engine is not None and engine.process.poll() is not None:
                del ready[group, kernels]
    finally:
        for engine in ready.values():  # Processes that rest would not see that the pipe closes.
            engine.end()
    print(f"measured in {time.monotonic() - begun:.0f} s", flush=True)
    return left


def chosen(a: argparse.Namespace) -> list[tuple[str, str, tuple[int, ...]]]:
    """Returns the rows that are asked for."""
    return [row for row in ROWS if row[0] in a.groups and (not a.rows or named(*row) in a.rows)]


def named(group: str, what: str, sizes: tuple[int, ...]) -> str:
    """Returns the name of a row."""
    return f"{group} {what} {' x '.join(map(str, sizes))}".strip()


def asked(engine: Engine, what: str, sizes: tuple[int, ...], out: Path, deadline: float) -> str | None:
    """Has an engine measure a row and records it; where that fails, ends the engine and returns why."""
    try:
        row = engine.ask({"do": what, "sizes": sizes}, deadline - time.monotonic())
        engine.rest()
    except (TimeoutError, RuntimeError) as e:
        engine.end()
        return str(e)
    write(out, {"group": engine.group, "kernels": engine.kernels, "row": what, "sizes": sizes, **row})
    return None


def serve(orders: int, engine: Any, config: dict[str, Any], facts: dict[str, Any], a: argparse.Namespace) -> None:
    """Runs in an engine's process: says that it is ready, and measures what is asked for until the pipe closes."""
    link = Connection(orders)
    link.send(facts)
    while True:
        try:
            order = link.recv()
        except EOFError:
            return
        link.send(_answer(order, engine, config, a))


def _answer(order: dict[str, Any], engine: Any, config: dict[str, Any], a: argparse.Namespace) -> dict[str, Any]:
    """Returns a measured row; or the seconds that a first run of all rows took, with few requests; or what failed."""
    begun = time.monotonic()
    try:
        if order["do"] != "warm":
            return _row(order["do"], order["sizes"], engine, config, a, a.repeat)
        for what, sizes in order["rows"]:
            if what == "decode":
                _row(what, (min(2, sizes[0]), min(8192, sizes[1])), engine, config, a, 1)
            elif what != "answers":
                _row(what, sizes, engine, config, a, 1)
    except Exception as e:  # A failure is the engine's answer, and the others go on.
        return {"failed": f"{type(e).__name__}: {e}"[:500]}
    return {"seconds": time.monotonic() - begun}


def _row(
    what: str, sizes: tuple[int, ...], engine: Any, config: dict[str, Any], a: argparse.Namespace, repeat: int
) -> dict[str, Any]:
    if what == "answers":
        record: dict[str, Any] = {}
        rows.answers(engine, a, config, record)
        for name in ("alone", "together"):
            record[name] = [{key: row[key] for key in ("prompt", "tokens")} for row in record[name]]
        return record
    if what == "decode":
        return rows.decode(engine, sizes[0], sizes[1], a)
    if what == "prefill":
        return rows.prefill(engine, sizes[0], repeat)
    return rows.prefix(engine, sizes[0], sizes[1], repeat)


def table(records: list[dict[str, Any]]) -> str:
    """Returns a table of the engine's own kernels against ours, one line for each row of a record: milliseconds by the wall
    clock, of the forward and of the stages on the GPU, and microseconds of the host for a layer."""
    found: dict[tuple[str, str, tuple[int, ...]], dict[str, list[dict[str, Any]]]] = {}
    for r in records:
        if r["row"] != "start":
            found.setdefault((r["group"], r["row"], tuple(r["sizes"])), {}).setdefault(r["kernels"], []).append(r)
    lines = ["row: own, ours, times faster"]
    for (group, what, sizes), pair in found.items():
        name = named(group, what, sizes)
        if set(pair) < set(KERNELS):
            lines.append(f"{name}: only {', '.join(pair)}")
        elif what == "answers":
            lines += [
                f"{name}, {x['prompt']} tokens: error {x['prompt_mean']:.4f}, {y['prompt_mean']:.4f}; answer "
                f"{x['decode_mean']:.4f}, {y['decode_mean']:.4f}"
                for x, y in zip(*(pair[k][-1].get("errors", []) for k in KERNELS), strict=True)
            ]
        else:
            lines.append(f"{name}: " + " | ".join(_figures(what, *(pair[k] for k in KERNELS))))
    return "\n".join(lines)


def _figures(what: str, own: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """Returns what is said of a row: medians over its turns, and how many they are."""
    walls = [[r["step_ms"] if what == "decode" else 1e3 * r["wall_s"] for r in turns] for turns in (own, ours)]
    stages = [[_stages(r) for r in turns] for turns in (own, ours)]
    figures = [_times("wall", *map(median, walls))]
    names = [n for n in ("forward", "indexer", "attend", "both", "host us") if all(n in x for turns in stages for x in turns)]
    figures += [_times(name, *(median(x[name] for x in turns) for turns in stages)) for name in names]
    if what == "prefix":
        figures.append(f"cached and anew apart {own[-1]['apart']}, {ours[-1]['apart']}")
    if what == "decode":
        figures.append("tokens a request " + ", ".join(f"{r[-1]['tokens'] / r[-1]['batch']:.0f}" for r in (own, ours)))
    if len(own) > 1:
        figures.append(f"{len(own)} turns")
    return figures


def _times(name: str, own: float, ours: float) -> str:
    return f"{name} {own:.3g} {ours:.3g} {own / ours:.2f}x"


def _stages(row: dict[str, Any]) -> dict[str, float]:
    """Returns GPU milliseconds by stage, of a prompt or of a step of decode, of whose forwards the median counts, since one may
    have compiled a kernel; what both sparse stages take; and the host's microseconds for a layer."""
    stages, decode = row["stages"], row["row"] == "decode"
    steps = stages.get("forward", {}).get("calls", 1) if decode else 1
    found = {name: stage["gpu_ms"] / steps for name, stage in stages.items()}
    if decode and "forward" in stages:
        found["forward"] = stages["forward"]["gpu_median_ms"]
    if {"indexer", "attend"} <= set(stages):
        found["both"] = found["indexer"] + found["attend"]
        found["host us"] = stages["indexer"]["host_median_us"] + stages["attend"]["host_median_us"]
    return found


def main() -> None:
    """Runs what the command line says."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-o", "--out", type=Path, default=Path("rows.jsonl"))
    p.add_argument("--groups", nargs="*", choices=list(GROUPS), default=list(GROUPS)[:4])
    p.add_argument("--seconds", type=float, default=400, help="no row is begun later; starting counts")
    p.add_argument("--start-seconds", type=float, default=240, help="engines that are not ready by then are left out")
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--rows", nargs="*", help="names of rows, such as 'rank prefill 4096' (default: all of the groups)")
    p.add_argument("--turns", type=int, default=1, help="times that each row is measured; the table gives medians")
    p.add_argument("--compare", type=Path, help="print the table of a record and stop")
    p.add_argument("more", nargs="*", help="further arguments of every engine, behind --")
    a = p.parse_args()
    left: list[str] = []
    if a.compare and not a.compare.is_file():
        p.error(f"--compare must name a record, got {str(a.compare)!r}")
    known = [named(*row) for row in ROWS if row[0] in a.groups]
    for name in a.rows or ():
        if name not in known:
            p.error(f"--rows must name rows of --groups, such as {known[0]!r}, got {name!r}")
    if not a.compare:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        left = measure(a)
    if a.compare or a.out.exists():  # There is no record where no engine got ready.
        print(table([json.loads(line) for line in (a.compare or a.out).read_text().splitlines()]))
    for line in left:
        print(f"left out: {line}")
    if left and len(left) == len(KERNELS) * len(chosen(a)) * a.turns:
        sys.exit(1)


if __name__ == "__main__":
    main()
