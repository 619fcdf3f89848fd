# SPDX-License-Identifier: MIT
"""This module makes the page and the plots of docs/results from the records of one run, or of several with seeds of their own:

python -m benchmarks.evidence.report RECORDS [RECORDS ...] docs/results

RECORDS is a folder that a run wrote, or its records under another name.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.evidence import plots
from benchmarks.evidence.records import FILE, read

PAGE = "byte-model.md"
RECORDS = "2026-11-23-byte-model.jsonl"
NAMES = {"dense": "dense", "msa": "MSA from the start", "dense_then_msa": "dense, then MSA"}
Record = dict[str, Any]


def of(records: Iterable[Record], kind: str, **values: Any) -> list[Record]:
    """Returns the records of a kind with these values."""
    return [r for r in records if r["kind"] == kind and all(r.get(name) == value for name, value in values.items())]


def table(head: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a Markdown table, the first column to the left."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *([str(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


Runs = list[list[Record]]
"""Holds the records of each run. Tables have a row for what the first run measured, with the mean of the runs that did, too."""


def against(row: Record, base: Record) -> tuple[float, float, float]:
    """Returns by how much a loss exceeds another one on the same windows: in percent, in nats, and the standard error of the
    latter."""
    differences = [a - b for a, b in zip(row["windows"], base["windows"], strict=True)]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return 100 * mean / base["loss"], mean, error


def spread(values: list[float], form: str = ".4f", unit: str = "") -> str:
    """Returns a number, or the mean of several with their standard deviation."""
    shown = f"{statistics.fmean(values):{form}}"
    if len(values) > 1:
        shown += f" ± {statistics.stdev(values):{form.lstrip('+')}}"
    return shown + unit


def differences(pairs: list[tuple[Record, Record]]) -> tuple[str, str]:
    """Returns by how much losses exceed others, in percent and in nats: for one pair with the standard error over windows, for
    one pair a run with the standard deviation over runs."""
    found = [against(row, base) for row, base in pairs]
    if not found:
        return "", ""
    nats = f"{found[0][1]:+.4f} ± {found[0][2]:.4f}" if len(found) == 1 else spread([x[1] for x in found], "+.4f")
    return spread([x[0] for x in found], "+.2f", " %"), nats


def alike(runs: Runs, row: Record, *names: str) -> list[tuple[list[Record], Record]]:
    """Returns, for each run that has such a record, its records and the one with a row's kind and values of `names`."""
    found = [(records, of(records, row["kind"], **{name: row[name] for name in names})) for records in runs]
    return [(records, same[0]) for records, same in found if same]


def losses(runs: Runs, length: int) -> str:
    """Returns the table of held-out losses and recall in windows of a length."""
    rows = []
    for row in of(runs[0], "held_out", length=length):
        if row["way"].startswith(("index", "stored")):
            continue
        same = alike(runs, row, "arm", "way", "length")
        bases = [of(records, "held_out", arm="dense", way="dense", length=length) for records, _ in same]
        recalled = [of(records, "recall", arm=row["arm"], way=row["way"], length=length) for records, _ in same]
        pairs = [(own, base[0]) for (_, own), base in zip(same, bases, strict=True) if base]
        percent, nats = differences(pairs)
        by_seed = [", ".join(f"{against(*pair)[0]:+.2f}" for pair in pairs)] if len(runs) > 1 else []
        told = [100 * found[0]["recalled"] for found in recalled if found]
        loss = spread([own["loss"] for _, own in same])
        found = spread(told, ".1f", " %") if told else ""
        rows.append((NAMES[row["arm"]], row["way"], loss, percent, *by_seed, nats, found))
    seeds = ["by seed"] if len(runs) > 1 else []
    return table(["trained", "reads", "nats a byte", "against dense", *seeds, "nats", "lines recalled"], rows)


def plain_loss(records: list[Record]) -> Record | None:
    """Returns the record of the arm msa's loss when it reads as many blocks as in training."""
    plain = [r for r in of(records, "held_out", arm="msa") if r["way"].startswith("msa")]
    topk = of(records, "plan")[0].get("topk") if of(records, "plan") else None
    return next((r for r in plain if r["way"] == f"msa {topk}"), plain[0] if plain else None)


