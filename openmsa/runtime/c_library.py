# SPDX-License-Identifier: MIT
"""C kernels of a CPU are compiled when one is first called, by the C compiler of the machine, in about a second, and kept in
the cache folder. Where there is no compiler, PyTorch's operations do the work; `openmsa doctor` says which of both do."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import operator
import os
import platform
import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from openmsa.runtime.environment import c_compiler, cache_folder

MACHINES = {"aarch64": "-mcpu=native", "arm64": "-mcpu=apple-m1"}
"""What names the instructions of a machine, as Linux and macOS call it. Apple's later processors have those of the first."""
NATIVE = MACHINES.get(platform.machine(), "-march=native")
FLAGS = ("-O3", NATIVE, "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
LEAST_PRODUCTS = 1 << 20  # Fewer products are made by one thread in the time that another takes to start.
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """A C file becomes a library: functions, or None where it could not be compiled, a sentence that says so or how it was, and
    what multiplies tiles of bfloat16 (see tiles.h), "" where nothing does."""

    functions: ctypes.CDLL | None
    says: str
    tiles: str = ""


@functools.cache
def library(source: Path, flags: tuple[str, ...] = FLAGS) -> Library:
    """Compiles and loads a C file of the package, or takes what the cache folder holds of it."""
    compiler = c_compiler()
    if compiler is None:
        return Library(None, "PyTorch's operations: no C compiler was found (cc, gcc, clang), or OPENMSA_CC is none")
    try:
        functions = ctypes.CDLL(str(_compiled(compiler, source, flags)))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        why = f"PyTorch's operations: {compiler} could not compile {source.name} ({said[0] if said else error!r})"
        log.warning(why)
        return Library(None, why)
    functions.memory_bytes.restype = ctypes.c_int64
    tiles = ""
    if (by := getattr(functions, "multiplies_tiles_by", None)) is not None:
        by.restype = ctypes.c_char_p
        tiles = by().decode()
    return Library(functions, f"compiled by {compiler}{f', bfloat16 by {tiles}' if tiles else ''}", tiles)


def _compiled(compiler: str, source: Path, flags: tuple[str, ...]) -> Path:
    """Returns the library of a C file, which is compiled unless the cache folder holds what the same compiler made of the same
    files for a processor with the same instructions."""
    macros = _run(compiler, *flags, "-dM", "-E", "-x", "c", os.devnull)  # the compiler's version and the instructions
    headers = sorted([*source.parent.glob("*.h"), *(source.parent.parent / "primitives").glob("*.h")])
    parts = (compiler, *flags, macros, *(path.read_text() for path in (source, *headers)))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    found = cache_folder() / "c" / f"{source.stem}-{key}.so"
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(found))
        return found
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # The cache folder cannot be written: the library lasts as long as the process.
        found = Path(tempfile.mkdtemp(prefix="openmsa-")) / found.name
    draft = found.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    _run(compiler, *flags, "-o", str(draft), str(source), "-lm")
    draft.replace(found)  # in one step: no process loads half a library
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def threads_for(products: int) -> int:
    """Returns how many threads make so many products."""
    return torch.get_num_threads() if products >= LEAST_PRODUCTS else 1


class _Work(ctypes.Structure):
    """This is `Work` of openmsa/primitives/lanes.h."""

    _fields_ = (
        *(("function", ctypes.c_void_p), ("calls", ctypes.c_void_p)),
        *((name, ctypes.c_int64) for name in ("count", "pieces", "most_threads", "bytes", "memory", "next", "threads")),
    )


class Task(NamedTuple):
    """A function of a library is called with each of the structures `calls` and each number below `pieces`, by so many threads
    at most. held: what the addresses in the calls belong to."""

    functions: ctypes.CDLL
    name: str
    calls: Sequence[Any]
    pieces: int
    threads: int
    held: Sequence[Any] = ()


def run(*tasks: Task) -> None:
    """Does one task after the other. A function is called with memory of a thread's own, too, as much as ``memory_bytes`` of
    its library says of a call.

    Each thread takes the next piece when it is done with one, so that a busy core makes fewer. The threads are those with which
    PyTorch's operations run, which may still wait in a loop for the next operation and would hinder others.
    """
    tasks = tuple(task for task in tasks if task.calls and task.pieces)
    if not tasks:
        return
    threads = [max(1, min(task.threads, len(task.calls) * task.pieces)) for task in tasks]
    needs = [max(task.functions.memory_bytes(ctypes.byref(call)) for call in task.calls) for task in tasks]
    memory = torch.empty(max(map(operator.mul, threads, needs)), dtype=torch.uint8, device="cpu")
    works, places = (_Work * len(tasks))(), []
    for work, task, most, need in zip(works, tasks, threads, needs, strict=True):
        places.append((ctypes.c_void_p * len(task.calls))(*map(ctypes.addressof, task.calls)))
        work.function = ctypes.cast(getattr(task.functions, task.name), ctypes.c_void_p)
        work.calls, work.count, work.pieces = ctypes.addressof(places[-1]), len(task.calls), task.pieces
        work.most_threads, work.bytes, work.memory = most, need, memory.data_ptr()
    parallel = _openmp() if max(threads) > 1 else None
    if parallel is not None or max(threads) == 1:
        tasks[0].functions.serve_in_turn(works, ctypes.c_int64(len(works)), parallel)
        return
    with ThreadPoolExecutor(max(threads)) as pool:
        for work, task, most in zip(works, tasks, threads, strict=True):
            for done in [pool.submit(task.functions.serve, ctypes.byref(work)) for _ in range(most)]:
                done.result()


@functools.cache
def _openmp() -> ctypes.c_void_p | None:
    """Returns GOMP_parallel of the OpenMP library that PyTorch has loaded, or None where it has none that is found."""
    home = str(Path(torch.__file__).parent)
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    except OSError:
        return None
    for path in sorted(mapped, key=lambda path: (not path.startswith(home), path)):
        with contextlib.suppress(OSError, AttributeError):
            if re.match(r"lib(g|i)omp", Path(path).name):
                return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p)
    return None
