# SPDX-License-Identifier: MIT
"""This module packs the text and code of the machine's own Python installation into bytes: the standard library's and installed
packages' sources, as far as their licences are permissive."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = (".py", ".rst", ".md", ".txt")
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|Zlib|Unlicense|CC0|0BSD|HPND)\b", re.IGNORECASE)
COPYLEFT = re.compile(r"\b(A?L?GPL|GNU|MPL|Mozilla|EUPL|EPL|CDDL|Proprietary)", re.IGNORECASE)
LARGEST = 400_000  # Larger files are mostly tables that a program wrote.
RUN = 8  # So many neighbouring files of a package are on one side.
HELD_OUT = 24  # One run of files in so many is held out.
MOST_OF_ONE = 0.3  # A package gives at most such a share of the bytes wanted, so that no style fills the text.


@dataclass
class Corpus:
    """Holds the bytes for training and those held out, uint8, file after file, a package's files side by side in order of
    their paths. Runs of `RUN` files are on one side, and a file whose content was met before is left out.

    sources: of each package its version, its licence as its metadata states it, and how many files and bytes were used.
    """

    train: np.ndarray
    held_out: np.ndarray
    sources: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Source:
    """Describes one package of the corpus."""

    name: str
    version: str
    licence: str
    files: int = 0
    bytes: int = 0


def gather(most: int, seconds: float = 60.0) -> Corpus:
    """Reads up to `most` bytes, for at most `seconds`. The standard library comes first, then packages by names' hashes."""
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    sources, seen, total, end = [], set[bytes](), 0, time.monotonic() + seconds
    for source, files in _packages():
        for path in files:
            if total >= most or source.bytes >= MOST_OF_ONE * most or time.monotonic() > end:
                break
            data = _read(path)
            digest = hashlib.sha256(data).digest()
            if not data or digest in seen:
                continue
            seen.add(digest)
            run = f"{source.name} {source.files // RUN}".encode()
            sides[hashlib.sha256(run).digest()[0] % HELD_OUT == 0].append(data + b"\n\n")
            source.files, source.bytes, total = source.files + 1, source.bytes + len(data), total + len(data)
        if source.files:
            sources.append(asdict(source))
    if not all(sides):
        raise ValueError(f"the installed packages must have text for training and for tests, got {total} bytes")
    train, held_out = (np.frombuffer(b"".join(side), np.uint8).copy() for side in sides)
    return Corpus(train, held_out, sources)


def _packages() -> Iterator[tuple[Source, list[Path]]]:
    """Yields the standard library, then every installed package with a permissive licence, each with its text files."""
    library = Path(sysconfig.get_path("stdlib"))
    version = sysconfig.get_python_version()
    # Installed packages may stand below the standard library, and its tests hold odd encodings.
    files = [p for p in _walk(library) if not {"site-packages", "dist-packages", "test"} & set(p.parts)]
    yield Source("python standard library", version, "PSF-2.0"), files
    found = {}
    for package in importlib.metadata.distributions():
        name, licence = package.metadata["Name"], _licence(package)
        if name and PERMISSIVE.search(licence) and not COPYLEFT.search(licence):
            found[name] = (package, licence)
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        package, licence = found[name]
        paths = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix in SUFFIXES]
        yield Source(name, package.version, licence), sorted(paths)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(SUFFIXES))


def _licence(package: importlib.metadata.Distribution) -> str:
    """Returns what the metadata says of the licence, in at most 100 characters."""
    meta = package.metadata
    stated = [x for name in ("License-Expression", "Classifier") for x in meta.get_all(name) or ()]
    stated = [x for x in stated if x.startswith("License ::") or " :: " not in x]
    if not stated:  # The field may hold the whole text of the licence, whose first line is its name.
        stated = [x.strip().partition("\n")[0] for x in meta.get_all("License") or ()]
    return "; ".join(x.rpartition(" :: ")[2] for x in stated if x)[:100]


def _read(path: Path) -> bytes:
    """Returns what a file holds; nothing where it is no UTF-8 text, too large or cannot be read."""
    try:
        if path.stat().st_size > LARGEST:
            return b""
        data = path.read_bytes()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in data else data
