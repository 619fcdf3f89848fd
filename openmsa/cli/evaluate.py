# SPDX-License-Identifier: MIT
"""`openmsa evaluate` says what MSA costs a language model: dense attention, MSA and two baselines on the same text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openmsa.cli.checks import INTERRUPTED, check_writable, refuse, tell_left_out, writing
from openmsa.cli.models import SMOLLM2, Device, Dtype, Model, check_tokens, find_device, find_model, load_model, load_tokenizer

if TYPE_CHECKING:
    from openmsa.training.compare import Row
    from openmsa.training.needle import Needle
    from openmsa.training.text import Windows

BUDGETS = (6.25, 12.5, 25.0, 50.0)
HELP = f"""Measure what MSA costs a model: its loss and what it finds, beside dense attention and two baselines.

MODEL is a converted one, whose index branches select the blocks, or any model that `openmsa convert` takes: then index queries
are the mean of a group's queries and index keys its keys, which needs no training. Baselines: window (the first block and the
last ones) and random (the query's own block and random ones).

Four measurements. Loss: cross-entropy in nats a token, over all positions and by position. Block recall: of the blocks with
most attention in the dense model, the share that is selected; score recall: the same, weighted by attention. Needles: a number
is hidden in the text and asked for at its end, at several distances; found is how often the likeliest tokens are the number.

Examples:

openmsa evaluate trained --text notes/ --length 8192

openmsa evaluate {SMOLLM2} --text notes.txt --length 2048 --windows 1 --needles 0"""


def evaluate(
    model: Model,
    text: Annotated[list[Path], typer.Option(help="A text file, or a folder of them; repeatable.", show_default=False)],
    length: Annotated[int, typer.Option(min=64, help="Tokens of a window.")] = 4096,
    windows: Annotated[int, typer.Option(min=1, help="Windows of the text to read.")] = 4,
    budget: Annotated[list[float], typer.Option(min=0.1, max=100, help="Per cent of a window's blocks; repeatable.")] = [  # noqa: B006
        *BUDGETS
    ],
    block_size: Annotated[
        int | None, typer.Option(min=16, max=256, help="Keys a block; the model's own, or 64, if not given.")
    ] = None,
    needles: Annotated[int, typer.Option(min=0, help="Needles to hide at each distance; 0: none.")] = 4,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for evaluation.json and evaluation.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of tables.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**62, help="Seed by which windows, random blocks and needles are drawn.")
    ] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Evaluate (`HELP` is what --help prints)."""
    source = find_model(model)
    place, wanted = find_device(device, dtype)
    if out is not None:
        for name in ("evaluation.json", "evaluation.png"):
            check_writable("--out", out / name)

    from openmsa.training.text import Windows, read_files, text_files, tokens_of

    try:
        texts, left_out = read_files(text_files(text), text)
        tell_left_out(left_out)
        tokenizer = load_tokenizer(source)
        data = Windows(tokens_of(tokenizer, texts.values()), length, seed)
        hidden = _needles(tokenizer, data, needles)
        loaded = load_model(source, place, wanted)
        check_tokens(loaded, data.tokens, *(needle.ids for needle in hidden))
        _note_length(loaded, length)
        record, rows = _run(loaded, data, hidden, windows, budget, block_size)
    except (ValueError, NotImplementedError) as error:
        refuse(str(error))
    except FloatingPointError as error:
        typer.echo(f"MODEL cannot be evaluated: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    record = {"model": model, "text": [str(path) for path in text], **record}
    written = json.dumps(_finite(record), indent=2)
    try:
        if as_json:
            typer.echo(written)
        else:
            _print(record, rows)
    finally:  # Standard output may be full.
        if out is not None:
            with writing("--out", out, "What was measured stands above."):
                out.mkdir(parents=True, exist_ok=True)
                (out / "evaluation.json").write_text(written + "\n", encoding="utf-8")
                _plot(record, rows, out / "evaluation.png")


evaluate.__doc__ = HELP


def _finite(value: Any) -> Any:
    """Returns a record with null in place of numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _note_length(model: Any, length: int) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        typer.echo(f"Note: {length:,} tokens (--length) are more than the {longest:,} positions of the model.", err=True)


def _needles(tokenizer: Any, data: Windows, trials: int) -> list[Needle]:
    from openmsa.training.needle import make_needles, needle_distances

    return make_needles(tokenizer, data.tokens, data.length, needle_distances(data.length), trials, data.seed)


def _run(
    model: Any, data: Windows, needles: list[Needle], count: int, percents: list[float], block_size: int | None
) -> tuple[dict[str, Any], list[Row]]:
    from openmsa.bench.record import environment
    from openmsa.cli.evaluation_progress import evaluation_bar
    from openmsa.training.compare import compare, index_of, variants_of, windows_on
    from openmsa.training.evaluate import position_bins
    from openmsa.training.layers import attention_layers, branches_of

    branches, config = branches_of(model) if getattr(model.config, "msa", None) else ({}, None)
    size = block_size or (config.index_block_size if config else 64)
    dense_layers = frozenset(set(attention_layers(model)) - set(branches)) if branches else frozenset()
    name = "MSA" if branches else "training-free"
    read = windows_on(model.device, data, count)
    with evaluation_bar() as watcher:
        options = {"index": index_of(branches), "dense_layers": dense_layers, "seed": data.seed}
        if config:
            options["forced"] = (config.index_init_blocks, config.index_local_blocks)
        variants = variants_of(data.length, size, percents, name, **options)
        rows = compare(model, variants, read, needles, watcher)
    record = {
        "length": data.length,
        "windows": len(read),
        "block_size": size,
        "dense_layers": sorted(dense_layers),
        "bins": position_bins(data.length),
        "rows": [row.to_dict() for row in rows],
        "environment": environment(model.device),
    }
    return record, rows


def _plot(record: dict[str, Any], rows: list[Row], file: Path) -> None:
    try:
        from openmsa.training.comparison_plot import plot
    except ImportError:
        typer.echo("No plot: pip install matplotlib", err=True)
        return
    budgets = sorted({row.percent for row in rows[1:]}, key=lambda percent: abs(percent - 25))
    title = f"{record['model']}, {record['windows']} windows of {record['length']} tokens, blocks of {record['block_size']}"
    plot(rows, record["bins"], budgets[0], title, file)


def _print(record: dict[str, Any], rows: list[Row]) -> None:
    from rich.console import Console

    from openmsa.cli.evaluation_tables import tables

    console = Console(highlight=False)
    for table in tables(record, rows):
        console.print(table)
