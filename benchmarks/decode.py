# SPDX-License-Identifier: MIT
"""Measures decode steps over many batches, lengths and new tokens beside vLLM's kernels, each step in a CUDA graph.

    python3 -m benchmarks.decode --peers .peers --out records.jsonl [--heads 64/4] [--batch 8 32 128] [--keys 1024] [--new 8]

A step is one layer's selection and attention, on random keys with a cold L2 cache; all ways take turns. `plan` is a
`DecodePlan`, `apart` the same plan whose new tokens each read their blocks on their own, `steps` an `AttentionPlan`, `vllm` are
vLLM's Triton kernels. With several new tokens, those of a sequence choose alike ("near") or each for itself ("far").
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openmsa import AttentionPlan, DecodePlan, PagedIndexKeys, PagedKV
from openmsa.bench.record import append, environment
from openmsa.bench.vllm_peer import load
from openmsa.testing.timing import ColdCudaClock, captured, settle

PAGE, DIM, TOPK = 128, 128, 16
GPU = torch.device("cuda", 0)


class Step:
    """Holds the tensors of a step."""

    def __init__(self, batch: int, keys: int, new: int, heads: tuple[int, int], near: bool) -> None:
        self.batch, self.keys, self.new, (q_heads, kv_heads) = batch, keys, new, heads
        pages, tokens = keys // PAGE, batch * new
        self.table = torch.randperm(batch * pages, device=GPU).int().view(batch, pages)
        self.lens = torch.full((batch,), keys, dtype=torch.int32, device=GPU)
        draw = partial(torch.randn, device=GPU, dtype=torch.bfloat16)
        self.pool = torch.empty(batch * pages, kv_heads, PAGE, 2 * DIM, dtype=torch.bfloat16, device=GPU).normal_()
        self.index = draw(batch * pages, 1, PAGE, DIM)
        self.q, self.index_q = draw(tokens, q_heads, DIM), draw(tokens, kv_heads, DIM)
        if near:
            self.index_q = draw(batch, kv_heads, DIM).repeat_interleave(new, 0) + 0.3 * self.index_q
        self.kv = PagedKV(self.pool[..., :DIM], self.pool[..., DIM:], self.table, self.lens)
        self.index_keys = PagedIndexKeys(self.index, self.table, self.lens)

    def decode_plan(self, max_pages: int) -> DecodePlan:
        """Returns a `DecodePlan` for such steps with room for so many pages a sequence."""
        return DecodePlan(
            max_batch=self.batch, num_q_heads=self.q.shape[1], num_kv_heads=self.kv.num_heads, head_dim=DIM, page_size=PAGE,
            max_pages=max_pages, new_tokens=self.new, topk=TOPK, certified_keys=False, device=GPU,
        )  # fmt: skip

    def plan(self, apart: bool) -> Callable[[], Tensor]:
        """Returns a step of a `DecodePlan`. apart: whether each new token reads its blocks on its own."""
        made = self.decode_plan(self.table.shape[1])
        if apart:
            made._kernels.shared = made._kernels.shared._replace(cuts=[None] * self.batch)
        return partial(made.run, self.q, self.kv, self.index_q, self.index_keys)

    def steps(self) -> Callable[[], Tensor]:
        """Returns a step of an `AttentionPlan`."""
        cu = torch.arange(self.batch + 1, dtype=torch.int32, device=GPU) * self.new
        made = AttentionPlan(
            cu_seqlens_q=cu, total_q=self.q.shape[0], max_seqlen_q=self.new, max_seqlen_k=self.keys, page_table=self.table,
            seq_lens=self.lens, page_size=PAGE,
        )  # fmt: skip
        out, (k, v) = torch.empty_like(self.q), (self.pool[..., :DIM], self.pool[..., DIM:])

        def run() -> Tensor:
            made.run(self.q, k, v, self.index_q, self.index, out=out)
            return out

        return run

    def vllm(self, kernels: Any) -> Callable[[], Tensor]:
        """Returns a step of vLLM's kernels."""
        heads, out = self.kv.num_heads, torch.empty_like(self.q)

        def run() -> Tensor:
            ids = kernels.minimax_m3_index_decode(
                self.index_q, self.index[:, 0], self.table, self.lens, self.keys, TOPK, 0, 1, heads, self.new, self.new
            )
            kernels.minimax_m3_sparse_attn_decode(
                self.q, self.pool, ids, self.table, self.lens, heads, DIM**-0.5, out, self.new
            )
            return out

        return run


