# SPDX-License-Identifier: MIT
"""Records are lines of JSON, written as soon as they are known, so that a run that is stopped leaves what it found."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

FILE = "records.jsonl"


class Records:
    """Appends records to a file. `most`: how many digits a float keeps after the point."""

    def __init__(self, folder: Path, most: int = 6) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.most, self.start = folder, most, time.monotonic()
        self.file = (folder / FILE).open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Writes one record. It says its kind and the seconds since the run began."""
        record = {"kind": kind, "at": round(time.monotonic() - self.start, 2), **_rounded(values, self.most)}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {name: _rounded(x, digits) for name, x in value.items()}
    return [_rounded(x, digits) for x in value] if isinstance(value, list | tuple) else value


def read(place: Path) -> list[dict[str, Any]]:
    """Returns the records of a folder, or of a file."""
    file = place / FILE if place.is_dir() else place
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def machine(device: torch.device) -> dict[str, Any]:
    """Says on what a run ran."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    try:
        import triton

        own: str | None = triton.__version__
    except ImportError:
        own = None
    return {"device": name, "torch": torch.__version__, "triton": own, "python": platform.python_version()}
