# SPDX-License-Identifier: MIT
"""Measures what each format costs in accuracy, on random numbers and on real activations: the table of docs/numerics.md.

    python scripts/numerics.py --write docs/numerics.md     # about five minutes on two cores
    python scripts/numerics.py --tokens 2048 --layers 9     # a quick look

Real activations are the queries, keys and values of SmolLM2-135M on source code of the standard library, with the index branch
that needs no training (the mean of a group's queries against the group's keys).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from openmsa import (
    E4M3,
    MXFP4,
    NVFP4,
    Int8,
    Sequences,
    block_scores,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)
from openmsa.demo.model import load, load_tokenizer, token_ids
from openmsa.integrations.transformers import group_mean_index, register_packed

BLOCK_SIZE, TOPK = 64, 8
INDEX_FORMATS = {"e4m3": E4M3.quantize, "int8": Int8.quantize, "nvfp4": NVFP4.quantize, "mxfp4": MXFP4.quantize}
KV_FORMATS = {"e4m3": E4M3.quantize, "nvfp4": NVFP4.quantize}
BEGIN, END = "<!-- table of scripts/numerics.py: begin -->", "<!-- end -->"


@dataclass(frozen=True)
class Layer:
    """Holds what an attention layer reads: q ``[tokens, heads, dim]``, k and v ``[tokens, kv heads, dim]``, bf16; `data` says
    where it comes from."""

    data: str
    q: Tensor
    k: Tensor
    v: Tensor

    def index(self) -> tuple[Tensor, Tensor]:
        """Returns index_q ``[tokens, kv heads, dim]`` and index_k, bf16."""
        index_q, index_k = group_mean_index(torch.nn.Module(), self.q, self.k)
        return index_q.bfloat16(), index_k


def captured(tokens: int, layers: list[int]) -> Iterator[Layer]:
    """Yields what layers of the model read, for a text of `tokens` tokens."""
    model, tokenizer = load(), load_tokenizer()
    kept: dict[int, Layer] = {}

    def keep(module: Any, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float) -> Tensor:
        i = int(module.layer_idx)
        if i in layers:
            kept[i] = Layer(f"layer {i}", q.bfloat16(), k.bfloat16(), v.bfloat16())
        heads = q.shape[1] // k.shape[1]
        sides = (q.transpose(0, 1), *(x.repeat_interleave(heads, 1).transpose(0, 1) for x in (k, v)))
        out = torch.nn.functional.scaled_dot_product_attention(*(x[None] for x in sides), is_causal=True, scale=softmax_scale)
        return out[0].transpose(0, 1)

    register_packed("openmsa-numerics", keep)
    model.set_attn_implementation("openmsa-numerics")
    with torch.no_grad():
        model(token_ids(tokenizer, None, tokens), logits_to_keep=1)
    yield from (kept[i] for i in layers)


def random_layer(tokens: int, q_heads: int = 9, kv_heads: int = 3, dim: int = 64) -> Layer:
    """Returns normally distributed numbers in the layout of the model."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, h, dim, generator=draw).bfloat16() for h in (q_heads, kv_heads, kv_heads))
    return Layer("random", q, k, v)


def relative(x: Tensor, truth: Tensor) -> float:
    """Returns the root mean square of the difference over that of the truth."""
    return float((x.double() - truth.double()).norm() / truth.double().norm())


def measure(layer: Layer) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table for one layer; the queries are its second half."""
    half = layer.q.shape[0] // 2
    seqs = Sequences.from_lengths([layer.q.shape[0] - half], [layer.q.shape[0]])
    index_q, index_k = layer.index()
    q, index_q = layer.q[half:], index_q[half:]
    options: dict[str, Any] = {"block_size": BLOCK_SIZE}
    exact = select_blocks(index_q, index_k, TOPK, seqs, **options)
    out = sparse_attention(q, layer.k, layer.v, exact, seqs, **options)
    for name, quantize in INDEX_FORMATS.items():
        keys = quantize(index_k.float())
        scores = block_scores(index_q, keys, seqs, **options)
        truth = block_scores(index_q.double(), keys.dequantize(torch.float64), seqs, **options)
        honest = block_scores(index_q.float(), keys.dequantize(torch.float32), seqs, impl="reference", **options)
        seen = truth > -torch.inf
        chosen = select_blocks_from_scores(scores, TOPK, seqs, **options)
        recall = (chosen[..., :, None] == exact[..., None, :]).any(-1).float().mean()
        changed = sparse_attention(q, layer.k, layer.v, chosen, seqs, **options)
        errors = (relative(x[seen], truth[seen]) for x in (scores, honest))
        yield layer.data, f"index keys {name}", *(f"{e:.1e}" for e in errors), f"{recall:.3f}", f"{relative(changed, out):.3f}"
    for name, quantize in KV_FORMATS.items():
        k, v = quantize(layer.k.float()), quantize(layer.v.float())
        stored = sparse_attention(q, k, v, exact, seqs, **options)
        numbers = (k.dequantize(torch.float64), v.dequantize(torch.float64))
        truth = sparse_attention(q.double(), *numbers, exact, seqs, **options)
        honest = sparse_attention(q, *(x.bfloat16() for x in numbers), exact, seqs, impl="reference", **options)
        errors = (relative(x, truth) for x in (stored, honest))
        yield layer.data, f"K and V {name}", *(f"{e:.1e}" for e in errors), "", f"{relative(stored, out):.3f}"


def markdown(rows: list[tuple[str, ...]]) -> str:
    """Formats the table."""
    head = ("data", "format", "error", "honest PyTorch's", "selection kept", "change of out")
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(
    tokens: Annotated[int, typer.Option(help="length of the context")] = 8192,
    layers: Annotated[str, typer.Option(help="layers of the model, by comma; empty: random numbers only")] = "2,9,16,23,29",
    write: Annotated[Path | None, typer.Option(help="document whose table is replaced")] = None,
) -> None:
    """Measures every format and prints the table."""
    chosen = [int(i) for i in layers.split(",") if i]
    sources = [random_layer(tokens), *(captured(tokens, chosen) if chosen else ())]
    with torch.no_grad():
        rows = [row for layer in track(sources, "layers", console=Console(stderr=True)) for row in measure(layer)]
    table = markdown(rows)
    print(table)
    if write is not None:
        text = write.read_text()
        before, rest = text.split(BEGIN)
        write.write_text(before + BEGIN + "\n" + table + "\n" + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    typer.run(main)
