#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks MSAttention and converted models on a GPU against the CPU, and times them, dense beside sparse.

    python scripts/modules.py [--out FOLDER] [--parts checks timings] [--tokens 8192 32768 65536] [--device cuda] [--small]

Checked: outputs, index losses and gradients of a layer in every stage in bfloat16, against float64 on the CPU, at most twice
the error of PyTorch's kernels on the CPU in bfloat16; a compiled layer against an eager one; steps over paged caches in every
format against one forward; a converted Llama over each of its caches. Timed: a layer's forward and backward in each stage, and
SmolLM2-135M's shape with random weights, reading a prompt and decoding. --small takes sizes for a CPU, --parts names what
to run and in which order. Prints one table and writes it to FOLDER/modules.jsonl line by line, so that a run which is cut off
leaves what it found; exits with 1 where a check fails or a timing raises.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openmsa.modules import STAGES, MSACache, MSAConfig, MSAttention, Rotary, set_stage

RECORDS: list[dict[str, Any]] = []
FILES: list[Path] = []  # to which records go as they come


def note(what: str, ok: bool | None = None, **values: Any) -> None:
    """Prints and keeps one line of the table; ok None: a measurement."""
    RECORDS.append({"what": what, "ok": ok, **values})
    for file in FILES:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(RECORDS[-1]) + "\n")
    words = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
    print(f"{'      ' if ok is None else 'ok    ' if ok else 'WRONG '}{what:<58}{words}", flush=True)


def error(found: Tensor, truth: Tensor) -> float:
    """Returns the relative error, by the norm."""
    return float((found.double().cpu() - truth).norm() / truth.norm().clamp(min=1e-30))


