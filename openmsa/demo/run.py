# SPDX-License-Identifier: MIT
"""This module runs the demonstration: the sweep over kinds of attention, the heat map, the continuation and its check."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openmsa.block_topk import select_blocks
from openmsa.demo import model as smollm
from openmsa.demo.continuation import PagedCaches, decode_step
from openmsa.demo.plot import heat_map
from openmsa.demo.sweep import Watch, cross_entropy, hidden_states
from openmsa.demo.variants import BLOCK_SIZE, Variant, attention_name, variants
from openmsa.integrations.transformers import group_mean_index

SHOWN = ("msa", 25)  # This variant is drawn and continues the text.
TOLERANCE = 1e-3  # Logits of prefill and of decode, in float32, may differ by so much.


class Progress:
    """Receives the progress of a run and ignores it; a progress bar overrides its methods."""

    def begin(self, units: int) -> None:
        """Receives how many ticks will come."""

    def stage(self, title: str) -> None:
        """Receives what runs now."""

    def tick(self) -> None:
        """Is called when one layer of a forward, or one decoded token, is done."""

    def row(self, row: Row) -> None:
        """Receives a line of the table as soon as it is complete."""


@dataclass
class Row:
    """Holds one line of the table. difference: cross_entropy less that of dense attention, in nats a token; attention_seconds:
    time inside the attention of all layers; speedup: dense attention's seconds divided by these."""

    attention: str
    kind: str
    percent: int
    blocks: int
    cross_entropy: float
    difference: float
    attention_seconds: float
    speedup: float


@dataclass
class Result:
    """Holds what the demonstration found, under the names that its JSON has."""

    model: str
    tokens: int
    block_size: int
    num_blocks: int
    rows: list[Row]
    heat_map: str
    prompt_tokens: int
    new_tokens: int
    prompt_end: str
    continuation: str
    max_logit_difference: float
    tolerance: float
    agrees: bool
    seconds: float


