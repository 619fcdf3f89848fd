# SPDX-License-Identifier: MIT
"""This module draws the records of a run, or of several runs with seeds of their own, whose curves have the same colours."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

Record = dict[str, Any]
COLOURS = {"dense": "#4d4d4d", "msa": "#c0392b", "dense_then_msa": "#2471a3"}
NAMES = {"dense": "dense", "msa": "MSA from the start", "dense_then_msa": "dense, then MSA"}
STYLES = ("-", "--", ":", "-.")  # lines of the first run, the second and so on
LAYERS = ("#1b4f72", "#148f77", "#b7950b", "#a04000", "#6c3483", "#78281f")


def _figure(columns: int, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 3.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def training(runs: list[list[Record]], file: Path) -> None:
    """Draws the loss of each arm, its difference from the dense arm's of the same run, and the index loss of each layer of the
    arm msa in the first run."""
    figure, ((left, middle, right),) = _figure(3)
    for number, records in enumerate(runs):
        steps = {arm: [r for r in records if r["kind"] == "step" and r["arm"] == arm] for arm in NAMES}
        dense = {r["step"]: r["loss"] for r in steps["dense"]}
        for arm, rows in steps.items():
            style = {
                "color": COLOURS[arm],
                "lw": 1.2,
                "label": None if number else NAMES[arm],
                "ls": STYLES[number % len(STYLES)],
            }
            left.plot([r["tokens"] / 1e6 for r in rows], [r["loss"] for r in rows], **style)
            both = [r for r in rows if r["step"] in dense]
            if arm != "dense" and both:
                smooth = _smooth([r["loss"] - dense[r["step"]] for r in both], 5)
                middle.plot([r["tokens"] / 1e6 for r in both], smooth, **style)
    left.set(title="training loss", xlabel="million bytes", ylabel="nats a byte", yscale="log")
    left.legend(frameon=False)
    middle.axhline(0, color=COLOURS["dense"], lw=0.8)
    middle.set(title="training loss less the dense arm's", xlabel="million bytes", ylabel="nats a byte, mean of 5 records")
    middle.legend(frameon=False)
    rows = [r for r in runs[0] if r["kind"] == "step" and r["arm"] == "msa" and any(r["index_loss"])]
    for layer in range(len(rows[0]["index_loss"]) if rows else 0):
        values = [max(r["index_loss"][layer], 1e-6) for r in rows]
        right.plot([r["tokens"] / 1e6 for r in rows], values, color=LAYERS[layer % 6], lw=1.2, label=f"layer {layer}")
    for before, after in pairwise(rows):
        if (before["stage"], before["context"]) != (after["stage"], after["context"]):
            right.axvline(before["tokens"] / 1e6, color="0.6", lw=0.8, ls="--")
    right.set(title="index loss, MSA from the start", xlabel="million bytes (dashed: stage or window changes)", yscale="log")
    right.set_ylabel("KL divergence, nats a query and head")
    right.legend(frameon=False)
    figure.savefig(file, dpi=120)


def _smooth(values: list[float], width: int) -> list[float]:
    """Returns the mean of each value and those before it, `width` in all."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / len(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def held_out(runs: list[list[Record]], file: Path) -> None:
    """Draws the loss by position and recall by distance, means over the runs, in windows of the length of training and in
    longer ones."""
    records = runs[0]
    lengths = sorted({r["length"] for r in records if r["kind"] == "held_out"})
    figure, axes = _figure(2, len(lengths))
    for (left, right), length in zip(axes, lengths, strict=True):
        for kind, axis in (("held_out", left), ("recall", right)):
            for r in records:
                shown = r["kind"] == kind and r["length"] == length
                if not shown or r["way"].startswith(("index", "stored")) or (r["arm"] == "msa" and r["way"] == "dense"):
                    continue
                main = r["way"] == "dense" or (r["way"].startswith("msa") and r["way"] == _own(records))
                if not main and not r["way"].startswith("window"):
                    continue
                label = f"{NAMES[r['arm']]}: {r['way']}"
                style = {
                    "color": COLOURS[r["arm"]],
                    "ls": "-" if main else ":",
                    "lw": 1.4,
                    "label": label,
                    "marker": "o",
                    "ms": 3,
                }
                same = [own for run in runs for own in run if _same(own, r)]
                if kind == "held_out":
                    spans = [fmean(values) for values in zip(*(own["by_position"] for own in same), strict=True)]
                    axis.plot([(i + 0.5) * length / len(spans) for i in range(len(spans))], spans, **style)
                else:
                    found: dict[int, list[float]] = {}
                    for x in (x for own in same for x in own["by_distance"]):
                        found.setdefault(x["from"], []).append(100 * x["recalled"])
                    ordered = sorted(found)
                    axis.plot([1.41 * x for x in ordered], [fmean(found[x]) for x in ordered], **style)
        left.set(title=f"held-out loss, windows of {length:,} bytes", xlabel="position", ylabel="nats a byte")
        right.set(title=f"recall, windows of {length:,} bytes", xlabel="bytes between the lines", ylabel="% of lines recalled")
        right.set_xscale("log", base=2)
        right.set_ylim(-3, 103)
        for axis in (left, right):
            if axis.lines:
                axis.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=120)