def results(layer: MSAttention, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Returns output, index loss and all gradients of a layer."""
    hidden = hidden.detach().requires_grad_()
    out = layer(hidden, *rotation)
    weight = torch.linspace(-1, 1, out.shape[-1], device=out.device).to(out.dtype)
    leaves = {"hidden": hidden, **dict(layer.named_parameters())}
    grads = torch.autograd.grad((out * weight).float().sum(), list(leaves.values()), allow_unused=True)
    found = {"out": out.detach()} | {f"d {name}": x for name, x in zip(leaves, grads, strict=True) if x is not None}
    return found if layer.index_loss is None else found | {"index loss": layer.index_loss}


def check_layer(device: str) -> None:
    """Checks every stage in bfloat16; in the stage "sparse" all blocks are selected, as rounding would change a selection."""
    torch.manual_seed(0)
    config = MSAConfig(2, index_head_dim=64, index_block_size=32, index_topk_blocks=16)
    layer = MSAttention(256, 16, 2, 64, config, loss_coefficient=100.0).bfloat16()
    hidden, rotation = torch.randn(2, 400, 256).bfloat16(), Rotary(32)(torch.arange(400))
    for stage in STAGES:
        layer.stage = stage
        truth = results(copy.deepcopy(layer).double(), hidden.double(), tuple(x.double() for x in rotation))
        honest = results(layer, hidden, rotation)
        on_gpu = copy.deepcopy(layer).to(device)
        args = (hidden.to(device), tuple(x.to(device) for x in rotation))
        found = results(on_gpu, *args)
        ratios = {k: error(found[k], truth[k]) / max(error(honest[k], truth[k]), 1e-3) for k in truth}
        worst = max(ratios, key=lambda k: ratios[k])
        note(f"layer, {stage}: error over the CPU's", ratios[worst] <= 2, worst=ratios[worst], of=worst)
        torch._dynamo.reset()
        compiled = results(torch.compile(on_gpu, fullgraph=True), *args)
        names = {k.replace("_orig_mod.", ""): x for k, x in compiled.items()}
        off = max(error(names[k], x.double().cpu()) for k, x in found.items())
        note(f"layer, {stage}: compiled against eager", off < 0.03, off=off)


@torch.no_grad()
def check_cache(device: str) -> None:
    """Compares chunks and decode over a paged cache, plain keys with one forward, every format with the same steps on the
    CPU."""
    torch.manual_seed(1)
    config = MSAConfig(2, index_head_dim=64, index_block_size=64, index_topk_blocks=4)
    layer, rotary = MSAttention(256, 16, 2, 64, config).bfloat16(), Rotary(32)
    hidden = torch.randn(2, 700, 256).bfloat16()

    def steps(device: str, kv: str, index: str) -> Tensor:
        own, made = copy.deepcopy(layer).to(device), {"dtype": torch.bfloat16, "device": device}
        cache = MSACache(1, 2, 2, 64, config, kv_format=kv, index_format=index, **made)
        parts, start = [], 0
        for stop in (300, 683, *range(684, 701)):
            cache.extend([stop - start] * 2)
            rotation = [x.view(2, stop - start, -1) for x in rotary.to(device)(cache.positions)]
            parts.append(own(hidden[:, start:stop].to(device), *rotation, cache=cache.layers[0]))
            start = stop
        return torch.cat(parts, 1).float().cpu()

    def near(x: Tensor, y: Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(x, y, -1).quantile(0.05))

    whole = layer.to(device)(hidden.to(device), *rotary.to(device)(torch.arange(700, device=device))).float().cpu()
    cosine = near(steps(device, "plain", "plain"), whole)
    note("paged steps against one forward: cosine", cosine > 0.999, near=cosine)
    for kv, index in (("plain", "certified"), ("e4m3", "int8"), ("nvfp4", "e4m3"), ("e4m3", "nvfp4"), ("plain", "mxfp4")):
        cosine = near(steps(device, kv, index), steps("cpu", kv, index))
        note(f"paged steps, {kv} and {index} keys, against the CPU: cosine", cosine > 0.999, near=cosine)


@torch.no_grad()
def check_model(device: str) -> None:
    """Checks a converted Llama over every cache against one forward without; with all blocks, against "sdpa"."""
    import transformers

    from openmsa.integrations.hugging_face import ATTENTION, PagedCache, cache_argument, convert

    torch.manual_seed(2)
    sizes = {"hidden_size": 384, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6}
    config = transformers.LlamaConfig(**sizes, vocab_size=500, num_key_value_heads=2, head_dim=64)
    plain = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval().to(device)
    ids = torch.randint(0, 500, (2, 600), device=device)
    model = convert(copy.deepcopy(plain), index_topk_blocks=64, index_block_size=16)
    off = error(model(ids).logits, plain(ids).logits.double().cpu())
    note("converted Llama, all blocks, against sdpa", off < 0.02, off=off)
    model = convert(plain, index_topk_blocks=4, index_block_size=64)
    whole = model(ids).logits.double().cpu()
    caches: dict[str, Callable[[], Any]] = {
        "DynamicCache": lambda: transformers.DynamicCache(config=model.config),
        "StaticCache": lambda: transformers.StaticCache(config=model.config, max_cache_len=640),
        "PagedCache": lambda: PagedCache(model),
    }
    for name, make in caches.items():
        cache, parts, start = make(), [], 0
        for stop in (300, 590, *range(591, 601)):
            parts.append(model(ids[:, start:stop], **cache_argument(model, cache), use_cache=True).logits)
            start = stop
        off = error(torch.cat(parts, 1), whole)
        note(f"converted Llama, steps over a {name}", off < 0.05, off=off)
    options = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    same = model.generate(ids, **options) == model.generate(ids, **options, **cache_argument(model, PagedCache(model)))
    note("generate over PagedCache and DynamicCache", None, same_tokens=float(same.float().mean()))
    assert model.config._attn_implementation == ATTENTION


def seconds(run: Callable[[], Any], device: str, repeats: int = 3) -> float:
    """Returns the least wall time of a few runs after one that warms up."""
    found = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def time_layer(device: str, tokens: int) -> None:
    """Times forward and backward of one layer of MiniMax-M3's heads."""
    layer = MSAttention(1024, 64, 4, 128, MSAConfig(4)).to(device, torch.bfloat16)
    hidden = torch.randn(1, tokens, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    rotation = Rotary(64).to(device)(torch.arange(tokens, device=device))
    for stage, coefficient in (("dense", 0.0), ("warmup", 1.0), ("sparse", 0.0), ("sparse", 1.0)):
        set_stage(layer, stage, loss_coefficient=coefficient)

        def step() -> None:
            layer(hidden, *rotation).sum().backward()

        label = f"layer of M3's heads, {tokens:,} tokens, {stage}{'' if coefficient or stage == 'dense' else ' without loss'}"
        note(label, None, step_ms=seconds(step, device) * 1e3)


@torch.inference_mode()
def time_model(device: str, tokens: int, small: bool) -> None:
    """Times a model of SmolLM2-135M's shape with random weights: reading a prompt in chunks of 8,192, and decoding 32
    tokens."""
    import transformers

    from openmsa.integrations.hugging_face import PagedCache, convert, prefill, stream

    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2 if small else 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = convert(transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval())
    ids = torch.randint(0, 49152, (1, tokens), device=device)
    for stage in ("dense", "sparse"):
        set_stage(model, stage)
        for _ in range(2):  # the first run compiles kernels
            cache = PagedCache(model, tokens=tokens + 64)
            start = time.perf_counter()
            *_, last = prefill(model, ids, cache, chunk=8192)
            int(last.argmax())
            read = time.perf_counter() - start
            list(stream(model, last, cache, max_new_tokens=4))
            start = time.perf_counter()
            list(stream(model, last, cache, max_new_tokens=32))
            decode = (time.perf_counter() - start) / 31
        values = {"read_tokens_s": round(tokens / read), "decode_ms": decode * 1e3, "cache_mb": cache.memory() / 1e6}
        note(f"SmolLM2's shape, {tokens:,} tokens, {stage}", None, **values)


def attempt(check: Callable[[str], None], device: str) -> None:
    """Runs a check or a timing; where it raises, the others still say what they find."""
    try:
        check(device)
    except Exception as failure:
        name = check.func.__name__ if isinstance(check, partial) else check.__name__
        note(name, False, failure=f"{type(failure).__name__}: {str(failure)[:300]}")


def main() -> int:
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--parts", nargs="+", choices=("checks", "timings"), default=["checks", "timings"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 65536])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    FILES.append(given.out / "modules.jsonl")
    FILES[0].write_text("")
    name = torch.cuda.get_device_name() if given.device != "cpu" else "CPU"
    note(f"{name}, torch {torch.__version__}")
    layers, lengths = ([256], [700]) if given.small else ([16384, 65536], given.tokens)
    jobs: dict[str, list[Callable[[str], None]]] = {
        "checks": [check_layer, check_cache, check_model],
        "timings": [
            *(partial(time_layer, tokens=tokens) for tokens in layers),
            *(partial(time_model, tokens=tokens, small=given.small) for tokens in lengths),
        ],
    }
    for part in given.parts:
        for job in jobs[part]:
            attempt(job, given.device)
    return int(any(x["ok"] is False for x in RECORDS))


if __name__ == "__main__":
    sys.exit(main())
