# SPDX-License-Identifier: MIT
"""`openmsa train-index` reads its text here: what it trains on, and what it holds out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from openmsa.cli.checks import tell_left_out

if TYPE_CHECKING:
    from openmsa.training.text import Windows


def read_texts(text: list[Path], held_out: float, tells: bool) -> tuple[list[str], list[str]]:
    """Returns the texts to train on and those held out, of the files that hold text."""
    from openmsa.training.text import read_files, split_files, text_files

    texts, left_out = read_files(text_files(text), text)
    if tells:
        tell_left_out(left_out)
    train, held = split_files(list(texts), held_out)
    return [texts[file] for file in train], [texts[file] for file in held]


def cut_windows(tokenizer: Any, texts: list[str], length: int, seed: int, what: str) -> Windows:
    """Returns the windows of texts; an error calls them `what`."""
    from openmsa.training.text import Windows, tokens_of

    return Windows(tokens_of(tokenizer, texts), length, seed, what)


def nothing_to_measure(model: Any, held: list[str], held_out: float, length: int, tells: bool) -> bool:
    """Says whether recall is not measured, and on stderr why, where it was asked for."""
    from openmsa.training.layers import branches_of

    config, reason = branches_of(model)[1], ""
    reads = config.index_topk_blocks * config.index_block_size
    if length <= reads:
        reason = f"a query reads {reads} tokens, and a window has {length} (--length): there is nothing to select"
    elif held_out and not held:
        reason = "a single file with text cannot be held out"
    if reason and tells:
        typer.echo(f"Note: recall is not measured, as {reason}.", err=True)
    return bool(reason) or not held
