# SPDX-License-Identifier: MIT
"""`openmsa demo` runs MSA on a real language model and real text, next to dense attention and two baselines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openmsa.cli.checks import INTERRUPTED, check_writable, refuse

if TYPE_CHECKING:
    from openmsa.bench.narrow import Narrow
    from openmsa.demo.run import Result, Row

OUTPUT = Path("demo_output")
CAPTION = (
    "Cross-entropy in nats a token. Attention seconds over all layers of one forward; dense is PyTorch's SDPA, the model's "
    "default. Sliding window: the first block and the last ones. Random: the query's own block and random ones."
)


def demo(
    tokens: Annotated[int, typer.Option(min=1024, max=8192, help="How many tokens of the text the model reads.")] = 4096,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="A text to read instead of the standard library's sources."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the heat map.")] = OUTPUT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Run a real language model with MSA: losses, times, which blocks it reads, and paged decoding.

    It takes about three minutes on two cores. Ctrl-C ends it and prints the rows that are complete by then.
    """
    result = run_demo(tokens, text, output)
    if isinstance(result, list):
        _print_rows(tokens, result, as_json)
        typer.echo(f"Interrupted: {len(result)} rows are complete.", err=True)
        raise typer.Exit(INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        _print(result)
    if not result.agrees:
        typer.echo(
            f"decode and prefill disagree: logits differ by {result.max_logit_difference:.2e}, more than "
            f"{result.tolerance:.0e}",
            err=True,
        )
        raise typer.Exit(1)


def run_demo(tokens: int = 4096, text: Path | None = None, output: Path = OUTPUT) -> Result | list[Row]:
    """Runs the demonstration with a progress bar on stderr. Returns the rows that are complete where Ctrl-C ends it.

    Where the demo extra or the weights are missing, the text is no text or too short, or `output` cannot be written, it says
    so on stderr before any work and raises typer.Exit(2).
    """
    from openmsa.demo.model import HEAT_MAP, missing, read_text

    if sentences := missing():
        refuse("\n".join(sentences))
    try:
        content = None if text is None else read_text(text, tokens)
        check_writable("--output", output / HEAT_MAP)
        return _run_with_bar(tokens, content, output)
    except ValueError as error:
        refuse(str(error))


def _run_with_bar(tokens: int, text: str | None, output: Path) -> Result | list[Row]:
    import rich.progress
    from rich.console import Console

    from openmsa.cli.progress import WHOLE, columns

    try:
        from openmsa.demo import run
    except ImportError as error:  # a library of the demo extra is too old, as its sentence says
        refuse(str(error))
    of_bar = columns(rich.progress.TaskProgressColumn(table_column=WHOLE))
    rows: list[Row] = []
    with rich.progress.Progress(*of_bar, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        class Bar(run.Progress):
            def begin(self, units: int) -> None:
                bar.update(task, total=units, began=bar.get_time())

            def stage(self, title: str) -> None:
                bar.update(task, description=title)

            def tick(self) -> None:
                bar.advance(task)

            def row(self, row: Row) -> None:
                rows.append(row)

        try:
            return run.run(tokens, text, output, progress=Bar())
        except KeyboardInterrupt:
            return rows


def _print_rows(tokens: int, rows: list[Row], as_json: bool) -> None:
    """Prints the rows of a demonstration that has not come to its end."""
    from rich.console import Console

    from openmsa.demo.model import MODEL

    if as_json:
        typer.echo(json.dumps({"tokens": tokens, "rows": [dataclasses.asdict(row) for row in rows]}, indent=2))
    elif rows:
        Console().print(_table(f"{MODEL}, {tokens} tokens", rows))


def _table(title: str, rows: list[Row]) -> Narrow:
    from rich.table import Table

    from openmsa.bench.narrow import Narrow

    table = Table(title=title)
    table.add_column("attention")
    for name in ("blocks\nread", "cross-\nentropy", "minus\ndense", "attention\nseconds", "dense\n/ these"):
        table.add_column(name, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.kind != row.kind:
            table.add_section()
        table.add_row(
            row.attention,
            str(row.blocks),
            f"{row.cross_entropy:.4f}",
            "" if row.kind == "dense" else f"{row.difference:+.4f}",
            f"{row.attention_seconds:.2f}",
            f"{row.speedup:.2f}x",
        )
    return Narrow(table)


def _print(result: Result) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from openmsa.cli.progress import in_all

    console = Console()
    title = f"{result.model}, {result.tokens} tokens, blocks of {result.block_size} keys, {result.num_blocks} blocks"
    console.print(_table(title, result.rows))
    console.print(CAPTION, style="dim")
    words = Text.assemble((result.prompt_end, "dim"), (result.continuation, "bold green"))
    console.print(Panel(words, title=f"{result.new_tokens} tokens decoded over paged caches", title_align="left"))
    verdict = "agree" if result.agrees else "DISAGREE"
    console.print(
        f"Prefill and decode {verdict}: over the {result.new_tokens} decoded positions their logits differ by at most "
        f"{result.max_logit_difference:.1e} (tolerance {result.tolerance:.0e})."
    )
    console.print(f"Which blocks each layer reads: {result.heat_map}", soft_wrap=True, markup=False)
    console.print(in_all(result.seconds))
