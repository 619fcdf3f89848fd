# SPDX-License-Identifier: MIT
"""A short forward shows what a model's attention layers hand over, before they are converted and again afterwards."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from openmsa.dense_attention import dense_attention
from openmsa.integrations.hugging_face.model import ATTENTION, CACHE_NAMES, cache_argument
from openmsa.integrations.transformers import packed_forward, padding_mask
from openmsa.types import Sequences

PROBE = f"{ATTENTION}-probe"
TOKENS = 24


@dataclass
class Seen:
    """Holds what one attention layer handed to the attention function for the tokens of a probe: q ``[tokens, num_q_heads,
    head_dim]``, k ``[tokens, num_kv_heads, head_dim]``, both turned by their positions, and, of a layer with an index branch,
    index_q and index_k. rotation: the layer's cos and sin ``[..., width]``; None: it got none."""

    layer: Any
    q: Tensor
    k: Tensor
    index: tuple[Tensor, ...]
    rotation: tuple[Tensor, Tensor] | None


class Given(DynamicCache):
    """Checks that layers attend to the keys and values that they give their cache, each once: other caches attend to what they
    hold."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.given[layer_idx] = key_states, value_states  # [1, num_kv_heads, tokens, head_dim]; index keys come here, too
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def check(self, layer: Any, k: Tensor, v: Tensor) -> None:
        """Refuses a layer that attends to packed keys and values of its own, or a second time."""
        given = [x[0].transpose(0, 1).to(k.dtype) for x in self.given.pop(layer.layer_idx, ())]  # autocast lowers k and v
        if not given or not all(map(torch.equal, (k, v), given)):
            raise NotImplementedError(
                f"layer {layer.layer_idx} ({type(layer).__name__}) must attend, once, to the keys and values that it gives its "
                "cache, got others"
            )


def probe(model: Any, cache: Given | None = None) -> list[Seen]:
    """Runs a model on a few tokens and returns what its layers handed over, in their order; the model is left as it was.

    cache: what the layers are to use, if anything, and which checks what they attend to.

    Raises NotImplementedError where its attention cannot be served, does not come from transformers' AttentionInterface, is
    missing in a layer, or knows its cache by another name than those of CACHE_NAMES, and ValueError where it is not finite.
    """
    seen: dict[int, Seen] = {}
    rotations: dict[int, Any] = {}

    def note(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        rotations[id(layer)] = kwargs.get("position_embeddings")

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float, *index: Tensor) -> Tensor:
        if not all(x.isfinite().all() for x in (q, k, v)):
            where = f"layer {layer.layer_idx} ({type(layer).__name__})"
            raise ValueError(f"{where} must compute finite queries, keys and values, got others: look at the model's weights")
        if cache is not None:
            cache.check(layer, k, v)
        seen[int(layer.layer_idx)] = Seen(layer, q, k, index, rotations.get(id(layer)))
        return dense_attention(q, k, v, seqs, softmax_scale=softmax_scale)

    AttentionInterface.register(PROBE, packed_forward(ATTENTION, attend))
    AttentionMaskInterface.register(PROBE, padding_mask(ATTENTION))
    hooks = [x.register_forward_pre_hook(note, with_kwargs=True) for x in model.modules() if hasattr(x, "layer_idx")]
    before, training = model.config._attn_implementation, model.training
    ids = torch.arange(TOKENS, device=model.device)[None] % model.config.vocab_size
    try:
        model.eval()
        model.set_attn_implementation(PROBE)
        with torch.no_grad():
            model(input_ids=ids, use_cache=cache is not None, **({} if cache is None else cache_argument(model, cache)))
    except NotImplementedError as error:
        raise NotImplementedError(f"{error}; all layers share one attention, so none can be left out") from error
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise NotImplementedError(
            f"{type(model).__name__} could not be run to find its attention: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.set_attn_implementation(before)
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not seen:
        raise NotImplementedError(
            f"model must read its attention from transformers' AttentionInterface, got {type(model).__name__}, which does not"
        )
    layers = [seen[number].layer for number in sorted(seen)]
    if len(layers) != model.config.num_hidden_layers:
        rule = f"model must have attention in each of its {model.config.num_hidden_layers} layers"
        raise NotImplementedError(f"{rule}, got it in {', '.join(map(str, sorted(seen)))} alone")
    for layer in layers:
        if inspect.signature(layer.forward).parameters.keys().isdisjoint(CACHE_NAMES):
            where = f"layer {layer.layer_idx} ({type(layer).__name__})"
            raise NotImplementedError(
                f"{where} must take its cache as past_key_values or cache, as index keys go there, got a forward without"
            )
    return [seen[number] for number in sorted(seen)]