def formats(runs: Runs) -> str:
    """Returns the table of low-precision formats."""
    rows = []
    for row in of(runs[0], "held_out", arm="msa"):
        if row["way"].startswith(("index", "stored")) and plain_loss(runs[0]):
            same = alike(runs, row, "arm", "way", "length")
            bases = [(own, plain_loss(records)) for records, own in same]
            agreed = [statistics.fmean(x) for x in zip(*(own.get("agreement", []) for _, own in same), strict=True)]
            told = ", ".join(f"{100 * x:.1f} %" for x in agreed)
            changes = differences([(own, base) for own, base in bases if base])
            rows.append((row["way"], spread([own["loss"] for _, own in same]), *changes, told))
    return table(["stored as", "nats a byte", "change", "nats", "blocks selected alike, by layer"], rows)


def selections(runs: Runs) -> str:
    """Returns the table of selections, a line for each arm, length and layer."""
    rows = []
    for row in of(runs[0], "selections"):
        same = [own for _, own in alike(runs, row, "arm", "length", "layer") if own["quality"] and own["statistics"]]
        if not same:
            continue

        recalls = [spread([own["quality"][name] for own in same], ".3f") for name in ("block_recall", "score_recall")]
        mass, best = (statistics.fmean(own["quality"][name] for own in same) for name in ("mass", "best_mass"))
        found = [own["statistics"] for own in same]
        unions = [statistics.fmean(s["union"][n] for s in found) for n in ("4", "8", "16")]
        rows.append(
            (
                f"{NAMES[row['arm']]}, {row['length']:,} bytes, layer {row['layer']}",
                *recalls,
                f"{mass:.3f} of {best:.3f}",
                f"{100 * statistics.fmean(s['shared_after']['1'] for s in found):.1f} %",
                ", ".join(f"{x:.1f}" for x in unions),
                f"{100 * statistics.fmean(s['first_block'] for s in found):.0f} %",
                f"{100 * statistics.fmean(s.get('heads_share', 0) for s in found):.0f} %",
            )
        )
    head = ["", "block recall", "score recall", "mass read", "shared with the next query", "union of 4, 8, 16 queries"]
    return table([*head, "reads block 0", "heads share"], rows)


def sources(records: list[Record]) -> str:
    """Says which text was used, and lists it."""
    corpus = of(records, "corpus")[-1]
    rows = [(s["name"], s["version"], s["licence"], s["files"], f"{s['bytes'] / 1e6:.2f}") for s in corpus["sources"]]
    return (
        f"{corpus['train']:,} bytes to train on and {corpus['held_out']:,} held out, from text and code of these packages.\n"
        "Runs of eight neighbouring files are on one side, and a file whose content was met before is left out; but packages\n"
        "resemble each other, so held-out losses are lower than those of a text from elsewhere.\n\n"
        + table(["package", "version", "licence", "files", "MB"], rows)
    )


def steps(runs: Runs) -> str:
    """Returns the table of the time of a training step: the median of each arm, stage and window over all runs whose steps are
    timed. Those of a run that shared its GPU with other work are not."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for r in (r for records in runs for r in of(records, "step") if "milliseconds" in r):
        found.setdefault((r["arm"], r["stage"], r["context"]), []).append(r["milliseconds"])
    rows = [
        (NAMES[arm], stage, f"{context:,}", f"{statistics.median(times):.1f}") for (arm, stage, context), times in found.items()
    ]
    return table(["arm", "stage", "window", "milliseconds a step"], rows)


def listed(words: list[str]) -> str:
    """Returns words as a list in a sentence."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def check_alike(runs: Runs) -> None:
    """Raises ValueError unless the runs have one model, one schedule, and seeds of their own."""
    plans = [of(records, "plan")[-1] for records in runs]
    seeds = [plan["seed"] for plan in plans]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"records must have seeds of their own, got seeds {listed([str(seed) for seed in seeds])}")
    kinds = [(of(r, "run")[-1]["config"], plan["tokens"], plan["windows"]) for r, plan in zip(runs, plans, strict=True)]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError("records must be those of one model and of windows of the same lengths, got several")


