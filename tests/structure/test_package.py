# SPDX-License-Identifier: MIT
"""What the package says of itself agrees with what the code needs and what is tried."""

import re
import runpy
from pathlib import Path

from openmsa.runtime.torch_version import OLDEST

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
WHEEL = runpy.run_path(str(ROOT / "scripts/test_wheel.py"))


def test_the_oldest_torch_is_the_one_that_is_asked_for():
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]}"' in PROJECT
    assert f"PyTorch {OLDEST[0]}.{OLDEST[1]} or newer" in (ROOT / "README.md").read_text()


def test_numpy_is_a_dependency():
    """PyTorch warns at every import where it is missing."""
    assert re.search(r'^dependencies = .*"numpy', PROJECT, re.MULTILINE)


def test_classifiers_name_the_versions_that_are_tried():
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert tuple(named) == WHEEL["VERSIONS"]
    assert f'requires-python = ">={named[0]}"' in PROJECT
    for needed in ("Operating System :: POSIX :: Linux", "Typing :: Typed", "[project.urls]"):
        assert needed in PROJECT


def test_the_wheel_is_tried_with_what_readme_shows():
    commands = WHEEL["checks"](Path("bin"))
    assert "README block 1" in commands
    assert {"import", "openmsa --help", "openmsa doctor"} <= set(commands)


def test_what_is_wrong_with_a_command_is_said(tmp_path):
    import sys

    check = WHEEL["check"]
    assert check([sys.executable, "-c", "print('fine')"], tmp_path) is None
    assert check([sys.executable, "-c", "import warnings; warnings.warn('no numpy')"], tmp_path).endswith("no numpy")
    assert check([sys.executable, "-c", "raise SystemExit('no file')"], tmp_path) == "status 1: ['no file']"


def test_pythons_that_are_not_here_are_none():
    assert WHEEL["interpreter"]("3.99") is None