def run(
    tokens: int,
    text: str | None,
    output: Path,
    *,
    new_tokens: int = 64,
    progress: Progress | None = None,
) -> Result:
    """Runs everything and writes the heat map into the folder `output`. text: what to read; None: source code.

    Raises ValueError when `text` holds fewer than `tokens` tokens, before the model is loaded.
    """
    start, progress = time.perf_counter(), progress or Progress()
    progress.stage("reading the text")
    tokenizer = smollm.load_tokenizer()
    ids = smollm.token_ids(tokenizer, text, tokens)
    progress.stage("loading the model")
    model = smollm.load()
    config, rows_to_run = model.config, variants(tokens)
    progress.begin((len(rows_to_run) + 1) * config.num_hidden_layers + new_tokens)
    shown = next(variant for variant in rows_to_run if (variant.kind, variant.percent) == SHOWN)
    with torch.inference_mode():
        record = Record(config, shown.topk, tokens, new_tokens)
        rows = sweep(model, ids, rows_to_run, shown, record, progress)
        file = output / smollm.HEAT_MAP
        num_blocks = -(-tokens // BLOCK_SIZE)
        title = f"{shown.title}: blocks read ({shown.topk} of {num_blocks} a query and KV head)"
        heat_map(record.blocks, num_blocks, BLOCK_SIZE, title, file)
        new, decoded = continue_text(model, record, new_tokens, progress)
        whole = torch.cat([ids[0, : record.prompt], new])[None]
        expected = prefill_logits(model, whole, new_tokens, shown, progress)
    difference = (decoded - expected).abs().max().item()
    return Result(
        model=smollm.MODEL,
        tokens=tokens,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        rows=rows,
        heat_map=str(file),
        prompt_tokens=record.prompt,
        new_tokens=new_tokens,
        prompt_end=tokenizer.decode(ids[0, max(0, record.prompt - 48) : record.prompt]),
        continuation=tokenizer.decode(new),
        max_logit_difference=difference,
        tolerance=TOLERANCE,
        agrees=difference <= TOLERANCE,
        seconds=time.perf_counter() - start,
    )


class Record:
    """Keeps each layer's selection, and its keys and values in paged caches, from the forward of the shown variant."""

    def __init__(self, config: Any, topk: int, tokens: int, new_tokens: int) -> None:
        # The prompt leaves room for the new tokens among the positions of the model.
        self.prompt = min(tokens, config.max_position_embeddings - new_tokens)
        self.topk, self.blocks = topk, dict[int, Tensor]()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.caches = PagedCaches(config.num_hidden_layers, self.prompt + new_tokens, config.num_key_value_heads, head_dim)
        self.next_logits = torch.empty(0, device="cpu")  # [vocabulary], the logits after the prompt

    def keep(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Keeps what a layer attends to; `Watch` calls it once a layer."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, head_dim]
        index_q, index_k = group_mean_index(torch.nn.Identity(), q, k)
        self.blocks[layer] = select_blocks(index_q, index_k, self.topk, block_size=BLOCK_SIZE)
        self.caches.fill(layer, k[: self.prompt], v[: self.prompt])


def sweep(model: Any, ids: Tensor, rows_to_run: list[Variant], shown: Variant, record: Record, progress: Progress) -> list[Row]:
    """Runs each variant on the same tokens; the first must be dense. The shown one fills `record`."""
    rows: list[Row] = []
    tokens = ids.shape[1]
    for variant in rows_to_run:
        progress.stage(variant.title)
        name = attention_name(variant, model.config.num_hidden_layers, model.config.num_key_value_heads, tokens)
        if not rows:
            warm_up(model, ids, name)
        watch = Watch(progress.tick, record.keep if variant is shown else None)
        watch.install(model, name)
        hidden = hidden_states(model, ids)
        loss = cross_entropy(model, hidden, ids)
        if variant is shown:
            record.next_logits = model.lm_head(hidden[record.prompt - 1])
        dense = rows[0] if rows else None
        rows.append(
            Row(
                attention=variant.title,
                kind=variant.kind,
                percent=variant.percent,
                blocks=variant.topk or -(-tokens // BLOCK_SIZE),
                cross_entropy=loss,
                difference=loss - (dense.cross_entropy if dense else loss),
                attention_seconds=watch.seconds,
                speedup=(dense.attention_seconds if dense else watch.seconds) / watch.seconds,
            )
        )
        progress.row(rows[-1])
    return rows


def warm_up(model: Any, ids: Tensor, name: str) -> None:
    """Runs a short forward, so that the time of the first row holds no first-use costs."""
    model.set_attn_implementation(name)
    hidden_states(model, ids[:, :256])


def continue_text(model: Any, record: Record, new_tokens: int, progress: Progress) -> tuple[Tensor, Tensor]:
    """Decodes greedily over the paged caches. Returns the new tokens, int64 ``[new_tokens]``, and the logits after each of
    them, ``[new_tokens, vocabulary]``."""
    progress.stage(f"decoding {new_tokens} tokens over paged caches")
    model.set_attn_implementation(record.caches.register(record.topk))
    tokens, logits = [int(record.next_logits.argmax())], list[Tensor]()
    for step in range(new_tokens):
        logits.append(decode_step(model, tokens[-1], record.prompt + step))
        tokens.append(int(logits[-1].argmax()))
        progress.tick()
    return torch.tensor(tokens[:new_tokens], device="cpu"), torch.stack(logits)


def prefill_logits(model: Any, ids: Tensor, last: int, shown: Variant, progress: Progress) -> Tensor:
    """Returns the logits ``[last, vocabulary]`` at the last positions of ids ``[1, tokens]``, from one prefill."""
    progress.stage("checking decode against prefill")
    name = attention_name(shown, model.config.num_hidden_layers, model.config.num_key_value_heads, ids.shape[1])
    Watch(progress.tick).install(model, name)
    return model.lm_head(hidden_states(model, ids)[-last:])
