#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds the repository that the `kernels` library loads; it is pure Python, self-contained and movable.

    python scripts/build_hub.py OUTPUT

OUTPUT/build/<variant>/ is the module `msa` with copies of `openmsa` and `fmha_sm100` in it, whose imports are made relative, so
that it runs from any folder, under any name, beside an installed version. OUTPUT/torch-ext/msa is the same for kernel-builder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("openmsa", "fmha_sm100")
LEFT_OUT = ("bench", "cli", "demo", "integrations", "testing")  # No operation needs these folders of openmsa.
VARIANTS = {"torch-cpu": "cpu", "torch-cuda": "cuda", "torch-universal": "cpu"}  # The last serves other backends and libraries.

_NAMES = "|".join(PACKAGES)
FROM = re.compile(rf"^(\s*)from ((?:{_NAMES})(?:\.\w+)*) import ", re.MULTILINE)
PLAIN = re.compile(rf"^(\s*)import ((?:{_NAMES}))$", re.MULTILINE)
DEEP = re.compile(rf"^\s*import (?:{_NAMES})\.", re.MULTILINE)
STRING = re.compile(rf'"((?:{_NAMES})\.\w+(?:\.\w+)*(?::\w+)?)"')


def relative(source: str, path: Path) -> str:
    """Returns the source of the module at `path` below the root module, without absolute imports of the packages.

    Names of modules in strings (tables that import lazily) start with the root's name, found when the module runs.
    """
    if DEEP.search(source):
        raise ValueError(f"{path} must not use 'import package.module' (it binds the package's name); use 'from ... import'")
    dots, levels = "." * len(path.parts), len(path.parts) - (path.name == "__init__.py")
    source = FROM.sub(lambda m: f"{m[1]}from {dots}{m[2]} import ", source)
    source = PLAIN.sub(lambda m: f"{m[1]}from {dots} import {m[2]}", source)
    return STRING.sub(lambda m: f'(__name__.rsplit(".", {levels})[0] + ".{m[1]}")', source)


def module_files() -> dict[str, str]:
    """Returns the path inside the module and the text of each of its files."""
    files = {"__init__.py": (ROOT / "hub" / "torch-ext" / "msa" / "__init__.py").read_text()}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if inside.parts[0] == "openmsa" and inside.parts[1] in LEFT_OUT:
                continue
            files[str(inside)] = relative(path.read_text(), inside)
    for name in ("LICENSE", "NOTICE"):
        files[name] = (ROOT / name).read_text()
    return files


def write(files: dict[str, str], folder: Path) -> None:
    """Writes each file under `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def build(output: Path) -> None:
    """Writes the repository, and replaces build/ and torch-ext/ of an earlier one."""
    files = module_files()
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    for folder in ("build", "torch-ext"):
        shutil.rmtree(output / folder, ignore_errors=True)
    write(files, output / "torch-ext" / "msa")
    for name in ("build.toml", "README.md"):
        (output / name).write_text((ROOT / "hub" / name).read_text())
    for variant, backend in VARIANTS.items():
        metadata = {
            "name": "msa",
            "id": f"_msa_{variant.removeprefix('torch-')}_{digest}",  # the name of the loaded module
            "version": 0,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
        }
        write(files | {"metadata.json": json.dumps(metadata, indent=2) + "\n"}, output / "build" / variant)


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUTPUT")
    output: Path = parser.parse_args().output
    if output.resolve() == ROOT or (output.exists() and any(output.iterdir()) and not (output / "build.toml").exists()):
        print(f"OUTPUT must be a new or empty folder, or one that this script wrote, got {output}", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    build(output)
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
