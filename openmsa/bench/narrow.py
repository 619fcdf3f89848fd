# SPDX-License-Identifier: MIT
"""A table is printed in several parts, one below the other, where the terminal is too narrow for all its columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Column, Table

ANY_WIDTH = 10_000


class Narrow:
    """Prints a table whose first column names its rows. Each part repeats that column beside as many others as fit the
    terminal, and where not even one fits, its cells are folded: no number is cut."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        name, *others = self.table.columns
        parts: list[list[Column]] = [[name]]
        for column in others:
            wider = _part(self.table, [*parts[-1], column])
            if (
                len(parts[-1]) > 1
                and Measurement.get(console, options.update(width=ANY_WIDTH), wider).maximum > options.max_width
            ):
                parts.append([name])
            parts[-1].append(column)
        for number, columns in enumerate(parts):
            shown = _part(self.table, columns)
            shown.title = self.table.title if number == 0 else None
            yield shown


def _part(table: Table, columns: Sequence[Column]) -> Table:
    """Returns a table of some columns of another."""
    part = copy(table)
    part.columns, part.rows = [], []
    for column in columns:
        part.add_column(column.header, justify=column.justify, overflow="fold")
    for row, *cells in zip(table.rows, *(column.cells for column in columns), strict=True):
        part.add_row(*cells, end_section=row.end_section)
    return part
