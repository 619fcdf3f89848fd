# SPDX-License-Identifier: MIT
"""The report of a run: plots of the loss and of the recall by layer, from the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHOWN = 200  # A curve is drawn with so many points: neighbouring steps are averaged.


def loss_plot(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Writes a PNG of the index loss against the step: each layer, coloured by its depth, and the mean; none where no
    step was logged. Raises ImportError without matplotlib."""
    steps = [r for r in records if "loss" in r]
    if not steps:
        return
    layers = [int(layer) for layer in steps[0]["by_layer"]]
    every = max(1, len(steps) // SHOWN)
    parts = [steps[i : i + every] for i in range(0, len(steps), every)]
    at = [p[0]["step"] + (len(p) - 1) / 2 for p in parts]
    curves = [[sum(r["by_layer"][str(layer)] for r in p) / len(p) for p in parts] for layer in layers]
    mean = [sum(r["loss"] for r in p) / len(p) for p in parts]
    sparse = next((r["step"] for r in steps if r["stage"] == "sparse"), None)
    _curves(at, curves, layers, mean, sparse, "index loss (nats)", file, log=True)


def recall_plot(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Writes a PNG of the block recall on held-out text against the steps done, by layer, and its mean; none where
    nothing was held out."""
    found = [r for r in records if "measured" in r]
    if not found:
        return
    layers = [int(layer) for layer in found[0]["measured"]["by_layer"]]
    curves = [[r["measured"]["by_layer"][str(layer)] for r in found] for layer in layers]
    at = [r["step"] for r in found]
    _curves(at, curves, layers, [r["measured"]["block_recall"] for r in found], None, "block recall", file)


def _curves(
    at: Sequence[float],
    curves: Sequence[Sequence[float]],
    layers: Sequence[int],
    mean: Sequence[float],
    sparse: int | None,
    title: str,
    file: Path,
    log: bool = False,
) -> None:
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    shades, places = matplotlib.colormaps["viridis"], Normalize(min(layers), max(max(layers), min(layers) + 1))
    for layer, curve in zip(layers, curves, strict=True):
        axes.plot(at, curve, color=shades(places(layer)), linewidth=0.8, alpha=0.8, marker="." if len(at) < 20 else None)
    axes.plot(at, mean, color="black", linewidth=2, label="mean of layers")
    if sparse:
        axes.axvline(sparse, color="grey", linestyle="--", linewidth=1, label="sparse stage begins")
    if log and max(mean) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.colorbar(ScalarMappable(places, shades), ax=axes, label="layer", ticks=MaxNLocator(integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(file, dpi=130)


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Says in two lines what came of a run."""
    steps, found = [r for r in records if "loss" in r], [r["measured"] for r in records if "measured" in r]
    lines = []
    for stage in ("warmup", "sparse"):
        own = [r["loss"] for r in steps if r["stage"] == stage]
        if own:
            lines.append(f"{stage} stage: index loss {own[0]:.4f} to {own[-1]:.4f} nats in {len(own)} steps")
    if found:
        first, last = found[0], found[-1]
        lines.append(
            f"held-out text: block recall {first['block_recall']:.3f} to {last['block_recall']:.3f}, "
            f"score recall {first['score_recall']:.3f} to {last['score_recall']:.3f}"
        )
    return "\n".join(lines or ["The log holds no step."])
