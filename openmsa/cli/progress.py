# SPDX-License-Identifier: MIT
"""This column of a progress bar tells how much time is left."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text


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


def told(seconds: float) -> str:
    """Returns seconds as people say them: "40 s", "3 min", "1 h 5 min"."""
    if seconds < 90:
        return f"{max(0, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
