# SPDX-License-Identifier: MIT
"""`stream` continues a long text token by token over a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openmsa.integrations.hugging_face.cache import PagedCache
from openmsa.integrations.hugging_face.model import cache_argument
from openmsa.runtime import checks


@torch.no_grad()
def prefill(model: Any, ids: Tensor, cache: PagedCache, chunk: int = 4096) -> Iterator[Tensor]:
    """Reads `ids`, int64 ``[batch, length]``, into the cache of a converted model, `chunk` tokens at a time, which bounds
    memory; yields the logits ``[batch, vocabulary]`` after each chunk. The chunk changes results by rounding alone: where the
    length of the whole prompt changes how positions are encoded (rope types "dynamic" and "longrope"), it is read at once."""
    checks.integer("chunk", chunk, 1)
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a PagedCache, got {type(cache).__name__}")
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ValueError(f"ids must have shape [batch, length] with a token at least, got {tuple(ids.shape)}")
    rope = getattr(model.config, "rope_parameters", None) or {}
    if {rope.get("rope_type"), rope.get("type")} & {"dynamic", "longrope"}:
        chunk = max(chunk, ids.shape[1])
    for start in range(0, ids.shape[1], chunk):
        piece = ids[:, start : start + chunk]
        yield model(input_ids=piece, **cache_argument(model, cache), use_cache=True, logits_to_keep=1).logits[:, -1]


@torch.no_grad()
def stream(
    model: Any,
    logits: Tensor,
    cache: PagedCache,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    stop: frozenset[int] = frozenset(),
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yields new tokens of one sequence as they are decoded, at most `max_new_tokens`, before the first that is in `stop`.

    logits:       ``[1, vocabulary]`` after what the cache holds, as `prefill` yields them.
    temperature:  0: the most likely token; above: a sample from the softmax of logits / temperature, drawn by `generator`.
    """
    checks.integer("max_new_tokens", max_new_tokens, 0)
    if logits.dim() != 2 or logits.shape[0] != 1:
        raise ValueError(f"logits must have shape [1, vocabulary], of one sequence, got {tuple(logits.shape)}")
    if checks.scale("temperature", temperature) < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    for number in range(max_new_tokens):
        if temperature:
            below = logits.float() - logits.float().amax(-1, keepdim=True)  # A small temperature makes no infinite numbers.
            weights = (below / temperature).softmax(-1)
            token = int(torch.multinomial(weights, 1, generator=generator))
        else:
            token = int(logits.argmax(-1))
        if token in stop:
            return
        yield token
        if number + 1 < max_new_tokens:
            ids = torch.tensor([[token]], device=logits.device)
            logits = model(input_ids=ids, **cache_argument(model, cache), use_cache=True, logits_to_keep=1).logits[:, -1]
