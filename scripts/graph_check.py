#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares compiled calls with eager ones on a GPU, bit for bit, and prints a table; exits with 1 where one differs.

    python scripts/graph_check.py

"inductor" compiles with dynamic shapes, "CUDA graph" with ``mode="reduce-overhead"``. us: host time of a call, without waiting.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openmsa import DecodePlan, PagedIndexKeys, PagedKV, Sequences, dense_attention, msa_attention, select_blocks

BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def prefill(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor) -> tuple[Tensor, ...]:
    """Runs the whole path over one sequence, and its selection and dense attention."""
    out, lse = msa_attention(q, k, v, index_q, index_k, 4, return_lse=True)
    return out * 2, lse, select_blocks(index_q, index_k, 4), dense_attention(q, k, v)


def step(kv: PagedKV, keys: PagedIndexKeys, k: Tensor, v: Tensor, index_k: Tensor, q: Tensor, index_q: Tensor) -> Tensor:
    """Appends a token to each sequence and attends."""
    kv.append(k, v)
    keys.append(index_k)
    starts = torch.arange(kv.batch + 1, dtype=torch.int32, device=q.device)
    seqs = Sequences(starts, max_seqlen_q=1, max_seqlen_k=kv.capacity)
    out = msa_attention(q, kv, None, index_q, keys, 4, seqs)
    assert isinstance(out, Tensor)
    return out


def packed(total_q: int, total_k: int) -> tuple[Tensor, ...]:
    """Returns q, k, v, index_q and index_k."""
    shapes = ((total_q, 16, 128), (total_k, 2, 128), (total_k, 2, 128), (total_q, 2, 128), (total_k, 1, 128))
    return tuple(torch.randn(shape, **BF16) for shape in shapes)


def caches(batch: int, format: str, index_format: str) -> tuple[PagedKV, PagedIndexKeys]:
    """Returns caches of 1,000 tokens a sequence, the same ones each time."""
    torch.manual_seed(1)
    table = torch.randperm(batch * 16, device="cuda").int().view(batch, 16)
    kv = PagedKV.allocate(table, batch * 16, 2, 128, 128, torch.bfloat16, format)
    keys = PagedIndexKeys.allocate(table, batch * 16, 1, 128, 128, torch.bfloat16, index_format)
    kv.append(*(torch.randn(batch * 1000, 2, 128, **BF16) for _ in range(2)))
    keys.append(torch.randn(batch * 1000, 1, 128, **BF16))
    return kv, keys


def tokens(batch: int) -> tuple[Tensor, ...]:
    """Returns k, v, index_k, q and index_q of a token a sequence."""
    return tuple(torch.randn(batch, heads, 128, **BF16) for heads in (2, 2, 1, 16, 2))


def host_us(function: Callable[[], Any]) -> float:
    """Returns the host time of a call in microseconds."""
    for _ in range(5):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        function()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / 20 * 1e6


def same(found: Any, expected: Any) -> bool:
    """Says whether results are equal bit for bit."""
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found, expected, strict=True))


def main() -> int:
    """Runs every comparison."""
    rows = []
    modes = {"inductor": {"dynamic": True}, "CUDA graph": {"mode": "reduce-overhead"}}
    with torch.no_grad():
        for name, options in modes.items():
            torch._dynamo.reset()
            graph = torch.compile(prefill, fullgraph=True, **options)
            for sizes in ((512, 2048), (300, 3001)):
                arguments = packed(*sizes)
                equal = all(same(tuple(x.clone() for x in graph(*arguments)), prefill(*arguments)) for _ in range(3))
                rows.append((f"prefill {sizes[0]} on {sizes[1]}", name, equal, *times(graph, prefill, arguments)))
            for formats in (("plain", "plain"), ("e4m3", "int8"), ("nvfp4", "e4m3"), ("plain", "certified")):
                torch._dynamo.reset()
                graph = torch.compile(step, fullgraph=True, **options)
                mine, theirs, equal = caches(4, *formats), caches(4, *formats), True
                for _ in range(4):
                    new = tokens(4)
                    equal &= same(graph(*mine, *new).clone(), step(*theirs, *new))
                equal &= torch.equal(mine[0].seq_lens, theirs[0].seq_lens)
                rows.append((f"step, {' and '.join(formats)}", name, equal, *times(graph, step, (*mine, *new))))
            rows.append(("decode plan", name, *planned(options)))
    for case, name, equal, ours, eager in rows:
        print(f"{case:28}{name:12}{'equal' if equal else 'DIFFERS':9}{ours:8.0f} us{eager:8.0f} us eager")
    return 0 if all(row[2] for row in rows) else 1


def times(graph: Callable[..., Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Returns the host times of a compiled and of an eager call."""
    return host_us(lambda: graph(*arguments)), host_us(lambda: function(*arguments))


def planned(options: dict[str, Any]) -> tuple[bool, float, float]:
    """Compares a decode plan's run, which a graph names by its number."""
    kv, keys = caches(4, "plain", "plain")
    plan = DecodePlan(max_batch=4, num_q_heads=16, num_kv_heads=2, head_dim=128, page_size=128, max_pages=16, topk=4)

    def run(q: Tensor, index_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return plan.run(q, kv, index_q, keys) * 2, plan.lse + 1, plan.blocks + 0

    torch._dynamo.reset()
    graph, equal = torch.compile(run, fullgraph=True, **options), True
    for _ in range(4):
        *_, q, index_q = tokens(4)
        equal &= same(tuple(x.clone() for x in graph(q, index_q)), run(q, index_q))
    return equal, *times(graph, run, (q, index_q))


if __name__ == "__main__":
    sys.exit(main())
