# SPDX-License-Identifier: MIT
"""scripts/compare.py measures checkouts side by side."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPARE = runpy.run_path(str(ROOT / "scripts/compare.py"))


def test_the_table_compares_with_the_first_checkout():
    found = [{"a": [1e-6, 2e-6, 3e-6], "b": [1e-3]}, {"a": [3e-6, 3e-6, 9e-6]}]
    lines = [line.split() for line in COMPARE["table"](["old", "new"], found).splitlines()]
    assert lines[1:] == [
        ["a", "old", "2.0", "1.5", "2.5", "1.000"],
        ["a", "new", "3.0", "3.0", "6.0", "1.500"],
        ["b", "old", "1000.0", "1000.0", "1000.0", "1.000"],
        ["b", "new", "absent"],
    ]


@pytest.mark.parametrize(
    ("arguments", "said"), [([str(ROOT)], "at least two, got 1"), ([str(ROOT), "/nowhere"], "must hold openmsa, got /nowhere")]
)
def test_what_it_refuses(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, "--match", "x"])
    with pytest.raises(SystemExit):
        COMPARE["main"]()
    assert said in capsys.readouterr().err


def test_a_checkout_against_itself():
    command = [
        sys.executable,
        "scripts/compare.py",
        ".",
        ".",
        "--match",
        "decode-128k/select_blocks",
        "--rounds=1",
        "--samples=2",
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("decode-128k/select_blocks") == 2
