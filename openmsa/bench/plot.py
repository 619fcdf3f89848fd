# SPDX-License-Identifier: MIT
"""Records are plotted as speed-up over dense attention against context length."""

from __future__ import annotations

from pathlib import Path

from openmsa.bench.record import Record

WHOLE = ("decode_plan", "msa_attention", "msa_attention/paged")  # the row measured at most contexts is drawn, or the first such
MODES = ("graph", "eager")
PEER = "sdpa"
ROOM = 1.17  # two values written at one context differ by this factor at least, so that both can be read
MOST_LINES = 3
KINDS = ("prefill", "decode", "chunk")  # among lines with equally many points, those of an earlier kind are drawn


def series(records: list[Record]) -> dict[str, list[tuple[int, float]]]:
    """Returns (context, times faster than dense) by line of the plot, one for each kind of call and batch: the `MOST_LINES`
    with most points. Of several records of the same point the last counts."""
    found: dict[tuple[str, int], dict[tuple[int, int], dict[int, float]]] = {}
    for r in records:
        drawn = r["row"] in WHOLE and r["kind"] in KINDS and r["mode"] in MODES
        if drawn and r["error"] is None and PEER in r["times_faster_than"]:
            rank = WHOLE.index(r["row"]), MODES.index(r["mode"])
            points = found.setdefault(_line(r), {}).setdefault(rank, {})
            points[r["shape"]["context"]] = r["times_faster_than"][PEER]
    best = {line: min(choices, key=lambda choice: (-len(choices[choice]), choice)) for line, choices in found.items()}
    order = sorted(found, key=lambda line: (-len(found[line][best[line]]), KINDS.index(line[0]), -line[1]))
    lines = {}
    for line in sorted(order[:MOST_LINES]):
        row, mode = best[line]
        graph = ", CUDA graph" if MODES[mode] == "graph" else ""
        lines[f"{_label(*line)} ({WHOLE[row]}{graph})"] = sorted(found[line][row, mode].items())
    return lines


def _line(r: Record) -> tuple[str, int]:
    """Returns the kind of call, and the number that tells lines of that kind apart."""
    return r["kind"], {"prefill": 0, "chunk": r["shape"]["q_len"], "decode": r["shape"]["batch"]}[r["kind"]]


def _label(kind: str, number: int) -> str:
    return {
        "prefill": "whole prefill",
        "chunk": f"{number:,} queries behind a prefix",
        "decode": f"decode, batch {number}",
    }[kind]


def labelled(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the points whose values are written: where several are close at one context, the highest of them."""
    kept: list[tuple[int, float]] = []
    for point in sorted(points, reverse=True):
        if not kept or kept[-1][0] != point[0] or kept[-1][1] > ROOM * point[1]:
            kept.append(point)
    return kept


def plot(records: list[Record], output: Path) -> None:
    """Writes the plot as an image. Raises ValueError when the records hold no speed-up, ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = series(records)
    if not lines:
        raise ValueError(f"records must hold a row of {', '.join(WHOLE)} next to {PEER}, got none")
    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    for at in labelled([point for points in lines.values() for point in points]):
        axes.annotate(f"{at[1]:.1f}", at, xytext=(0, 6), ha="center", textcoords="offset points", fontsize=8)
    contexts = sorted({context for points in lines.values() for context, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(contexts, [_tokens(c) for c in contexts])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("times faster than dense attention, same run")
    names = sorted({r["device_name"] for r in records})
    axes.set_title(", ".join(names), fontsize=10, parse_math=False)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    axes.grid(alpha=0.3)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    pyplot.close(figure)


def _tokens(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K" if count >= 1 << 10 else str(count)
