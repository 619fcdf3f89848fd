# SPDX-License-Identifier: MIT
"""A record is one row of a run; it says where, with what and on which commit it was measured.

A file holds one JSON object a line. What many rows share (`SHARED`) stands once, in a line of its own, ``{"shared": {...}}``,
which holds for the rows after it, up to the next such line.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from openmsa.runtime.files import check_ends

Record = dict[str, Any]


def device_name(device: torch.device) -> str:
    """Returns the GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Returns the versions of openmsa, python, torch, triton, cuda and cudnn; None where one is not there."""
    import openmsa

    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        "openmsa": openmsa.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def checkout_commit() -> str | None:
    """Returns the commit of the checkout that this code runs from, with ``+`` behind it where tracked files differ; None
    elsewhere."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # fails where the checkout is not this project's
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(device: torch.device, commit: str | None = None) -> Record:
    """Returns what every record of a run shares. commit None: that of the checkout."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or checkout_commit(),
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": versions(),
    }


SHARED = (
    *("date", "commit", "device", "device_name", "threads", "platform", "versions"),
    *("workload", "kind", "shape", "dtype", "ceilings"),
)


def append(records: Iterable[Record], path: Path) -> None:
    """Adds records to a JSONL file, which need not exist. What they share with the file's last ones is not written again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    behind = [json.loads(line)["shared"] for line in text.splitlines() if line.startswith('{"shared"')]
    shared = behind[-1] if behind else {}
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            now = json.loads(json.dumps({name: record[name] for name in SHARED if name in record}))
            if now != shared:
                file.write(_line({"shared": now}))
                shared = now
            file.write(_line({name: value for name, value in record.items() if name not in shared}))


def _line(values: Record) -> str:
    return json.dumps(values, separators=(",", ":")) + "\n"


def rows(path: Path) -> list[Record]:
    """Returns the rows of a JSONL file, each with what it shares with others. Raises ValueError, which says what is wrong, for
    lines that are no JSON objects."""
    check_ends("FILE", path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must hold one JSON record a line, got bytes that are no text at {error.start}") from error
    shared: Record = {}
    found: list[Record] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict) or not isinstance(record.get("shared", {}), dict):
                raise ValueError(f"{path} must hold one JSON record a line, got {line[:40]!r} in line {number}")
            if "shared" in record:
                shared = record["shared"]
            else:
                found.append(shared | record)
    return found


Types = tuple[type, ...]
TEXT: Types = (str,)
COUNT: Types = (int,)
NUMBER: Types = (int, float)
TABLE: Types = (dict,)
NOTHING: Types = (type(None),)
FIELDS = dict.fromkeys(("workload", "date", "row", "mode", "kind", "dtype", "device_name"), TEXT)
FIELDS |= {"shape": TABLE, "threads": COUNT, "ceilings": TABLE, "form": TEXT + NOTHING, "error": TEXT + NOTHING}
SHAPE = dict.fromkeys(("batch", "q_len", "context", "num_q_heads", "num_kv_heads"), COUNT)
CEILINGS = dict.fromkeys(("gemm", "copy", "read", "launch"), NUMBER)
FIGURES = {"samples": (list,), "bound": TEXT, "times_faster_than": TABLE, "peak_extra_bytes": NUMBER + NOTHING}
FIGURES |= dict.fromkeys(("median_s", "lower_quartile_s", "upper_quartile_s", "percent_of_limit"), NUMBER)
FIGURES |= dict.fromkeys(("flops_per_s", "bytes_per_s"), NUMBER)
"""What tables and plots read of a record, of which types; figures, of one without an error."""


def load(path: Path) -> list[Record]:
    """Returns the records of `openmsa bench` in a JSONL file. Raises ValueError, which says what is wrong, for an empty or any
    other file."""
    records = rows(path)
    for number, record in enumerate(records, 1):
        rule = f"{path} must hold records of `openmsa bench`; row {number}"
        _check(rule, record, FIELDS if record.get("error") else FIELDS | FIGURES)
        _check(f"{rule}, its shape", record["shape"], SHAPE)
        _check(f"{rule}, its ceilings", record["ceilings"], CEILINGS)
        if not record["error"]:
            factors = record["times_faster_than"]
            _check(f"{rule}, its times_faster_than", factors, dict.fromkeys(factors, NUMBER))
            if not record["median_s"] > 0:
                raise ValueError(f"{rule} has a median_s of {record['median_s']}, which must be positive")
    if not records:
        raise ValueError(f"{path} must hold at least one record, got an empty file")
    return records


def _check(rule: str, record: Record, fields: dict[str, Types]) -> None:
    if missing := sorted(set(fields) - set(record)):
        raise ValueError(f"{rule} lacks {', '.join(missing)}")
    for name, types in fields.items():
        if not isinstance(record[name], types) or isinstance(record[name], bool):
            raise ValueError(f"{rule} has {str(record[name])[:40]!r} as {name}")
