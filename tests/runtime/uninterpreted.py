# SPDX-License-Identifier: MIT
"""Tests that need compiled kernels or recorded launches run in a process of their own, without Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def passes(module: str, *arguments: str) -> None:
    """Runs a module, which fails where what it checks does not hold."""
    space = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=space | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
