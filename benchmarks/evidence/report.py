# SPDX-License-Identifier: MIT
"""This module makes the page and the plots of docs/results from the records of a run:

python -m benchmarks.evidence.report RECORDS_FOLDER docs/results
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


def against(row: Record, base: Record) -> tuple[str, str]:
    """Returns by how much a loss exceeds another one on the same windows: in percent, and in nats with the standard error."""
    differences = [a - b for a, b in zip(row["windows"], base["windows"], strict=True)]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return f"{100 * mean / base['loss']:+.2f} %", f"{mean:+.4f} ± {error:.4f}"


def losses(records: list[Record], length: int) -> str:
    """Returns the table of held-out losses and recall in windows of a length."""
    found, base = of(records, "held_out", length=length), of(records, "held_out", arm="dense", way="dense", length=length)
    rows = []
    for row in found:
        if row["way"].startswith(("index", "stored")):
            continue
        recalled = of(records, "recall", arm=row["arm"], way=row["way"], length=length)
        percent, nats = against(row, base[0]) if base else ("", "")
        told = f"{100 * recalled[0]['recalled']:.1f} %" if recalled else ""
        rows.append((NAMES[row["arm"]], row["way"], f"{row['loss']:.4f}", percent, nats, told))
    return table(["trained", "reads", "nats a byte", "against dense", "nats", "lines recalled"], rows)


def formats(records: list[Record]) -> str:
    """Returns the table of low-precision formats."""
    plain = [r for r in of(records, "held_out", arm="msa") if r["way"].startswith("msa")]
    topk = of(records, "plan")[0].get("topk") if of(records, "plan") else None
    base = next((r for r in plain if r["way"] == f"msa {topk}"), plain[0]) if plain else None
    rows = []
    for row in of(records, "held_out", arm="msa"):
        if base and row["way"].startswith(("index", "stored")):
            agreed = [f"{100 * x:.1f} %" for x in row.get("agreement", [])]
            rows.append((row["way"], f"{row['loss']:.4f}", *against(row, base), ", ".join(agreed)))
    return table(["stored as", "nats a byte", "change", "nats", "blocks selected alike, by layer"], rows)


def selections(records: list[Record]) -> str:
    """Returns the table of selections, a line for each arm, length and layer."""
    rows = []
    for r in of(records, "selections"):
        q, s = r["quality"], r["statistics"]
        if not q or not s:
            continue
        rows.append(
            (
                f"{NAMES[r['arm']]}, {r['length']:,} bytes, layer {r['layer']}",
                f"{q['block_recall']:.3f}",
                f"{q['score_recall']:.3f}",
                f"{q['mass']:.3f} of {q['best_mass']:.3f}",
                f"{100 * s['shared_after']['1']:.1f} %",
                ", ".join(f"{s['union'][n]:.1f}" for n in ("4", "8", "16")),
                f"{100 * s['first_block']:.0f} %",
                f"{100 * s.get('heads_share', 0):.0f} %",
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


def steps(records: list[Record]) -> str:
    """Returns the table of the time of a training step: the median of each arm, stage and window."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for r in of(records, "step"):
        found.setdefault((r["arm"], r["stage"], r["context"]), []).append(r["milliseconds"])
    rows = [
        (NAMES[arm], stage, f"{context:,}", f"{statistics.median(times):.1f}") for (arm, stage, context), times in found.items()
    ]
    return table(["arm", "stage", "window", "milliseconds a step"], rows)


def page(records: list[Record]) -> str:
    """Returns the page."""
    run, plan = of(records, "run")[-1], of(records, "plan")[-1]
    longest = plan["windows"][-1][1]
    lengths = sorted({r["length"] for r in of(records, "held_out")})
    c, msa = run["config"], run["config"]["msa"]
    longer = "".join(
        f"\nIn windows of {n:,} bytes, {n / longest:g} times as long as in training:\n\n{losses(records, n)}"
        for n in lengths
        if n > longest
    )
    sizes = (
        f"{c['num_layers']} layers of {c['num_heads']} query and {c['num_kv_heads']} KV heads (dim {c['head_dim']}), hidden "
        f"size {c['hidden_size']},\nan index branch that selects {msa['index_topk_blocks']} blocks of "
        f"{msa['index_block_size']} keys with heads of dim {msa['index_head_dim']}"
    )
    read = f"{plan['steps'] * plan['tokens']:,} bytes ({plan['steps']} steps of {plan['tokens']:,}, seed {plan['seed']})"
    minutes = f"{records[-1]['at'] / 60:.1f}"
    where = f"{run['device']}, torch {run['torch']}, triton {run['triton']}; the whole run took {minutes} minutes"
    return f"""# Training with MSA: a byte model

Made by `benchmarks/evidence/report.py` from `benchmarks/results/{RECORDS}`. The model reads bytes; it has
{sizes}.
Three arms read the same {read}, in windows that grow up to {longest:,} bytes:
dense attention; MSA from the start, with a warm-up of the index branch; dense attention for 70 % of the steps and MSA, with a
warm-up, for the rest. {where}.

Lines of the form `@ab=1234` stand twice in every training window, and recall is the share of second lines whose four digits
are all the model's first choice. Half of the pairs of lines in a window are more than three tenths of its length apart.
Differences from dense are means over the same held-out windows, with their standard error; there is one seed.

## Held-out loss and recall

{losses(records, longest)}{longer}
![losses of training](byte-model-training.png)

![held-out loss by position, recall by distance](byte-model-held-out.png)

## What the index branch selects

Of the {msa["index_topk_blocks"]} blocks with the largest attention mass, block recall is the share that is selected, and score
recall the mass of these over the mass of all of them; mass read is the attention mass of all selected blocks, and of the best
ones. All means are over queries that see more blocks than they read.

{selections(records)}
![selections](byte-model-selections.png)

## Low precision

{formats(records)}
## Time of a step

{steps(records)}
## The text

{sources(records)}"""


def summary(records: list[Record]) -> str:
    """Returns the short table that a run ends with."""
    longest = of(records, "plan")[-1]["windows"][-1][1]
    return "\n".join((steps(records), losses(records, longest), selections(records), formats(records)))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.report", description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if not (options.records / FILE).is_file():
        parser.error(f"records must be a folder with {FILE}, got {str(options.records)!r}")
    records = read(options.records)
    absent = [kind for kind in ("held_out", "selections") if not of(records, kind)]
    if absent:
        parser.error(
            f"records must be those of a run that ended, got none of {' and '.join(absent)} in {str(options.records)!r}"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / PAGE).write_text(page(records), encoding="utf-8")
    plots.training(records, options.folder / "byte-model-training.png")
    plots.held_out(records, options.folder / "byte-model-held-out.png")
    plots.selections(records, options.folder / "byte-model-selections.png")


if __name__ == "__main__":
    main()
