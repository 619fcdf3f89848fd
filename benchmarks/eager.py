# SPDX-License-Identifier: MIT
"""Measures sparse attention as an engine calls it: eagerly, layer after layer, on a rank's share of the heads, beside vLLM's
kernels.

    python3 -m benchmarks.eager --peers .peers --out records.jsonl [--heads 64/4 16/1] [--layers 60]

A step has `--layers` layers. Each has its own queries and caches, of which a few are held and used in turn. For each shape
the table says, a layer: the time of the host (its clock, from the first call to the return of the last, the GPU not waited for)
and the time of the step (until the GPU has finished), both the median of several steps; ways take turns. Each step has another
number of new tokens, a few less than the shape says, as steps of an engine have. `plan` makes an `AttentionPlan` in each step;
`call` is `msa_attention`; `vllm` are its three Triton kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmsa import AttentionPlan, PagedIndexKeys, PagedKV, Sequences, msa_attention
from openmsa.bench.vllm_peer import load as load_peer

PAGE = 128
SHAPES = (
    ((20,), (18_000,)),
    ((182,), (18_000,)),
    ((338,), (75_000,)),
    ((171, 512), (17_700, 60_000)),
    ((1024,), (32_768,)),
    ((2048,), (47_744,)),
    ((20, 300, 1500), (131_000, 20_000, 40_000)),
    ((4096,), (4096,)),
    ((4096,), (65_536,)),
    ((8192,), (8192,)),
    ((8192,), (47_744,)),
    ((16384,), (47_744,)),
    ((16384,), (131_072,)),
)
"""New tokens of each sequence, and its keys with them."""


class Step(NamedTuple):
    """Holds the tensors of a step: those of all layers, and for each layer held its queries and caches."""

    new: tuple[int, ...]
    keys: tuple[int, ...]
    cu: Tensor
    lens: Tensor
    table: Tensor
    layers: list[
        tuple[Tensor, Tensor, Tensor, Tensor]
    ]  # q, kv [pages, heads, 128, 2 * dim], index_q, index [pages, 1, 128, dim]
    outs: list[Tensor]

    def shortened(self, times: int, tokens: int) -> Step:
        """Returns the step with fewer new tokens in its last sequence, `tokens` so many times; its keys are as many."""
        last = self.new[-1]
        new = (*self.new[:-1], last - min(times * tokens, last - 1))
        cu, total = self.cu.clone(), sum(new)
        cu[-1] = total
        layers = [(q[:total], kv, index_q[:total], index) for q, kv, index_q, index in self.layers]
        return self._replace(new=new, cu=cu, layers=layers, outs=[out[:total] for out in self.outs])


def step_of(new: tuple[int, ...], keys: tuple[int, ...], heads: tuple[int, int], local: bool, held: int) -> Step:
    """Makes random tensors. local: neighbouring queries choose alike."""
    device, (q_heads, kv_heads), total = torch.device("cuda"), heads, sum(new)
    pages = [-(-n // PAGE) for n in keys]
    table = torch.zeros(len(new), max(pages), dtype=torch.int32, device=device)
    order, first = torch.randperm(sum(pages), device=device).int(), 0
    for b, n in enumerate(pages):
        table[b, :n] = order[first : first + n]
        first += n
    cu = torch.tensor([0, *new], device=device).cumsum(0, dtype=torch.int32)
    layers = []
    for _ in range(held):
        kv = torch.randn(sum(pages), kv_heads, PAGE, 256, device=device, dtype=torch.bfloat16)
        index = torch.randn(sum(pages), 1, PAGE, 128, device=device, dtype=torch.bfloat16)
        q = torch.randn(total, q_heads, 128, device=device, dtype=torch.bfloat16)
        index_q = torch.randn(total, kv_heads, 128, device=device, dtype=torch.bfloat16)
        if local:
            base = torch.randn(total // 64 + 1, kv_heads, 128, device=device, dtype=torch.bfloat16).repeat_interleave(64, 0)
            index_q = base[:total] + 0.3 * index_q
        layers.append((q, kv, index_q, index))
    outs = [torch.empty_like(layers[0][0]) for _ in range(held)]
    return Step(new, keys, cu, torch.tensor(keys, dtype=torch.int32, device=device), table, layers, outs)


def by_plan(x: Step, layers: int) -> None:
    """Runs a step with a plan."""
    plan = AttentionPlan(
        cu_seqlens_q=x.cu,
        total_q=sum(x.new),
        max_seqlen_q=max(x.new),
        max_seqlen_k=max(x.keys),
        page_table=x.table,
        seq_lens=x.lens,
        page_size=PAGE,
    )
    run_layers(x, plan, layers)
    if plan.not_recorded:
        raise RuntimeError(str(plan.not_recorded))


def run_layers(x: Step, plan: AttentionPlan, layers: int) -> None:
    """Runs layers with a plan. Views of the caches are made once, as in an engine, which binds caches once."""
    halves = [(kv[..., :128], kv[..., 128:]) for _, kv, _, _ in x.layers]
    for i in range(layers):
        at = i % len(x.layers)
        q, _, index_q, index = x.layers[at]
        plan.run(q, *halves[at], index_q, index, out=x.outs[at])


def caches_of(x: Step) -> list[tuple[PagedKV, PagedIndexKeys]]:
    """Makes the caches of each layer that is held, which calls share, as those of a model do."""
    halves = [(kv[..., :128], kv[..., 128:], index) for _, kv, _, index in x.layers]
    return [(PagedKV(k, v, x.table, x.lens), PagedIndexKeys(index, x.table, x.lens)) for k, v, index in halves]


def by_call(x: Step, layers: int) -> None:
    """Runs a step with a call a layer."""
    seqs, caches = Sequences(x.cu, None, max(x.new), max(x.keys)), caches_of(x)
    for i in range(layers):
        (q, _, index_q, _), (keys, index) = x.layers[i % len(x.layers)], caches[i % len(caches)]
        out = msa_attention(q, keys, None, index_q, index, 16, seqs)
        assert isinstance(out, Tensor)
        x.outs[i % len(x.outs)] = out


def by_vllm(x: Step, layers: int, kernels: Any) -> None:
    """Runs a step with vLLM's kernels."""
    before = x.lens - x.cu.diff()
    heads, most, longest = x.layers[0][1].shape[1], max(x.new), max(x.keys)
    for i in range(layers):
        q, kv, index_q, index = x.layers[i % len(x.layers)]
        lengths = x.cu, x.lens, before
        scores = kernels.minimax_m3_index_score(index_q, index[:, 0], x.table, *lengths, most, longest, heads)
        ids = kernels.minimax_m3_index_topk(scores, x.cu, before, most, 16, 0, 1)
        kernels.minimax_m3_sparse_attn(q, kv, ids, x.table, *lengths, most, heads, 128**-0.5, x.outs[i % len(x.outs)])


