# SPDX-License-Identifier: MIT
"""Converted models are transformers models whose attention layers have an index branch, and whose type says so: a Llama
becomes an ``msa_llama``, so that nothing loads it as a Llama without its branches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from openmsa.dense_attention import dense_attention
from openmsa.integrations.hugging_face.cache import PagedCache, branch_settings, held_index_keys
from openmsa.integrations.padding import refuse_packed
from openmsa.integrations.transformers import packed_forward, refuse_unsupported, register_forward
from openmsa.modules import IndexBranch
from openmsa.runtime import checks
from openmsa.types import Sequences

ATTENTION = "openmsa-index-branch"
"""The attention implementation of converted models; with any other, "sdpa" for example, they are what they were before."""
PREFIX = "msa_"
CACHE_NAMES = ("past_key_values", "cache")
"""What models and their attention layers call their cache: the first name before transformers 5.24, the second since."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The transformers Auto classes know these families once this module is imported; `load` and `convert` make others known."""


class MSAModel:
    """Comes before a causal language model of transformers among the bases of a converted model's class. Its configuration has
    ``msa``: the fields of `MSAConfig`, "dense_layers", the numbers of the layers without a branch, and "attention", the name of
    the attention module in a layer."""

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        if config._attn_implementation is None:
            config._attn_implementation = ATTENTION
        super().__init__(config, *inputs, **kwargs)  # type: ignore[call-arg]
        add_branches(self)


@functools.cache
def family(base: str) -> Any:
    """Returns the class of converted models of a model type of transformers ("llama"), and makes the Auto classes know it."""
    if base not in CONFIG_MAPPING or CONFIG_MAPPING[base] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model_type must be that of a causal language model of transformers, got {base!r}")
    plain: Any = CONFIG_MAPPING[base]
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[plain]
    names = {"__module__": __name__, "__doc__": f"{plain.__name__} with index branches."}
    config_class = type(f"MSA{plain.__name__}", (plain,), {**names, "model_type": PREFIX + base})
    names["__doc__"] = f"{model.__name__} with index branches."
    model_class = type(f"MSA{model.__name__}", (MSAModel, model), {**names, "config_class": config_class})
    globals().update({made.__name__: made for made in (config_class, model_class)})  # where pickle looks for them
    AutoConfig.register(PREFIX + base, config_class)
    AutoModelForCausalLM.register(config_class, model_class)
    for known, own in ((base, PREFIX + base), (model.__name__, model_class.__name__)):
        renamed = get_checkpoint_conversion_mapping(known)  # Files hold experts under other names than the modules of a model.
        if renamed is not None:
            register_checkpoint_conversion_mapping(own, renamed, overwrite=True)
    if plain in TOKENIZER_MAPPING:
        TOKENIZER_MAPPING.register(config_class, TOKENIZER_MAPPING[plain], exist_ok=True)
    return model_class


def attention_layers(model: nn.Module, name: str) -> Iterator[Any]:
    """Gives the attention modules of a model, which bear `name` in their layers, in order."""
    found: list[Any] = [x for path, x in model.named_modules() if path.rpartition(".")[2] == name and hasattr(x, "layer_idx")]
    yield from sorted(found, key=lambda x: int(x.layer_idx))


def add_branches(model: Any) -> None:
    """Gives the attention layers of a model the index branches that its configuration names, and lets them hand these on."""
    (config, dense), rank = branch_settings(model.config), 0
    if config is None:
        raise ValueError("config.msa must hold the settings of the index branches, got none")
    for number in dense:
        checks.integer("dense_layers of config.msa", number, 0, model.config.num_hidden_layers - 1)
    for layer in attention_layers(model, model.config.msa["attention"]):
        if layer.layer_idx not in dense:
            hidden = getattr(getattr(layer, "q_proj", None), "in_features", model.config.hidden_size)
            like = next(layer.parameters())
            layer.index_branch = IndexBranch(hidden, config, device=like.device, dtype=like.dtype)
            layer.index_rank, rank = rank, rank + 1  # among the layers with a branch
        layer.register_forward_pre_hook(_hand_over, with_kwargs=True)
    if not rank:
        name = model.config.msa["attention"]
        raise ValueError(f"config.msa must leave a layer {name!r} with an index branch, got none with dense_layers {dense}")


def remove_branches(model: nn.Module, name: str) -> None:
    """Undoes `add_branches`."""
    for layer in attention_layers(model, name):
        for key, hook in list(layer._forward_pre_hooks.items()):
            if hook is _hand_over:
                del layer._forward_pre_hooks[key]
                layer._forward_pre_hooks_with_kwargs.pop(key, None)
        if hasattr(layer, "index_branch"):
            del layer.index_branch, layer.index_rank


def cache_argument(module: Any, cache: Any) -> dict[str, Any]:
    """Returns the keyword argument by which a model's forward, and `generate`, take a cache: ``{"cache": cache}`` from
    transformers 5.24 on, ``{"past_key_values": cache}`` before."""
    known = inspect.signature(module.forward).parameters
    return {next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[0]): cache}


def _hand_over(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Runs before an attention layer: computes its index queries and keys, which then reach the attention function among the
    keyword arguments that transformers passes on."""
    if not layer.config._attn_implementation.startswith(ATTENTION):
        return args, kwargs
    hidden = args[0] if args else kwargs["hidden_states"]
    past: Any = next((x for x in map(kwargs.get, CACHE_NAMES) if isinstance(x, Cache)), None)
    mask = kwargs.get("attention_mask")
    paged = isinstance(past, PagedCache)
    if past is not None and not (paged and layer.layer_idx):  # before a cache changes; layer 0 checks for a paged one
        refuse_unsupported(ATTENTION, layer, mask, None, {name: x for name, x in kwargs.items() if x is not past})
        held = past.get_seq_length(layer.layer_idx) if mask is None else 0
        refuse_packed(ATTENTION, layer.layer_idx, kwargs.get("position_ids"), hidden.shape[1], held, mask)
    if paged:
        kwargs["msa_cache"] = past.step(layer.layer_idx, hidden, mask)
    branch = getattr(layer, "index_branch", None)
    holds = paged and past.held.layers[layer.layer_idx].index is not None  # which must then hold those of every token
    if branch is None or (branch.stage == "dense" and not holds):
        return args, kwargs
    index_q, index_k = (x.transpose(1, 2) for x in branch(hidden, *kwargs["position_embeddings"]))
    if past is not None:
        index_k = held_index_keys(past, layer, index_k)
    kwargs["msa_index"] = (index_q, index_k)
    return args, kwargs


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float, *index: Tensor) -> Tensor:
    if not index:
        return dense_attention(q, k, v, seqs, softmax_scale=softmax_scale)
    return module.index_branch.attend(q, k, v, *index, seqs, softmax_scale=softmax_scale)


_packed = packed_forward(ATTENTION, _attend)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    msa_cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if msa_cache is None:
        return _packed(module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs)
    index = kwargs.pop("msa_index", None)
    refuse_unsupported(ATTENTION, module, attention_mask, is_causal, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return msa_cache.attend(getattr(module, "index_branch", None), query, None if index is None else index[0], scale), None


register_forward(ATTENTION, _forward)
for _base in FAMILIES:
    family(_base)
