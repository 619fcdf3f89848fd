# SPDX-License-Identifier: MIT
"""Compiled kernels have a folder of our own, which Triton uses where ``TRITON_CACHE_DIR`` names it.

Nothing here changes where Triton looks: `scripts/warmup_fmha_sm100.py` fills the folder and prints the line to export.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from openmsa.runtime.environment import cache_folder

MARK = "openmsa-kernels"  # this file says that the folder is ours to clear


@dataclass(frozen=True)
class Info:
    """A folder holds so many kernels (one folder each) and bytes."""

    folder: Path
    kernels: int
    bytes: int


def folder() -> Path:
    """Returns our folder of compiled kernels, existing or not."""
    return cache_folder() / "triton"


def prepare() -> Path:
    """Makes our folder and marks it as ours. Raises FileExistsError where something else stands there."""
    ours = folder()
    if ours.exists() and any(ours.iterdir()) and not (ours / MARK).exists():
        raise FileExistsError(f"{ours} must be empty or written by openmsa, but it holds something else; see OPENMSA_CACHE_DIR")
    ours.mkdir(parents=True, exist_ok=True)
    (ours / MARK).touch()
    return ours


def info(where: Path | None = None) -> Info:
    """Says what `where` (None: our folder) holds, which is nothing where it does not exist. Links are not followed."""
    where, kernels, size = folder() if where is None else where, 0, 0
    for root, _, files in os.walk(where):
        kernels += any(name.endswith((".cubin", ".hsaco")) for name in files)
        size += sum((Path(root) / name).lstat().st_size for name in files)
    return Info(where, kernels, size)


def clear() -> Info:
    """Removes our folder and returns what it held. Without our mark on it this raises FileExistsError and removes nothing."""
    held = info()
    if held.folder.is_symlink():
        raise FileExistsError(f"{held.folder} must be a folder to be cleared, got a link")
    if not held.folder.exists():
        return held
    if not (held.folder / MARK).exists() and any(held.folder.iterdir()):
        raise FileExistsError(f"{held.folder} must have been written by openmsa to be cleared; it holds something else")
    doomed = held.folder.with_name(f"triton.{os.getpid()}.removed")
    held.folder.rename(doomed)  # renaming is one step, so no process sees half a cache
    shutil.rmtree(doomed)
    return held