def _same(own: Record, other: Record) -> bool:
    """Says whether two records are of the same measurement."""
    return all(own.get(name) == other[name] for name in ("kind", "arm", "way", "length"))


def _own(records: list[Record]) -> str:
    """Returns the name of the way that models trained with MSA attend in."""
    return next((f"msa {r['topk']}" for r in records if r["kind"] == "selections"), "")


def selections(records: list[Record], file: Path) -> None:
    """Draws, of each layer, what queries share by lag, unions of tiles, distances, and recall."""
    found = [r for r in records if r["kind"] == "selections" and r["statistics"]]
    pairs = sorted({(r["arm"], r["length"]) for r in found}, key=lambda pair: (pair[1], pair[0]))
    figure, axes = _figure(4, max(1, len(pairs)))
    for (lags, unions, distances, recall), (arm, length) in zip(axes, pairs, strict=False):
        rows = [r for r in found if (r["arm"], r["length"]) == (arm, length)]
        for r in rows:
            colour, label, s = LAYERS[r["layer"] % 6], f"layer {r['layer']}", r["statistics"]
            lags.plot(
                [int(n) for n in s["shared_after"]],
                [100 * x for x in s["shared_after"].values()],
                "o-",
                ms=3,
                color=colour,
                label=label,
            )
            unions.plot(
                [1, *(int(n) for n in s["union"])], [1, *(x / r["topk"] for x in s["union"].values())], "o-", ms=3, color=colour
            )
            distances.plot(range(len(s["distance"])), [100 * x for x in s["distance"]], "o-", ms=3, color=colour)
        lags.set(title=f"{NAMES[arm]}, {length:,} bytes", xlabel="positions between two queries", ylabel="% of blocks shared")
        lags.set_xscale("log", base=2)
        lags.legend(frameon=False, fontsize=8)
        unions.set(title="union of a tile", xlabel="queries of a tile", ylabel="blocks read / blocks of a query")
        distances.set(title="distance", xlabel="blocks back: 0, 1, 2-3, 4-7, ...", ylabel="% of selected blocks")
        width = 0.38
        for i, name in enumerate(("block_recall", "score_recall")):
            places = [r["layer"] + (i - 0.5) * width for r in rows]
            recall.bar(places, [r["quality"][name] for r in rows], width, color=LAYERS[i], label=name.replace("_", " "))
        recall.set_xticks([r["layer"] for r in rows])
        recall.set(title="recall of the main branch's blocks", xlabel="layer", ylim=(0, 1.02))
        recall.legend(loc="lower right", fontsize=8)
    figure.savefig(file, dpi=100)
