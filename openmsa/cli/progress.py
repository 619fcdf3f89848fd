# SPDX-License-Identifier: MIT
"""These are the columns of progress bars; one tells how much time is left."""

from __future__ import annotations

import os

from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

BUSY = 1.5  # A load of so many a core is not this program's alone.
WHOLE = Column(no_wrap=True)  # What stands in such a column is not cut.


class Remaining(ProgressColumn):
    """Shows the time that the rest of a task takes at the speed so far, counted from the task's field `began` (seconds of the
    progress bar's clock), or from its start."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        now, began = task.get_time(), task.fields.get("began", task.start_time)
        if not task.total or not task.completed or began is None:
            return Text("")
        left = (now - began) * (task.total - task.completed) / task.completed
        return Text(f"{told(left)} left")


def columns(*counts: ProgressColumn, spins: bool = True) -> list[ProgressColumn]:
    """Returns the columns of a progress bar: what is done, a bar, counts, and times. Description and bar give way on a narrow
    terminal, numbers do not."""
    bar = [TextColumn("{task.description}", table_column=Column(overflow="fold")), BarColumn(bar_width=20)]
    times = [TimeElapsedColumn(table_column=WHOLE), Remaining(table_column=WHOLE)]
    return [*([SpinnerColumn(table_column=WHOLE)] if spins else []), *bar, *counts, *times]


def in_all(seconds: float) -> str:
    """Says how long a command on a CPU took, and what makes it faster where its threads spin and other programs run there. The
    load of the last minute tells of these: the command's own is at most one a core."""
    import torch

    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    sentence = f"{seconds:.0f} s in all."
    if load < BUSY * cores or torch.get_num_threads() == 1 or os.environ.get("OMP_WAIT_POLICY"):
        return sentence
    return (
        f"{sentence} Other programs use this CPU, too (a load of {load:.1f} on {cores} cores), where threads that spin while "
        "they wait take much longer: set OMP_WAIT_POLICY=passive (docs/environment.md)."
    )


def told(seconds: float) -> str:
    """Returns seconds as people say them: "40 s", "3 min", "1 h 5 min"."""
    if seconds < 90:
        return f"{max(0, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
