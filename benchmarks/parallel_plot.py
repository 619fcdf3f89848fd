# SPDX-License-Identifier: MIT
"""This module draws from records of `benchmarks.parallel` how many times faster several GPUs are than one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openmsa.bench.record import rows

GOALS = {"prefill-128k": 1.8, "prefill-1m": 1.9, "decode-8x1m": 1.7, "decode-1x1m": 1.3}


def newest(files: list[Path]) -> list[dict[str, Any]]:
    """Returns the newest record of each case and number of GPUs, prompts first."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for file in files:
        for record in rows(file):
            key = record["case"]["name"], record["ranks"]
            if record["row"] == "parallel" and (key not in found or found[key]["date"] < record["date"]):
                found[key] = record
    return sorted(found.values(), key=lambda r: (bool(r["case"]["batch"]), r["case"].get("chunk", 0), r["case"]["name"]))


def plot(files: list[Path], output: Path) -> None:
    """Writes the plot as an image. Raises ValueError where there is no record, ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = newest(files)
    if not records:
        raise ValueError(f"records must hold a row of parallel, got none in {', '.join(map(str, files)) or 'no file'}")
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.55 * len(records)), layout="constrained")
    names = []
    for at, record in enumerate(reversed(records)):
        name, ranks, one = record["case"]["name"], record["ranks"], record["median_s"]["one"]
        times = record["times_faster_than_one"]
        names.append(f"{name}, {ranks} GPUs")
        axes.barh(at, times, color="tab:blue" if record["case"]["batch"] else "tab:green", height=0.6)
        unit, scale = ("us", 1e6) if record["case"]["batch"] else ("ms", 1e3)
        text = f"{times:.2f}x: {scale * one:,.1f} to {scale * one / times:,.1f} {unit}"
        axes.text(0.03, at, text, va="center", color="white", fontsize=9)
        if name in GOALS and ranks == 2:
            axes.plot([GOALS[name]] * 2, [at - 0.3, at + 0.3], color="black", linewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xlabel("times faster than one GPU (black: the goal)")
    devices = sorted({record["device_name"] for record in records})
    axes.set_title(f"Several GPUs beside one, {', '.join(devices)}, a layer of M3's sizes", fontsize=10)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)
