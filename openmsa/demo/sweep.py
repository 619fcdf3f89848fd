# SPDX-License-Identifier: MIT
"""This module runs a forward of the model with one kind of attention, and finds its loss and the time in its attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

WATCHED = "openmsa-demo-watched"
LOGIT_ROWS = 512  # Logits of so many positions exist at a time: [512, 49152] float32 is 100 MB.


@dataclass
class Watch:
    """Counts the attention seconds of the layers so far. `keep` is called once a layer, outside of the time, with the layer's
    number and its query, key and value ``[1, heads, tokens, head_dim]``; `tick` is called after each layer."""

    tick: Callable[[], None] = lambda: None
    keep: Callable[[int, Tensor, Tensor, Tensor], None] | None = None
    seconds: float = field(default=0.0, init=False)

    def install(self, model: Any, name: str) -> None:
        """Makes `model` use the attention registered as `name`, timed."""
        forward = AttentionInterface()[name]

        def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = forward(module, query, key, value, *args, **kwargs)
            self.seconds += time.perf_counter() - start
            if self.keep is not None:
                self.keep(int(module.layer_idx), query, key, value)  # type: ignore[arg-type]
            self.tick()
            return result

        AttentionInterface.register(WATCHED, watched)
        AttentionMaskInterface.register(WATCHED, AttentionMaskInterface()[name])
        model.set_attn_implementation(WATCHED)


def hidden_states(model: Any, ids: Tensor, first_position: int = 0) -> Tensor:
    """Returns the last hidden states ``[tokens, hidden]`` of ids ``[1, tokens]``, which stand at `first_position` and after."""
    positions = torch.arange(first_position, first_position + ids.shape[1], device="cpu")[None]
    return model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]


def cross_entropy(model: Any, hidden: Tensor, ids: Tensor) -> float:
    """Returns the mean negative log-likelihood (nats) of the next tokens of ids ``[1, tokens]`` given `hidden` ``[tokens,
    hidden]``."""
    targets, total = ids[0, 1:], 0.0
    for start in range(0, targets.numel(), LOGIT_ROWS):
        target = targets[start : start + LOGIT_ROWS]
        logits = model.lm_head(hidden[start : start + target.numel()])  # [LOGIT_ROWS, vocabulary]
        total += nn.functional.cross_entropy(logits, target, reduction="sum").item()
    return total / targets.numel()
