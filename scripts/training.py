#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the gradients of attention and of the index loss on a GPU, and times forward and backward beside cuDNN's attention.

    python scripts/training.py [--tokens 16384 65536] [--selections random clustered] [--repeats 7] [--sweep]
                               [--skip checks dense losses]

Every kernel's gradients are held against float64 on small inputs, at most twice the error of PyTorch in bfloat16, and a second
run must have the same bits. Then MiniMax-M3's layout (64 query and 4 KV heads, dim 128, 16 blocks of 128) is timed, causal
self-attention of one sequence, with a cold L2 cache; below each attention the index loss over the keys that it reads, and by
what it multiplies the time of forward and backward. With --sweep also the parts of the backward, and other tiles. Prints one
table; times are medians in milliseconds. --skip leaves out checks, our dense attention, or the index loss. Exits with 1 where
a gradient is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openmsa import dense_attention, index_loss, sparse_attention
from openmsa.bench.inputs import Inputs
from openmsa.bench.workloads import Workload
from openmsa.index_loss import STAGE as LOSS
from openmsa.index_loss import triton_loss
from openmsa.primitives.gradients import RowTerms
from openmsa.primitives.readers import readers
from openmsa.primitives.triton_readers import listed
from openmsa.runtime.devices import facts
from openmsa.sparse_attention import STAGE, triton_backward
from openmsa.testing.inputs import problem, random_blocks
from openmsa.testing.timing import ColdCudaClock
from tests import gradients, oracle
from tests.index_loss import truth

GPU = torch.device("cuda")
SHAPES = ((128, 16, 1, 128, 4), (64, 4, 2, 64, 5), (96, 3, 2, 48, 3), (64, 1, 2, 32, 8), (256, 2, 1, 128, 2))


def differentiated(
    function: Callable[..., Any], leaves: list[torch.Tensor], grads: tuple[torch.Tensor, ...], *args: Any
) -> Any:
    """Returns the gradients of the leaves, with those of out and of finite lse given."""
    out, lse = function(*leaves, *args)
    some = lse.isfinite()
    return torch.autograd.grad((out, lse[some]), leaves, (grads[0], grads[1][some]))


def wrong() -> list[str]:
    """Returns a sentence for each wrong gradient, on ragged lengths in both 16-bit dtypes."""
    found = []
    for dim, group, heads, block, topk in SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            lens = ((300, 0, 3, 1), (2 * block + 305, 7, block, 9))
            p = problem(*lens, kv_heads=heads, group=group, head_dim=dim, dtype=dtype)
            blocks = random_blocks(p, topk, block, heads)
            grads = gradients.inputs_and_gradients(p)
            here, given = p.to(GPU), tuple(x.to(GPU) for x in grads)
            for name, reads, call in (
                ("sparse", oracle.reads_of_blocks(blocks, block), _sparse(here, blocks.to(GPU), block)),
                ("dense", oracle.reads_everything(p), _dense(here)),
            ):
                leaves = [x.detach().requires_grad_() for x in (here.q, here.k, here.v)]
                first, second = (differentiated(call, leaves, given) for _ in range(2))
                what = f"{name} dim {dim} group {group} block {block} {dtype}"
                try:
                    gradients.check(first, p, reads, dim**-0.5, *grads)
                except AssertionError as error:
                    found.append(f"{what}: {error}")
                if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
                    found.append(f"{what}: a second run has other bits")
    return found


def wrong_losses() -> list[str]:
    """Returns a sentence for each wrong index loss or gradient of it, on ragged lengths in three dtypes."""
    found = []
    for dim, group, heads, block, topk in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            lens = ((300, 0, 3, 1), (2 * block + 305, 7, block, 9))
            p = problem(*lens, kv_heads=heads, group=group, head_dim=dim, dtype=dtype)
            selection = random_blocks(p, topk, block, heads)
            for blocks, reads in ((selection, oracle.reads_of_blocks(selection, block)), (None, oracle.reads_everything(p))):
                what = f"index loss dim {dim} group {group} block {block} {dtype}, {'all' if blocks is None else 'selected'}"
                first, second = (_loss(p.to(GPU), None if blocks is None else blocks.to(GPU), block) for _ in range(2))
                try:
                    truth.check(first, p, reads, dim**-0.5, dim**-0.5)
                except AssertionError as error:
                    found.append(f"{what}: {error}")
                if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
                    found.append(f"{what}: a second run has other bits")
    return found


