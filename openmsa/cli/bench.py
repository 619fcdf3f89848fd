# SPDX-License-Identifier: MIT
"""`openmsa bench` and `python -m benchmarks` measure named workloads, record them, and plot records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(
    help="Measure named workloads against dense attention and the device's limits in the same run.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def bench(
    context: typer.Context,
    match: Annotated[
        list[str] | None,
        typer.Option(
            "--match", "-m", help="Workloads by part of their name, or a pattern such as 'decode-*/msa*'; repeatable."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Passes over the rows of a workload (cpu: 3, cuda: 1).")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; PyTorch's default otherwise.")] = None,
    impl: Annotated[str, typer.Option(help="Which implementation of ours, as impl= takes it.")] = "auto",
    peers: Annotated[Path, typer.Option(help="Folder with the peers' kernels.")] = Path(".peers"),
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Append the records to this JSONL file.")] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded as the commit where no checkout tells it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSONL instead of tables.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="List the workloads and stop.")] = False,
) -> None:
    """Measure named workloads against dense attention and the device's limits in the same run."""
    if context.invoked_subcommand is not None:
        return
    if list_only:
        _list(device, as_json)
        return
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        _refuse(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        _refuse("device must be cpu where PyTorch finds no GPU, got 'cuda'")
    from openmsa.bench import record, report, runner, workloads
    from openmsa.explain import STAGES

    names = dict.fromkeys(row.name for stage in STAGES.values() for row in stage.table)
    if impl not in ("auto", *names):
        _refuse(f"impl must be auto or one of {', '.join(names)}, got {impl!r}")
    try:
        work = workloads.chosen(device, match or ())
    except ValueError as error:
        _refuse(str(error))
    torch.set_num_threads(threads or torch.get_num_threads())
    settings = runner.Settings.for_device(torch.device(device), repeat, impl=impl, peers=peers, commit=commit)
    records = []
    with _progress() as progress:
        task = progress.add_task("", total=runner.count_steps(work, settings))

        def step(text: str) -> None:
            progress.update(task, advance=1, description=text)
            progress.refresh()

        for line in runner.run(work, settings, step):
            records.append(line)
            if output is not None:
                record.append([line], output)
            if as_json:
                typer.echo(json.dumps(line))
    if not as_json:
        report.print_summary(records)
    if all(r["error"] for r in records):
        raise typer.Exit(1)


@app.command()
def plot(
    records: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="JSONL files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The image to write.")],
) -> None:
    """Plot the speed-up over dense attention against context length, from records."""
    from openmsa.bench import record
    from openmsa.bench.plot import plot as draw

    try:
        draw([line for path in records for line in record.load(path)], output)
    except ImportError:
        _refuse("plots need matplotlib: pip install 'openmsa[demo]'")
    except ValueError as error:
        _refuse(str(error))
    typer.echo(f"wrote {output}")


@app.command()
def show(
    records: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="JSONL files.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.")] = False,
) -> None:
    """Print the tables of records."""
    from openmsa.bench import record, report

    try:
        report.print_summary([line for path in records for line in record.load(path)], markdown)
    except ValueError as error:
        _refuse(str(error))


def _list(device: str | None, as_json: bool) -> None:
    from openmsa.bench import report, workloads

    if as_json:
        for w in workloads.WORKLOADS:
            if device in (None, w.device):
                fields: dict[str, Any] = {"name": w.name, "device": w.device, "shape": str(w), "modes": w.modes, "rows": w.rows}
                typer.echo(json.dumps(fields))
    else:
        report.print_workloads(device)


def _progress() -> Progress:
    """Returns a bar on stderr that is drawn only between measurements: a thread that draws would be measured too."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)


def _refuse(sentence: str) -> None:
    typer.echo(sentence, err=True)
    raise typer.Exit(2)
