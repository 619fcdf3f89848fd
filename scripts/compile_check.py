#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compiles what calls would launch on sm_80, sm_90, sm_100 and sm_120, and inspects the machine code. Needs no GPU.

    python scripts/compile_check.py [--all] [--arch 80 90 100 120] [--match TEXT] [--jobs N] [--sass DIRECTORY]

The calls, in the folder `compile_calls`, run under `openmsa.runtime.recording`; launches that compile to the same code count
once. Every variant is compiled for sm_90, which the kernels are tuned for. For each other architecture (for all others together
where a kernel has no matrix products) a part is compiled in which every constant, type and option occurs that some launch there
has; with --all, every variant is. Prints, for each kernel
and architecture, how many variants are compiled and recorded, their most registers, stack bytes and shared memory and their
matrix instructions, and below them each fault: a call or a compilation that fails, spills, a missing matrix instruction, more
shared memory than the architecture has. Exits with 1 on a fault.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # Triton reads this when it is imported.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # Line numbers are not read here.
os.environ.setdefault("MLIR_DISABLE_MULTITHREADING", "1")  # Each process has one core.

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compile_calls import calls
from compile_calls.covering import covering
from compile_calls.known import KNOWN
from compile_calls.machine_code import instructions, mnemonics, operations, resources, write

from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.runtime.recording import Launch, recording

ARCHS = tuple(COMPILE_TARGETS)
TUNED = 90  # Every variant is compiled for this one.
WGMMA = ("HGMMA", "QGMMA", "IGMMA")
CHUNK = 4  # A process takes so many variants at a time.


class Variant(NamedTuple):
    """Holds a launch to compile. files: the names of all launches with this machine code: call, kernel, number in the call."""

    launch: Launch
    files: list[str]


@dataclass
class Inspection:
    """Holds the facts about the machine code of one variant. place: where it stands in `_WANTED`; operations: how many
    instructions have each opcode, and one of them."""

    place: int
    kernel: str
    arch: int
    name: str
    registers: int = 0
    stack: int = 0
    reloads: int = 0
    shared: int = 0
    operations: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    matrix: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def variants(archs: list[int], match: str) -> tuple[list[Variant], list[str]]:
    """Returns what the calls would launch, each variant once, and a sentence for each call that failed."""
    found: dict[Any, Variant] = {}
    failures = []
    for arch in archs:
        for label, call in calls(arch):
            with recording(arch) as launches:
                try:
                    call.run()
                except Exception as error:
                    failures.append(f"sm_{arch} {label}: the call fails: {_cause(error)}")
            numbers: Counter[str] = Counter()
            for launch in launches:
                name = re.sub(r"[^\w=]+", "_", f"{label} {launch.name} sm{arch} {numbers[launch.name]}")
                numbers[launch.name] += 1
                if match in f"{label} {launch.name}":
                    found.setdefault((arch, launch.kernel, launch.variant), Variant(launch, [])).files.append(name)
    return list(found.values()), failures


def part(wanted: list[Variant]) -> list[Variant]:
    """Returns the variants for `TUNED`, and of the others those that cover what the variants of their kernel have: on each
    architecture, or, where the kernel has no matrix products, on any of them, as little of such code is one's own."""
    kept = [variant for variant in wanted if variant.launch.arch == TUNED]
    multiplying = {v.launch.name for v in wanted if (known := KNOWN.get(v.launch.name)) and known.matrix(v.launch)}
    others: dict[Any, list[Variant]] = {}
    for variant in wanted:
        if variant.launch.arch != TUNED:
            arch = variant.launch.arch if variant.launch.name in multiplying else None
            others.setdefault((variant.launch.kernel, arch), []).append(variant)
    for group in others.values():
        kept += [group[place] for place in covering([variant.launch for variant in group])]
    return kept


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__} {str(error).strip()[-200:].rsplit(chr(10), 1)[-1]}"


def inspect(chunk: list[int], sass_to: Path | None) -> list[Inspection]:
    """Compiles variants, known by their places in `_WANTED`, and reads their machine code."""
    found = []
    for place in chunk:
        launch, files = _WANTED[place]
        here = Inspection(place, launch.name, launch.arch, files[0])
        found.append(here)
        try:
            compiled = launch.compile()
        except Exception as error:
            here.faults.append(f"does not compile: {_cause(error)}")
            continue
        here.shared = compiled.metadata.shared
        here.operations = operations(instructions(compiled.asm["cubin"]))
        here.registers, here.stack = resources(compiled.asm["cubin"])
        if sass_to is not None:
            write(sass_to, files, compiled.asm)
    gc.collect()
    return found


