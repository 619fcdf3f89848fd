#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures benchmark rows of several checkouts on one machine, in processes that take turns, and prints them side by side.

    PYTHONPATH=. python3 scripts/compare.py OLD NEW --match 'gpu-decode-b32-128k/decode_plan*' [--rounds 3] [--samples 15]

OLD, NEW, ...: folders that hold `openmsa`. Rows are named as for `openmsa bench --match`; on a GPU they run in CUDA graphs on
a cold L2 cache. Prints the median of each, its quartiles, and how many times as long it takes as in the first checkout
that has the row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from openmsa.testing.timing import quartiles

Samples = dict[str, list[float]]
REPORT = "samples: "


def measure(patterns: list[str], samples: int) -> Samples:
    """Returns the seconds of each row, with the `openmsa` that this process imports."""
    import torch

    from openmsa.bench.inputs import Inputs
    from openmsa.bench.rows import ROWS, Context
    from openmsa.bench.workloads import chosen
    from openmsa.testing.timing import ColdCudaClock, captured, settle, wall_seconds

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = ColdCudaClock(device) if device.type == "cuda" else wall_seconds
    found: Samples = {}
    for workload, names in chosen(device.type, patterns):
        context = Context(Inputs(workload, device), "auto", Path(".peers"), clock)
        with torch.no_grad():
            calls = {name: ROWS[name].build(context) for name in names if ROWS[name].absent(context) is None}
            runs = {name: captured(call) if device.type == "cuda" else call for name, call in calls.items()}
            for run in runs.values():
                run()
            settle(clock)
            for _ in range(samples):
                for name, run in runs.items():
                    found.setdefault(f"{workload.name}/{name}", []).append(clock(run))
    return found


def launch(tree: Path, arguments: list[str]) -> Samples:
    """Runs `measure` in a new process on one checkout."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, __file__, "--child", *arguments], env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(REPORT)]
    if done.returncode or not lines:
        raise RuntimeError(f"{tree}: {done.stderr.strip()[-2000:]}")
    samples: Samples = json.loads(lines[-1].removeprefix(REPORT))
    return samples


def table(trees: list[str], found: list[Samples]) -> str:
    """Formats one line for each row and checkout, in microseconds."""
    lines = [f"{'row':44} {'checkout':20} {'median us':>10} {'quartiles':>19} {'times':>7}"]
    for row in dict.fromkeys(row for samples in found for row in samples):
        first = None
        for tree, samples in zip(trees, found, strict=True):
            if row not in samples:
                lines.append(f"{row:44} {tree:20} {'absent':>10}")
                continue
            low, median, high = (1e6 * seconds for seconds in quartiles(samples[row]))
            first = first or median
            lines.append(f"{row:44} {tree:20} {median:10.1f} {low:9.1f} {high:9.1f} {median / first:7.3f}")
    return "\n".join(lines)


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="folders that hold openmsa")
    parser.add_argument("--match", action="append", required=True, help="workload/row, shell patterns; repeatable")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each checkout")
    parser.add_argument("--samples", type=int, default=15, help="of each row a turn")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(REPORT + json.dumps(measure(options.match, options.samples)))
        return 0
    if missing := [tree for tree in options.trees if not (tree / "openmsa/__init__.py").is_file()]:
        parser.error(f"trees must hold openmsa, got {', '.join(map(str, missing))}")
    if len(options.trees) < 2:
        parser.error(f"trees must be at least two, got {len(options.trees)}")
    arguments = [f"--match={pattern}" for pattern in options.match] + [f"--samples={options.samples}"]
    found: list[Samples] = [{} for _ in options.trees]
    for i in range(options.rounds):
        for tree, samples in zip(options.trees, found, strict=True):
            print(f"round {i + 1} of {options.rounds}: {tree}", file=sys.stderr)
            for row, seconds in launch(tree.resolve(), arguments).items():
                samples.setdefault(row, []).extend(seconds)
    print(table([str(tree) for tree in options.trees], found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