def _loss(p: Any, blocks: torch.Tensor | None, block: int) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (p.index_q, p.index_k)]
    loss = index_loss(p.q, p.k, *leaves, blocks, p.seqs, block_size=block)
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


def _sparse(p: Any, blocks: torch.Tensor, block: int) -> Callable[..., Any]:
    return lambda q, k, v: sparse_attention(q, k, v, blocks, p.seqs, block_size=block, return_lse=True)


def _dense(p: Any) -> Callable[..., Any]:
    return lambda q, k, v: dense_attention(q, k, v, p.seqs, return_lse=True)


class Timer:
    """Times calls with a cold L2 cache, and prints a row for each."""

    def __init__(self, repeats: int) -> None:
        self.repeats, self.clock = repeats, ColdCudaClock(GPU)

    def __call__(self, call: Callable[[], Any]) -> float:
        """Returns the median of the milliseconds that the call takes."""
        call()
        return 1e3 * statistics.median(self.clock(call) for _ in range(self.repeats))

    def show(self, name: str, forward: Callable[[], Any], leaves: list[torch.Tensor], flops: float) -> float:
        """Prints forward, backward and both; returns both. flops: of two products of the forward; the backward needs five."""
        with torch.no_grad():
            ahead = self(forward)
        out = forward()
        grad = torch.randn_like(out)
        back = self(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
        rate = 3.5 * flops / (ahead + back) / 1e9
        print(f"{name:<44}{ahead:9.3f}{back:10.3f}{ahead + back:10.3f}{rate:9.0f}", flush=True)
        return ahead + back


def cudnn(x: Inputs) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """Returns dense attention by cuDNN, with 64 KV heads as its backward takes them, and its inputs."""
    heads = x.q.shape[1] // x.k.shape[1]
    shared = (x.k.repeat_interleave(heads, 1), x.v.repeat_interleave(heads, 1))
    leaves = [t.transpose(0, 1)[None].contiguous().requires_grad_() for t in (x.q, *shared)]

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*leaves, is_causal=True)

    return run, leaves


def times(tokens: int, kinds: list[str], timer: Timer, sweep: bool, skip: list[str]) -> None:
    """Prints the table of one length."""
    x = Inputs(Workload(f"training {tokens}", "cuda", tokens, tokens, ()), GPU)
    pairs = 4 * 64 * 128  # FLOPs of the forward for a (query, key) pair of all heads
    print(f"\n{f'{tokens} tokens, ms':<44}{'forward':>9}{'backward':>10}{'both':>10}{'TFLOP/s':>9}")
    peer = timer.show("cuDNN dense", *cudnn(x), pairs * tokens * (tokens + 1) / 2)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    if "dense" not in skip:
        both = timer.show("openmsa dense", lambda: dense_attention(*leaves), leaves, pairs * tokens * (tokens + 1) / 2)
        if "losses" not in skip:
            losses(x, None, both, timer, sweep)
    for kind in kinds:
        blocks = x.selection(kind)
        last = torch.arange(tokens, device=GPU)[:, None, None]
        seen = (last - blocks * 128 + 1).clamp(0, 128).masked_fill(blocks < 0, 0).sum().item() / 4
        both = timer.show(f"openmsa sparse, {kind}", lambda b=blocks: sparse_attention(*leaves, b), leaves, pairs * seen)
        print(f"{'':<4}cuDNN / openmsa: {peer / both:.2f}")
        if "losses" not in skip:
            losses(x, blocks, both, timer, sweep)
        if sweep:
            parts(x, blocks, timer)