def page(runs: Runs, names: list[str]) -> str:
    """Returns the page. names: the names of the records' files."""
    run, plans = of(runs[0], "run")[-1], [of(records, "plan")[-1] for records in runs]
    longest = plans[0]["windows"][-1][1]
    lengths = sorted({r["length"] for r in of(runs[0], "held_out")})
    c, msa = run["config"], run["config"]["msa"]
    topk = msa["index_topk_blocks"]
    longer = "".join(
        f"\nIn windows of {n:,} bytes, {n / longest:g} times as long as in training:\n\n{losses(runs, n)}"
        for n in lengths
        if n > longest
    )
    taken = listed(
        [f"{p['steps'] * p['tokens']:,} bytes ({p['steps']} steps of {p['tokens']:,}, seed {p['seed']})" for p in plans]
    )
    minutes = listed([f"{records[-1]['at'] / 60:.1f}" for records in runs])
    if len(runs) == 1:
        seeds = "Differences from dense are means over the same held-out windows, with their standard error; there is one seed."
    else:
        told = f"There are {len(runs)} seeds"
        seeds = (
            f"{told}, of weights and of what is read in which order: numbers are means over seeds, with the standard\n"
            "deviation between seeds behind ±. Differences from dense are those of the same seed and held-out windows. In the\n"
            "plots each seed has its own line style in the losses of training, held-out losses and recall are means over\n"
            "seeds, and everything else comes from the first seed."
        )
    sizes = (
        f"{c['num_layers']} layers of {c['num_heads']} query and {c['num_kv_heads']} KV heads (dim {c['head_dim']}), hidden "
        f"size {c['hidden_size']},\nan index branch that selects {msa['index_topk_blocks']} blocks of "
        f"{msa['index_block_size']} keys with heads of dim {msa['index_head_dim']}"
    )
    whole = "the whole run" if len(runs) == 1 else "whole runs"
    where = f"{run['device']}, torch {run['torch']}, triton {run['triton']}; {whole} took {minutes} minutes"
    made_from = listed([f"`benchmarks/results/{name}`" for name in names])
    return f"""# Training with MSA: a byte model

Made by `benchmarks/evidence/report.py` from {made_from}. The model reads bytes; it has
{sizes}.
Three arms read the same {taken}, in windows that grow up to {longest:,} bytes:
dense attention; MSA from the start, with a warm-up of the index branch; dense attention for 70 % of the steps and MSA, with a
warm-up, for the rest. {where}.

Lines of the form `@ab=1234` stand twice in every training window, and recall is the share of second lines whose four digits
are all the model's first choice. Half of the pairs of lines in a window are more than three tenths of its length apart.
{seeds}

## Held-out loss and recall

A row says which model reads what: "dense" all keys, "msa {topk}" the {topk} blocks that the index branch selects,
"window {topk}" the first block and the last ones, {topk} in all.

{losses(runs, longest)}{longer}
![losses of training](byte-model-training.png)

![held-out loss by position, recall by distance](byte-model-held-out.png)

## What the index branch selects

Of the {msa["index_topk_blocks"]} blocks with the largest attention mass, block recall is the share that is selected, and score
recall the mass of these over the mass of all of them; mass read is the attention mass of all selected blocks, and of the best
ones. Shared with the next query is the share of a query's blocks that the query one byte later selects, too, which is what
consecutive decode steps share; the union is how many blocks so many neighbouring queries read together; the next column is the
share of queries that select the first block; heads share is the share of a head's blocks that the next head selects, too. All
means are over queries that see more blocks than they read.

{selections(runs)}
![selections](byte-model-selections.png)

## Low precision

The arm "{NAMES["msa"]}" reads index keys, or keys and values, that were stored in a format, against the same model with
16 bits; "stored" is the model as its file has it, int8 matrices. Blocks selected alike are the share of blocks that index keys
of 16 bits select, too.

{formats(runs)}
## Time of a step

The median time of an optimizer step, forward, backward and the index loss of its stage included.

{steps(runs)}
## The text

{sources(runs[0])}"""


def summary(records: list[Record]) -> str:
    """Returns the short table that a run ends with."""
    longest = of(records, "plan")[-1]["windows"][-1][1]
    return "\n".join((steps([records]), losses([records], longest), selections([records]), formats([records])))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.report", description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="folders of runs, or files of their records")
    parser.add_argument("folder", type=Path, help="where page and plots go")
    options = parser.parse_args()
    runs = []
    for place in options.records:
        file = place / FILE if place.is_dir() else place
        if not file.is_file():
            parser.error(f"records must be a folder with {FILE} or such a file, got {str(place)!r}")
        runs.append(read(file))
        if absent := [kind for kind in ("held_out", "selections") if not of(runs[-1], kind)]:
            parser.error(f"records must be those of a run that ended, got none of {' and '.join(absent)} in {str(place)!r}")
    try:
        check_alike(runs)
    except ValueError as error:
        parser.error(str(error))
    options.folder.mkdir(parents=True, exist_ok=True)
    names = [RECORDS if place.is_dir() else place.name for place in options.records]
    (options.folder / PAGE).write_text(page(runs, names), encoding="utf-8")
    plots.training(runs, options.folder / "byte-model-training.png")
    plots.held_out(runs, options.folder / "byte-model-held-out.png")
    plots.selections(runs[0], options.folder / "byte-model-selections.png")


if __name__ == "__main__":
    main()
