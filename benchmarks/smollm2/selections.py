# SPDX-License-Identifier: MIT
"""Describes what SmolLM2-135M selects without training, layer by layer, and what stored keys and values cost it.

    python -m benchmarks.smollm2.selections --data FOLDER --out RECORD.jsonl [--device cpu] [--windows 4]
    python -m benchmarks.smollm2.selections --page RECORD.jsonl --folder docs/results

FOLDER is what `python -m benchmarks.smollm2.files` made. Index queries are the mean of a group's queries, index keys the
group's keys. Each layer attends to a quarter of the blocks while its selection is described; an eighth is described beside it.
Then keys and values of every layer are rounded to a format, and the held-out loss is taken again, dense and sparse. The second
form draws the plot and writes the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.evidence.selections import quality, statistics
from benchmarks.smollm2.measuring import FORMATS as STORED
from benchmarks.smollm2.page import table
from benchmarks.smollm2.setting import Study, load, random_study, rounded
from openmsa import dense_attention, sparse_attention
from openmsa.training.evaluate import hidden_states, token_losses
from openmsa.training.layers import LayerInputs
from openmsa.training.variants import Variant, blocks_by_index, group_mean

SHARES = (0.25, 0.125)
"""Such shares of a window's blocks are selected; the layers attend to the first."""
MACHINE = ("device_name", "date", "commit")
"""The page names these facts of its record."""
FORMATS: dict[str, Callable[[Tensor], Any]] = {"as they are": lambda x: x} | {name: STORED[name] for name in ("e4m3", "nvfp4")}
"""Keys and values are stored so."""


@dataclass
class Attention:
    """Is a layer's attention to all keys, or to those that its selection of `variants[0]` holds, with keys and values rounded
    to a format. `described` gets, of each layer, a description of every selection of the variants."""

    variants: tuple[Variant, ...]
    store: Callable[[Tensor], Any]
    described: dict[tuple[int, int], list[dict[str, Any]]] | None = None

    def __call__(self, inputs: LayerInputs) -> Tensor:
        k, v, scale = self.store(inputs.k), self.store(inputs.v), inputs.softmax_scale
        if not self.variants:
            return dense_attention(inputs.q, k, v, inputs.seqs, softmax_scale=scale)
        blocks = [blocks_by_index(group_mean, inputs, variant) for variant in self.variants]
        for variant, found in zip(self.variants, blocks, strict=True):
            if self.described is not None:
                facts = statistics(found, variant.block_size)
                facts |= quality(inputs.q, inputs.k, found, variant.block_size, scale)
                self.described.setdefault((inputs.number, variant.topk), []).append(facts)
        size = self.variants[0].block_size
        return sparse_attention(inputs.q, k, v, blocks[0], inputs.seqs, block_size=size, softmax_scale=scale)


def mean_of(found: list[Any]) -> Any:
    """Returns the mean of numbers, or of the numbers in lists and dicts of one shape."""
    if isinstance(found[0], dict):
        return {name: mean_of([x[name] for x in found]) for name in found[0]}
    if isinstance(found[0], list):
        longest = max(map(len, found))
        return [mean_of([x[i] if i < len(x) else 0.0 for x in found]) for i in range(longest)]
    return sum(found) / len(found)


def everything(study: Study, write: Callable[..., None]) -> None:
    """Describes the selections, then takes the losses."""
    write("environment", **study.facts)
    size = study.sizes[0]
    counts = [max(1, round(share * study.length / size)) for share in SHARES]
    variants = tuple(Variant("training-free", 100 * share, size, n) for share, n in zip(SHARES, counts, strict=True))
    described: dict[tuple[int, int], list[dict[str, Any]]] = {}
    losses: dict[tuple[str, bool], list[float]] = {}
    for number, window in enumerate(study.held_out):
        ids = window.to(study.device)
        for name, store in FORMATS.items():
            for selects in (False, True):
                told = described if selects and name == "as they are" else None
                attend = Attention(variants[: 2 if told is not None else 1] if selects else (), store, told)
                with study.precision():
                    hidden = hidden_states(study.model, ids[None], attend)[0]
                losses.setdefault((name, selects), []).append(token_losses(study.model, hidden, ids).mean().item())
                study.tell(f"window {number}, {'sparse' if selects else 'dense'}, keys and values {name}")
    for (layer, topk), found in sorted(described.items()):
        write("selection", layer=layer, topk=topk, block_size=size, length=study.length, windows=len(found), **mean_of(found))
    for (name, selects), each in losses.items():
        base = losses["as they are", selects]
        change = torch.tensor(each, dtype=torch.float64) - torch.tensor(base, dtype=torch.float64)
        error = (change.std() / len(change) ** 0.5).item() if len(change) > 1 else None
        topk = counts[0] if selects else 0
        write("loss", stored=name, topk=topk, loss=mean_of(each), change=change.mean().item(), change_error=error)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Draws what the selections of a quarter of the blocks are like, by layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots(2, 2)
    layers = [row["layer"] for row in rows]
    for lag in ("1", "8", "64"):
        axes[0, 0].plot(layers, [row["shared_after"][lag] for row in rows], label=f"{lag} later")
    axes[0, 0].set_title("share of a query's blocks that a later one selects, too")
    for tile in ("4", "8", "16"):
        axes[0, 1].plot(layers, [row["union"][tile] / row["topk"] for row in rows], label=f"{tile} queries")
    axes[0, 1].set_title("distinct blocks of neighbours over those of one query")
    axes[1, 0].plot(layers, [row["first_block"] for row in rows], label="the first block")
    axes[1, 0].plot(layers, [sum(row["distance"][:4]) for row in rows], label="selected blocks at most 7 back")
    axes[1, 0].plot(layers, [row["heads_share"] for row in rows], label="blocks that the next head shares")
    axes[1, 0].set_title("shares")
    for name, label in (("block_recall", "of blocks"), ("score_recall", "of their mass"), ("mass", "mass of all keys")):
        axes[1, 1].plot(layers, [row[name] for row in rows], label=label)
    axes[1, 1].set_title("what the selection holds of the main branch's best blocks")
    for axis in axes.flat:
        axis.set_xlabel("layer")
        axis.legend()
    figure.savefig(file, dpi=80)


