# SPDX-License-Identifier: MIT
"""`convert` turns a causal language model of transformers into an MSA model without training; `load` reads a saved one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from openmsa.integrations.hugging_face.model import ATTENTION, PREFIX, MSAModel, add_branches, family, remove_branches
from openmsa.integrations.hugging_face.probe import Given, Seen, probe
from openmsa.integrations.transformers import group_mean_index
from openmsa.modules import IndexBranch, MSAConfig, index_branches

INITIALISATIONS = ("group_mean", "random")


def convert(
    model: Any,
    config: MSAConfig | None = None,
    *,
    dense_layers: Sequence[int] = (),
    initialise: str = "group_mean",
    **settings: Any,
) -> Any:
    """Gives the attention layers of a causal language model index branches, in place, and returns the model.

    model:         of transformers, with rotary position embedding and one attention for all its layers, such as Llama, Mistral
                   and Qwen models. A forward of a few tokens finds out whether it can be served.
    config:        of the branches; None: one index query head and one index key head a KV head with the head dim, norms and
                   biases of the layer's own projections, which "group_mean" needs. settings are fields of `MSAConfig` that then
                   take other values, such as ``index_topk_blocks=32``.
    dense_layers:  numbers of layers that stay dense; MiniMax-M3 leaves the first three so.
    initialise:    "group_mean": index queries are the mean of a group's queries, index keys its keys, by weights alone, and no
                   training is needed. Where the model norms queries (Qwen3), its norm is applied to the mean of a group's
                   queries, not to each of them. "random": projections as the model initialises its own, to be trained.

    The model then selects blocks in whatever runs it; ``model.set_attn_implementation("sdpa")`` makes it dense again, and
    `openmsa.modules.set_stage` chooses a stage of training. ``save_pretrained`` keeps the branches, `load` reads them.

    Raises TypeError, ValueError or NotImplementedError where the model cannot be converted as asked, and leaves it as it was.
    """
    _check_model(model)
    if initialise not in INITIALISATIONS:
        raise ValueError(f"initialise must be one of {', '.join(map(repr, INITIALISATIONS))}, got {initialise!r}")
    seen = probe(model)
    numbers = [int(x.layer.layer_idx) for x in seen]
    if isinstance(dense_layers, str) or not isinstance(dense_layers, Collection):
        raise TypeError(f"dense_layers must be numbers of layers, such as [0, 1], got {type(dense_layers).__name__}")
    for number in dense_layers:
        if number not in numbers:
            raise ValueError(f"dense_layers must name layers from 0 to {numbers[-1]}, got {number!r}")
    chosen = [x for x in seen if x.layer.layer_idx not in dense_layers]
    if not chosen:
        raise ValueError(f"dense_layers must leave a layer to convert, got all {len(numbers)}")
    if config is None:
        config = _own_config(chosen[0], **settings)
    elif not isinstance(config, MSAConfig):
        raise TypeError(f"config must be an openmsa.modules.MSAConfig or None, got {type(config).__name__}")
    elif settings:
        raise ValueError(f"config must be None where fields are given ({', '.join(settings)}), got {type(config).__name__}")
    for x in chosen:
        _check_layer(x, config, initialise)
    names = {path.rpartition(".")[2] for path, module in model.named_modules() if any(module is x.layer for x in seen)}
    if len(names) != 1:
        raise NotImplementedError(f"attention modules must bear one name in all layers, got {', '.join(sorted(names))}")
    (name,) = names
    model.config.msa = {**config.to_dict(), "dense_layers": sorted(map(int, dense_layers)), "attention": name}
    try:
        add_branches(model)
        with torch.no_grad():
            for x in chosen:
                if initialise == "group_mean":
                    _start_as_group_mean(x)
                else:
                    _start_at_random(x.layer.index_branch, model.config)
        _check_branches(model, initialise)
    except BaseException:
        remove_branches(model, name)
        del model.config.msa
        raise
    _forget_gguf(model)
    converted: Any = family(model.config.model_type)
    model.config.__class__, model.__class__ = converted.config_class, converted
    model.set_attn_implementation(ATTENTION)
    return model


def load(pretrained_model_name_or_path: str | Path, **options: Any) -> Any:
    """Reads a converted model that ``save_pretrained`` wrote. options: as ``AutoModelForCausalLM.from_pretrained`` takes them,
    ``dtype`` and ``device_map`` for example.

    Raises ValueError where that place holds a model without index branches, and OSError where it holds none.
    """
    kind = _model_type(pretrained_model_name_or_path, **options)
    if not kind.startswith(PREFIX):
        where = str(pretrained_model_name_or_path)
        raise ValueError(f"{where!r} must hold a converted model, got one of type {kind!r}: convert it first")
    family(kind.removeprefix(PREFIX))
    return AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, **options)


def is_converted(path: str | Path) -> bool:
    """Says whether `path`, a folder or a name on the hub, holds a converted model."""
    return _model_type(path).startswith(PREFIX)


def _model_type(path: str | Path, **options: Any) -> str:
    values, _ = PreTrainedConfig.get_config_dict(path, **options)
    return str(values.get("model_type"))


def _forget_gguf(model: Any) -> None:
    """Lets a model that was read from a GGUF file be saved: its weights are plain numbers once they are read."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and str(getattr(quantizer.quantization_config.quant_method, "value", "")) == "gguf":
        model.hf_quantizer = None
        for owner, name in ((model.config, "quantization_config"), (model, "is_quantized"), (model, "quantization_method")):
            if name in vars(owner):
                delattr(owner, name)


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    if isinstance(model, MSAModel):
        raise ValueError(f"model must have no index branches yet, got {type(model).__name__}")
    kind = type(model.config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or type(model) is not MODEL_FOR_CAUSAL_LM_MAPPING[kind]:
        raise NotImplementedError(
            f"model must be what AutoModelForCausalLM makes of its configuration, got {type(model).__name__} of {kind.__name__}"
        )
    if model.config.get_text_config() is not model.config:
        raise NotImplementedError(f"model must be of text alone, got {type(model).__name__}, which holds a text model")


def _own_config(seen: Seen, **settings: Any) -> MSAConfig:
    """Returns the settings of branches that can be a group's mean."""
    layer, heads = seen.layer, seen.k.shape[1]
    norm = getattr(layer, "q_norm", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6))
    own = {
        "index_n_heads": heads,
        "index_n_key_heads": heads,
        "index_head_dim": seen.k.shape[2],
        "index_norm": norm is not None,
        "index_bias": any(getattr(getattr(layer, name, None), "bias", None) is not None for name in ("q_proj", "k_proj")),
        "index_norm_eps": epsilon,
    }
    return MSAConfig.from_dict({**own, **settings})