_WANTED: list[Variant] = []  # The processes that compile inherit it.


def judge(results: list[Inspection]) -> None:
    """Counts the matrix instructions and the reloads of all that was compiled, and adds what is wrong with each."""
    for arch in ARCHS:
        here = [found for found in results if found.arch == arch]
        names = mnemonics([found.operations for found in here], arch)
        for found in here:
            for opcode, (number, _) in found.operations.items():
                found.reloads += number * (names[opcode] == "LDL")
                found.matrix[names[opcode]] += number * ("MMA" in names[opcode])
            found.matrix = +found.matrix
            if found.operations:
                found.faults += faults(found, _WANTED[found.place].launch)


def faults(found: Inspection, launch: Launch) -> list[str]:
    """Returns what is wrong with a variant, as sentences."""
    sentences, known, limit = [], KNOWN.get(launch.name), COMPILE_TARGETS[found.arch].shared_bytes
    allowed = known.may_spill(launch) if known else 0
    if found.reloads and found.stack > allowed:  # Some sm_120 code reserves stack that it never reads.
        sentences.append(f"spills: {found.stack} bytes of stack ({allowed} allowed), {found.reloads} reloads")
    if found.shared > limit:
        sentences.append(f"needs {found.shared} bytes of shared memory (limit {limit})")
    if known and known.wgmma(launch) and found.arch == 90 and not any(found.matrix[name] for name in WGMMA):
        sentences.append(f"no {' or '.join(WGMMA)} on sm_90")
    if known and known.matrix(launch) and not found.matrix:
        sentences.append("no matrix instruction")
    return sentences


def chunks(wanted: list[Variant]) -> Iterator[list[int]]:
    """Yields places of variants, a few at a time. Kernels with matrix products take longest and come first, so that all
    processes end at about the same time."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i].launch.name not in KNOWN)
    yield from (order[at : at + CHUNK] for at in range(0, len(order), CHUNK))


def show(results: list[Inspection], recorded: Counter[tuple[str, int]], console: Console) -> None:
    """Prints one row for each kernel and architecture, and the faults in full. recorded: variants of each, compiled or not."""
    table = Table("kernel", "arch", "compiled of", "regs", "stack", "LDL", "shared", "matrix", "")
    for column in table.columns[2:7]:
        column.justify = "right"
    for kernel, arch in sorted({(r.kernel, r.arch) for r in results}):
        here = [r for r in results if (r.kernel, r.arch) == (kernel, arch)]
        worst = [str(max(getattr(r, name) for r in here)) for name in ("registers", "stack", "reloads", "shared")]
        matrix = " ".join(sorted(set().union(*(r.matrix for r in here))))
        failed = sum(bool(r.faults) for r in here)
        verdict = f"[red]{failed} with faults" if failed else "[green]ok"
        table.add_row(kernel, f"sm_{arch}", f"{len(here)} {recorded[kernel, arch]:3}", *worst, matrix, verdict)
    console.print(table)
    for result in results:
        for fault in result.faults:
            console.print(f"{result.name}: {fault}", style="red", markup=False)


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help=f"compile every variant for other architectures than sm_{TUNED} too")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHS, choices=ARCHS)
    parser.add_argument("--match", default="", help="only launches whose 'call kernel' contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    parser.add_argument(
        "--sass", type=Path, help="also write disassembly and parameters of each launch to this directory; implies --all"
    )
    options = parser.parse_args()
    console, start = Console(width=None if sys.stdout.isatty() else 160), time.perf_counter()
    torch.set_num_threads(1)  # Processes are forked from this one.
    recorded, failures = variants(list(options.arch), options.match)
    wanted = recorded if options.all or options.sass else part(recorded)
    _WANTED.extend(wanted)
    console.print(f"{len(recorded)} variants recorded in {time.perf_counter() - start:.0f} s; {len(wanted)} are compiled")
    gc.freeze()  # What stands here is not searched for garbage again and again: compiling takes a fifth less time.
    gc.disable()
    results: list[Inspection] = []
    with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("compiling", total=len(wanted))
        running = [pool.submit(inspect, chunk, options.sass) for chunk in chunks(wanted)]
        for done in running:
            results += done.result()
            progress.update(bar, completed=len(results))
    judge(results)
    show(results, Counter((variant.launch.name, variant.launch.arch) for variant in recorded), console)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    failed = sum(bool(r.faults) for r in results) + len(failures)
    console.print(f"{len(results)} variants compiled in {time.perf_counter() - start:.0f} s, {failed} faults")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
