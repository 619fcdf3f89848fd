# SPDX-License-Identifier: MIT
"""This module measures recall, held-out loss and needles of every index, budget and block size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.smollm2.setting import Study
from openmsa import E4M3, MXFP4, NVFP4, Int8
from openmsa.modules import IndexBranch
from openmsa.training.branches import index_vectors
from openmsa.training.evaluate import RecallOfVariants, hidden_states, needle_scores, position_bins, token_losses
from openmsa.training.layers import LayerInputs
from openmsa.training.recall import spaced_rows
from openmsa.training.variants import Index, Variant, VariantAttention, budgets, group_mean

PERCENTS = (6.25, 12.5, 25.0, 50.0)
FORMATS: dict[str, Callable[[Tensor], Any]] = {
    "e4m3": lambda k: E4M3.quantize(k, per="head"),
    "int8": Int8.quantize,
    "nvfp4": NVFP4.quantize,
    "mxfp4": MXFP4.quantize,
}


def index_of(branches: dict[int, IndexBranch]) -> Index:
    """Returns the index that a candidate's branches are."""
    return lambda inputs: index_vectors(branches[inputs.number], inputs)


def stored(index: Index, form: str) -> Index:
    """Returns an index whose keys are stored in a format."""

    def quantised(inputs: LayerInputs) -> tuple[Tensor, Any]:
        index_q, index_k = index(inputs)
        return index_q, FORMATS[form](index_k)  # type: ignore[arg-type]

    return quantised


def attentions(study: Study, indexes: dict[str, Index]) -> dict[str, VariantAttention]:
    """Returns every variant that is measured, the most important first. indexes: by name; those of the main table come first,
    then those that are measured at two budgets alone, whose names begin with "~"."""
    main = {name: index for name, index in indexes.items() if not name.startswith("~")}
    found = {"dense": VariantAttention(Variant("dense"))}

    def add(kind: str, index: Index, size: int, percents: Iterable[float]) -> None:
        for percent, topk in budgets(study.length, size, tuple(percents)).items():
            variant = Variant(kind, percent, size, topk)
            found[variant.title] = VariantAttention(variant, index)

    for size in study.sizes:
        for name, index in main.items():
            add(name, index, size, PERCENTS)
        for name in ("window", "random"):
            add(name, group_mean, size, PERCENTS)
    for name, index in indexes.items():
        if name.startswith("~"):
            add(name[1:], index, study.sizes[0], (12.5, 25.0))
    for name in ("training-free", f"trained {study.candidates[0].kind} + sparse"):
        for form in FORMATS:
            add(f"{name}, {form} keys", stored(indexes[name], form), study.sizes[0], (12.5, 25.0))
    return found


def measure(study: Study, variants: dict[str, VariantAttention]) -> dict[str, dict[str, Any]]:
    """Measures recall, held-out loss and needles of all variants, as far as the time goes. Returns a row for each."""
    rows: dict[str, dict[str, Any]] = {name: dataclasses.asdict(a.variant) for name, a in variants.items()}
    sparse = {name: a for name, a in variants.items() if a.variant.kind != "dense"}
    watch = RecallOfVariants(sparse, spaced_rows(study.length, 128))
    for window in study.held_out[:4]:
        with study.precision():
            hidden_states(study.model, window[None].to(study.device), watch)
    for name in sparse:
        mean = watch.mean(name)
        rows[name] |= {"block_recall": mean.blocks, "score_recall": mean.scores, "mass": mean.mass}
        more = {}
        if rows[name]["percent"] == 25.0:
            more["by_layer"] = {str(layer): [round(x, 4) for x in found[:2]] for layer, found in watch.by_layer(name).items()}
        study.record("recall", variant=name, **rows[name], **more)
    study.tell(f"recall of {len(sparse)} variants on {min(4, len(study.held_out))} windows")

    bins, dense_losses = position_bins(study.length), None
    needles_at = study.seconds - 0.12 * study.seconds
    for name, attention in variants.items():
        if study.used > needles_at:
            study.tell(f"no time for the loss of {name} and what follows")
            break
        found = []
        for window in study.held_out:
            ids = window.to(study.device)
            with study.precision():
                found.append(token_losses(study.model, hidden_states(study.model, ids[None], attention)[0], ids))
        attention.kept.clear()
        losses = torch.stack(found)  # [windows, length - 1]
        dense_losses = losses if dense_losses is None else dense_losses
        change = (losses - dense_losses).mean(1)
        error = (change.std() / len(change) ** 0.5).item() if len(change) > 1 else None
        rows[name] |= {"loss": losses.mean().item(), "change": change.mean().item(), "change_error": error}
        by_position = [losses[:, max(0, first - 1) : last - 1].mean().item() for first, last in bins]
        study.record("loss", variant=name, **rows[name], bins=bins, by_position=by_position, by_window=losses.mean(1).tolist())
    study.tell("held-out losses")
    chosen = [n for n, a in variants.items() if a.variant.kind == "dense" or a.variant.block_size == study.sizes[0]]
    chosen = [n for n in chosen if rows[n]["percent"] in (100.0, 12.5, 25.0) and "loss" in rows[n] and "keys," not in n]
    for name in sorted(chosen, key=lambda n: -rows[n]["percent"]) if study.needles else ():
        if study.used > study.seconds:
            study.tell(f"no time for the needles of {name} and what follows")
            break
        with study.precision():
            scores = needle_scores(study.model, study.needles, variants[name])
        variants[name].kept.clear()
        rows[name]["needles"] = sum(s.found * s.trials for s in scores) / sum(s.trials for s in scores)
        study.record("needles", variant=name, **rows[name], scores=[dataclasses.asdict(s) for s in scores])
    study.tell("needles")
    return rows


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Prints the table."""
    print(f"\n{'attention':<42}{'blocks':>7}{'loss':>8}{'change':>9}{'%':>7}{'block':>7}{'score':>7}{'found':>7}")
    base = rows["dense"].get("loss", float("nan"))
    for name, row in rows.items():
        words = {key: f"{row[key]:.3f}" for key in ("block_recall", "score_recall", "needles") if key in row}
        change = f"{row['change']:+.4f}" if "change" in row else ""
        share = f"{100 * row['change'] / base:+.2f}" if "change" in row else ""
        loss = f"{row['loss']:.4f}" if "loss" in row else ""
        recalls = "".join(f"{words.get(key, ''):>7}" for key in ("block_recall", "score_recall", "needles"))
        print(f"{name:<42}{row['topk'] or '':>7}{loss:>8}{change:>9}{share:>7}{recalls}")