def page(records: list[dict[str, Any]], source: str) -> str:
    """Returns the page of a record."""
    facts = next(r for r in records if r["what"] == "environment")
    rows = [r for r in records if r["what"] == "selection"]
    first, selections = rows[0], []
    for topk in sorted({r["topk"] for r in rows}, reverse=True):
        found = []
        for row in (r for r in rows if r["topk"] == topk):
            cells = [row["shared_after"]["1"], row["shared_after"]["64"], row["union"]["8"] / topk, row["first_block"]]
            found.append([*cells, row["heads_share"], row["block_recall"], row["score_recall"]])
            if topk > first["topk"]:  # Of an eighth the mean alone is shown.
                selections.append([f"{row['layer']}, {topk} blocks", *(f"{x:.2f}" for x in found[-1])])
        selections.append([f"mean, {topk} blocks", *(f"{x:.2f}" for x in mean_of(found))])
    head = ["layer", "1 later", "64 later", "union of 8", "first block", "next head", "block recall", "score recall"]
    losses = []
    for row in (r for r in records if r["what"] == "loss"):
        error = "" if row["change_error"] is None else f" ± {row['change_error']:.4f}"
        way = f"{row['topk']} blocks" if row["topk"] else "dense"
        losses.append([way, row["stored"], f"{row['loss']:.4f}", f"{row['change']:+.4f}{error}"])
    return f"""# What SmolLM2-135M selects, and stored keys and values

Written by `benchmarks/smollm2/selections.py` from `{source}`: {", ".join(str(facts[x]) for x in MACHINE if x in facts)}.

SmolLM2-135M-Instruct (30 layers, 9 query and 3 KV heads, head dim 64) reads {first["windows"]} held-out windows of
{first["length"]:,} tokens of Python source in float32. Its index is made of its own queries and keys, without training; blocks
have {first["block_size"]} keys. Statistics are over queries that see more blocks than they may read, all heads.

![selections by layer](smollm2-selections.png)

* **1 later**, **64 later**: share of a query's blocks that the query so many positions later selects, too. Consecutive decode
  steps are one apart.
* **union of 8**: distinct blocks that 8 neighbouring queries read together, over those of one.
* **first block**: share of queries that select it. **next head**: share of a head's blocks that the next head selects.
* **block recall**, **score recall**: share of the blocks with most weight in the main branch that is selected, and of their
  weight.

{table(head, selections)}

## Keys and values in a format

Held-out loss in nats, and its change beside keys and values as they are. ± is the standard error over windows.

{table(["attention", "keys and values", "loss", "change"], losses)}
"""


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--commit")
    parser.add_argument("--toy", action="store_true", help="a random model of 2 layers")
    parser.add_argument("--page", type=Path, help="write the page and the plot of this record")
    parser.add_argument("--folder", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    options.candidates, options.minutes = None, 0.0
    if options.page is not None:
        records = [json.loads(line) for line in options.page.read_text().splitlines()]
        quarter = max(r["topk"] for r in records if r["what"] == "selection")
        plot([r for r in records if r.get("topk") == quarter and "layer" in r], options.folder / "smollm2-selections.png")
        (options.folder / "smollm2-selections.md").write_text(page(records, str(options.page)))
        return
    if options.out is None or (options.data is None and not options.toy):
        parser.error("--out, and --data or --toy, must be given")
    study = random_study(options) if options.toy else load(options)
    with options.out.open("w", encoding="utf-8") as file:
        everything(study, lambda what, **values: print(json.dumps(rounded({"what": what, **values})), file=file, flush=True))


if __name__ == "__main__":
    main()
