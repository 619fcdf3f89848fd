#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs a MiniMax-M3, small with random weights or from a checkpoint, in a real engine: with the engine's kernels and with ours.

    python -m benchmarks.engine -o record.jsonl                      # both, one after the other, and their comparison
    python -m benchmarks.engine --kernels openmsa -o record.jsonl    # one of them
    python -m benchmarks.engine --compare record.jsonl               # the table of a record
    python -m benchmarks.engine_rows -o rows.jsonl                   # several engines, row by row, in bounded time

It prints how far prompts and answers are from a forward in plain PyTorch (random weights only), rates of prefill and decode,
the time of the sparse layers' stages on the GPU, and the host's time of a layer where layers are launched one by one.
The engine runs in this process, without a server or a tokenizer. --heads 16 --kv-heads 1 is what a rank of four sees.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_model import errors, redraw, write_config
from benchmarks.engine_vllm import Vllm, environment
from openmsa.bench.record import checkout_commit

SHORT = (5, 700, 3000)
KERNELS = ("own", "openmsa")


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kernels", choices=KERNELS, help="one of them; without it, both in processes of their own")
    p.add_argument("-o", "--out", type=Path, default=Path("engine.jsonl"), help="one JSON object a run is appended")
    p.add_argument("--compare", type=Path, help="print the table of a record and stop")
    p.add_argument("--checkpoint", type=Path, help="weights to serve instead of random ones")
    p.add_argument("--model-dir", type=Path, default=Path("/tmp/openmsa-m3"), help="where the small model's config.json goes")
    for name, default, text in (
        ("layers", 8, ""),
        ("dense", 2, "leading layers with dense attention"),
        ("hidden", 2048, ""),
        ("heads", 32, "query heads"),
        ("kv-heads", 4, "KV heads, and index heads"),
        ("max-len", 262144, ""),
        ("chunk", 16384, "tokens a step at most"),
        ("repeat", 3, "times that each prefill is taken"),
        ("context", 16384, "tokens of each request that decodes"),
        ("steps", 64, "decode steps that are timed"),
        ("speculative", 0, "drafted tokens a step (n-grams)"),
        ("ranks", 1, "tensor parallel ranks, a GPU each; several are not compared with PyTorch, and no stages are timed"),
    ):
        p.add_argument(f"--{name}", type=int, default=default, help=text)
    p.add_argument("--kv-gib", type=float, default=24)
    p.add_argument("--gpu-share", type=float, help="of the GPU's memory that must be free at start, where engines share it")
    p.add_argument("--orders", type=int, help=argparse.SUPPRESS)  # a pipe from which `engine_rows` asks for rows
    p.add_argument("--kv-dtype", default="auto", help="auto or fp8")
    p.add_argument("--index-dtype", help="bf16 or fp8")
    p.add_argument("--long", type=int, nargs="*", default=[4096, 32768, 131072], help="prompts whose prefill is timed")
    p.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="requests that decode together")
    p.add_argument("--dense-backend", default="FLASH_ATTN", help="of the dense layers")
    p.add_argument("--plugins", nargs="*", default=[], help="more of vLLM's plug-ins to name")
    p.add_argument("--prefix-caching", action="store_true")
    p.add_argument("--eager", action="store_true", help="no CUDA graphs: decode launches layer by layer, too")
    p.add_argument("--capture", type=int, nargs="*", default=[], help="steps of so many tokens run in CUDA graphs, too")
    p.add_argument("--no-timing", action="store_true")
    p.add_argument("--logit-std", type=float, default=3.0, help="of random weights: how peaked attention is")
    return p.parse_args()


