# SPDX-License-Identifier: MIT
"""This is a small MiniMax-M3 with random weights for `benchmarks/engine.py`: its configuration, its weights, and a forward in
PyTorch alone that says what an engine should compute."""

from __future__ import annotations

import json
import math
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

DIM = BLOCK = 128
EPS = 1e-6
ROTARY = 64


def write_config(a: Namespace) -> dict[str, Any]:
    """Writes config.json into ``a.model_dir``, and returns it."""
    sparse = [0] * a.dense + [1] * (a.layers - a.dense)
    config = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_text",
        "dtype": "bfloat16",
        "vocab_size": 32000,
        "hidden_size": a.hidden,
        "intermediate_size": 512,
        "dense_intermediate_size": 4096,
        "shared_intermediate_size": 512,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": DIM,
        "max_position_embeddings": a.max_len,
        "rms_norm_eps": EPS,
        "rope_theta": 5_000_000,
        "rotary_dim": ROTARY,
        "partial_rotary_factor": ROTARY / DIM,
        # All experts serve every token: then no rounding routes a token elsewhere.
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_layer_freq": sparse,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": DIM,
            "sparse_num_index_heads": a.kv_heads,
            "sparse_topk_blocks": 16,
            "sparse_block_size": BLOCK,
            "sparse_disable_index_value": sparse,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": sparse,
        },
    }
    Path(a.model_dir).mkdir(parents=True, exist_ok=True)
    (Path(a.model_dir) / "config.json").write_text(json.dumps(config, indent=1))
    return config


def drawn(name: str, shape: tuple[int, ...], device: torch.device | str, logit_std: float) -> Tensor:
    """Draws a float32 weight of a usual scale from its name. logit_std: of attention logits, which says how peaked they are."""
    draw = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
    mean, std = 0.0, 1 / math.sqrt(shape[-1])
    if name.endswith(("q_norm.weight", "k_norm.weight")):  # q . k / sqrt(dim) gets the square of 1 + weight
        mean, std = (0.0 if "index" in name else math.sqrt(logit_std) - 1), 0.05
    elif "norm" in name or name.endswith("e_score_correction_bias"):
        std = 0.1 if "norm" in name else 0.05
    elif name.endswith("embed_tokens.weight"):
        std = 1.0
    elif name.endswith("lm_head.weight"):
        std *= 2
    return torch.empty(shape, device=device, dtype=torch.float32).normal_(mean, std, generator=draw)


def redraw(model: torch.nn.Module, logit_std: float) -> int:
    """Draws all weights with `drawn`, so that every engine and every run has the same; returns how many numbers they are."""
    count = 0
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            weight.copy_(drawn(name, tuple(weight.shape), weight.device, logit_std))
            count += weight.numel()
    return count


