# SPDX-License-Identifier: MIT
"""Measures the host time of attention calls: how long a call takes to return, without waiting for the GPU.

    python3 -m benchmarks.host --out records.jsonl [--peers .peers] [--heads 64/4 32/2 16/1 8/1] [--seconds 90]

A row is a rank's share of the heads and a step: the new tokens of each sequence, and its keys with these. Its columns are
microseconds, medians of several turns in which all ways take part:

    plan      an `AttentionPlan` is made, of a new kind.
    first     its first layer, which is recorded.
    known     a layer of a known kind, the mean of some layers that follow each other.
    mean      a layer of a step with a plan of a new kind: its plan and all its layers, over their number.
    like      the same of a step with a token less, where the number of tokens did not come before.
    call 1st  `msa_attention` of a new kind.
    call      `msa_attention` of a known kind, a layer.
    decode 1st, decode   the first `run` of a `DecodePlan`, and a later one; of steps with one new token a sequence.
    vllm      vLLM's Triton kernels, a layer, where `--peers` names a folder with them.

No row begins after `--seconds`, so a machine that compiles slowly measures fewer rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.eager import PAGE, Step, by_vllm, caches_of, run_layers, step_of
from openmsa import AttentionPlan, DecodePlan, PagedIndexKeys, PagedKV, Sequences, msa_attention
from openmsa.bench.record import environment
from openmsa.bench.vllm_peer import load as load_peer

SHAPES = (
    ((338,), (75_000,)),
    ((8192,), (8192,)),
    ((1,) * 32, (8192,) * 32),
    ((20, 300, 1500), (131_000, 20_000, 40_000)),
    ((2048,), (47_744,)),
    ((1,), (32_768,)),
    ((1,) * 8, (8192,) * 8),
    ((182,), (18_000,)),
)
"""New tokens of each sequence, and its keys with them."""
COLUMNS = ("plan", "first", "known", "mean", "like", "call_first", "call", "decode_first", "decode", "vllm")
TITLES = ("plan", "first", "known", "mean", "like", "call 1st", "call", "decode 1st", "decode", "vllm")
FEW_LAYERS = 20
"""Layers of a known kind that are timed together."""
MOST_KINDS = 512
numbers = itertools.count()
"""Steps of new kinds have page tables of different widths."""


def microseconds(run: Callable[[], object]) -> float:
    """Returns the time until the function returns, on an idle GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def widened(x: Step) -> Step:
    """Returns the step with a page table wide enough to cut tables of many widths from it."""
    table = x.table.new_zeros(x.table.shape[0], x.table.shape[1] + MOST_KINDS)
    table[:, : x.table.shape[1]] = x.table
    return x._replace(table=table)


def of_new_kind(x: Step) -> Step:
    """Returns the step as one of a new kind."""
    return x._replace(table=x.table[:, : x.table.shape[1] - next(numbers) % MOST_KINDS])


def plan_of(x: Step) -> AttentionPlan:
    """Makes the plan of a step."""
    return AttentionPlan(
        cu_seqlens_q=x.cu,
        total_q=sum(x.new),
        max_seqlen_q=max(x.new),
        max_seqlen_k=max(x.keys),
        page_table=x.table,
        seq_lens=x.lens,
        page_size=PAGE,
    )


Caches = list[tuple[PagedKV, PagedIndexKeys]]


def layers_by_call(x: Step, caches: Caches, layers: int) -> None:
    """Runs `layers` layers with a call each. caches: of each layer that is held, `caches_of`."""
    seqs = Sequences(x.cu, None, max(x.new), max(x.keys))
    for i in range(layers):
        (q, _, index_q, _), (keys, index) = x.layers[i % len(x.layers)], caches[i % len(caches)]
        msa_attention(q, keys, None, index_q, index, 16, seqs)


def layers_by_decode_plan(x: Step, caches: Caches, plan: DecodePlan, layers: int) -> None:
    """Runs `layers` layers with a decode plan. caches: as in `layers_by_call`."""
    for i in range(layers):
        (q, _, index_q, _), (keys, index) = x.layers[i % len(x.layers)], caches[i % len(caches)]
        plan.run(q, keys, index_q, index, out=x.outs[i % len(x.outs)])


