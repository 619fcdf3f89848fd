#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Prints when each kernel of a benchmark row starts and ends, in a CUDA graph on a cold L2 cache. Needs a GPU.

    PYTHONPATH=. python3 scripts/timeline.py gpu-decode-b32-128k/decode_plan/certified [MORE ROWS]

A row is named as for `openmsa bench --match`. Times are microseconds after the kernel that empties the cache; with programmatic
launches a kernel starts before the one in front has ended, and waits inside.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from openmsa.bench.inputs import Inputs
from openmsa.bench.rows import ROWS, Context
from openmsa.bench.workloads import chosen
from openmsa.testing.timing import ColdCudaClock, captured, settle


class Span(NamedTuple):
    """Describes a kernel, a copy or a fill on the GPU; times are microseconds."""

    name: str
    start: float
    end: float


def last_run(spans: Iterable[Span], flush: str) -> list[Span]:
    """Returns what follows the last span whose name contains `flush`, counted from its end, in the order of starts."""
    ordered = sorted(spans, key=lambda span: span.start)
    last = max(i for i, span in enumerate(ordered) if flush in span.name)
    zero = ordered[last].end
    return [Span(span.name, span.start - zero, span.end - zero) for span in ordered[last + 1 :]]


def observe(run: Callable[[], Any], clock: ColdCudaClock) -> list[Span]:
    """Returns the spans of the last of three runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            clock(run)
    events = (e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA)
    return last_run((Span(e.name, e.time_range.start, e.time_range.end) for e in events), "reduce")


def table(title: str, spans: list[Span]) -> str:
    """Formats one line for each span."""
    lines = [f"{title}\n{'':44} {'start':>9} {'end':>9} {'us':>9}"]
    lines += [f"{span.name[:44]:44} {span.start:9.1f} {span.end:9.1f} {span.end - span.start:9.1f}" for span in spans]
    return "\n".join(lines)


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="workload/row, shell patterns")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("it needs a CUDA device, and PyTorch sees none", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    clock = ColdCudaClock(device)
    for workload, names in chosen("cuda", options.rows):
        context = Context(Inputs(workload, device), "auto", Path(".peers"), clock)
        for name in names:
            if reason := ROWS[name].absent(context):
                print(f"{workload.name}/{name}: {reason}")
                continue
            with torch.no_grad():
                run = captured(ROWS[name].build(context))
            settle(clock)
            clock(run)
            print(table(f"{workload.name}/{name}", observe(run, clock)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
