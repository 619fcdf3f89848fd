# SPDX-License-Identifier: MIT
"""`openmsa bench` and `python -m benchmarks` measure named workloads, record them, and plot records."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openmsa.cli.checks import INTERRUPTED, check_writable, refuse, writing
from openmsa.cli.commands import Command, Group
from openmsa.cli.words import paragraphs

if TYPE_CHECKING:
    from rich.progress import Progress

    from openmsa.bench.record import Record
    from openmsa.bench.runner import Settings
    from openmsa.bench.workloads import Work

DEVICES = ("cpu", "cuda")
MOST_THREADS = 1024  # PyTorch ends without a word where the system gives it fewer threads than it was asked for.
HELP = paragraphs("""Measure named workloads against dense attention and the device's limits in the same run.

Without --match and --full a quick choice is measured, in less than two minutes on two cores. Ctrl-C ends a run and prints
what it has by then.""")


class Commands(Group):
    """Tells who names a workload where a command stands which option takes it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that `args` begin with."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            words = f"commands of openmsa bench are {', '.join(self.commands)}, got {args[0]!r}"
            refuse(f"{words}; to measure a workload: openmsa bench --match {args[0]} (openmsa bench --list names them)")
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=Commands, help=HELP, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def bench(
    context: typer.Context,
    match: Annotated[
        list[str] | None,
        typer.Option(
            "--match", "-m", help="Workloads by part of their name, or a pattern such as 'decode-*/msa*'; repeatable."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every workload of the device, not the quick ones alone.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU where there is one.")] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Passes over the rows of a workload (quick: 1, cpu: 3, cuda: 1).")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; PyTorch's default otherwise.")] = None,
    impl: Annotated[str, typer.Option(help="Which implementation of ours, as impl= takes it.")] = "auto",
    peers: Annotated[Path, typer.Option(help="Folder with the peers' kernels (GPU).")] = Path(".peers"),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", dir_okay=False, help="Append each record to this JSONL file.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded as the commit where no checkout tells it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSONL instead of tables.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="List the workloads and stop.")] = False,
) -> None:
    """Measure named workloads and print or record what was found; `HELP` is what the command says of itself."""
    if context.invoked_subcommand is not None:
        if given := [name for name, value in context.params.items() if value and value not in ("auto", Path(".peers"))]:
            named = given[0].replace("as_json", "json").replace("list_only", "list")
            refuse(f"openmsa bench {context.invoked_subcommand} takes no --{named}; options that it takes stand behind it")
        return
    if "" in (match or ()):
        refuse("--match must name a workload, or a part of its name, got ''; --full measures everything")
    if match and full:
        refuse("--full measures everything: leave it out, or --match")
    if device not in (None, *DEVICES):
        refuse(f"--device must be cpu or cuda, got {device!r}")
    if threads is not None and threads > MOST_THREADS:
        refuse(f"--threads must be at most {MOST_THREADS}, got {threads}")
    if list_only:
        _list(device, match or [], as_json)
        return
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        refuse("--device must be cpu where PyTorch finds no GPU, got 'cuda'")
    from openmsa.bench import runner, workloads
    from openmsa.explain import STAGES

    names = dict.fromkeys(row.name for stage in STAGES.values() for row in stage.table)
    if impl not in ("auto", *names):
        refuse(f"--impl must be auto or one of {', '.join(names)}, got {impl!r}")
    quick = not (match or full)
    try:
        work = workloads.quick(device) if quick else workloads.chosen(device, match or ())
    except ValueError as error:
        refuse(str(error))
    if output is not None:
        check_writable("--output", output)
        _check_records(output)
    torch.set_num_threads(threads or torch.get_num_threads())
    options: dict[str, Any] = {"impl": impl, "peers": peers, "commit": commit}
    settings = runner.Settings.for_device(torch.device(device), repeat or (1 if quick else None), **options)
    start = time.perf_counter()
    records: list[Record] = []
    try:
        interrupted = _measure(records, work, settings, output, as_json)
    finally:
        if not as_json and records:
            from openmsa.bench import report

            report.print_summary(records)
    if interrupted:
        typer.echo(f"Interrupted: {len(records)} rows have samples{_and_recorded(records, output)}.", err=True)
        raise typer.Exit(INTERRUPTED)
    if quick:
        whole = runner.Settings.for_device(torch.device(device), repeat, **options)
        share = (time.perf_counter() - start) / runner.expected_seconds(work, settings)
        _tell_what_full_adds(device, work, whole.rounds, share * runner.expected_seconds(workloads.chosen(device), whole))
    if all(r["error"] for r in records):
        raise typer.Exit(1)


