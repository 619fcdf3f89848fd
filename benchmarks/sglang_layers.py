#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs one sparse layer of SGLang 0.5.16, with its own Triton backend and with ours, over SGLang's own pools and batches.

    python -m benchmarks.sglang_layers -o record.jsonl     # where SGLang is installed; needs a GPU

SGLang's wheel unpacked into a folder of PYTHONPATH will do, with dill, msgspec and pydantic beside it: the other packages that
it imports get stand-ins (`tests/integrations/sglang_itself.py`).
Both backends get the same queries, caches and metadata calls, as SGLang's model runner makes them, but no model runs. A prompt
is timed with its metadata and six layers, eagerly; a decode step as a CUDA graph of six layers. Writing the new keys is part of
both. `--jit` leaves SGLang the kernels that it compiles with nvcc when it first calls them, for which apache-tvm-ffi must be
there; else it takes its Triton ones. Triton kernels tune themselves in the first call of a shape, which takes 10 to 40 seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LAYERS = 6
ITSELF = "tests.integrations.sglang_itself"
SHAPES: list[tuple[int, int]] = [(4096, 0), (16384, 16384), (16384, 114688), (512, 32768)]
"""New tokens of a prompt, and tokens before them."""
STEPS: list[tuple[int, int]] = [(1, 16384), (8, 16384), (32, 16384), (128, 8192)]
"""Requests that decode, and tokens of each."""


