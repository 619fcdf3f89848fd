#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compiles every declared kernel variant for sm_80, sm_90, sm_100 and sm_120 and inspects the machine code. Needs no GPU.

    python scripts/compile_check.py [--arch 80 90 100 120] [--match NAME] [--jobs N] [--sass DIRECTORY]

Prints registers, stack bytes and loads from it, shared memory and the matrix instructions of each, and exits with 1 on a
compile error, on spills, on a missing matrix instruction or on more shared memory than the architecture has.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from openmsa.runtime.variants import ARCHS, Variant, declared

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
WGMMA = ("HGMMA", "QGMMA", "IGMMA")
OPERAND = re.compile(r"tensor<([0-9x]+)x\w+, #ttg\.dot_op<\{opIdx = (\d), parent = #(\w+), kWidth = (\d+)\}>>")
MATRIX = re.compile(r"\b(U?[A-Z0-9]*(?:MMA|TCHMMA|TCQMMA)[A-Z]*)[.\s]")
TOOLS = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"


@dataclass
class Inspection:
    """What the machine code of one variant on one architecture looks like."""

    arch: int
    module: str
    name: str
    num_warps: int
    num_stages: int
    registers: int = 0
    stack: int = 0
    reloads: int = 0
    shared: int = 0
    instructions: int = 0
    seconds: float = 0.0
    matrix: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def compile_variant(variant: Variant, arch: int) -> triton.compiler.CompiledKernel:
    """Offline: needs no driver."""
    source_type = ASTSource
    if type(variant.fn).__module__.startswith("triton.experimental.gluon"):
        from triton.experimental.gluon._runtime import GluonASTSource as source_type
    source = source_type(variant.fn, variant.signature(), variant.constants(), variant.attributes())
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.maxnreg is not None:
        options["maxnreg"] = variant.maxnreg
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def tool(name: str, *arguments: str) -> str:
    """Output of one of the binary tools in triton's wheel."""
    return subprocess.run([str(TOOLS / name), *arguments], check=True, capture_output=True, text=True).stdout


@functools.cache
def variants(arch: int) -> list[tuple[str, Variant]]:
    """The declared ones, in an order that every process finds."""
    return list(declared(arch))


def inspect(arch: int, index: int, sass_to: Path | None) -> Inspection:
    """Compiles one variant and reads its machine code."""
    module, variant = variants(arch)[index]
    found = Inspection(arch, module, variant.name, variant.num_warps, variant.num_stages)
    start = time.perf_counter()
    try:
        kernel = compile_variant(variant, arch)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = str(cause).strip().rsplit("\n", 1)[-1].strip()
        found.faults.append(f"does not compile: {type(cause).__name__} {text[-200:]}")
        return found
    found.seconds = time.perf_counter() - start
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = tool("cuobjdump", "-res-usage", cubin.name)
        sass = tool("cuobjdump", "-sass", cubin.name)
    if sass_to is not None:
        name = re.sub(r"\W+", "_", f"{module.removeprefix('openmsa.')} {variant.name} sm{arch}")
        sass_to.mkdir(parents=True, exist_ok=True)
        (sass_to / f"{name}.sass").write_text(sass)
        (sass_to / f"{name}.ttgir").write_text(kernel.asm["ttgir"])
    found.registers = max((int(n) for n in re.findall(r"REG:(\d+)", usage)), default=0)
    found.stack = max((int(n) for n in re.findall(r"STACK:(\d+)", usage)), default=0)
    found.reloads = len(re.findall(r"\bLDL\b", sass))
    found.shared = kernel.metadata.shared
    found.instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE))
    found.matrix = Counter(MATRIX.findall(sass))
    found.faults += faults(found, variant) + narrow_products(kernel.asm["ttgir"])
    return found


def faults(found: Inspection, variant: Variant) -> list[str]:
    """What is wrong with it, as sentences."""
    sentences = []
    if found.reloads and found.stack > variant.may_spill:  # some sm_120 code reserves stack that it never reads
        sentences.append(f"spills: {found.stack} bytes of stack ({variant.may_spill} allowed), {found.reloads} reloads")
    if found.shared > SHARED_LIMIT[found.arch]:
        sentences.append(f"needs {found.shared} bytes of shared memory (limit {SHARED_LIMIT[found.arch]})")
    if variant.wgmma and found.arch == 90 and not any(found.matrix[name] for name in WGMMA):
        sentences.append(f"no {' or '.join(WGMMA)} on sm_90")
    if (variant.dot or variant.wgmma) and not found.matrix:
        sentences.append("no matrix instruction")
    return sentences


def narrow_products(ttgir: str) -> list[str]:
    """Products of the warps' own matrix instructions that sum fewer elements than the compiler spreads over the four threads
    of a row, kWidth to each: Triton 3.6 multiplies some of them twice and others never."""
    layouts = set(re.findall(r"^#(\w+) = #ttg\.nvidia_mma<\{versionMajor = 2,", ttgir, re.MULTILINE))
    sentences = set()
    for shape, side, layout, width in OPERAND.findall(ttgir):
        summed = int(shape.split("x")[-1 if side == "0" else -2])
        if layout in layouts and summed < 4 * int(width):
            sentences.add(f"a product sums {summed} elements, laid out for {4 * int(width)}")
    return sorted(sentences)


def show(results: list[Inspection], console: Console) -> None:
    """One row a variant."""
    table = Table("arch", "module", "variant", "warps", "stages", "regs", "stack", "LDL", "shared", "instr", "matrix", "s", "")
    for column in table.columns[3:10]:
        column.justify = "right"
    for r in results:
        matrix = " ".join(f"{name}x{n}" for name, n in r.matrix.most_common())
        verdict = "[red]" + "; ".join(r.faults) if r.faults else "[green]ok"
        numbers = (r.num_warps, r.num_stages, r.registers, r.stack, r.reloads, r.shared, r.instructions)
        table.add_row(
            f"sm_{r.arch}",
            r.module.removeprefix("openmsa."),
            r.name,
            *map(str, numbers),
            matrix,
            f"{r.seconds:.1f}",
            verdict,
        )
    console.print(table)


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHS, choices=ARCHS)
    parser.add_argument("--match", default="", help="only variants whose 'module name' contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; default: one a core")
    parser.add_argument("--sass", type=Path, help="also write the disassembly and TTGIR of each variant to this directory")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200)
    wanted = [
        (arch, index, options.sass)
        for arch in options.arch
        for index, (module, variant) in enumerate(variants(arch))
        if options.match in f"{module} {variant.name}"
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        found = pool.map(inspect, *zip(*wanted, strict=True)) if wanted else []
        results = list(track(found, "compiling", total=len(wanted), console=console, transient=True))
    show(results, console)
    failed = sum(bool(r.faults) for r in results)
    console.print(f"{len(results)} variants compiled, {failed} with faults")
    if not results:
        console.print("[red]nothing matched")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
