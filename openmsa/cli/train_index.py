# SPDX-License-Identifier: MIT
"""`openmsa train-index` trains the index branches of a language model, whose own weights stay as they are."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openmsa.cli.checks import INTERRUPTED, check_writable, refuse, writing
from openmsa.cli.models import (
    Device,
    Dtype,
    Source,
    check_tokens,
    find_device,
    find_model,
    is_converted,
    load_model,
    load_tokenizer,
    quiet,
)
from openmsa.cli.training_text import cut_windows, nothing_to_measure, read_texts

if TYPE_CHECKING:
    import torch

    from openmsa.training.settings import TrainSettings
    from openmsa.training.text import Windows

CALLS = """Examples:

openmsa train-index converted --text books/ --text notes.md --out trained

openmsa train-index converted --text books/ --out trained --resume

torchrun --nproc-per-node 8 -m openmsa train-index converted --text books/ --out trained --batch 32"""
HELP = f"""Train the index branches of a model, so that attention reads the blocks that it would attend to.

MODEL is one that `openmsa convert` wrote. Its own weights are frozen: each layer's index branch learns the attention weights of
that layer, first over all keys (the warm-up, in which attention is dense), then over the blocks that it selects (attention is
sparse). One layer's graph is held at a time, so training takes little more memory than reading the text does.

OUT gets the trained model, and in OUT/training the log (log.jsonl, one line a step), plots of loss and recall where matplotlib
is installed, and a checkpoint, written every so many steps and on Ctrl-C. A run that was stopped or killed goes on with
--resume, and ends with the same bits as one that was not. Recall is measured on files that are held out: how many of the blocks
with most attention are selected.

{CALLS}"""
AGAIN = "The same command with --resume goes on from the last checkpoint."
RESTART = "--resume goes on with it, another --out begins a new one"


def train_index(
    model: Annotated[str, typer.Argument(help="A model that openmsa convert wrote.", metavar="MODEL", show_default=False)],
    text: Annotated[list[Path], typer.Option(help="A text file, or a folder of them; repeatable.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write.", file_okay=False, show_default=False)],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT, or begin it.")] = False,
    length: Annotated[int, typer.Option(min=32, help="Tokens of a window, what a training sequence is.")] = 4096,
    steps: Annotated[int, typer.Option(help="Optimizer steps in all.")] = 400,
    warmup_steps: Annotated[int, typer.Option(help="The first of them, in which attention is dense.")] = 200,
    batch: Annotated[int, typer.Option(help="Windows a step, on all GPUs together.")] = 4,
    micro_batch: Annotated[int, typer.Option(help="Windows that go through the model at a time, on each GPU.")] = 1,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 1e-3,
    schedule: Annotated[str, typer.Option(help="cosine (falls to a tenth) or constant.")] = "cosine",
    clip: Annotated[float, typer.Option(min=0, help="Largest norm of a step's gradients together; 0: as they are.")] = 1.0,
    held_out: Annotated[float, typer.Option(help="Share of the files on which recall is measured; 0: none.")] = 0.05,
    save_every: Annotated[int, typer.Option(min=1, help="Steps from checkpoint to checkpoint.")] = 50,
    measure_every: Annotated[int, typer.Option(min=1, help="Steps from measurement to measurement.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed by which the order of the windows is drawn.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Train the index branches (`HELP` is what --help prints)."""
    settings = _settings(
        steps=steps, warmup_steps=warmup_steps, batch=batch, micro_batch=micro_batch, lr=lr, schedule=schedule,
        clip=clip or None, seed=seed,
    )  # fmt: skip
    source = find_model(model)
    _check_converted(model, source)
    place, wanted = find_device(device, dtype)
    first = os.environ.get("RANK", "0") == "0"
    if first:  # The others would see what this one tries out; they end with it.
        _check_out(out, resume)

    import torch

    from openmsa.training.parallel import join

    try:
        train, held = read_texts(text, held_out, first)
        world = join(place)
        _check_machine(settings, world.size, wanted)  # A model may take minutes to load.
        tokenizer, loaded = load_tokenizer(source), load_model(source, world.device, wanted)
        _check_length(loaded, length)
        windows, measured = cut_windows(tokenizer, train, length, seed, "text to train on"), None
        if not nothing_to_measure(loaded, held, held_out, length, first):
            measured = cut_windows(tokenizer, held, length, seed, "text held out (--held-out)")
        check_tokens(loaded, windows.tokens, *([] if measured is None else [measured.tokens]))
        with writing("--out", out / "training", AGAIN):
            done = _run(loaded, windows, measured, settings, out, world, save_every, measure_every)
    except (ValueError, NotImplementedError) as error:
        refuse(str(error))
    except FloatingPointError as error:
        if first:
            typer.echo(f"Stopped: {error}. {_kept(out)}", err=True)
        raise typer.Exit(1) from error
    if done < settings.steps:
        if world.first:
            typer.echo(f"Stopped after {done} of {settings.steps} steps; the same command with --resume goes on.", err=True)
        world.close(INTERRUPTED)
        raise typer.Exit(INTERRUPTED)
    if world.first:
        if world.size > 1:  # The model is cut among the processes, but for its index branches.
            loaded = _with_branches(load_model(source, torch.device("cpu"), wanted), loaded)
        with writing("--out", out, AGAIN), quiet():
            loaded.save_pretrained(out)
            tokenizer.save_pretrained(out)
        _report(out)
    world.wait()
    world.close()