def _check_records(output: Path) -> None:
    """Refuses a file that holds something else than records, behind which records would be lost."""
    from openmsa.bench import record

    try:
        if os.path.exists(output):
            record.rows(output)
    except ValueError as error:
        refuse(f"--output must be a new file or one of records, as {error}")


def _measure(records: list[Record], work: Work, settings: Settings, output: Path | None, as_json: bool) -> bool:
    """Appends the records, and returns whether Ctrl-C ended the run; each is written as soon as it is complete."""
    from openmsa.bench import record, runner

    with _progress() as progress:
        task = progress.add_task("", total=runner.expected_seconds(work, settings))
        before = 0.0

        def step(text: str, seconds: float) -> None:
            nonlocal before
            progress.update(task, advance=before, description=text)
            progress.refresh()
            before = seconds

        try:
            for line in runner.run(work, settings, step):
                records.append(line)
                if output is not None:
                    with writing("--output", output, "Its last line may be cut off: remove it."):
                        record.append([line], output)
                if as_json:
                    typer.echo(json.dumps(line))
        except KeyboardInterrupt:
            return True
    return False


def _and_recorded(records: list[Record], output: Path | None) -> str:
    return f" and stand in {output}" if records and output is not None else ""


def _tell_what_full_adds(device: str, work: Work, rounds: int, seconds: float) -> None:
    from openmsa.bench import workloads
    from openmsa.cli.progress import told

    whole = workloads.chosen(device)
    done, all_rows = (sum(len(rows) for _, rows in some) for some in (work, whole))
    more = [w.name for w, _ in whole if w not in dict(work)]
    named = f" (also {' and '.join(more)})" if 0 < len(more) <= 2 else f" of {len(whole)} workloads"
    passes = "one pass" if rounds == 1 else f"{rounds} passes"
    typer.echo(
        f"This was the quick choice, {done} of {all_rows} rows in one pass. openmsa bench --full measures all rows{named} in "
        f"{passes}: about {told(seconds)} here.",
        err=True,
    )


@app.command(cls=Command)
def plot(
    records: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, readable=True, help="JSONL files.")],
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The image to write, such as speed.png.")],
) -> None:
    """Plot the speed-up over dense attention against context length, from records."""
    from openmsa.bench import record
    from openmsa.bench.plot import plot as draw

    if not output.suffix:
        refuse(f"--output must end as an image does (.png, .svg, .pdf), got {str(output)!r}")
    try:
        lines = [line for path in records for line in record.load(path)]
        check_writable("--output", output)
        with writing("--output", output, "What may stand there is no whole image."):
            draw(lines, output)
    except ImportError:
        refuse("plots need matplotlib: pip install 'openmsa[demo]'")
    except ValueError as error:
        refuse(str(error))
    typer.echo(f"wrote {output}")


@app.command(cls=Command)
def show(
    records: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, readable=True, help="JSONL files.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.")] = False,
) -> None:
    """Print the tables of records."""
    from openmsa.bench import record, report

    try:
        report.print_summary([line for path in records for line in record.load(path)], markdown)
    except ValueError as error:
        refuse(str(error))


def _list(device: str | None, match: list[str], as_json: bool) -> None:
    from openmsa.bench import report, workloads

    listed = [w for kind in DEVICES if device in (None, kind) for w, _ in workloads.chosen(kind, match, missing_ok=True)]
    if not listed:
        refuse(
            f"match must name a workload or one of its rows, got {', '.join(map(repr, match))}; openmsa bench --list has them"
        )
    if not as_json:
        report.print_workloads(listed)
        return
    for w in listed:
        fields: dict[str, Any] = {"name": w.name, "device": w.device, "shape": str(w), "modes": w.modes, "rows": w.rows}
        typer.echo(json.dumps(fields))


def _progress() -> Progress:
    """Returns a bar on stderr that is drawn only between measurements: a thread that draws would be measured too."""
    from rich.console import Console
    from rich.progress import Progress

    from openmsa.cli.progress import columns

    return Progress(*columns(spins=False), console=Console(stderr=True), transient=True, auto_refresh=False)
