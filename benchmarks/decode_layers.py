# SPDX-License-Identifier: MIT
"""Times decode layers as an engine runs them: each has caches of its own, and other kernels run between two of them.

    python3 -m benchmarks.decode_layers --out layers.jsonl [--heads 16/1] [--batch 8 32] [--keys 16384] [--peers .peers]

A figure is a layer's share of a graph of `LAYERS` layers, in microseconds. "in a row": they follow each other, so that their
code stays in the multiprocessors' caches. "behind": each stands behind a copy of 96 MB, which empties the L2 cache, and nine
small kernels, as in an engine, so that it fetches its code anew; the time of these is taken off. Ways take turns: "plan" is a
`DecodePlan` with room for `--room` keys, "stages" the same without the kernel that runs a layer in one launch, "vllm" are
vLLM's Triton kernels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.decode import GPU, PAGE, Step, parser_of
from openmsa.bench.record import append, environment
from openmsa.bench.vllm_peer import load
from openmsa.testing.timing import captured

LAYERS = 4
PLACES = ("in a row", "behind")


class Others:
    """Runs other kernels: a copy that empties the L2 cache, and nine small ones of PyTorch and cuBLAS."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(2, 96 << 20, dtype=torch.uint8, device=GPU)
        self.x, self.w = (torch.randn(n, 2048, device=GPU, dtype=torch.bfloat16) for n in (64, 512))

    def __call__(self) -> Tensor:
        self.bytes[1].copy_(self.bytes[0])
        hidden = functional.silu(functional.layer_norm(self.x, (2048,)) @ self.w.t())
        gates = (hidden.softmax(-1) + hidden) * 2
        gates.argmax(-1)
        return gates.cumsum(0) @ self.w


def layers_of(
    steps: list[Step], room: int, kernels: Any, names: list[str]
) -> dict[str, tuple[list[Callable[[], Any]], list[Tensor]]]:
    """Returns, for each way, what runs each layer, and where its results are."""
    ways: dict[str, tuple[list[Callable[[], Any]], list[Tensor]]] = {}
    first = steps[0]
    for name in names:
        if name == "vllm":
            runs = [step.vllm(kernels) for step in steps]
            ways[name] = runs, [run() for run in runs]
            continue
        plan = first.decode_plan(room // PAGE)
        if name == "stages":
            plan._kernels.one_launch = [None] * first.batch
        outs = [torch.empty_like(step.q) for step in steps]
        runs = [
            lambda plan=plan, step=step, out=out: plan.run(step.q, step.kv, step.index_q, step.index_keys, out=out)  # type: ignore[misc]
            for step, out in zip(steps, outs, strict=True)
        ]
        for run in runs:
            run()
        ways[name] = runs, outs
    return ways


def measure(steps: list[Step], room: int, kernels: Any, others: Others, samples: int) -> dict[str, float]:
    """Returns the microseconds of a layer by way and place, and how far results of the ways lie apart at most."""
    ways = layers_of(steps, room, kernels, ["plan", "stages", *(["vllm"] if kernels is not None else [])])

    def graph(runs: list[Callable[[], Any]], behind: bool) -> Callable[[], Any]:
        return captured(lambda: [(others() if behind else None, run()) for run in runs])

    graphs = {f"{name} {place}": graph(runs, place == "behind") for name, (runs, _) in ways.items() for place in PLACES}
    graphs["others"] = graph([lambda: None] * len(steps), True)
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(samples + 2):  # The first two load code and warm the clock.
        for name, replay in graphs.items():
            start.record()
            replay()
            stop.record()
            stop.synchronize()
            if i > 1:
                taken[name].append(1e3 * start.elapsed_time(stop) / len(steps))
    found = {name: statistics.median(times) for name, times in taken.items()}
    idle = found.pop("others")
    found = {name: us - idle if name.endswith("behind") else us for name, us in found.items()}
    outs = [[out.float() for out in outs] for _, outs in ways.values()]
    found["apart"] = max(float((x - y).abs().max()) for other in outs for x, y in zip(outs[0], other, strict=True))
    return found


def main() -> None:
    """Runs the command."""
    parser = parser_of(__doc__, heads=["16/1", "32/4"], batch=[1, 8, 32], keys=[16384], new=[1], samples=12)
    parser.add_argument("--room", type=int, nargs="+", default=[32768, 262144], help="keys that a plan is made for")
    options = parser.parse_args()
    kernels, shared, others = load(options.peers) if options.peers else None, environment(GPU), Others()
    for heads in options.heads:
        q_heads, kv_heads = map(int, heads.split("/"))
        for batch, keys, new in ((b, n, t) for b in options.batch for n in options.keys for t in options.new):
            torch.manual_seed(batch + keys + new)
            steps = [Step(batch, keys, new, (q_heads, kv_heads), near=new > 1) for _ in range(LAYERS)]
            for room in (room for room in options.room if room >= keys):
                found = measure(steps, room, kernels, others, options.samples)
                shape = {"heads": heads, "batch": batch, "keys": keys, "new": new, "room": room}
                append([{**shared, "row": "decode_layers", **shape, "us": found}], options.out)
                figures = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
                print(f"{heads} {batch} x {keys}, {new} new, room {room}: {figures}", flush=True)


if __name__ == "__main__":
    main()
