#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times decode steps of one length with plans made for more and more keys: what an engine's longest context costs short ones.

    python -m benchmarks.plan_capacity -o record.jsonl     # needs a GPU

An engine makes its `DecodePlan` for the longest context that it may serve, and a CUDA graph keeps the plan's cut into programs.
Each row is a layer's share of a graph of `LAYERS` layers, each with a cache of its own, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from openmsa import DecodePlan, PagedIndexKeys, PagedKV
from openmsa.block_scores import triton_route
from openmsa.testing.timing import captured

LAYERS, DIM, PAGE = 6, 128, 128
STEPS = [(1, 16384), (8, 16384), (32, 16384), (128, 8192)]
CAPACITIES = [1, 4, 16]
"""Keys that a plan is made for, as multiples of a step's."""


def step_us(heads: int, kv_heads: int, batch: int, length: int, capacity: int, repeat: int) -> float:
    """Returns a layer's microseconds in a step of `batch` sequences of `length` keys, with tables for `capacity` keys."""
    pages, width = length // PAGE, capacity // PAGE
    table = torch.zeros(batch, width, dtype=torch.int32, device="cuda")
    table[:, :pages] = torch.randperm(batch * pages, device="cuda").view(batch, pages)
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    plan = DecodePlan(
        max_batch=batch, num_q_heads=heads, num_kv_heads=kv_heads, head_dim=DIM, page_size=PAGE, max_pages=width,
        index_heads=kv_heads, index_dim=DIM, topk=16, block_size=128, certified_keys=False, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, index_q, out = drawn(batch, heads, DIM), drawn(batch, kv_heads, DIM), drawn(batch, heads, DIM)
    caches = []
    for _ in range(LAYERS):
        k, v = (drawn(batch * pages, kv_heads, PAGE, DIM) for _ in range(2))
        caches.append((PagedKV(k, v, table, lens), PagedIndexKeys(drawn(batch * pages, 1, PAGE, DIM), table, lens)))

    def layers() -> None:
        for kv, keys in caches:
            plan.run(q, kv, index_q, keys, out=out)

    replay, taken = captured(layers), []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(1e3 * start.elapsed_time(end) / LAYERS)
    return statistics.median(taken)


def main() -> None:
    """Runs what the command line says."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-o", "--out", type=Path, default=Path("capacity.jsonl"))
    p.add_argument("--repeat", type=int, default=50)
    a = p.parse_args()
    for heads, kv_heads in ((16, 1), (32, 4)):
        for batch, length in STEPS:
            row = {"heads": heads, "kv_heads": kv_heads, "batch": batch, "length": length}
            for even in (False, True):
                triton_route.EVEN_SPLITS = even
                us = [step_us(heads, kv_heads, batch, length, times * length, a.repeat) for times in CAPACITIES]
                with a.out.open("a") as f:
                    f.write(json.dumps(row | {"even_splits": even, "us": dict(zip(CAPACITIES, us, strict=True))}) + "\n")
                cells = ", ".join(f"{times} times {x:.1f} us" for times, x in zip(CAPACITIES, us, strict=True))
                print(f"capacity {heads}/{kv_heads} {batch} x {length}, even splits {even}: {cells}", flush=True)


if __name__ == "__main__":
    main()