class PlainModel:
    """This is the model in plain PyTorch: products in bfloat16 as the engine has them, attention and norms in float32."""

    def __init__(self, parameters: dict[str, Tensor], config: dict[str, Any]) -> None:
        self.p, self.config = parameters, config
        self.kv_heads, self.heads = config["num_key_value_heads"], config["num_attention_heads"]
        self.sparse = config["sparse_attention_config"]

    def logits(self, ids: Tensor) -> Tensor:
        """Returns float32 ``[tokens, vocabulary]`` for one prompt ``[tokens]``."""
        x, residual = self.p["model.embed_tokens.weight"][ids], None
        for i in range(self.config["num_hidden_layers"]):
            here = f"model.layers.{i}."
            residual = x if residual is None else (x.float() + residual.float()).bfloat16()
            h = _norm(residual, self.p[here + "input_layernorm.weight"]).bfloat16()
            x = self._attention(here + "self_attn.", h, bool(self.sparse["sparse_attention_freq"][i]))
            residual = (x.float() + residual.float()).bfloat16()
            h = _norm(residual, self.p[here + "post_attention_layernorm.weight"]).bfloat16()
            x = (
                self._experts(here + "block_sparse_moe.", h)
                if self.config["moe_layer_freq"][i]
                else self._mlp(here + "mlp.", h)
            )
        assert residual is not None
        h = _norm(x.float() + residual.float(), self.p["model.norm.weight"]).bfloat16()
        return linear(h, self.p["lm_head.weight"]).float()

    def _attention(self, here: str, h: Tensor, sparse: bool) -> Tensor:
        kv, total = self.kv_heads, h.shape[0]
        sizes = [self.heads, kv, kv] + ([kv, 1] if sparse else [])
        parts = linear(h, self.p[here + "qkv_proj.weight"]).view(total, -1, DIM).split(sizes, 1)
        at = torch.arange(total, device=h.device)
        q, k = (self._rotated(_norm(x, self.p[f"{here}{name}_norm.weight"]), at) for x, name in zip(parts, "qk", strict=False))
        allowed = (at <= at[:, None])[None]
        if sparse:
            index_q, index_k = (
                self._rotated(_norm(x, self.p[f"{here}index_{n}_norm.weight"]), at)
                for x, n in zip(parts[3:], "qk", strict=True)
            )
            allowed = self._selected(index_q, index_k, allowed)
        out, group = [], self.heads // kv
        for j in range(kv):
            logits = torch.einsum("qhd,kd->hqk", q[:, j * group : (j + 1) * group], k[:, j]) * DIM**-0.5
            weight = logits.masked_fill(~allowed[j if sparse else 0], -math.inf).softmax(-1)
            out.append(torch.einsum("hqk,kd->qhd", weight, parts[2][:, j].float()))
        return linear(torch.cat(out, 1).reshape(total, -1).bfloat16(), self.p[here + "o_proj.weight"])

    def _selected(self, index_q: Tensor, index_k: Tensor, causal: Tensor) -> Tensor:
        """Returns which keys each query may see, bool ``[heads, queries, keys]``."""
        score = torch.einsum("qhd,kd->hqk", index_q, index_k[:, 0]).masked_fill(~causal, -math.inf)
        total = score.shape[1]
        blocks = -(-total // BLOCK)
        score = pad(score, (0, blocks * BLOCK - total), value=-math.inf).unflatten(-1, (blocks, BLOCK)).amax(-1)
        own = torch.nn.functional.one_hot(torch.arange(total, device=score.device) // BLOCK, blocks).bool()
        score = score.masked_fill(own, math.inf)
        best = score.topk(min(self.sparse["sparse_topk_blocks"], blocks), -1)
        picked = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best.indices, best.values > -math.inf)
        return causal & picked.repeat_interleave(BLOCK, -1)[..., :total]

    def _rotated(self, x: Tensor, at: Tensor) -> Tensor:
        steps = torch.arange(0, ROTARY, 2, device=x.device, dtype=torch.float32) / ROTARY
        angle = at.float()[:, None, None] * self.config["rope_theta"] ** -steps
        cos, sin = angle.cos().bfloat16().float(), angle.sin().bfloat16().float()  # engines keep their table in bfloat16
        a, b, rest = x.split([ROTARY // 2, ROTARY // 2, DIM - ROTARY], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).bfloat16().float()

    def _mlp(self, here: str, h: Tensor, inside: str = "") -> Tensor:
        up, down = (self._one(here, f"{inside}{name}_proj.weight") for name in ("gate_up", "down"))
        return linear(_activated(linear(h, up)), down)

    def _experts(self, here: str, h: Tensor) -> Tensor:
        score = torch.sigmoid(linear(h.float(), self._one(here, "gate.weight").float()))
        _, expert = (score + self._one(here, "e_score_correction_bias").float()).topk(self.config["num_experts_per_tok"], -1)
        weight = score.gather(-1, expert)
        weight = 2.0 * weight / weight.sum(-1, keepdim=True)
        w13, w2 = self._one(here, "w13_weight"), self._one(here, "w2_weight")
        x = torch.zeros(h.shape, device=h.device)
        for e in range(self.config["num_local_experts"]):
            row, slot = (expert == e).nonzero(as_tuple=True)
            x.index_add_(0, row, linear(_activated(linear(h[row], w13[e])), w2[e]).float() * weight[row, slot, None])
        return (x + self._mlp(here, h, "shared_experts.").float()).bfloat16()

    def _one(self, prefix: str, end: str) -> Tensor:
        """Returns the one parameter below `prefix` that ends so; engines name what lies between differently."""
        found = [n for n in self.p if n.startswith(prefix) and n.endswith(end)]
        plain = [n for n in found if n == prefix + end]
        if len(plain or found) != 1:
            raise ValueError(f"the model must have one parameter {prefix}*{end}, got {found}")
        return self.p[(plain or found)[0]]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1 + weight.float())


def _activated(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).bfloat16()


def errors(
    parameters: dict[str, Tensor], config: dict[str, Any], rows: list[dict[str, Any]], prompts: list[list[int]]
) -> list[dict]:
    """Returns how far an engine's log-probabilities of prompt and answer are from those of `PlainModel` on the same tokens."""
    plain, out = PlainModel(parameters, config), []
    for row, prompt in zip(rows, prompts, strict=True):
        ids = torch.tensor(prompt + row["tokens"], device=next(iter(parameters.values())).device)
        with torch.inference_mode():
            truth = plain.logits(ids[:-1]).log_softmax(-1)
        mine = truth.gather(-1, ids[1:, None])[:, 0].cpu()
        engine = torch.tensor([x for x in row["prompt_logprobs"] if x is not None] + row["logprobs"])
        error, n = (engine - mine).abs(), len(prompt) - 1
        out.append(
            {
                "prompt": len(prompt),
                "prompt_mean": error[:n].mean().item(),
                "prompt_max": error[:n].max().item(),
                "decode_mean": error[n:].mean().item(),
                "decode_max": error[n:].max().item(),
                "same_argmax": (truth[n:].argmax(-1).cpu() == torch.tensor(row["tokens"])).float().mean().item(),
            }
        )
    return out
