# SPDX-License-Identifier: MIT
"""How much a reader opens to follow one call does not grow: files and their lines, as `scripts/reading.py` counts them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = {
    "prefill of 6K": (23, 5263),
    "prefill of 16K": (21, 5011),
    "decode of 1 sequence": (12, 2569),
    "decode of 32 sequences": (14, 2691),
}
"""Files and lines of each call."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="launches are recorded with triton")
def test_a_call_takes_no_more_to_read():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "scripts" / "reading.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)}, check=True)
    rows = [line for line in done.stdout.splitlines()[1:] if line.strip()]
    found = {line[:24].strip(): tuple(map(int, line[24:].split()[:2])) for line in rows}
    assert found.keys() == MOST.keys()
    for call, (files, lines) in found.items():
        assert files <= MOST[call][0], f"{call} opens {files} files"
        assert lines <= MOST[call][1], f"{call} opens {lines} lines"