train_index.__doc__ = HELP


def _check_out(out: Path, resume: bool) -> None:
    checkpoint = out / "training" / "checkpoint.safetensors"
    if os.path.exists(checkpoint) and not resume:
        refuse(f"--out must be a new folder, got {str(out)!r}, which holds a run: {RESTART}")
    if os.path.exists(out / "config.json") and not os.path.exists(checkpoint):
        refuse(f"--out must be a new folder, got {str(out)!r}, which holds a model")
    for name in ("checkpoint.safetensors", "log.jsonl", "loss.png", "recall.png"):
        check_writable("--out", out / "training" / name)
    check_writable("--out", out / "config.json")


def _check_converted(model: str, source: Source) -> None:
    if not is_converted(source):
        refuse(f"MODEL must have index branches to train, got {model!r}: openmsa convert {model} OUT gives it some")


def _settings(**values: Any) -> TrainSettings:
    from openmsa.training.settings import TrainSettings

    try:
        return TrainSettings(**values)
    except (ValueError, TypeError) as error:
        refuse("--" + str(error).replace("_", "-", 1))


def _check_machine(settings: TrainSettings, processes: int, dtype: torch.dtype) -> None:
    try:
        settings.check_machine(processes, dtype)
    except ValueError as error:
        refuse(f"--{error}")


def _check_length(model: Any, length: int) -> None:
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ValueError(f"--length must be at most what the model reads ({most} tokens), got {length}")


def _run(
    model: Any,
    windows: Windows,
    held_out: Windows | None,
    settings: TrainSettings,
    out: Path,
    world: Any,
    save_every: int,
    measure_every: int,
) -> int:
    """Trains with a progress bar. Returns how many steps are done."""
    from openmsa.cli.training_progress import training_bar
    from openmsa.training.layers import branches_of
    from openmsa.training.loop import Trainer

    run = Trainer(model, *branches_of(model), windows, settings, out / "training", world, held_out)
    start = run.resume()
    with training_bar(world.first) as watcher:
        before = {n: signal.signal(n, watcher.ask_to_stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            return run.run(start, save_every=save_every, measure_every=measure_every, watcher=watcher)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _kept(out: Path) -> str:
    """Says what remains of a run that met numbers which are not finite."""
    from openmsa.training import checkpoint

    file = out / "training" / checkpoint.FILE
    if not file.exists():
        return "There is no checkpoint yet."
    return f"The checkpoint after {checkpoint.read_facts(file)['step']} steps, all finite, stands: {file}"


def _with_branches(model: Any, trained: Any) -> Any:
    """Returns a model with the index branches of another."""
    from openmsa.training.layers import branches_of

    for branch, source in zip(*(branches_of(x)[0].values() for x in (model, trained)), strict=True):
        branch.load_state_dict(source.state_dict())
    return model


def _report(out: Path) -> None:
    """Draws the plots, where matplotlib is installed, and says what came of the run."""
    from openmsa.training.log import read_log
    from openmsa.training.report import loss_plot, recall_plot, summary

    folder = out / "training"
    records = read_log(folder / "log.jsonl")
    typer.echo(summary(records))
    try:
        loss_plot(records, folder / "loss.png")
        recall_plot(records, folder / "recall.png")
        typer.echo(f"Plots and log: {folder}{os.sep}")
    except ImportError:
        typer.echo(f"Log: {folder / 'log.jsonl'}; for plots, pip install matplotlib")
    typer.echo(f"The trained model: {out}")
