# SPDX-License-Identifier: MIT
"""What is true of all commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    [["openmsa", "plan"], ["openmsa", "plan", "--json"], ["openmsa", "--help"], ["benchmarks", "--list", "--json"]],
)
def test_a_full_standard_output_ends_a_command_in_a_sentence(command, unbuffered):
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            [sys.executable, "-m", *command], stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "Standard output cannot be written to its end: No space left on device\n"
