# SPDX-License-Identifier: MIT
"""`openmsa plan` says what of a model's caches fits where, how long a decode step takes, and what to change."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openmsa.cli.checks import refuse

if TYPE_CHECKING:
    from openmsa.capacity import Model, Plan

MOST_COLUMNS = 80
SCALES = {"": 1, "k": 1 << 10, "m": 1 << 20}
# What one option gives together is an argument each of `openmsa.capacity.Model`.
PAIRS = {
    "num_q_heads": "query heads of --heads",
    "num_kv_heads": "KV heads of --heads",
    "sparse_layers": "sparse layers of --layers",
    "dense_layers": "dense layers of --layers",
}


def plan(
    model: Annotated[str, typer.Option(help="minimax-m3, or a config.json, or its folder.")] = "minimax-m3",
    context: Annotated[str, typer.Option(help="Keys of a sequence, such as 131072, 128K or 1M.")] = "1M",
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of one host.")] = 1,
    gpu: Annotated[str, typer.Option(help="Whose measured rates count.")] = "h200",
    gpu_memory: Annotated[float | None, typer.Option(help="GiB of a GPU; left out: all of it.")] = None,
    host_memory: Annotated[float | None, typer.Option(help="GiB of the host for caches.")] = None,
    weights: Annotated[float, typer.Option(help="GiB of the model's weights.")] = 0.0,
    reserve: Annotated[float, typer.Option(help="GiB of a GPU for all else.")] = 6.0,
    kv: Annotated[str, typer.Option(help="Format of K and V: bf16, e4m3, nvfp4.")] = "bf16",
    index: Annotated[str, typer.Option(help="Format of index keys; also int8, mxfp4, certified.")] = "bf16",
    cache: Annotated[float, typer.Option(help="Share of the keys in the block cache.")] = 0.1,
    hits: Annotated[float, typer.Option(help="Share of chosen blocks found there.")] = 0.95,
    new_tokens: Annotated[int, typer.Option(help="New tokens of a sequence in a step.")] = 1,
    heads: Annotated[str | None, typer.Option(help="Query/KV heads in place of the model's: 64/4.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements of a head, in place of the model's.")] = None,
    layers: Annotated[str | None, typer.Option(help="Sparse/dense layers in place of the model's: 57/3.")] = None,
    index_dim: Annotated[int | None, typer.Option(help="Elements of an index key, in place of the model's.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Keys of a block, in place of the model's.")] = None,
    topk: Annotated[int | None, typer.Option(help="Blocks that a query reads, in place of the model's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what of a model's caches fits where, how long a decode step takes, and what to change.

    Two ways are compared: all caches on the GPUs, and keys and values in host memory with a block cache on the GPU. Times are
    predictions from rates that were measured on the named GPU, of attention alone.

    openmsa plan --context 1M --batch 4 --gpus 2 --host-memory 500
    """
    from openmsa.capacity import GPUS, Machine, Request
    from openmsa.capacity import plan as make
    from openmsa.capacity.rates import GIB

    if gpu not in GPUS:
        refuse(f"--gpu must be one of {', '.join(GPUS)}, whose rates were measured, got {gpu!r}")
    own: dict[str, Any] = {"head_dim": head_dim, "index_dim": index_dim, "block_size": block_size, "topk": topk}
    own["num_q_heads"], own["num_kv_heads"] = _pair("--heads", heads)
    own["sparse_layers"], own["dense_layers"] = _pair("--layers", layers)
    for option, size in (
        ("--gpu-memory", gpu_memory), ("--host-memory", host_memory), ("--weights", weights), ("--reserve", reserve)
    ):  # fmt: skip
        if size is not None and not 0 <= size < float("inf"):
            refuse(f"{option} must be at least 0 GiB and finite, got {size:g}")
    of_gpu, of_host = (None if x is None else x * GIB for x in (gpu_memory, host_memory))
    try:
        request = Request(
            context=_keys(context), batch=batch, new_tokens=new_tokens, kv=kv, index=index, cache=cache, hits=hits
        )  # fmt: skip
        machine = Machine(
            gpu=GPUS[gpu], gpus=gpus, gpu_memory=of_gpu, host_memory=of_host, reserve=reserve * GIB, weights=weights * GIB
        )  # fmt: skip
        found = make(_model(model, {name: x for name, x in own.items() if x is not None}), request, machine)
    except (ValueError, TypeError) as error:
        refuse(_in_options(str(error)))
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _print(found)


