# SPDX-License-Identifier: MIT
"""This progress bar shows how far an evaluation is, and each variant's loss as soon as it is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

import rich.progress
from rich.console import Console

from openmsa.cli.progress import WHOLE, columns
from openmsa.training.compare import Row, Watcher


class Bar(Watcher):
    """Moves on with each layer of a forward."""

    def __init__(self, bar: rich.progress.Progress) -> None:
        self.bar, self.task = bar, bar.add_task("", total=None)

    def begin(self, ticks: int) -> None:
        self.bar.update(self.task, total=ticks, began=self.bar.get_time())

    def stage(self, title: str) -> None:
        self.bar.update(self.task, description=title)

    def tick(self) -> None:
        self.bar.advance(self.task)

    def row(self, row: Row) -> None:
        name = row.kind if row.kind == "dense" else f"{row.kind}, {row.percent:g} %"
        beyond = "" if isfinite(row.loss) else ", which is not finite"
        self.bar.console.print(f"{name}: loss {row.loss:.4f}{beyond}", style="dim")


@contextmanager
def evaluation_bar() -> Iterator[Bar]:
    """Shows the bar on stderr."""
    of_bar = columns(rich.progress.TaskProgressColumn(table_column=WHOLE))
    with rich.progress.Progress(*of_bar, console=Console(stderr=True), transient=True) as bar:
        yield Bar(bar)
