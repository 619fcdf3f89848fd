# SPDX-License-Identifier: MIT
"""This module writes the small MiniMax-M3 of `benchmarks/engine_model.py` as a checkpoint of Hugging Face's form, which
`benchmarks/engine_sglang.py` has SGLang load, and gives the same weights to the forward in plain PyTorch."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engine_model import DIM, drawn, write_config

READ_BY_SGLANG: dict[str, Any] = {
    "model_type": "minimax_m2",  # Transformers knows no text model of M3; the keys that it does not know stay attributes.
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "use_gemma_norm": True,
    "qk_norm_type": "per_head",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""What SGLang's model reads of a configuration beside what vLLM's reads."""


def write_checkpoint(a: Namespace, device: torch.device | str) -> dict[str, Any]:
    """Writes config.json and the weights into ``a.model_dir``; returns the configuration."""
    config = write_config(a) | READ_BY_SGLANG
    (Path(a.model_dir) / "config.json").write_text(json.dumps(config, indent=1))
    (Path(a.model_dir) / "generation_config.json").write_text("{}")
    weights = {name: x.cpu().contiguous() for name, x in named_weights(config, device, a.logit_std).items()}
    save_file(weights, Path(a.model_dir) / "model.safetensors", metadata={"format": "pt"})
    return config


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the weights of a checkpoint and their shapes."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    q, kv = config["num_attention_heads"] * DIM, config["num_key_value_heads"] * DIM
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }

    def mlp(here: str, size: int) -> None:
        for name, shape in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size))):
            found[f"{here}{name}_proj.weight"] = shape

    for i, (moe, sparse) in enumerate(
        zip(config["moe_layer_freq"], config["sparse_attention_config"]["sparse_attention_freq"], strict=True)
    ):
        here = f"model.layers.{i}."
        found |= {here + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        found |= {f"{here}self_attn.{name}_proj.weight": (size, hidden) for name, size in (("q", q), ("k", kv), ("v", kv))}
        found |= {f"{here}self_attn.{name}_norm.weight": (DIM,) for name in ("q", "k")}
        found[here + "self_attn.o_proj.weight"] = (hidden, q)
        if sparse:
            found |= {f"{here}self_attn.index_{name}_proj.weight": (n, hidden) for name, n in (("q", kv), ("k", DIM))}
            found |= {f"{here}self_attn.index_{name}_norm.weight": (DIM,) for name in ("q", "k")}
        if not moe:
            mlp(here + "mlp.", config["dense_intermediate_size"])
            continue
        here += "block_sparse_moe."
        found |= {here + "gate.weight": (experts, hidden), here + "e_score_correction_bias": (experts,)}
        mlp(here + "shared_experts.", config["shared_intermediate_size"])
        for e in range(experts):
            found |= {f"{here}experts.{e}.{name}.weight": (inner, hidden) for name in ("w1", "w3")}
            found[f"{here}experts.{e}.w2.weight"] = (hidden, inner)
    return found


def named_weights(config: dict[str, Any], device: torch.device | str, logit_std: float) -> dict[str, Tensor]:
    """Draws the weights of a checkpoint by their names: bfloat16, and float32 for the bias of the router."""
    return {
        name: drawn(name, shape, device, logit_std).to(torch.float32 if name.endswith("bias") else torch.bfloat16)
        for name, shape in shapes(config).items()
    }


def parameters(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a checkpoint's weights as `benchmarks.engine_model.PlainModel` names them, which joins some as engines do."""
    found = {name: x for name, x in weights.items() if "_proj." not in name and ".experts." not in name}
    for name, x in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = x
        elif name.endswith(".gate_proj.weight"):
            up = weights[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([x, up])
        elif name.endswith("self_attn.q_proj.weight"):
            here = name.removesuffix("q_proj.weight")
            parts = [f"{here}{part}_proj.weight" for part in ("q", "k", "v", "index_q", "index_k")]
            found[here + "qkv_proj.weight"] = torch.cat([weights[part] for part in parts if part in weights])
        elif name.endswith("experts.0.w1.weight"):
            here = name.removesuffix("0.w1.weight")
            w1, w2, w3 = (
                [weights[f"{here}{e}.{part}.weight"] for e in range(config["num_local_experts"])] for part in ("w1", "w2", "w3")
            )
            found[here + "w13_weight"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)])
            found[here + "w2_weight"] = torch.stack(w2)
    return found
