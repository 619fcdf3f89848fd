# SPDX-License-Identifier: MIT
"""`openmsa demo` runs MSA on a real language model and real text, next to dense attention and two baselines."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.progress
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from openmsa.demo.run import Result

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
    """Run a real language model with MSA: losses, times, which blocks it reads, and paged decoding."""
    result = run_demo(tokens, text, output)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        _print(result)
    if not result.agrees:
        Console(stderr=True).print(
            f"[red]decode and prefill disagree:[/] logits differ by {result.max_logit_difference:.2e}, "
            f"more than {result.tolerance:.0e}"
        )
        raise typer.Exit(1)


def run_demo(tokens: int = 4096, text: Path | None = None, output: Path = OUTPUT) -> Result:
    """Runs the demonstration with a progress bar on stderr. Where the demo extra or the weights are missing, or the text is
    too short, it says so on stderr and raises typer.Exit(2)."""
    from openmsa.demo.model import missing

    errors = Console(file=sys.stderr, soft_wrap=True, markup=False)
    if sentences := missing():
        errors.print("\n".join(sentences))
        raise typer.Exit(2)
    from openmsa.demo import run

    columns = (
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=None)

        class Bar(run.Progress):
            def begin(self, units: int) -> None:
                bar.update(task, total=units)

            def stage(self, title: str) -> None:
                bar.update(task, description=title)

            def tick(self) -> None:
                bar.advance(task)

        try:
            return run.run(tokens, text, output, progress=Bar())
        except ValueError as error:
            errors.print(str(error))
            raise typer.Exit(2) from None


def _print(result: Result) -> None:
    console = Console()
    table = Table(
        title=f"{result.model}, {result.tokens} tokens, blocks of {result.block_size} keys, {result.num_blocks} blocks"
    )
    table.add_column("attention", no_wrap=True)
    for name in ("blocks\nread", "cross-\nentropy", "minus\ndense", "attention\nseconds", "dense\n/ these"):
        table.add_column(name, justify="right", no_wrap=True)
    for before, row in zip([None, *result.rows], result.rows, strict=False):
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
    console.print(table)
    console.print(CAPTION, style="dim")
    words = Text.assemble((result.prompt_end, "dim"), (result.continuation, "bold green"))
    console.print(Panel(words, title=f"{result.new_tokens} tokens decoded over paged caches", title_align="left"))
    verdict = "agree" if result.agrees else "DISAGREE"
    console.print(
        f"Prefill and decode {verdict}: over the {result.new_tokens} decoded positions their logits differ by at most "
        f"{result.max_logit_difference:.1e} (tolerance {result.tolerance:.0e})."
    )
    console.print(f"Which blocks each layer reads: {result.heat_map}", soft_wrap=True)
    console.print(f"{result.seconds:.0f} s in all.")
