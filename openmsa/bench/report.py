# SPDX-License-Identifier: MIT
"""Records are printed as tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.box import MARKDOWN, SIMPLE_HEAD, Box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from openmsa.bench import workloads
from openmsa.bench.record import Record

FILE_WIDTH = 140


def print_workloads(device: str | None = None) -> None:
    """Prints every workload for `device` (None: any) and its shape, and below them the rows that workloads share."""
    listed = [w for w in workloads.WORKLOADS if device in (None, w.device)]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("workload", no_wrap=True)
    table.add_column("device")
    table.add_column("shape")
    for w in listed:
        table.add_row(w.name, w.device, str(w))
    console = _console()
    console.print(table)
    for rows in dict.fromkeys(w.rows for w in listed):
        names = ", ".join(w.name for w in listed if w.rows == rows)
        console.print(Text.assemble(("rows of ", "dim"), names, ("\n  " + ", ".join(rows), "dim")))


def _console(wide: bool = False) -> Console:
    """Returns the terminal or, where there is none or on request, a console as wide as tables need."""
    console = Console()
    return console if console.is_terminal and not wide else Console(width=FILE_WIDTH)


def summary(records: Iterable[Record], markdown: bool = False) -> RenderableType:
    """Makes one table a workload, in the order of the records."""
    groups = groupby(records, key=lambda r: (r["workload"], r["date"]))
    return Group(*(_table(list(group), MARKDOWN if markdown else SIMPLE_HEAD) for _, group in groups))


def print_summary(records: Iterable[Record], markdown: bool = False) -> None:
    """Prints `summary` on the terminal, or as wide as it needs to be where there is none."""
    _console(wide=markdown).print(summary(records, markdown))


def _table(records: list[Record], box: Box) -> RenderableType:
    first = records[0]
    shape, ceilings = first["shape"], first["ceilings"]
    title = (
        f"{first['workload']}: {shape['batch']} x {shape['q_len']:,} queries on {shape['context']:,} keys, "
        f"{shape['num_q_heads']}/{shape['num_kv_heads']} heads, {first['dtype']}, {first['device_name']}, "
        f"{first['threads']} threads"
    )
    peers = list(dict.fromkeys(p.split("_")[0] for r in records for p in r.get("times_faster_than", {})))
    table = Table(box=box)
    table.add_column("row", overflow="fold")
    for column in ("time", "spread", "rate", "of limit", *(f"vs {peer}" for peer in peers), "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    notes = []
    for r in records:
        name = r["row"] if r["mode"] == "eager" else f"{r['row']} ({r['mode']})"
        if r["error"] is not None:
            table.add_row(name, "-")
            notes.append(f"{name}: {r['error'].strip()}")
            continue
        table.add_row(name, *_cells(r, peers))
        if r["form"]:
            notes.append(f"{name}: {r['form']}")
    notes.append(
        f"limits in this run: matrix product {_rate(ceilings['gemm'], 'FLOP/s')}, copy {_rate(ceilings['copy'], 'B/s')}, "
        f"read {_rate(ceilings['read'], 'B/s')}, smallest call {_time(ceilings['launch'])}"
    )
    return Group(Text(title, style="bold"), table, *(Text(note, style="dim") for note in dict.fromkeys(notes)), Text())


def _cells(r: Record, peers: list[str]) -> list[str]:
    spread = (r["upper_quartile_s"] - r["lower_quartile_s"]) / (2 * r["median_s"])
    rate = _rate(r["flops_per_s"], "FLOP/s") if r["bound"] == "flops" else _rate(r["bytes_per_s"], "B/s")
    ratios = {peer.split("_")[0]: ratio for peer, ratio in r["times_faster_than"].items()}
    return [
        _time(r["median_s"]),
        f"{100 * spread:.0f} %",
        rate,
        f"{r['percent_of_limit']:.0f} %",
        *(f"{ratios[peer]:.2f}x" if peer in ratios else "" for peer in peers),
        "-" if r["peak_extra_bytes"] is None else f"{r['peak_extra_bytes'] / 2**20:,.0f} MiB",
    ]


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _rate(per_second: float, unit: str) -> str:
    prefix, factor = ("T", 1e12) if per_second >= 1e12 else ("G", 1e9)
    return f"{per_second / factor:.3g} {prefix}{unit}"