def losses(x: Inputs, blocks: torch.Tensor | None, both: float, timer: Timer, sweep: bool) -> None:
    """Prints the times of the index loss. both: of forward and backward of the attention over the same keys."""
    with torch.no_grad():
        if blocks is None:
            lse = dense_attention(x.q, x.k, x.v, return_out=False, return_lse=True)
        else:
            lse = sparse_attention(x.q, x.k, x.v, blocks, return_lse=True)[1]
    call = LOSS.check(x.q, x.k, x.index_q, x.index_k, blocks, lse=lse)

    def run(change: dict[str, Any], **options: Any) -> Callable[[], Any]:
        return lambda: triton_loss.loss_and_gradients(*call._replace(**change), **options)

    rows = {
        "index loss and gradients": run({}),
        "without its value": run({"return_loss": False}),
        "the value alone": run({}, gradients=False),
        "with the main lse made again": run({"lse": None}),
    }
    own = triton_loss.loss_config(128, 1, 128, 2, facts(GPU))
    for change in ({"stages": 1}, {"stages": 3}, {"warps": 4}, {"rows": 32}, {"rows": 128}, {"keys": 64}, {"item": 2048}):
        if sweep:
            rows[f"index loss, tiles {change}"] = run({}, config=dataclasses.replace(own, **change))
    for name, call_row in rows.items():
        print(f"{'':<4}{name:<40}{'':>9}{_or_why(timer, call_row)}", flush=True)
    ratio = (both + timer(rows["index loss and gradients"])) / both
    print(f"{'':<4}attention with the index loss / without: {ratio:.2f}")


def parts(x: Inputs, blocks: torch.Tensor, timer: Timer) -> None:
    """Prints the time of the parts of the backward, and of the whole with other tiles and workspaces."""
    call = STAGE.check(x.q, x.k, x.v, blocks, return_lse=True)
    with torch.no_grad():
        out, lse = STAGE.run("auto", call)
    call = call._replace(out=out, lse=lse)
    grad, own = torch.randn_like(out), triton_backward.backward_config(128, 16, 128, 9, 2)

    def whole(**options: Any) -> Callable[[], Any]:
        return lambda: triton_backward.sparse_attention_backward(*call, grad, None, **options)

    rows: dict[str, Callable[[], Any]] = {
        "lists, sorted": lambda: readers(blocks, call.seqs, x.k.shape[0], 128, own.item),
        "terms of rows": lambda: RowTerms.of(out, lse, grad, None),
        "lists, counted": lambda: listed(blocks, call.seqs, x.k.shape[0], 128, own.item),
        "as it is": whole(),
        "in Triton": whole(tuned=False),
        **{f"Hopper's kernel, {n} stages": whole(tuned=True, options={"STAGES": n}) for n in (1, 2)},
    }
    for item in (512, 2048):
        rows[f"Hopper's kernel, items of {item}"] = whole(tuned=True, config=dataclasses.replace(own, item=item))
    for change in (
        {"stages": 1},
        {"stages": 3},
        {"rows": 32},
        {"keys": 64},
        {"keys": 64, "warps": 4},
        {"item": 256},
        {"item": 2048},
    ):
        rows[f"tiles {change}"] = whole(tuned=False, config=dataclasses.replace(own, **change))
    for gigabytes in (1, 4, 8):
        rows[f"workspace {gigabytes} GiB"] = whole(workspace_bytes=gigabytes << 30)
    for name, run in rows.items():
        print(f"{'':<4}{name:<40}{'':>9}{_or_why(timer, run)}", flush=True)


def _or_why(timer: Timer, run: Callable[[], Any]) -> str:
    """Returns the time of a call, or the error of one whose tiles do not fit."""
    try:
        return f"{timer(run):10.3f}"
    except Exception as error:
        return f" {type(error).__name__}"


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--selections", nargs="+", default=["random", "clustered"], choices=["random", "clustered"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--skip", nargs="+", default=[], choices=["checks", "dense", "losses"])
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    if "checks" not in options.skip:
        found = wrong() + wrong_losses()
        print(f"gradients: {len(found)} wrong of {10 * len(SHAPES)}", *found, sep="\n  ")
    timer = Timer(options.repeats)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for tokens in options.tokens:
        times(tokens, options.selections, timer, options.sweep, options.skip)
        torch.cuda.empty_cache()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
