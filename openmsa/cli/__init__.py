# SPDX-License-Identifier: MIT
"""The command line: `openmsa demo`, `openmsa doctor`, `openmsa bench`. Each command imports what it needs when it runs."""

from __future__ import annotations

import typer

from openmsa.cli import bench
from openmsa.cli.demo import demo
from openmsa.cli.doctor import doctor

app = typer.Typer(
    name="openmsa",
    help="MiniMax Sparse Attention for every machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(doctor)
app.add_typer(bench.app, name="bench")
