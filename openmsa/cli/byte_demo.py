# SPDX-License-Identifier: MIT
"""`openmsa demo-bytes` lets the shipped byte model read a file with dense attention and with MSA, and continue it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openmsa.cli.checks import INTERRUPTED, check_writable, refuse
from openmsa.cli.demo import OUTPUT

if TYPE_CHECKING:
    from openmsa.demo.byte_model import ByteResult

NEEDED = ("safetensors", "matplotlib")


def demo_bytes(
    file: Annotated[
        Path | None,
        typer.Argument(
            exists=True, dir_okay=False, readable=True, help="A file of any kind; this package's sources without it."
        ),
    ] = None,
    most: Annotated[int, typer.Option("--bytes", min=4096, max=131072, help="How many bytes of it are read, at most.")] = 32768,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the heat map.")] = OUTPUT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Let a small model that was trained with MSA read a long file: losses, times, which blocks it reads, a continuation.

    The model reads bytes and comes with the package. Dense attention reads 32,768 bytes at most; what is beyond them, up to
    131,072 bytes, MSA reads alone.
    """
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        refuse(f"The demo extra is not installed ({', '.join(absent)} missing): pip install 'openmsa[demo]'")
    from openmsa.demo import byte_model

    if sentence := byte_model.missing():
        refuse(sentence)
    try:
        data = byte_model.own_sources(most) if file is None else byte_model.read_bytes(file, most)
        check_writable("--output", output / byte_model.HEAT_MAP)
        result = _with_spinner(data, output)
    except ValueError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        _print(result)


def _with_spinner(data: bytes, output: Path) -> ByteResult:
    from rich.console import Console

    from openmsa.demo import byte_model

    with Console(stderr=True).status("") as status:
        return byte_model.run(data, output, stage=lambda title: status.update(title))


def _print(result: ByteResult) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from openmsa.bench.narrow import Narrow
    from openmsa.cli.progress import in_all

    console = Console()
    table = Table(title=f"The byte model reads {result.bytes:,} bytes")
    table.add_column("attention")
    for name in ("bytes", "nats\na byte", "seconds", "attention\nseconds"):
        table.add_column(name, justify="right")
    for row in result.readings:
        table.add_row(row.attention, f"{row.bytes:,}", f"{row.loss:.4f}", f"{row.seconds:.1f}", f"{row.attention_seconds:.1f}")
    console.print(Narrow(table))
    words = Text.assemble((_printable(result.prompt_end), "dim"), (_printable(result.continuation), "bold green"))
    console.print(Panel(words, title="how it continues", title_align="left"))
    console.print(
        f"Continued at {result.bytes_a_second:.0f} bytes a second from a cache of {result.cache_bytes / 2**20:.0f} MiB."
    )
    console.print(f"Which blocks each layer reads: {result.heat_map}", soft_wrap=True, markup=False)
    console.print(in_all(result.seconds))


def _printable(text: str) -> str:
    """Returns a text in which control characters, which a terminal would obey, are replaced."""
    return "".join(x if x.isprintable() or x in "\n\t" else "\N{REPLACEMENT CHARACTER}" for x in text)