def engine(made: dict[str, Any], heads: int, kv_heads: int, a: argparse.Namespace) -> Any:
    """Returns an engine whose caches are full of random numbers, each request's pages in random order."""
    context = 2 * 128 + max(max(new + before for new, before in a.shapes), max(length for _, length in a.steps))
    requests = max(batch for batch, _ in a.steps)
    slots = 128 * (2 * requests + max(context, *(batch * (length + 128) for batch, length in a.steps)) // 128)
    e = importlib.import_module(ITSELF).Engine(
        made, device=a.device, heads=heads, kv_heads=kv_heads, layers=tuple(range(LAYERS)), topk=16, context=context,
        requests=requests, slots=slots,
    )  # fmt: skip
    for layer in e.layers:
        for pool in (*e.pool.get_kv_buffer(layer.layer_id), e.pool.get_index_k_buffer(layer.layer_id)):
            pool.normal_()
    return e


def place(e: Any, batch: int, length: int) -> None:
    """Gives the first requests of an engine `length` tokens each."""
    pages = -(-length // e.page)
    order = torch.randperm(batch * pages, device=e.device).view(batch, pages) + 1
    slots = (order[:, :, None] * e.page + torch.arange(e.page, device=e.device)).flatten(1)[:, :length]
    e.slots[1 : batch + 1, :length] = slots.int()


def forward_batch(e: Any, mode: str, batch: int, new: int, length: int) -> Any:
    """Returns SGLang's batch in which each request has `length` tokens, the last `new` of them new."""
    info = e.made["model_executor.forward_batch_info"]
    lens = torch.full((batch,), length, dtype=torch.int64, device=e.device)
    requests = torch.arange(1, batch + 1, device=e.device)
    slots = e.slots[1 : batch + 1, length - new : length].flatten().long()
    more: dict[str, Any] = {}
    if mode == "EXTEND":
        more = {
            "extend_seq_lens": torch.full_like(lens, new, dtype=torch.int32),
            "extend_prefix_lens": torch.full_like(lens, length - new, dtype=torch.int32),
            "extend_seq_lens_cpu": [new] * batch,
        }
    return info.ForwardBatch(
        forward_mode=info.ForwardMode[mode], batch_size=batch, input_ids=slots, req_pool_indices=requests, seq_lens=lens,
        out_cache_loc=slots, seq_lens_sum=batch * length, seq_lens_cpu=lens.cpu(), **more,
    )  # fmt: skip


def timed(call: Callable[[], Any], repeat: int, cuda: bool) -> float:
    """Returns the median milliseconds of a call on the GPU; 0 on a CPU."""
    taken = []
    for _ in range(repeat):
        if not cuda:
            call()
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken) if taken else 0.0


def widest_tie(e: Any, before: int, index_q: torch.Tensor, groups: torch.Tensor) -> float:
    """Returns how far the score of the last block that a query selects lies above that of the next one, over its best score:
    the widest of these gaps over queries and KV heads in `groups`, of which at most 512 are looked at. Where two backends
    differ by a tie alone, it is no larger than what 16-bit products round."""
    pool, widest = e.pool.get_index_k_buffer(e.layers[0].layer_id).flatten(0, -2), 0.0
    keys = pool[e.slots[1, : before + len(index_q)].long()].float()
    for query, head in groups.nonzero()[:512].tolist():
        own = (before + query) // 128  # It is selected whatever its score is.
        if own <= 15:
            return float("inf")  # Every block is selected.
        scores = keys[: own * 128] @ index_q[query, head].float()
        best = scores.view(own, 128).amax(1).sort(descending=True).values.tolist()
        widest = max(widest, (best[14] - best[15]) / abs(best[0]))
    return widest


def compare(e: Any, pair: dict[str, Any], mode: str, batch: int, new: int, length: int, repeat: int) -> dict[str, Any]:
    """Runs both backends on one batch; returns their times and how far their outputs are apart."""
    place(e, batch, length)
    b, drawn, outs, row = forward_batch(e, mode, batch, new, length), e.drawn(batch * new), {}, {}
    q, k, v, index_q, index_k = drawn
    cuda = e.device != "cpu"

    def layers(backend: Any) -> list[torch.Tensor]:
        call = backend.forward_decode if mode == "DECODE" else backend.forward_extend
        return [call(q, k, v, layer, b, True, idx_q=index_q, idx_k=index_k, idx_v=None)[1] for layer in e.layers]

    for name, backend in pair.items():

        def prompt(backend: Any = backend) -> list[torch.Tensor]:
            backend.init_forward_metadata(b)
            return layers(backend)

        def graphed(backend: Any = backend) -> list[torch.Tensor]:
            backend.init_forward_metadata_in_graph(b)
            return layers(backend)

        outs[name] = prompt()[0].clone()
        if mode == "DECODE" and cuda:
            backend.init_cuda_graph_state(batch, batch)
            backend.init_forward_metadata_out_graph(b, in_capture=True)
            graphed()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                graphed()
            row[name] = timed(graph.replay, 5 * repeat, cuda)
        else:
            row[name] = timed(prompt, repeat, cuda)
    apart = {}
    if "own" in outs:
        difference = (outs["own"].float() - outs["openmsa"].float()).abs()
        apart = {"apart_mean": difference.mean().item(), "apart_max": difference.max().item()}
        groups = difference.view(len(index_q), e.kv_heads, -1).amax(2) > 0.02
        apart["queries_apart"] = int(groups.any(1).sum())
        if batch == 1:
            apart["widest_tie"] = widest_tie(e, length - new, index_q, groups)
    return {"mode": mode, "batch": batch, "new": new, "length": length, "ms": row, **apart}


def main() -> None:
    """Runs what the command line says."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-o", "--out", type=Path, default=Path("sglang.jsonl"))
    p.add_argument("--heads", type=int, nargs="*", default=[16, 32], help="query heads; KV heads are 1 of 16, 4 of 32")
    p.add_argument("--jit", action="store_true", help="leave SGLang the kernels that it compiles with nvcc")
    p.add_argument("--prompts", action="store_true", help="no decode steps")
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--device", default="cuda")
    p.add_argument("--small", action="store_true", help="tiny shapes; on a CPU our backend alone, in Triton's interpreter")
    a = p.parse_args()
    a.shapes, a.steps = ([(200, 0), (40, 2300)], [(2, 2300)]) if a.small else (SHAPES, STEPS)
    for name in ("SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX", "SGLANG_OPT_USE_MINIMAX_FUSED_KV_INDEX_STORE"):
        os.environ[name] = str(int(a.jit))
    made = importlib.import_module(ITSELF).load()
    for heads in a.heads:
        e = engine(made, heads, 1 if heads == 16 else 4, a).start()
        pair = {"openmsa": e.backend.sparse}
        if a.device != "cpu":  # SGLang's kernels tune themselves on a GPU.
            own = made["layers.attention.minimax_sparse_backend"].MiniMaxSparseAttnBackend(e.runner)
            pair = {"own": own, **pair}
        rows = [("EXTEND", 1, new, new + before) for new, before in a.shapes]
        steps = [] if a.prompts else [("DECODE", batch, 1, length) for batch, length in a.steps]
        for mode, batch, new, length in [*rows, *steps]:
            row = {"heads": heads, "jit": a.jit, **compare(e, pair, mode, batch, new, length, a.repeat)}
            with a.out.open("a") as f:
                f.write(json.dumps(row) + "\n")
            line = ", ".join(f"{name} {ms:.3f} ms" for name, ms in row["ms"].items())
            if "apart_mean" in row:
                line += f", {row['ms']['own'] / row['ms']['openmsa']:.2f}x"
                line += f", apart {row['apart_mean']:.5f} in the mean, {row['apart_max']:.4f} at most"
                line += f", {row['queries_apart']} queries by more than 0.02 (widest tie {row.get('widest_tie', 0):.1e})"
            print(f"sglang {heads} heads {mode} {batch} x {length}, {new} new: {line}", flush=True)
        del e, pair


if __name__ == "__main__":
    main()
