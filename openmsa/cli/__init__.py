# SPDX-License-Identifier: MIT
"""The commands are put together here; each imports what it needs when it runs."""

from __future__ import annotations

from openmsa.cli import no_garbage  # isort: skip # noqa: F401

import signal
from importlib.metadata import version
from typing import Annotated

import typer

from openmsa.cli import bench
from openmsa.cli.byte_demo import demo_bytes
from openmsa.cli.commands import Command, Group
from openmsa.cli.convert import convert
from openmsa.cli.demo import demo
from openmsa.cli.doctor import doctor
from openmsa.cli.evaluate import evaluate
from openmsa.cli.generate import generate
from openmsa.cli.plan import plan
from openmsa.cli.train_index import train_index
from openmsa.cli.words import paragraphs

app = typer.Typer(
    name="openmsa",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (doctor, demo, demo_bytes, convert, generate, train_index, evaluate, plan):
    app.command(cls=Command, help=paragraphs(command.__doc__ or ""))(command)
app.add_typer(bench.app, name="bench")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"openmsa {version('openmsa')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """MiniMax Sparse Attention for every machine."""
    # Ctrl-C ended the process at once while it imported; from here on commands say what they have by then.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
