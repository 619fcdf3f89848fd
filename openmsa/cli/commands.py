# SPDX-License-Identifier: MIT
"""What is true of all commands stands here: they say in a sentence where their standard output cannot be written."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup


class Group(TyperGroup):
    """Runs a command, and ends it in a sentence where standard output is full."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Runs what the command line says."""
        try:
            return super().main(*args, **options)
        except OSError as error:
            try:
                print(flush=True)
            except OSError:  # So it is standard output that failed, and no file.
                typer.echo(f"Standard output cannot be written to its end: {error.strerror}", err=True)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest there when it ends.
                sys.exit(1)
            raise
