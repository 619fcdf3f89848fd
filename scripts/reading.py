#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Counts what a reader opens to follow one call from the public function to the last kernel. Needs no GPU.

    python scripts/reading.py [--files] [--names]

The host code runs on tensors without a GPU while its launches are recorded. A reader opens every file of the packages in which
a function runs, and every file in which a kernel, or a device function that it calls with the constants of the launch, is
written: Triton's front end says which these are. With --names every device function counts that a kernel names, also in
branches that the constants leave out, such as those of formats. "Lines" are those of the files, "passed" those of the
functions.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # Triton reads this when it is imported.

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.code_generator import CodeGenerator
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITCallable

from openmsa import DecodePlan, PagedIndexKeys, PagedKV, msa_attention
from openmsa.runtime.recording import Launch, recording

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "openmsa", ROOT / "fmha_sm100")


@dataclass(frozen=True)
class Reading:
    """Says what one call takes to read. files: in the order in which a reader meets them; functions: host and device ones;
    passed: lines of these functions, where `lines` counts those of the files."""

    files: tuple[Path, ...]
    functions: int
    passed: int
    launches: int

    @property
    def lines(self) -> int:
        """Returns the lines of all files together."""
        return sum(len(path.read_text().splitlines()) for path in self.files)


def read(call: Callable[[], Any], launches: list[Launch], device: Callable[[Launch], Iterable[JITCallable]]) -> Reading:
    """Runs a call whose launches are recorded in `launches`, once to import what it needs and once to count what it opens.
    device: tells the device functions of a launch."""
    call()
    functions: dict[tuple[str, str, int], CodeType] = {}
    start = len(launches)

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>":
            functions.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), code)

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    host = [key for key in functions if _ours(Path(key[0])) and not key[0].endswith("recording.py")]
    kernels = {function: None for launch in launches[start:] for function in device(launch)}
    files = [Path(name) for name, _, _ in host] + [_file(function) for function in kernels]
    passed = {line for key in host for line in _span(functions[key])}
    passed |= {line for function in kernels for line in _span(function.fn.__code__)}
    return Reading(tuple(dict.fromkeys(files)), len(host) + len(kernels), len(passed), len(launches) - start)


def _span(code: CodeType) -> Iterator[tuple[str, int]]:
    """Yields the file and the number of each line from the first to the last of a function."""
    last = max(line for _, _, line in code.co_lines() if line is not None)
    yield from ((code.co_filename, line) for line in range(code.co_firstlineno, last + 1))


def _ours(path: Path) -> bool:
    return any(package in path.parents for package in PACKAGES)


def _file(function: JITCallable) -> Path:
    return Path(function.fn.__code__.co_filename)


def called(launch: Launch) -> Iterator[JITCallable]:
    """Yields the kernel and every device function that it calls with these constants, outside of Triton."""
    found: dict[JITCallable, None] = {}
    begin = CodeGenerator.__init__

    def begun(*arguments: Any, jit_fn: JITCallable, **options: Any) -> None:
        found[jit_fn] = None
        begin(*arguments, jit_fn=jit_fn, **options)

    target = GPUTarget("cuda", launch.arch, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = kind(launch.kernel, launch.signature, launch.constexprs, launch.attributes)
    functions, modules = backend.get_codegen_implementation(launch.options), backend.get_module_map()
    CodeGenerator.__init__ = begun
    try:
        source.make_ir(target, launch.options, functions, modules, context)
    finally:
        CodeGenerator.__init__ = begin
    yield from (function for function in found if _ours(_file(function)))


def named(launch: Launch) -> Iterator[JITCallable]:
    """Yields the kernel and every device function that it names, or that one of these names, outside of Triton."""
    kernel = launch.kernel
    found, open_ = {kernel: None}, [kernel]
    while open_:
        function = open_.pop()
        names = function.fn.__globals__
        for name in _names(function.fn.__code__):
            value = names.get(name)
            if isinstance(value, JITCallable) and value not in found and _ours(_file(value)):
                found[value] = None
                open_.append(value)
    yield from found


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names(constant)


def tensors(total_q: int, total_k: int) -> dict[str, Any]:
    """Makes bf16 tensors of MiniMax-M3's layout: 64 query heads, 4 KV heads, 4 index heads with one index key head."""
    gpu = {"dtype": torch.bfloat16, "device": "cuda"}
    return {
        "q": torch.empty(total_q, 64, 128, **gpu),
        "k": torch.empty(total_k, 4, 128, **gpu),
        "v": torch.empty(total_k, 4, 128, **gpu),
        "index_q": torch.empty(total_q, 4, 128, **gpu),
        "index_k": torch.empty(total_k, 1, 128, **gpu),
    }


def prefill(length: int) -> Callable[[], Any]:
    """Returns a call of `msa_attention` for one packed sequence."""
    given = tensors(length, length)
    return lambda: msa_attention(**given, topk=16)


def decode(batch: int, length: int) -> Callable[[], Any]:
    """Returns a step of a `DecodePlan` over pages of 128 keys, its plan already made."""
    pages = length // 128
    given = tensors(batch, batch * length)
    table = torch.empty(batch, pages, dtype=torch.int32, device="cuda")
    lens = torch.empty(batch, dtype=torch.int32, device="cuda")
    k, v, index_k = (given[name].view(batch * pages, -1, 128, 128) for name in ("k", "v", "index_k"))
    kv, index_keys = PagedKV(k, v, table, lens), PagedIndexKeys(index_k, table, lens)
    sizes = {"num_q_heads": 64, "num_kv_heads": 4, "head_dim": 128, "page_size": 128, "max_pages": pages}
    plan = DecodePlan(max_batch=batch, **sizes)
    return lambda: plan.run(given["q"], kv, given["index_q"], index_keys)


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "prefill of 6K": lambda: prefill(6144),
    "prefill of 16K": lambda: prefill(16384),
    "decode of 1 sequence": lambda: decode(1, 32768),
    "decode of 32 sequences": lambda: decode(32, 32768),
}


def readings(device: Callable[[Launch], Iterable[JITCallable]] = called) -> dict[str, Reading]:
    """Returns what each of `CALLS` takes to read."""
    found = {}
    for name, prepare in CALLS.items():
        with recording(90) as launches:
            call = prepare()
            found[name] = read(call, launches, device)
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="also name the files")
    parser.add_argument("--names", action="store_true", help="count every device function that is named")
    options = parser.parse_args()
    print(f"{'call':24}{'files':>7}{'lines':>7}{'passed':>8}{'functions':>11}{'launches':>10}")
    for name, found in readings(named if options.names else called).items():
        print(f"{name:24}{len(found.files):7}{found.lines:7}{found.passed:8}{found.functions:11}{found.launches:10}")
        for path in found.files if options.files else ():
            print(f"    {len(path.read_text().splitlines()):5} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
