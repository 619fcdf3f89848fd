# SPDX-License-Identifier: MIT
"""C kernels of a CPU are compiled when one is first called, by the C compiler of the machine, in about a second, and kept in
the cache folder. Where there is no compiler, PyTorch's operations do the work; `openmsa doctor` says which of both do."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openmsa.runtime.environment import c_compiler, cache_folder

NATIVE = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
FLAGS = ("-O3", NATIVE, "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
LEAST_PRODUCTS = 1 << 23  # Fewer products are made by one thread in the time that another takes to start.
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """A C file becomes a library: functions, or None where it could not be compiled, and a sentence that says so or how it
    was."""

    functions: ctypes.CDLL | None
    says: str


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
    return Library(functions, f"compiled by {compiler}")


def _compiled(compiler: str, source: Path, flags: tuple[str, ...]) -> Path:
    """Returns the library of a C file, which is compiled unless the cache folder holds what the same compiler made of the same
    files for a processor with the same instructions."""
    macros = _run(compiler, *flags, "-dM", "-E", "-x", "c", os.devnull)  # the compiler's version and the instructions
    headers = sorted((source.parent.parent / "primitives").glob("*.h"))
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
    draft = found.with_suffix(f".{os.getpid()}")
    _run(compiler, *flags, "-o", str(draft), str(source), "-lm")
    draft.replace(found)  # in one step: no process loads half a library
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def threads_for(products: int) -> int:
    """Returns how many threads make so many products."""
    return torch.get_num_threads() if products >= LEAST_PRODUCTS else 1


def run(functions: ctypes.CDLL, name: str, calls: Sequence[Any], threads: int) -> None:
    """Calls a function of a library with each of the structures `calls`, whose field `memory` gets the address of as many bytes
    of a thread's own as ``memory_bytes`` of the library says.

    Each thread takes the next call when it is done with one, so that a busy core makes fewer. Threads that find none left end;
    none waits in a loop, and none runs PyTorch's operations, which would start threads of their own.
    """
    most = max((functions.memory_bytes(ctypes.byref(call)) for call in calls), default=0)
    function, left, lock = functions[name], iter(calls), threading.Lock()

    def serve() -> None:
        memory = torch.empty(most, dtype=torch.uint8, device="cpu")
        while True:
            with lock:
                call = next(left, None)
            if call is None:
                return
            call.memory = memory.data_ptr()
            function(ctypes.byref(call))

    others = min(threads, len(calls)) - 1
    if others <= 0:
        serve()
        return
    with ThreadPoolExecutor(others) as pool:
        started = [pool.submit(serve) for _ in range(others)]
        serve()
        for future in started:
            future.result()
