# SPDX-License-Identifier: MIT
"""Documents are true: paths that they name exist, and README's Python blocks run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(p for p in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "hub").glob("*.md")])
TOP = {p.name for p in ROOT.iterdir()}
PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+/?(?:\.\w+)?)`")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_paths_exist(document):
    """Whatever stands in backticks and starts with a folder of the repository, or is linked, must exist."""
    text = document.read_text()
    named = {m for m in PATH.findall(text) if "/" in m and m.split("/")[0] in TOP}
    linked = {m for m in re.findall(r"\]\(([^)#:\s]+)\)", text)}
    missing = [m for m in named if not (ROOT / m).exists()]
    missing += [m for m in linked if not (document.parent / m).exists() and not (ROOT / m).exists()]
    assert not missing


def blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.S)


def test_readme_blocks_run():
    code = blocks(ROOT / "README.md")
    assert code, "README.md shows no code"
    for block in code:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_environment_variables_are_documented():
    """Every OPENMSA_ variable that the code reads has a line in docs/environment.md, and no other has."""
    pattern = re.compile(r"OPENMSA_[A-Z0-9_]+")
    used = {v for p in (ROOT / "openmsa").rglob("*.py") for v in pattern.findall(p.read_text())}
    assert used == set(pattern.findall((ROOT / "docs" / "environment.md").read_text()))