def _in_options(sentence: str) -> str:
    """Says in the command's options what begins with the name of an argument, and not with a name of a config file."""
    name, rest = sentence.partition(" ")[::2]
    if rest.startswith("of "):
        return sentence
    if name in PAIRS:
        return f"{PAIRS[name]} {rest}".replace("num_q_heads", "query heads")
    return f"--{name.replace('_', '-')} {rest}" if name in inspect.signature(plan).parameters else sentence


def _model(name: str, own: dict[str, Any]) -> Model:
    """Returns the model with sizes of the caller's own."""
    from dataclasses import replace

    from openmsa.capacity import PRESETS, Model

    if not name:  # It would be the current folder.
        refuse("--model must be a preset or a JSON config file, got ''")
    base = PRESETS.get(name.lower()) or Model.from_config(Path(name))
    return replace(base, name=f"{base.name}, changed", **own) if own else base


def _keys(text: str) -> int:
    found = re.fullmatch(r"(\d+)([kKmM]?)", text)
    if not found:
        refuse(f"--context must be a number of keys, such as 131072, 128K or 1M, got {text!r}")
    return int(found[1]) * SCALES[found[2].lower()]


def _pair(option: str, text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found:
        refuse(f"{option} must be two numbers, such as 64/4, got {text!r}")
    return int(found[1]), int(found[2])


def _print(found: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from openmsa.bench.narrow import Narrow
    from openmsa.capacity.rates import GIB

    model, request, machine = found.model, found.request, found.machine
    console = Console(highlight=False)
    console.width = min(console.width, MOST_COLUMNS)
    many = "" if machine.gpus == 1 else f"{machine.gpus} x "
    console.print(
        f"{model.name}: {model.sparse_layers} sparse and {model.dense_layers} dense layers, {model.num_q_heads}/"
        f"{model.num_kv_heads} heads of {model.head_dim}; {request.batch} x {request.context:,} keys, K and V in {request.kv}, "
        f"index keys in {request.index}, on {many}{machine.gpu.name}.",
        markup=False,
    )
    table = Table("GiB", "all on GPUs:\na GPU", "K, V in host memory:\na GPU", "the host")
    for column in table.columns[1:]:
        column.justify = "right"
    ways = (found.resident.gpu, found.in_host_memory.gpu, found.in_host_memory.host)
    for name in dict.fromkeys(name for way in ways for name in way):
        table.add_row(name, *(f"{way[name] / GIB:.2f}" if name in way else "" for way in ways))
    table.add_section()
    table.add_row("sum", *(f"{sum(way.values()) / GIB:.2f}" for way in ways))
    host = "" if machine.host_memory is None else f"{machine.host_memory / GIB:.2f}"
    table.add_row("room", *[f"{found.room / GIB:.2f}"] * 2, host)
    table.add_section()
    answers = (found.resident, found.in_host_memory)
    table.add_row("fits", *("[green]yes[/]" if way.fits else "[red]no[/]" for way in answers), "")
    table.add_row(f"longest context, batch {request.batch}", *(f"{way.longest:,}" for way in answers), "")
    table.add_row("attention of a step, ms", *(f"{1e3 * way.step_s:.2f}" for way in answers), "")
    console.print(Narrow(table))
    console.print(
        f"Steps over host memory find {request.hits:.0%} of their blocks in the block cache (--hits). PyTorch takes a power "
        "of two of bytes of host memory for each layer's keys, and for its values.",
        markup=False,
    )
    for sentence in found.advice:
        console.print(f"- {sentence}", markup=False)