def _check_layer(seen: Seen, config: MSAConfig, initialise: str) -> None:
    layer, (kv_heads, dim) = seen.layer, seen.k.shape[1:]
    where = f"layer {layer.layer_idx} ({type(layer).__name__})"
    if seen.rotation is None or len(seen.rotation) != 2:
        raise NotImplementedError(f"{where} must be given position_embeddings, cos and sin, got {type(seen.rotation).__name__}")
    for part in seen.rotation:
        first, second = part.chunk(2, -1)
        if first.shape != second.shape or not torch.equal(first, second):
            raise NotImplementedError(f"{where} must turn the halves of its heads, got cos and sin whose halves differ")
    if config.index_n_heads not in (1, kv_heads):
        raise ValueError(f"index_n_heads must be the KV heads of {where} ({kv_heads}) or 1, got {config.index_n_heads}")
    if initialise == "random":
        return
    instead = "use initialise='random' and train the branches"
    for name, wanted in (("index_n_heads", kv_heads), ("index_n_key_heads", kv_heads), ("index_head_dim", dim)):
        if getattr(config, name) != wanted:
            rule = f"{name} must be that of {where} ({wanted}) for initialise='group_mean'"
            raise ValueError(f"{rule}, got {getattr(config, name)}: {instead}")
    for name in ("q_proj", "k_proj"):
        found = getattr(layer, name, None)
        if not isinstance(found, nn.Linear):
            raise NotImplementedError(f"{where} must have a Linear {name}, got {type(found).__name__}: {instead}")
        if found.bias is not None and not config.index_bias:
            raise ValueError(f"index_bias must be True, as {name} of {where} has a bias, got False")
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name, None)
        if (norm is not None) != config.index_norm:
            has = "has" if norm is not None else "has no"
            raise ValueError(f"index_norm must be {norm is not None}, as {where} {has} {name}, got {config.index_norm}")
        got = tuple(getattr(norm, "weight", torch.empty(dim, device="cpu")).shape)
        if got != (dim,):
            raise NotImplementedError(f"{name} of {where} must norm each head alone ({dim} weights), got {got}: {instead}")


