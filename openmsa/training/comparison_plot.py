# SPDX-License-Identifier: MIT
"""A comparison is drawn: loss against the budget, loss by position, recall against the budget, needles by distance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from openmsa.training.compare import Row


def plot(rows: Sequence[Row], bins: Sequence[tuple[int, int]], shown: float, title: str, file: Path) -> None:
    """Writes a PNG. bins: the positions that `Row.by_position` tells of; shown: the budget (per cent) whose loss by position
    and needles are drawn beside those of dense attention. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    dense, kinds = rows[0], list(dict.fromkeys(row.kind for row in rows[1:]))
    for number, kind in enumerate(kinds):
        own = [row for row in rows if row.kind == kind]
        at, style = [row.percent for row in own], {"marker": "o", "label": kind, "color": f"C{number}"}
        axes[0][0].plot(at, [100 * row.change / dense.loss for row in own], **style)
        axes[1][0].plot(at, [float("nan") if row.block_recall is None else row.block_recall for row in own], **style)
    axes[0][0].axhline(0, color="black", linewidth=1)
    axes[0][0].set_ylabel("loss, % above dense")
    axes[1][0].set_ylabel("block recall")
    for axis in (axes[0][0], axes[1][0]):
        axis.set_xscale("log", base=2)
        axis.set_xticks([row.percent for row in rows if row.kind == kinds[0]] if kinds else [])
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlabel("% of the blocks read")
        axis.legend(fontsize=8)
    chosen = [dense, *(row for row in rows[1:] if row.percent == shown)]
    for number, row in enumerate(chosen):
        style = {"marker": "o", "label": row.kind, "color": "black" if row is dense else f"C{kinds.index(row.kind)}"}
        axes[0][1].plot([last for _, last in bins], row.by_position, **style)
        if row.needles:
            moved = 1 + 0.015 * number  # lines at one height stay apart
            axes[1][1].plot([score.distance * moved for score in row.needles], [score.found for score in row.needles], **style)
    axes[0][1].set_xscale("log", base=2)
    axes[0][1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0][1].set_xlabel(f"position, up to (at {shown:g} % of the blocks)")
    axes[0][1].set_ylabel("loss, nats a token")
    axes[1][1].set_xlabel(f"tokens behind the needle (at {shown:g} % of the blocks)")
    axes[1][1].set_ylabel("needles found")
    axes[1][1].set_ylim(-0.05, 1.05)
    axes[0][1].legend(fontsize=8)
    for axis in axes.ravel():
        axis.grid(alpha=0.3)
    figure.suptitle(title, parse_math=False)  # A path may hold dollar signs.
    figure.savefig(file, dpi=130)
