# SPDX-License-Identifier: MIT
"""A missing or old PyTorch is named in one sentence: as an ImportError, and by the commands without a traceback."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from openmsa.runtime.torch_version import why_not

ROOT = Path(__file__).parents[2]
MISSING = "OpenMSA needs PyTorch 2.8 or newer, and none is installed: pip install torch"
OLD = "OpenMSA needs PyTorch 2.8 or newer, got 2.7.1+cpu: pip install --upgrade torch."


@pytest.mark.parametrize(
    ("version", "served"),
    [("2.8.0", True), ("2.13.0+cpu", True), ("3.0", True), ("2.10.0a0+git1", True), ("2.7.1", False), ("1.13.1+cu117", False)],
)
def test_versions(version, served):
    assert (why_not(version) is None) == served


def python(folder, *arguments):
    """Runs Python without the installed packages, so that `folder` alone says which PyTorch there is. An interrupt reaches it,
    also where the tests run in the background, whose children would ignore it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    options = {"capture_output": True, "text": True, "env": environment, "cwd": folder}
    attentive = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.run([sys.executable, "-S", *arguments], preexec_fn=attentive, **options)


@pytest.fixture(params=[MISSING, OLD], ids=["missing", "old"])
def lacking(request, tmp_path):
    if request.param == OLD:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.7.1+cpu"\n')
    return tmp_path, request.param


@pytest.mark.parametrize("package", ["openmsa", "openmsa.bench", "fmha_sm100.api", "fmha_sm100.sparse"])
def test_an_import_raises_the_sentence(lacking, package):
    folder, sentence = lacking
    done = python(folder, "-c", f"import {package}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {sentence}")


def test_the_drop_in_package_raises_the_sentence(lacking):
    folder, sentence = lacking
    done = python(folder, "-c", "from fmha_sm100 import fmha_sm100")
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {sentence}")


def test_commands_print_the_sentence(lacking):
    folder, sentence = lacking
    script = folder / "openmsa"  # as an installer writes it
    script.write_text("import sys\nfrom openmsa.cli import app\nsys.exit(app())\n")
    for arguments in ([str(script), "doctor"], ["-m", "openmsa", "doctor"]):
        done = python(folder, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(sentence)
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("way", ["script", "-m"])
def test_an_interrupt_while_a_command_imports_prints_nothing(tmp_path, way):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    script = tmp_path / "openmsa"
    script.write_text("import sys\nfrom openmsa.cli import app\nsys.exit(app())\n")
    done = python(tmp_path, *([str(script)] if way == "script" else ["-m", "openmsa"]), "doctor")
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""


def test_an_interrupt_while_a_program_imports_the_package_stays_its_own(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = python(tmp_path, "-c", "try:\n    import openmsa\nexcept KeyboardInterrupt:\n    print('caught')")
    assert done.stdout == "caught\n"
