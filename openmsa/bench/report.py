# SPDX-License-Identifier: MIT
"""Records are printed as tables for people."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

from rich.box import MARKDOWN, SIMPLE_HEAD, Box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from openmsa.bench import workloads
from openmsa.bench.narrow import Narrow
from openmsa.bench.record import Record

MARKDOWN_WIDTH = 200
SPREAD = 4  # samples from which on quartiles say something
NAME_WIDTH = 26  # Longer names of rows take a second line: tables fit 80 columns.


def print_workloads(listed: list[workloads.Workload]) -> None:
    """Prints these workloads and their shapes, and below them the rows that workloads share."""
    table = _empty(SIMPLE_HEAD)
    table.add_column("workload", no_wrap=True)
    table.add_column("device")
    table.add_column("shape")
    for w in listed:
        table.add_row(w.name, w.device, str(w))
    console = Console()
    console.print(table)
    for rows in dict.fromkeys(w.rows for w in listed):
        names = ", ".join(w.name for w in listed if w.rows == rows)
        console.print(Text.assemble(("rows of ", "dim"), names, ("\n  " + ", ".join(rows), "dim")))


def summary(records: Iterable[Record], markdown: bool = False) -> RenderableType:
    """Makes one table a workload, in the order of the records."""
    groups = groupby(records, key=lambda r: (r["workload"], r["date"]))
    return Group(*(_table(list(group), MARKDOWN if markdown else SIMPLE_HEAD) for _, group in groups))


def print_summary(records: Iterable[Record], markdown: bool = False) -> None:
    """Prints `summary` as wide as the terminal (80 columns where there is none), as Markdown with a line a row."""
    Console(width=MARKDOWN_WIDTH if markdown else None).print(summary(records, markdown))


def _empty(box: Box, padding: int = 1) -> Table:
    return Table(box=box) if box is MARKDOWN else Table(box=box, padding=(0, padding, 0, 0), pad_edge=False)


def _in_lines(name: str) -> str:
    """Breaks a long name before a slash or a bracket."""
    lines = [""]
    for piece in re.split(r"(?=/)|(?<= )(?=\()", name):
        if lines[-1] and len(lines[-1]) + len(piece) > NAME_WIDTH:
            lines.append("  ")
        lines[-1] += piece
    return "\n".join(lines)


def _table(records: list[Record], box: Box) -> RenderableType:
    first = records[0]
    shape, ceilings = first["shape"], first["ceilings"]
    title = (
        f"{first['workload']}: {shape['batch']} x {shape['q_len']:,} queries on {shape['context']:,} keys, "
        f"{shape['num_q_heads']}/{shape['num_kv_heads']} heads, {first['dtype']}, {first['device_name']}, "
        f"{first['threads']} threads"
    )
    peers = list(dict.fromkeys(p.split("_")[0] for r in records for p in r.get("times_faster_than", {})))
    columns = ["time", "spread", "rate\nper s", "of\nlimit", *(f"vs\n{peer}" for peer in peers), "memory\nMiB"]
    if not any(_spreads(r) for r in records):
        columns.remove("spread")
    table = _empty(box, padding=0)
    table.add_column("row")
    for column in columns:
        table.add_column(Text(column.replace("\n", " ") if box is MARKDOWN else column), justify="right")
    notes = []
    for r in records:
        name = r["row"] if r["mode"] == "eager" else f"{r['row']} ({r['mode']})"
        shown = Text(name if box is MARKDOWN else _in_lines(name))
        if r["error"] is not None:
            table.add_row(shown, "-")
            notes.append(f"{name}: {r['error'].strip()}")
            continue
        cells = _cells(r)
        table.add_row(shown, *(cells.get(column, "") for column in columns))
        if r["form"]:
            notes.append(f"{name}: {r['form']}")
    notes.append(
        f"limits in this run: matrix product {_count(ceilings['gemm'], 'FLOP/s')}, copy {_count(ceilings['copy'], 'B/s')}, "
        f"read {_count(ceilings['read'], 'B/s')}, smallest call {_time(ceilings['launch'])}"
    )
    return Group(Text(title, style="bold"), Narrow(table), *(Text(note, style="dim") for note in dict.fromkeys(notes)), Text())


def _spreads(r: Record) -> bool:
    return len(r.get("samples", ())) >= SPREAD


def _cells(r: Record) -> dict[str, str]:
    """Returns the text of each column."""
    spread = (r["upper_quartile_s"] - r["lower_quartile_s"]) / (2 * r["median_s"])
    rate = _count(r["flops_per_s"], "FLOP") if r["bound"] == "flops" else _count(r["bytes_per_s"], "B")
    memory = r["peak_extra_bytes"]
    return {
        "time": _time(r["median_s"]),
        "spread": f"{100 * spread:.0f} %" if _spreads(r) else "",
        "rate\nper s": rate,
        "of\nlimit": f"{r['percent_of_limit']:.0f} %",
        **{f"vs\n{peer.split('_')[0]}": f"{_three(ratio)}x" for peer, ratio in r["times_faster_than"].items()},
        "memory\nMiB": "-" if memory is None else f"{memory / 2**20:,.0f}",
    }


def _three(value: float) -> str:
    """Returns a number with three digits, or all that stand before its point, and no exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds * 1e6)} us"


def _count(value: float, unit: str) -> str:
    prefix, factor = next((p for p in (("P", 1e15), ("T", 1e12), ("G", 1e9)) if value >= p[1]), ("M", 1e6))
    return f"{_three(value / factor)} {prefix}{unit}"