def timed(run: Callable[[int], None], layers: int) -> tuple[float, float]:
    """Returns microseconds a layer of the host and of the step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(layers)
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return host / layers * 1e6, (time.perf_counter() - start) / layers * 1e6


def measure(x: Step, layers: int, turns: int, kernels: Any) -> dict[str, dict[str, float]]:
    """Lets the ways take turns and returns their medians."""
    ways: dict[str, Callable[[Step, int], None]] = {"plan": by_plan, "call": by_call}
    if kernels is not None:
        ways["vllm"] = partial(by_vllm, kernels=kernels)
    for run in ways.values():
        run(x, 2 * len(x.layers))
    outs = {}
    for name, run in ways.items():
        run(x, len(x.layers))
        outs[name] = x.outs[0].clone()
    different = {name: (outs["plan"] - outs[name]).abs().max().item() for name in outs if name != "plan"}
    # Queries whose selections differ by a tie differ; all others agree within the rounding.
    rows = {name: ((outs["plan"] - outs[name]).abs().amax((1, 2)) > 0.02).sum().item() for name in different}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(turns):
        step = x.shortened(turn + 1, max(x.new[-1] // 64, 1))
        for name, run in ways.items():
            times[name].append(timed(partial(run, step), layers))
    return {
        name: {
            "host_us": statistics.median(t[0] for t in found),
            "step_us": statistics.median(t[1] for t in found),
            "rows_that_differ": rows.get(name, 0),
        }
        for name, found in times.items()
    }


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with vLLM's kernels (none: only ours)")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--heads", nargs="+", default=["64/4", "16/1"])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--select", nargs="+", default=["random", "local"])
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of shapes")
    options = parser.parse_args()
    kernels = load_peer(options.peers) if options.peers else None
    shapes = [SHAPES[i] for i in options.shapes] if options.shapes else SHAPES
    print(f"{'':44} {'host us a layer':^23}   {'step us a layer':^23}   plan / vllm")
    print(
        f"{'heads, selection, new tokens, keys':44} {'plan':>7} {'call':>7} {'vllm':>7}   {'plan':>7} {'call':>7} {'vllm':>7}"
    )
    for name in options.heads:
        q_heads, kv_heads = map(int, name.split("/"))
        for local in (kind == "local" for kind in options.select):
            ratios = []
            for new, keys in shapes:
                torch.manual_seed(sum(new) + q_heads)
                x = step_of(new, keys, (q_heads, kv_heads), local, 3)
                found = measure(x, options.layers, options.turns, kernels)
                record = {"heads": name, "local": local, "new": new, "keys": keys, "layers": options.layers, "ways": found}
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
                title = f"{name} {'local' if local else 'random'} {'+'.join(map(str, new))} on {'+'.join(map(str, keys))}"
                columns = [
                    f"{found[way][key]:7.0f}" if way in found else "      -"
                    for key in ("host_us", "step_us")
                    for way in ("plan", "call", "vllm")
                ]
                ratio = found["vllm"]["step_us"] / found["plan"]["step_us"] if "vllm" in found else float("nan")
                ratios.append(ratio)
                differ = [found[way]["rows_that_differ"] for way in found if way != "plan"]
                print(f"{title:44} {' '.join(columns[:3])}   {' '.join(columns[3:])}   {ratio:5.2f}  rows {differ}", flush=True)
                del x
            print(f"{name}: geometric mean {statistics.geometric_mean(ratios):.2f}, worst {min(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
