# SPDX-License-Identifier: MIT
"""The attention layers of a Hugging Face model are handed to a function, with what the index branch needs to see of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from openmsa.integrations.transformers import register_packed
from openmsa.modules import IndexBranch, MSAConfig, index_branches
from openmsa.types import Sequences

NAME = "openmsa-training"


class LayerInputs(NamedTuple):
    """Holds what one attention layer works with: tensors of packed tokens, of ``batch`` windows of equal length.

    number:   the layer's number.
    hidden:   ``[total, hidden_size]``, what the layer's projections read.
    cos, sin: ``[total, rotary_dim]``, the position embedding.
    q, k, v:  ``[total, heads, head_dim]`` with the position embedding on q and k.
    """

    number: int
    hidden: Tensor
    cos: Tensor
    sin: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    seqs: Sequences
    softmax_scale: float


Attend = Callable[[LayerInputs], Tensor]
"""Returns a layer's attention ``[total, num_q_heads, head_dim]``."""


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Returns the attention modules of a model by layer number. Raises NotImplementedError where it has none like Llama's."""
    found = {int(cast(int, m.layer_idx)): m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")}
    if not found:
        raise NotImplementedError(
            f"model must have attention layers as Llama, Qwen and Mistral models of transformers do, got {type(model).__name__}"
        )
    return dict(sorted(found.items()))


@contextmanager
def attention_by(model: Any, attend: Attend) -> Iterator[None]:
    """Makes `attend` the attention of every layer of `model`, whose forwards then take whole windows without a cache.

    One model at a time, in one thread.
    """
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def look(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
        if keywords.get("position_embeddings") is None:
            raise NotImplementedError(
                f"{type(module).__name__} must be given position_embeddings, cos and sin, as Llama's layers are, got none"
            )
        # Each is [batch, length, dim]; embeddings of positions that all sequences share have a batch of 1.
        cos, sin = (x.expand(hidden.shape[0], -1, -1).flatten(0, 1) for x in keywords["position_embeddings"])
        seen[int(module.layer_idx)] = hidden.flatten(0, 1), cos, sin

    def packed(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float) -> Tensor:
        number = int(module.layer_idx)  # type: ignore[arg-type]
        return attend(LayerInputs(number, *seen.pop(number), q, k, v, seqs, softmax_scale))

    register_packed(NAME, packed)
    before = model.config._attn_implementation
    hooks = [m.register_forward_pre_hook(look, with_kwargs=True) for m in attention_layers(model).values()]
    try:
        model.set_attn_implementation(NAME)
        yield
        if seen:
            raise NotImplementedError(
                f"{type(model).__name__} must read its attention from transformers' AttentionInterface, but some layer does not"
            )
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)
        register_packed(NAME, _nobody)  # The registry outlives the model, which `attend` may refer to.


def _nobody(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float) -> Tensor:
    """Refuses calls outside of `attention_by`."""
    raise RuntimeError(f"attention {NAME!r} is called outside of attention_by")


def branches_of(model: Any) -> tuple[dict[int, IndexBranch], MSAConfig]:
    """Returns the index branches of a converted model by layer number, and their settings. Raises ValueError where it has
    none."""
    config = index_branches(model)[0].config
    found = {number: getattr(layer, "index_branch", None) for number, layer in attention_layers(model).items()}
    return {number: branch for number, branch in found.items() if isinstance(branch, IndexBranch)}, config


def backbone(model: Any) -> nn.Module:
    """Returns the part of a causal language model that gives its last hidden states."""
    part: nn.Module = getattr(model, model.base_model_prefix)
    return part
