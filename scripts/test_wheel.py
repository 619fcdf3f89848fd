#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds the wheel, installs it into an environment of each Python that is here, and does there what a newcomer does first.

    python scripts/test_wheel.py [--folder FOLDER] [--pip '--index-url https://download.pytorch.org/whl/cpu']

Environments stand in FOLDER (default: a temporary folder) and are used again where they are there already. The checks run
outside of the checkout: they import both packages, run README's Python blocks and the commands, and nothing may warn.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALONE = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}  # The checkout is not on the path.
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
IMPORTS = """
import importlib.metadata, pathlib, openmsa, fmha_sm100, fmha_sm100.sparse
for package in (openmsa, fmha_sm100):
    assert "site-packages" in package.__file__, package.__file__
    assert pathlib.Path(package.__file__).with_name("py.typed").exists()
assert importlib.metadata.version("openmsa") == openmsa.__version__
"""


def interpreter(version: str) -> str | None:
    """Returns a Python of this version, from the path or from pyenv; None where there is none that runs."""
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, managed)):
        if candidate is not None:
            done = subprocess.run([candidate, "--version"], capture_output=True, text=True)
            if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
                return candidate
    return None


def build(folder: Path) -> Path:
    """Builds the wheel of this checkout into `folder`."""
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], folder)
    return next(folder.glob("openmsa-*.whl"))


def install(python: str, wheel: Path, folder: Path, options: list[str]) -> Path:
    """Installs the wheel and what it needs into an environment at `folder`; returns its programs' folder."""
    if not folder.exists():
        run([python, "-m", "venv", str(folder)], folder.parent)
    programs = folder / "bin"
    pip = [str(programs / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run([*pip, *options, str(wheel)], folder.parent)
    run([*pip, "--force-reinstall", "--no-deps", str(wheel)], folder.parent)
    return programs


def checks(programs: Path) -> dict[str, list[str]]:
    """Returns the commands of each check, which must end with status 0 and print nothing on stderr."""
    python, openmsa = str(programs / "python"), str(programs / "openmsa")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return {
        "requirements": [python, "-m", "pip", "check", "--disable-pip-version-check"],
        "import": [python, "-c", IMPORTS],
        **{f"README block {i}": [python, "-c", block] for i, block in enumerate(blocks, 1)},
        "openmsa --help": [openmsa, "--help"],
        "openmsa --version": [openmsa, "--version"],
        "openmsa doctor": [openmsa, "doctor"],
        "openmsa bench --list": [openmsa, "bench", "--list"],
        "python -m openmsa": [python, "-m", "openmsa", "--version"],
    }


def check(command: list[str], folder: Path) -> str | None:
    """Says what was wrong with a command; None if nothing was."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ALONE)
    if done.returncode:
        return f"status {done.returncode}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}"
    return f"it warned: {done.stderr.strip().splitlines()[0]}" if done.stderr.strip() else None


def check_demo(programs: Path, folder: Path) -> str | None:
    """Says what was wrong where the demo is asked for without its extra, which it must name."""
    done = subprocess.run([str(programs / "openmsa"), "demo"], capture_output=True, text=True, cwd=folder, env=ALONE)
    named = "pip install 'openmsa[demo]'" in done.stderr and "Traceback" not in done.stderr
    return None if done.returncode == 2 and named else f"status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"


def run(command: list[str], folder: Path) -> None:
    """Runs a command that must succeed; its output is shown where it does not."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ALONE)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Checks every Python of `VERSIONS` that is here and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the environments stand; they are kept")
    parser.add_argument("--pip", default="", help="further arguments of pip install")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        outside = Path(temporary) / "outside"
        outside.mkdir()
        folder.mkdir(parents=True, exist_ok=True)
        wheel = build(Path(temporary))
        for version in VERSIONS:
            python = interpreter(version)
            if python is None:
                print(f"{version}: not here", flush=True)
                continue
            programs = install(python, wheel, folder / version, shlex.split(arguments.pip))
            found = {name: check(command, outside) for name, command in checks(programs).items()}
            found["openmsa demo without its extra"] = check_demo(programs, outside)
            wrong = {name: said for name, said in found.items() if said is not None}
            told = "import torch, numpy; print('torch', torch.__version__, 'numpy', numpy.__version__)"
            torch = [str(programs / "python"), "-c", told]
            versions = subprocess.run(torch, capture_output=True, text=True, cwd=outside, env=ALONE).stdout.strip()
            print(f"{version}: {len(found) - len(wrong)} of {len(found)} checks passed ({versions})", flush=True)
            for name, said in wrong.items():
                print(f"  {name}: {said}", flush=True)
            failed |= bool(wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()
