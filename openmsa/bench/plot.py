# SPDX-License-Identifier: MIT
"""Speed-up over dense attention against context length, from records."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from openmsa.bench.record import Record

WHOLE = ("msa_attention", "msa_attention/paged", "decode_plan")
PEER = "sdpa"


def series(records: list[Record]) -> dict[str, list[tuple[int, float]]]:
    """(context, times faster than dense) by line of the plot. Of several records of the same row the last counts."""
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for r in records:
        if r["row"] in WHOLE and r["error"] is None and PEER in r["times_faster_than"]:
            lines[_label(r)][r["shape"]["context"]] = r["times_faster_than"][PEER]
    return {label: sorted(points.items()) for label, points in sorted(lines.items())}


def _label(r: Record) -> str:
    shape = r["shape"]
    what = {
        "prefill": "whole prefill",
        "chunk": f"{shape['q_len']:,} queries behind a prefix",
        "decode": f"decode, batch {shape['batch']}",
    }[r["kind"]]
    graph = " (CUDA graph)" if r["mode"] == "graph" else ""
    return f"{what}, {r['row']}{graph}"


def plot(records: list[Record], output: Path) -> None:
    """Writes the plot as an image. Raises ValueError when the records hold no speed-up, ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = series(records)
    if not lines:
        raise ValueError(f"records must hold a row of {', '.join(WHOLE)} next to {PEER}, got none")
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
        for context, ratio in points:
            axes.annotate(f"{ratio:.1f}", (context, ratio), textcoords="offset points", xytext=(0, 6), fontsize=8, ha="center")
    contexts = sorted({context for points in lines.values() for context, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(contexts, [_tokens(c) for c in contexts])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("times faster than dense attention, same run")
    names = sorted({r["device_name"] for r in records})
    axes.set_title(", ".join(names), fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    pyplot.close(figure)


def _tokens(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K" if count >= 1 << 10 else str(count)
