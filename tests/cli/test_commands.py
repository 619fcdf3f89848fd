# SPDX-License-Identifier: MIT
"""What is true of all commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openmsa.cli import app


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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("train-index", "m", "--text", "t", "--out", ""), "--out"),
        (("train-index", "m", "--text", "t", "--text=", "--out", "o"), "--text"),
        (("evaluate", "m", "--text", ""), "--text"),
        (("evaluate", "m", "--text", "t", "--out="), "--out"),
        (("generate", "m", "--file", ""), "--file"),
        (("convert", "m", ""), "OUT"),
        (("demo", "--text", ""), "--text"),
        (("demo", "--output", ""), "--output"),
        (("demo-bytes", ""), "FILE"),
        (("bench", "-o", ""), "--output"),
        (("bench", "--peers", ""), "--peers"),
        (("bench", "show", __file__, ""), "RECORDS"),
        (("bench", "plot", __file__, "-o", ""), "--output"),
    ],
)
def test_an_empty_name_is_not_the_current_folder(arguments, named):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr == f"{named} must name a file or a folder, got ''\n"


@pytest.mark.parametrize(
    ("command", "said"), [("plan --model", "--model must be"), ("generate", "MODEL must be a folder, a .gguf")]
)
def test_an_empty_model_is_not_the_current_folder(command, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, [*command.split(), ""])
    assert result.exit_code == 2
    assert result.stderr.startswith(said)
    assert result.stderr.endswith("got ''\n")