def measure(x: Step, kernels: Any, samples: int) -> dict[str, float]:
    """Runs the ways in turns; returns their medians in microseconds, and how many rows of vLLM's result differ from ours."""
    ways = {"plan": x.plan(apart=False), "steps": x.steps()}
    if x.new > 1:
        ways["apart"] = x.plan(apart=True)
    if kernels is not None:
        ways["vllm"] = x.vllm(kernels)
    clock, outs = ColdCudaClock(GPU), {name: run().clone() for name, run in ways.items()}
    replays = {name: captured(run) for name, run in ways.items()}
    settle(clock)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(samples):
        for name, replay in replays.items():
            seconds[name].append(clock(replay))
    found = {name: 1e6 * statistics.median(times) for name, times in seconds.items()}
    for name, out in outs.items():
        if name != "plan":  # Rows differ where a tie is decided differently; all others agree up to rounding.
            found[f"{name}_rows_that_differ"] = int(((outs["plan"] - out).abs().amax((1, 2)) > 0.02).sum())
    return found


def parser_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns the parser of a command that measures decode steps of the shapes asked for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with vLLM's kernels (none: only ours)")
    parser.add_argument("--out", type=Path, required=True, help="records are added to this JSONL file")
    parser.add_argument("--heads", nargs="+")
    for name in ("batch", "keys", "new"):
        parser.add_argument(f"--{name}", type=int, nargs="+")
    parser.add_argument("--samples", type=int)
    parser.set_defaults(**defaults)
    return parser


def main() -> None:
    """Runs the command."""
    shapes = {"heads": ["64/4", "16/1"], "batch": [8, 32, 128], "keys": [1024, 8192, 32_768, 204_800], "new": [1, 8]}
    options = parser_of(__doc__, **shapes, samples=11).parse_args()
    kernels, shared = load(options.peers) if options.peers else None, environment(GPU)
    names = ("plan", "apart", "steps", "vllm")
    print(
        f"{'heads, batch x keys, new tokens':40}" + "".join(f"{name:>9}" for name in names) + "   vllm / plan, rows that differ"
    )
    for heads in options.heads:
        ratios = []
        for batch, keys in ((b, n) for b in options.batch for n in options.keys if b * n <= 8 << 20):
            for new, near in ((n, near) for n in options.new for near in ((True, False) if n > 1 else (False,))):
                torch.manual_seed(batch + keys + new)
                q_heads, kv_heads = map(int, heads.split("/"))
                x = Step(batch, keys, new, (q_heads, kv_heads), near)
                found = measure(x, kernels, options.samples)
                shape = {"heads": heads, "batch": batch, "keys": keys, "new": new, "near": near}
                append([{**shared, "row": "decode_step", **shape, "us": found}], options.out)
                title = f"{heads} {batch} x {keys}, {new}{' near' if near else ''}"
                columns = "".join(f"{found[name]:9.1f}" if name in found else f"{'-':>9}" for name in names)
                ratio = found["vllm"] / found["plan"] if "vllm" in found else float("nan")
                differ = [v for k, v in found.items() if k.endswith("differ")]
                print(f"{title:40}{columns}   {ratio:5.2f}  {differ}", flush=True)
                ratios.append(ratio)
                del x
        print(f"{heads}: geometric mean {statistics.geometric_mean(ratios):.2f}, worst {min(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
