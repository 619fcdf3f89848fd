# SPDX-License-Identifier: MIT
"""What `scripts/compile_check.py` says of machine code is true."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="launches are recorded with triton 3.6")
def test_the_check_finds_faults_and_its_calls_reach_every_kernel():
    """See `tests.runtime.compile_checked`, in a process whose kernels are not interpreted."""
    space = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runtime.compile_checked"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=space | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
