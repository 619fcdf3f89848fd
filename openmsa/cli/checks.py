# SPDX-License-Identifier: MIT
"""Commands check here, before any work, what they will need after it, and refuse in a sentence with exit status 2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import typer

INTERRUPTED = 130  # The exit status of a command that Ctrl-C ended, as shells know it.


def refuse(sentence: str) -> NoReturn:
    """Prints the sentence on stderr and ends the command."""
    typer.echo(sentence, err=True)
    raise typer.Exit(2)


def tell_left_out(files: Sequence[Path]) -> None:
    """Says on stderr which files of folders are not read."""
    if files:
        which = f"{files[0]}{' and so on' if len(files) > 1 else ''}"
        typer.echo(f"Left out, as no UTF-8 text: {len(files)} files of the folders, {which}", err=True)


def check_writable(option: str, file: Path) -> None:
    """Sees whether the file can be written, in a folder that may not be there yet. What the file holds stays, and what is made
    for the trial goes. Refuses, naming the option, where it cannot be written."""
    if os.path.lexists(file) and not os.path.isfile(file):
        refuse(f"{option} must be a place that can be written, got {str(file)!r}, which is no regular file")
    absent = [folder for folder in file.parents if not os.path.exists(folder)]  # Path.exists raises where a name is too long
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        with file.open("ab"):
            pass
        if new:
            file.unlink()
    except OSError as error:
        refuse(f"{option} must be a place that can be written, got {str(file)!r}: {error.strerror}")
    finally:
        for folder in absent:
            with contextlib.suppress(OSError):  # It is not there, or another process has put something there meanwhile.
                folder.rmdir()


@contextlib.contextmanager
def writing(option: str, place: Path, then: str) -> Iterator[None]:
    """Ends the command with a sentence where a place cannot be written to its end, as on a full disk. then: what stands there,
    and what to do."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        typer.echo(f"{option} cannot be written to its end, {str(place)!r}: {error}. {then}", err=True)
        raise typer.Exit(1) from error
