# SPDX-License-Identifier: MIT
"""The log of a run is a file of JSON lines: one a step, and one a measurement on held-out text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openmsa.training.checkpoint import write_atomically


class Log:
    """Appends records to a file, each on the disk before the next step. Where `writes` is False it does nothing."""

    def __init__(self, file: Path, writes: bool = True) -> None:
        self.file, self.writes = file, writes

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one record."""
        if self.writes:
            with self.file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(record) + "\n")

    def keep_before(self, step: int) -> None:
        """Drops what was logged after a checkpoint of `step` done steps: steps from this number on, and later measurements; and
        the end of a line that was cut off."""
        if self.writes and self.file.exists():
            kept = [r for r in read_log(self.file) if (r["step"] <= step if "measured" in r else r["step"] < step)]
            kept = kept if step else []
            text = "".join(json.dumps(record) + "\n" for record in kept)
            write_atomically(self.file, lambda path: path.write_text(text, encoding="utf-8"))


def read_log(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a log, none where there is no file; a last line that was cut off is left out. Raises ValueError
    for what is no log."""
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise _no_log(file, f"bytes that are no text at {error.start}") from error
    return [_record(file, line) for line in lines if line.endswith("\n")]


def _record(file: Path, line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
        needed = {"step"} | ({"stage", "by_layer"} if "loss" in found else set())
        if needed <= found.keys() and isinstance(found["step"], int):
            return found
    except (json.JSONDecodeError, AttributeError, TypeError, RecursionError):
        pass
    raise _no_log(file, repr(line.rstrip()[:40]))


def _no_log(file: Path, got: str) -> ValueError:
    return ValueError(f"{file} must hold a JSON object of a step a line, got {got}; without the file a run goes on as well")
