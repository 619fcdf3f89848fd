# SPDX-License-Identifier: MIT
"""Triton's compiler key is remembered between processes.

Every process that looks into Triton's cache first hashes the whole compiler, some 400 MB, which takes longer than loading a
kernel. `remember` makes Triton take the same key from a file beside its kernels as long as size and time of every hashed file
are what they were; otherwise the key is computed as ever. A file that is missing, damaged or not writable costs only that time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

RECORD = "openmsa-compiler-key.json"


@functools.cache
def remember() -> None:
    """Replaces `triton_key` of ``triton.runtime.cache`` by one that reads and keeps the record. Does nothing without triton, or
    with one that has no such function."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs
    from triton.runtime import cache

    compute = getattr(cache, "triton_key", None)
    if compute is None:
        return
    root, record = Path(cache.__file__).parents[1], Path(knobs.cache.dir) / RECORD
    cache.triton_key = functools.cache(lambda: remembered(compute, root, record))


def remembered(compute: Callable[[], str], root: Path, record: Path) -> str:
    """Returns the key in `record` if it was written for the files under `root` as they are, else ``compute()``, and records
    it."""
    state = fingerprint(root)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(record.read_text())
        if known["files"] == state and isinstance(known["key"], str):
            return known["key"]
    key = compute()
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        draft = record.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"files": state, "key": key}))
        draft.replace(record)
    return key


def fingerprint(root: Path) -> list[list[str | int]]:
    """Returns the path, bytes and time of change of each file of Triton that can change what it compiles."""
    found: list[list[str | int]] = []
    for folder in ("compiler", "backends", "language", "runtime", "_C"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".so"):
                status = path.stat()
                found.append([str(path), status.st_size, status.st_mtime_ns])
    return found
