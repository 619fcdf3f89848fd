# SPDX-License-Identifier: MIT
"""These settings are read from environment variables; docs/environment.md lists them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def _mebibytes(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default << 20
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} must be a positive whole number of MiB, got {text!r}")
    return int(text) << 20


def cpu_workspace_bytes() -> int:
    """Returns how many bytes of scratch memory a call of a CPU implementation may use beside its inputs and outputs."""
    return _mebibytes("OPENMSA_CPU_WORKSPACE_MIB", 256)


def cpu_waiting() -> str:
    """Says in a sentence how threads of PyTorch on a CPU wait for each other, which was settled when PyTorch was loaded."""
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    return policy or "unset, so they spin; where other programs use this CPU, OMP_WAIT_POLICY=passive is many times as fast"


def c_compiler() -> str | None:
    """Returns the path of the C compiler that makes kernels for the CPU, or None where there is none."""
    named = os.environ.get("OPENMSA_CC", "")
    if named == "none":
        return None
    if named and shutil.which(named) is None:
        raise ValueError(f"OPENMSA_CC must name a C compiler or be none, got {named!r}")
    return next(filter(None, map(shutil.which, (named,) if named else ("cc", "gcc", "clang"))), None)


def cache_folder() -> Path:
    """Returns the folder of files that can be made again."""
    text = os.environ.get("OPENMSA_CACHE_DIR", "")
    return Path(text).expanduser() if text else Path.home() / ".cache" / "openmsa"
