#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Says from which context on sparse attention pays on this CPU: it and PyTorch's dense attention take turns in one process.

    python scripts/short_contexts.py [--heads 9 --kv-heads 3 --dim 64] [--output FILE]

One thread, and CPU time instead of elapsed time, so that other work on the machine disturbs little; keys lie as a Hugging Face
cache holds them, index queries are means of groups. A row prints the medians of both in milliseconds, the median of their
ratios turn by turn, and the ratio of their fastest turns. Below 1, sparse attention is the faster.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from openmsa import msa_attention
from openmsa.bench.record import device_name, versions

DECODE = (500, 1500, 3000, 6000, 12000, 24000)
PREFILL = (1000, 2000, 3000, 6000, 8000, 12000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Work = Callable[[], torch.Tensor]


def both(queries: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Work, Work]:
    """Returns sparse and dense attention of the last `queries` positions of a context of `keys` tokens."""
    q = torch.randn(1, heads, queries, dim).to(dtype)
    k, v = (torch.randn(1, kv_heads, keys, dim).to(dtype) for _ in range(2))
    rows, index_keys, values = (x[0].transpose(0, 1) for x in (q, k, v))  # [tokens, heads, dim], without a copy

    def sparse() -> torch.Tensor:
        index_q = rows.unflatten(1, (kv_heads, -1)).mean(2)
        return msa_attention(rows, index_keys, values, index_q, index_keys)

    def dense() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=True)

    return sparse, dense


def in_turns(works: tuple[Work, Work], seconds: float) -> tuple[list[float], list[float]]:
    """Returns the CPU seconds of each turn of both, after two that do not count, at least five of them."""
    times: tuple[list[float], list[float]] = ([], [])
    turns = 0
    end = time.perf_counter() + seconds
    while turns < 7 or (turns < 300 and time.perf_counter() < end):
        for work, taken in zip(works, times, strict=True):
            start = time.process_time()
            work()
            taken.append(time.process_time() - start)
        turns += 1
    return times[0][2:], times[1][2:]


def main() -> None:
    """Measures and prints every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="a row, at least")
    parser.add_argument("--output", type=Path, help="append each row to this JSONL file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = (given.heads, given.kv_heads, given.dim)
    about = {"cpu": device_name(torch.device("cpu")), "platform": platform.platform(), "threads": 1, **versions()}
    print(f"{about['cpu']}, torch {torch.__version__}, heads {sizes[0]}/{sizes[1]} x {sizes[2]}, 16 blocks of 128, CPU time")
    print(f"{'call':8} {'tokens':>6} {'dtype':9} {'sparse ms':>9} {'dense ms':>9} {'ratio':>6} {'of fastest':>10}")
    for call, contexts in (("decode", DECODE), ("prefill", PREFILL)):
        for dtype in DTYPES if call == "decode" else DTYPES[:2]:
            for tokens in contexts:
                with torch.inference_mode():
                    sparse, dense = in_turns(both(1 if call == "decode" else tokens, tokens, *sizes, dtype), given.seconds)
                ratio = statistics.median(a / b for a, b in zip(sparse, dense, strict=True))
                fastest = min(sparse) / min(dense)
                medians = [statistics.median(x) * 1e3 for x in (sparse, dense)]
                name = str(dtype).removeprefix("torch.")
                print(f"{call:8} {tokens:6} {name:9} {medians[0]:9.2f} {medians[1]:9.2f} {ratio:6.2f} {fastest:10.2f}")
                sys.stdout.flush()
                if given.output is not None:
                    row = {"call": call, "tokens": tokens, "dtype": name, "heads": sizes, "turns": len(sparse), "ratio": ratio}
                    row |= {"sparse_ms": medians[0], "dense_ms": medians[1], "ratio_of_fastest": fastest, "about": about}
                    with given.output.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
