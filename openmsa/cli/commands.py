# SPDX-License-Identifier: MIT
"""What is true of all commands stands here: they refuse empty names of files, and say in a sentence where their standard output
cannot be written."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from openmsa.cli.checks import refuse

PLACES = ("file", "out", "output", "peers", "records", "text")
"""Parameters of commands that name files or folders. A `Path` that is made from an empty name is the current folder."""


class Command(TyperCommand):
    """Refuses empty names of files and folders."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the command line."""
        _check_places(self, ctx, args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """Runs a command, and ends it in a sentence where standard output is full. Refuses what `Command` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the command line."""
        _check_places(self, ctx, args)
        return super().parse_args(ctx, args)

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


def _check_places(command: Any, ctx: Any, args: list[str]) -> None:
    given = command.make_parser(ctx).parse_args(args=list(args))[0]
    for name in PLACES:
        value = given.get(name)
        if value == "" or (isinstance(value, list | tuple) and "" in value):
            options = next(param.opts for param in command.params if param.name == name)
            named = options[0] if options[0].startswith("-") else name.upper()
            refuse(f"{named} must name a file or a folder, got ''")
