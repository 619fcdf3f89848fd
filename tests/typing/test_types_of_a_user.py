# SPDX-License-Identifier: MIT
"""A user's strictly typed script passes mypy against the installed packages, whose ``py.typed`` makes their types count."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("user_script.py")


def checked(folder, script):
    """Type-checks a script in a folder of its own, with the packages on the path of Python, as an installation has them."""
    shutil.copy(script, folder)
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"} | {"PYTHONPATH": str(ROOT)}
    options = ["--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'user'}", Path(script).name]
    command = [sys.executable, "-m", "mypy", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_a_users_script_is_well_typed(tmp_path):
    pytest.importorskip("mypy")
    done = checked(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_users_mistakes_are_found(tmp_path):
    """The types count: a script is not accepted because everything in it is `Any`."""
    pytest.importorskip("mypy")
    mistakes = {
        "msa_attention(x, x, x, x, x, return_lse=True).shape": "attr-defined",
        "PagedKV.allocate(x, 4, 2, 16, 64).state_dict()": "attr-defined",
        "E4M3.quantize(x, 'half')": "arg-type",
        "dense_attention(x, x, x, block=16)": "call-overload",
    }
    script = tmp_path / "source" / "mistakes.py"
    script.parent.mkdir()
    names = "E4M3, PagedKV, dense_attention, msa_attention"
    head = f"import torch\nfrom openmsa import {names}\nx = torch.zeros(1)\n"
    script.write_text(head + "\n".join(mistakes))
    done = checked(tmp_path, script)
    first = head.count("\n") + 1
    for line, (mistake, code) in enumerate(mistakes.items(), first):
        told = [row for row in done.stdout.splitlines() if f"mistakes.py:{line}: error" in row]
        assert any(f"[{code}]" in row for row in told), f"{mistake}\n{done.stdout}"


def test_the_script_runs():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
