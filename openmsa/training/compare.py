# SPDX-License-Identifier: MIT
"""Dense attention, MSA and baselines are compared on the same windows: what `openmsa evaluate` runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from openmsa.modules import IndexBranch
from openmsa.training.branches import index_vectors
from openmsa.training.evaluate import NeedleScore, RecallOfVariants, loss_by_position, needle_scores, position_bins
from openmsa.training.needle import Needle
from openmsa.training.recall import spaced_rows
from openmsa.training.text import Windows
from openmsa.training.variants import Index, Variant, VariantAttention, budgets, group_mean

RECALL_ROWS = 256
"""So many queries of each window are compared with what the layer attends to."""


@dataclass
class Row:
    """Holds what was measured of one variant.

    loss:        mean cross-entropy in nats a token; change: loss less that of dense attention.
    by_position: mean loss of the positions in each of the evaluation's bins.
    block_recall, score_recall, mass: see `openmsa.training.recall.Recall`; None for dense attention and where every query
                 reads all its blocks.
    needles:     scores by distance.
    """

    kind: str
    percent: float
    block_size: int
    topk: int
    loss: float = float("nan")
    change: float = float("nan")
    by_position: list[float] = field(default_factory=list)
    block_recall: float | None = None
    score_recall: float | None = None
    mass: float | None = None
    needles: list[NeedleScore] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as what JSON holds."""
        return asdict(self)


class Watcher:
    """Receives the progress of a comparison and ignores it; a progress bar overrides its methods."""

    def begin(self, ticks: int) -> None:
        """Receives how many layers of forwards will run."""

    def stage(self, title: str) -> None:
        """Receives what runs now."""

    def tick(self) -> None:
        """Is called when a layer is done."""

    def row(self, row: Row) -> None:
        """Receives a variant's row when its loss is known."""


def index_of(branches: Mapping[int, IndexBranch]) -> Index:
    """Returns the index that a model's branches are; that of a model without any is `group_mean`."""
    return (lambda inputs: index_vectors(branches[inputs.number], inputs)) if branches else group_mean


def variants_of(length: int, block_size: int, percents: Sequence[float], name: str, **options: Any) -> list[VariantAttention]:
    """Returns dense attention, then the index called `name`, the window and random blocks, each at every budget. options: those
    of `VariantAttention`."""
    found = [VariantAttention(Variant("dense"))]
    for kind in (name, "window", "random"):
        for percent, topk in budgets(length, block_size, percents).items():
            variant = Variant(kind, percent, block_size, topk)
            found.append(VariantAttention(variant, **options))
    return found


def compare(
    model: Any,
    variants: Sequence[VariantAttention],
    windows: Sequence[Tensor],
    needles: Sequence[Needle],
    watcher: Watcher | None = None,
) -> list[Row]:
    """Measures recall in the dense model, then loss by position and needles of each variant, the first of which is dense.

    windows: int64 ``[length]`` each, on the model's device.

    Raises FloatingPointError where the loss of dense attention is not finite, as nothing can be compared with it.
    """
    watcher = watcher or Watcher()
    layers, forwards = model.config.num_hidden_layers, len(windows) + len(needles)
    watcher.begin(layers * (len(windows) + forwards * len(variants)))
    sparse = {str(i): v for i, v in enumerate(variants) if v.variant.kind != "dense"}
    recalls = RecallOfVariants(sparse, spaced_rows(len(windows[0]), RECALL_ROWS), watcher.tick)
    watcher.stage("recall of blocks")
    loss_by_position(model, windows, recalls)
    rows: list[Row] = []
    bins = position_bins(len(windows[0]))
    for number, attention in enumerate(variants):
        variant, attention.tick = attention.variant, watcher.tick
        watcher.stage(variant.title)
        row = Row(variant.kind, variant.percent, variant.block_size, variant.topk)
        losses = loss_by_position(model, windows, attention)
        row.loss = losses.mean().item()
        if variant.kind == "dense" and not math.isfinite(row.loss):
            raise FloatingPointError(f"its loss with dense attention must be finite, got {row.loss}")
        row.change = row.loss - (rows[0].loss if rows else row.loss)
        row.by_position = [losses[max(0, first - 1) : last - 1].mean().item() for first, last in bins]
        if str(number) in sparse:
            found = recalls.mean(str(number))
            if found.pairs:
                row.block_recall, row.score_recall, row.mass = found.blocks, found.scores, found.mass
        row.needles = needle_scores(model, needles, attention)
        attention.kept.clear()
        rows.append(row)
        watcher.row(row)
    return rows


def mean_found(row: Row) -> float | None:
    """Returns the share of needles found at all distances together; None where none were hidden."""
    trials = sum(score.trials for score in row.needles)
    return sum(score.found * score.trials for score in row.needles) / trials if trials else None


def windows_on(device: torch.device, windows: Windows, count: int) -> list[Tensor]:
    """Returns windows drawn from a text, each at most once and at most `count`, on a device."""
    return list(windows.drawn(0, min(count, len(windows))).to(device))