def tokens(length: int, seed: int) -> list[int]:
    """Draws a prompt."""
    return torch.randint(10, 32000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def permuted(length: int, seed: int) -> list[int]:
    """Draws a prompt that holds every token but the first ten once in each 31,990. An n-gram drafter then finds the token made
    last in every step, and drafts."""
    draw = torch.Generator().manual_seed(seed)
    passes = [torch.randperm(31990, generator=draw) + 10 for _ in range(-(-length // 31990))]
    return torch.cat(passes)[:length].tolist()


def start(a: argparse.Namespace) -> tuple[Vllm, dict[str, Any], dict[str, Any]]:
    """Starts an engine; returns it, the model's configuration, and what a record says of the engine."""
    environment(a)
    config, begun = write_config(a), time.perf_counter()
    engine = Vllm(a)
    record: dict[str, Any] = {
        "kernels": a.kernels,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": checkout_commit(),
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()},
        "start_s": time.perf_counter() - begun,
        **engine.facts(),
    }
    if not a.checkpoint:
        record["parameters"] = engine.inside(partial(redraw, logit_std=a.logit_std))
    print(f"{a.kernels}: {record['engine']} started in {record['start_s']:.0f} s, graphs {record['graphs']}", flush=True)
    for row in record["layers"]:
        print("  ", row, flush=True)
    return engine, config, record


def run(a: argparse.Namespace) -> dict[str, Any]:
    """Starts an engine, and returns the record of a run."""
    engine, config, record = start(a)
    answers(engine, a, config, record)
    if not a.no_timing:
        record["prefill"] = [prefill(engine, length, a.repeat) for length in a.long if length + 32 <= a.max_len]
        record["decode"] = [decode(engine, batch, a.context, a) for batch in a.batch]
    record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return record


def answers(engine: Vllm, a: argparse.Namespace, config: dict[str, Any], record: dict[str, Any]) -> None:
    """Adds the answers to prompts alone and together, and how far they are from the truth. With prefix caching, the second time
    reads the keys that the first one wrote."""
    prompts = [tokens(n, n) for n in SHORT]
    asked = {} if a.speculative else {"logprobs": 5, "prompt_logprobs": None if a.prefix_caching else 1}
    record["alone"] = [engine.generate([p], 32, **asked)[0] for p in prompts]
    if not a.checkpoint and not a.speculative and not a.prefix_caching and a.ranks == 1:
        record["errors"] = engine.inside(lambda model: errors(dict(model.named_parameters()), config, record["alone"], prompts))
        torch.cuda.empty_cache()
        for row in record["errors"]:
            print("  from PyTorch:", {k: round(v, 5) for k, v in row.items()}, flush=True)
    more = [*prompts, tokens(32768, 32768)] if a.max_len > 32800 else prompts
    record["together"] = engine.generate(more, 32)
    same = [_leading(x["tokens"], y["tokens"]) for x, y in zip(record["alone"], record["together"], strict=False)]
    print("  leading tokens that are equal alone and together, of 32:", same, flush=True)


def prefill(engine: Vllm, length: int, repeat: int) -> dict[str, Any]:
    """Times the prefill of one prompt, and keeps the best of `repeat`."""
    engine.generate([tokens(length, 100)], 1)  # loads kernels
    taken = []
    for i in range(repeat):
        prompt = tokens(length, 101 + i)
        torch.cuda.synchronize()
        engine.stages.on, start = True, time.perf_counter()
        engine.generate([prompt], 1)
        torch.cuda.synchronize()
        wall, engine.stages.on = time.perf_counter() - start, False
        taken.append((wall, engine.stages.take()))
    wall, stages = min(taken, key=lambda x: x[0])
    row = {"length": length, "wall_s": wall, "tokens_per_s": length / wall, "stages": stages}
    print("  prefill", json.dumps(row), flush=True)
    return row


def decode(engine: Vllm, batch: int, context: int, a: argparse.Namespace) -> dict[str, Any]:
    """Times steps in which every request decodes, by the wall clock, and then as many forwards on the GPU. The first request
    decodes while the others are prefilled. An engine with drafts gets prompts in which its n-gram drafter finds every token."""
    prompt, warm = permuted if a.speculative else tokens, 8
    names = [f"decode-{batch}-{context}-{time.monotonic_ns()}-{i}" for i in range(batch)]
    most = (1 + a.speculative) * (2 * a.steps + warm + 40 + 2 * batch * -(-context // a.chunk))
    for i, name in enumerate(names):
        engine.start(name, prompt(context, 1000 + i), most)
    made: dict[str, int] = {}
    while len(made) < batch or min(made.values()) < warm:
        made |= engine.step()
    torch.cuda.synchronize()
    before, laps = sum(made.values()), [time.perf_counter()]
    for _ in range(a.steps):
        made |= engine.step()
        laps.append(time.perf_counter())
    torch.cuda.synchronize()
    total = time.perf_counter() - laps[0]
    steps = sorted(y - x for x, y in itertools.pairwise(laps))
    count = sum(made.values()) - before
    engine.stages.on, engine.stages.ahead = True, not a.eager
    for _ in range(a.steps):
        engine.step()
    torch.cuda.synchronize()
    engine.stages.on = engine.stages.ahead = False
    row = {
        "batch": batch,
        "context": context,
        "tokens": count,
        "tokens_per_s": count / total,
        "step_ms": 1e3 * steps[len(steps) // 2],
        "stages": engine.stages.take(),
    }
    engine.finish(names if a.speculative else ())  # Where drafts are refused, the rest would take many steps.
    print("  decode", json.dumps(row), flush=True)
    return row


def prefix(engine: Vllm, length: int, new: int, repeat: int) -> dict[str, Any]:
    """Times prompts whose first `length` tokens the engine has cached and whose last `new` ones are new, keeps the best of
    `repeat`, and compares an answer that reads the cached keys with that of the same prompt computed anew."""
    shared, taken = tokens(length, 7), []
    engine.generate([shared], 1)
    for i in range(repeat + 1):
        prompt = shared + tokens(new, 200 + i)
        torch.cuda.synchronize()
        engine.stages.on, begun = True, time.perf_counter()
        engine.generate([prompt], 1)
        torch.cuda.synchronize()
        wall, engine.stages.on = time.perf_counter() - begun, False
        taken.append((wall, engine.stages.take()))
    wall, stages = min(taken[1:], key=lambda x: x[0])
    anew, cached = (
        engine.generate([prompt], 1, skip_reading_prefix_cache=skip, logprobs=5)[0]["top"][0] for skip in (True, False)
    )
    apart = [abs(cached[t] - anew[t]) for t in cached if t in anew]
    row = {"length": length, "new": new, "wall_s": wall, "stages": stages, "apart": max(apart, default=None)}
    print("  prefix", json.dumps(row), flush=True)
    return row


def _leading(x: list[int], y: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))


def table(records: list[dict[str, Any]]) -> str:
    """Returns the table of the last run of each kind: ours against the engine's own."""
    last = {r["kernels"]: r for r in records}
    lines = [f"{r['engine']}, {r['kernels']}: {r['gpu']}, start {r['start_s']:.0f} s" for r in last.values()]
    for kernels, r in last.items():
        for e in r.get("errors", []):
            lines.append(f"error of log-probabilities, {kernels}, {e['prompt']} tokens: mean {e['prompt_mean']:.4f}")
            lines[-1] += f" max {e['prompt_max']:.3f}; answer mean {e['decode_mean']:.4f}, same argmax {e['same_argmax']:.2f}"
    if set(last) < set(KERNELS):
        return "\n".join(lines)
    own, ours = last["own"], last["openmsa"]
    for x, y in zip(own["alone"], ours["alone"], strict=True):
        lines.append(
            f"prompt of {x['prompt']}: {_leading(x['tokens'], y['tokens'])} of {len(x['tokens'])} answer tokens are equal"
        )
    lines.append(f"{'':26}{'own':>10}{'ours':>10}{'times':>8}")

    def add(name: str, a: float | None, b: float | None) -> None:
        if a and b:
            lines.append(f"{name:26}{a:10.3f}{b:10.3f}{a / b:7.2f}x")

    def add_stages(a: dict[str, Any], b: dict[str, Any]) -> None:
        for stage in ("indexer", "attend", "forward"):
            x, y = a["stages"].get(stage, {}), b["stages"].get(stage, {})
            # One forward of many steps may have compiled a kernel.
            of = "gpu_median_ms" if stage == "forward" and "step_ms" in a else "gpu_ms"
            add(f"  {stage} ms on the GPU", x.get(of), y.get(of))
            if stage != "forward":
                add(f"  {stage} us of the host", x.get("host_mean_us"), y.get("host_mean_us"))
        parts = [sum(r["stages"].get(s, {}).get("gpu_ms", 0) for s in ("indexer", "attend")) for r in (a, b)]
        add("  both stages ms", *parts)

    for a, b in zip(own.get("prefill", []), ours.get("prefill", []), strict=True):
        add(f"prefill {a['length']} ms", 1e3 * a["wall_s"], 1e3 * b["wall_s"])
        add_stages(a, b)
    for a, b in zip(own.get("decode", []), ours.get("decode", []), strict=True):
        add(f"decode {a['batch']} x {a['context']} ms", a["step_ms"], b["step_ms"])
        add_stages(a, b)
    return "\n".join(lines)


def main() -> None:
    """Runs what the command line says."""
    a = arguments()
    if a.orders is not None:
        from benchmarks.engine_rows import serve

        serve(a.orders, *start(a), a)
    elif a.kernels:
        record = run(a)
        a.out.parent.mkdir(parents=True, exist_ok=True)
        with a.out.open("a") as f:
            f.write(json.dumps(record) + "\n")
    else:
        for kernels in () if a.compare else KERNELS:
            subprocess.run([sys.executable, "-m", "benchmarks.engine", *sys.argv[1:], "--kernels", kernels], check=True)
        print(table([json.loads(line) for line in (a.compare or a.out).read_text().splitlines()]))


if __name__ == "__main__":
    main()