def whole_step(x: Step, layers: int) -> None:
    """Makes a plan and runs its layers."""
    plan = plan_of(x)
    run_layers(x, plan, layers)
    if plan.not_recorded:
        raise RuntimeError(str(plan.not_recorded))


def turn(x: Step, layers: int, kernels: Any) -> Iterator[tuple[str, float]]:
    """Measures each column once."""
    plans: list[AttentionPlan] = []
    x, other = of_new_kind(x), of_new_kind(x)
    yield "plan", microseconds(lambda: plans.append(plan_of(x)))
    yield "first", microseconds(partial(run_layers, x, plans[0], 1))
    yield "known", microseconds(partial(run_layers, x, plans[0], FEW_LAYERS)) / FEW_LAYERS
    yield "mean", microseconds(partial(whole_step, other, layers)) / layers
    shorter = other.shortened(1, 1)
    yield "like", microseconds(partial(whole_step, shorter, layers)) / layers
    caches = caches_of(x)
    yield "call_first", microseconds(partial(layers_by_call, x, caches, 1))
    yield "call", microseconds(partial(layers_by_call, x, caches, FEW_LAYERS)) / FEW_LAYERS
    if max(x.new) == 1:
        x = x._replace(table=x.table[:, : -(-max(x.keys) // PAGE)])
        decode = DecodePlan(
            max_batch=len(x.new),
            num_q_heads=x.layers[0][0].shape[1],
            num_kv_heads=x.layers[0][1].shape[1],
            head_dim=128,
            page_size=PAGE,
            max_pages=x.table.shape[1],
        )
        caches = caches_of(x)
        yield "decode_first", microseconds(partial(layers_by_decode_plan, x, caches, decode, 1))
        yield "decode", microseconds(partial(layers_by_decode_plan, x, caches, decode, FEW_LAYERS)) / FEW_LAYERS
    if kernels is not None:
        yield "vllm", microseconds(partial(by_vllm, x, FEW_LAYERS, kernels)) / FEW_LAYERS


def measure(x: Step, layers: int, turns: int, kernels: Any) -> dict[str, list[float]]:
    """Returns the microseconds of each column, one number a turn; a turn before them loads kernels and is dropped."""
    found: dict[str, list[float]] = {}
    for number in range(turns + 1):
        for name, value in turn(x, layers, kernels):
            if number:
                found.setdefault(name, []).append(round(value, 1))
    return found


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--peers", type=Path, help="folder with vLLM's kernels (none: only ours)")
    parser.add_argument("--heads", nargs="+", default=["16/1", "64/4", "32/2", "8/1"])
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)), help="numbers of shapes")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=90, help="no row begins later")
    parser.add_argument("--name", default="here", help="what the records call this code")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    kernels = load_peer(options.peers) if options.peers else None
    shared = environment(torch.device("cuda")) | {"benchmark": "host", "name": options.name, "layers": options.layers}
    print(f"{'us of the host, ' + options.name:38}" + "".join(f"{title:>11}" for title in TITLES))
    for number in options.shapes:
        new, keys = SHAPES[number]
        for heads in options.heads:
            title = f"{heads} {_shown(new)} on {_shown(keys)}"
            if time.monotonic() > end:
                print(f"{title:38} not measured: the time is over", flush=True)
                continue
            q_heads, kv_heads = map(int, heads.split("/"))
            x = widened(step_of(new, keys, (q_heads, kv_heads), False, 3))
            found = measure(x, options.layers, options.turns, kernels)
            del x
            shown = [f"{statistics.median(found[name]):11.1f}" if name in found else f"{'-':>11}" for name in COLUMNS]
            print(f"{title:38}" + "".join(shown), flush=True)
            if options.out:
                row = shared | {"heads": heads, "new": new, "keys": keys, "microseconds": found}
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def _shown(lengths: tuple[int, ...]) -> str:
    """Returns lengths in a short form."""
    same = len(lengths) > 1 and len(set(lengths)) == 1
    return f"{len(lengths)} x {lengths[0]}" if same else "+".join(map(str, lengths))


if __name__ == "__main__":
    main()
