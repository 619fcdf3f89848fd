# SPDX-License-Identifier: MIT
"""An evaluation runs variants of a model's attention over the same text: loss by position, recall of blocks, needles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from openmsa.training.branches import dense
from openmsa.training.layers import Attend, LayerInputs, attention_by, backbone
from openmsa.training.needle import Needle
from openmsa.training.recall import Recall, block_mass, mean_recall, recall
from openmsa.training.variants import VariantAttention

LOGIT_ROWS = 1024  # Logits of so many positions exist at a time.


def hidden_states(model: Any, ids: Tensor, attend: Attend) -> Tensor:
    """Returns the last hidden states ``[batch, length, hidden_size]`` of ids ``[batch, length]`` under an attention."""
    with torch.no_grad(), attention_by(model, attend):
        states: Tensor = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
    return states


def token_losses(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Returns the loss (negative log-likelihood in nats) of each token of ids ``[length]`` but the first, float64, from
    hidden states ``[length, hidden_size]``."""
    parts = []
    for rows, targets in zip(hidden[:-1].split(LOGIT_ROWS), ids[1:].split(LOGIT_ROWS), strict=True):
        parts.append(nn.functional.cross_entropy(logits_of(model, rows), targets, reduction="none").double())
    return torch.cat(parts).cpu()


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Returns the logits ``[rows, vocabulary]`` of hidden states ``[rows, hidden_size]``, computed in float32, as the model's
    own forward makes them of what its head gives: some models scale them, or cap them."""
    head = model.get_output_embeddings()

    def product(rows: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(rows.float(), head.weight.float(), bias)

    ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
    plain = torch.autocast(hidden.device.type, enabled=False)
    with (
        torch.no_grad(),
        plain,
        _forward_by(backbone(model), lambda *_, **__: _States(hidden[None])),
        _forward_by(head, product),
    ):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


class _States:
    """Stands for what a backbone returns: last hidden states, and nothing by any other name."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, number: Any) -> Any:
        return (self.last_hidden_state,)[number]

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _forward_by(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Gives a module another forward for a while."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def check_logits(model: Any, ids: Tensor) -> None:
    """The logits of `model` for ids ``[length]`` must follow from the last hidden states, as `logits_of` takes them."""
    few = ids[None, :4].to(model.device)
    with torch.no_grad():
        try:
            found = model(input_ids=few, use_cache=False).logits[0].float()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"{type(model).__name__} could not be run: {type(error).__name__}: {error}") from error
        own = logits_of(model, model.base_model(input_ids=few, use_cache=False)[0][0])
    if own.isfinite().all() and not torch.allclose(found, own, rtol=0, atol=0.05 * float(own.abs().max())):
        raise NotImplementedError(f"{type(model).__name__} must make its logits of its last hidden states alone")


def loss_by_position(model: Any, windows: Sequence[Tensor], attend: Attend) -> Tensor:
    """Returns the mean over windows ``[length]`` of each position's loss, float64 ``[length - 1]``."""
    check_logits(model, windows[0])
    losses = [token_losses(model, hidden_states(model, ids[None], attend)[0], ids) for ids in windows]
    return torch.stack(losses).mean(0)


def position_bins(length: int) -> list[tuple[int, int]]:
    """Returns ranges of positions that double in size: the first sixteenth of a window, the second, the second eighth, ..."""
    edges = [0, *(length // part for part in (16, 8, 4, 2, 1))]
    return list(pairwise(edges))


class RecallOfVariants:
    """Is dense attention that compares, in passing, what each sparse variant would read with what the layer attends to.

    variants: by name. rows: positions that are compared. tick: is called after each layer. found: recalls by name and layer,
    one a forward.
    """

    def __init__(self, variants: Mapping[str, VariantAttention], rows: Tensor, tick: Callable[[], None] = lambda: None) -> None:
        self.variants, self.rows, self.tick = variants, rows, tick
        self.found: dict[str, dict[int, list[Recall]]] = {name: {} for name in variants}

    def __call__(self, inputs: LayerInputs) -> Tensor:
        mass: dict[int, Tensor] = {}
        for name, attention in self.variants.items():
            size = attention.variant.block_size
            if inputs.number in attention.dense_layers:
                continue
            if size not in mass:
                mass[size] = block_mass(inputs, self.rows, size)
            found = recall(mass[size], attention.blocks(inputs), self.rows, size)
            self.found[name].setdefault(inputs.number, []).append(found)
        self.tick()
        return dense(inputs)[0]

    def by_layer(self, name: str) -> dict[int, Recall]:
        """Returns a variant's mean recall in each layer."""
        return {layer: mean_recall(parts) for layer, parts in sorted(self.found[name].items())}

    def mean(self, name: str) -> Recall:
        """Returns a variant's mean recall."""
        return mean_recall([part for parts in self.found[name].values() for part in parts])


@dataclass(frozen=True)
class NeedleScore:
    """Holds what came of the needles at one distance. found: share of trials whose whole answer the model's best tokens give;
    loss: mean loss of the answers' tokens."""

    distance: int
    found: float
    loss: float
    trials: int


def needle_scores(model: Any, needles: Sequence[Needle], attend: Attend) -> list[NeedleScore]:
    """Returns how well the model answers, by distance. The answer stands in the text, so one forward judges all its tokens."""
    device = next(model.parameters()).device
    by_distance: dict[int, list[tuple[bool, float]]] = {}
    for needle in needles:
        ids = needle.ids.to(device)
        hidden = hidden_states(model, ids[None], attend)[0, -needle.answer - 1 : -1]
        logits, answer = logits_of(model, hidden), ids[-needle.answer :]
        right = bool((logits.argmax(-1) == answer).all())
        by_distance.setdefault(needle.distance, []).append((right, nn.functional.cross_entropy(logits, answer).item()))
    return [
        NeedleScore(distance, sum(r for r, _ in x) / len(x), sum(loss for _, loss in x) / len(x), len(x))
        for distance, x in by_distance.items()
    ]
