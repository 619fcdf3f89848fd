# SPDX-License-Identifier: MIT
"""This progress bar shows what a training run does, and hears Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import rich.progress
from rich.console import Console

from openmsa.cli.progress import WHOLE, columns
from openmsa.training.loop import Watcher


class Bar(Watcher):
    """Shows step, stage, loss and the last recall; asks the run to stop at the end of a step after Ctrl-C, and at once after a
    second one."""

    def __init__(self, bar: rich.progress.Progress) -> None:
        self.bar, self.stopping, self.recall = bar, False, ""
        self.task = bar.add_task("loading", total=None)

    def ask_to_stop(self, number: int, frame: Any) -> None:
        """Is the handler of the signals that end the command."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True

    def stop(self) -> bool:
        return self.stopping

    def begin(self, steps: int, done: int) -> None:
        self.bar.update(self.task, total=steps, completed=done, description="measuring")

    def step(self, record: Mapping[str, Any]) -> None:
        text = f"{record['stage']}, loss {record['loss']:.4f}{self.recall}"
        self.bar.update(self.task, completed=record["step"] + 1, description=text)

    def measured(self, record: Mapping[str, Any]) -> None:
        self.recall = f", recall {record['measured']['block_recall']:.3f}"


@contextmanager
def training_bar(shown: bool) -> Iterator[Bar]:
    """Shows the bar on stderr, or nothing where another process does."""
    of_bar = columns(rich.progress.MofNCompleteColumn(table_column=WHOLE))
    with rich.progress.Progress(*of_bar, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        yield Bar(bar)