def _start_as_group_mean(seen: Seen) -> None:
    """Sets a branch's weights so that its queries are the mean of a group's and its keys the group's."""
    layer, heads = seen.layer, seen.k.shape[1]
    for own, mine in ((layer.q_proj, layer.index_branch.q_proj), (layer.k_proj, layer.index_branch.k_proj)):
        mine.weight.copy_(_mean_of_groups(own.weight, heads, seen.k.shape[2]))
        if own.bias is not None:
            mine.bias.copy_(_mean_of_groups(own.bias, heads, seen.k.shape[2]))
        elif mine.bias is not None:
            mine.bias.zero_()
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name, None)
        if norm is not None:
            branch_norm = getattr(layer.index_branch, name)
            ones = torch.ones(1, seen.k.shape[2], dtype=torch.float32, device=branch_norm.weight.device)
            # Some norms multiply by weight, others by 1 + weight: their result for ones tells.
            branch_norm.weight.copy_(norm(ones)[0] * (1 + branch_norm.eps) ** 0.5)


def _mean_of_groups(rows: Tensor, groups: int, dim: int) -> Tensor:
    return rows.float().unflatten(0, (groups, -1, dim)).mean(1).flatten(0, 1)


def _start_at_random(branch: IndexBranch, config: Any) -> None:
    for projection in (branch.q_proj, branch.k_proj):
        projection.weight.normal_(std=getattr(config, "initializer_range", 0.02))
        if projection.bias is not None:
            projection.bias.zero_()


def _check_branches(model: Any, initialise: str) -> None:
    """Checks in a second forward that the branches reach the attention function, that layers attend to what they give a cache,
    and that branches that begin as a group's mean are it: an attention that computes its keys in a way of its own is found
    here, whatever its family."""
    after = [x for x in probe(model, Given()) if hasattr(x.layer, "index_branch")]
    for x in after:
        where = f"layer {x.layer.layer_idx} ({type(x.layer).__name__})"
        if len(x.index) != 2:
            raise NotImplementedError(
                f"{where} must pass keyword arguments on to its attention function, got one that drops them"
            )
        if initialise == "group_mean":
            wanted_q, wanted_k = group_mean_index(x.layer, x.q, x.k)
            pairs = [("keys", x.index[1], wanted_k)]
            if not x.layer.index_branch.config.index_norm:
                pairs.append(("queries", x.index[0], wanted_q))
            for name, mine, wanted in pairs:
                _check_near(f"index {name} of {where}", mine, wanted)
    assert len(after) == len(index_branches(model))


def _check_near(what: str, mine: Tensor, wanted: Tensor) -> None:
    off = float((mine.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-30))
    limit = max(1e-4, 16 * torch.finfo(wanted.dtype).eps)
    if not off <= limit:
        raise NotImplementedError(
            f"{what} must be those of its own projection, norm and position embedding, got others ({off:.1%} off): the layer "
            "computes its own in a way that no branch of this kind repeats; leave it dense or use initialise='random'"
        )
