# SPDX-License-Identifier: MIT
"""This module makes the tables that `openmsa evaluate` prints, at most 80 columns wide, or in parts on a narrower terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from openmsa.bench.narrow import Narrow
from openmsa.training.compare import Row, mean_found


def tables(record: dict[str, Any], rows: Sequence[Row]) -> list[Narrow]:
    """Returns the table of losses and recalls, that of losses by position, and that of needles where some were hidden."""
    blocks = -(-record["length"] // record["block_size"])
    title = f"{record['windows']} windows of {record['length']} tokens, {blocks} blocks of {record['block_size']} keys"
    main = _table(title, "attention", "blocks", "loss", "above\ndense", "block\nrecall", "score\nrecall", "found")
    by_position = _table("loss by position, up to", "attention", *(str(last) for _, last in record["bins"]))
    distances = [score.distance for score in rows[0].needles]
    found = _table("needles found, by tokens behind them", "attention", *map(str, distances))
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.kind != row.kind:
            for table in (main, by_position, found):
                table.add_section()
        name = row.kind if row.kind == "dense" else f"{row.kind}, {row.percent:g} %"
        dense = row.kind == "dense"
        main.add_row(
            name,
            "" if dense else str(row.topk),
            f"{row.loss:.4f}",
            "" if dense else f"{row.change / rows[0].loss:+.2%}",
            _share(row.block_recall),
            _share(row.score_recall),
            _share(mean_found(row)),
        )
        by_position.add_row(name, *(f"{loss:.4f}" for loss in row.by_position))
        found.add_row(name, *(f"{score.found:.2f}" for score in row.needles))
    return [Narrow(table) for table in (main, by_position, *([found] if distances else []))]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table
