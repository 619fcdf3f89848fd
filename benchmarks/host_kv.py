# SPDX-License-Identifier: MIT
"""Times decode over keys and values in host memory, beside the same steps with all of them on the GPU.

    python3 -m benchmarks.host_kv --out records.jsonl [--batch 8 --keys 262144 --cache 0.1 0.015] [--recorded ids.pt]

First results are compared with those of resident caches, bit for bit. Then a layer's step is timed: append, selection, the
block cache, attention, in a CUDA graph, with a cold L2 cache. All ways read selections of one kind: a step keeps a share of the
blocks of the step before and draws the others at random, the own block aside; or they are recorded ones of a real model, int
``[steps, heads, topk]``. The scores and the selection are computed all the same, and one small copy puts the given ids in their
place. The host link is measured in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from openmsa import DecodePlan, HostDecodePlan, HostKV, PagedIndexKeys, PagedKV
from openmsa.bench.record import append as write_records
from openmsa.bench.record import environment
from openmsa.decode import kernels as decode_kernels
from openmsa.host_kv import triton_fetch
from openmsa.runtime.kinds import computes
from openmsa.testing.timing import ColdCudaClock, captured, settle

Q_HEADS, HEADS, DIM, PAGE, TOPK = 64, 4, 128, 128, 16
WARM, TIMED = 160, 48
GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16


class Problem(NamedTuple):
    """Holds caches of one layer, resident and on the host, and the tensors of a step."""

    kv: PagedKV
    keys: PagedIndexKeys
    q: Tensor
    index_q: Tensor
    new: Tensor
    lens: Tensor

    def reset(self, *caches: Any) -> None:
        """Sets lengths back to those of the start."""
        for cache in (self.kv, self.keys, *caches):
            cache.seq_lens.copy_(self.lens)


def problem(batch: int, keys: int) -> Problem:
    """Makes a layer of random tensors; its sequences end between 300 and 600 keys before `keys`."""
    pages = keys // PAGE
    table = torch.randperm(batch * pages, device=GPU).int().view(batch, pages)
    lens = torch.tensor([keys - 300 - 37 * b % 300 for b in range(batch)], dtype=torch.int32, device=GPU)
    pool, index = (torch.empty(batch * pages, heads, PAGE, DIM, dtype=BF16, device=GPU) for heads in (HEADS, 1))
    kv = PagedKV(pool.normal_(), torch.empty_like(pool).normal_(), table, lens.clone())
    q, index_q, new = (torch.randn(batch, n, DIM, dtype=BF16, device=GPU) for n in (Q_HEADS, HEADS, HEADS))
    return Problem(kv, PagedIndexKeys(index.normal_(), table, lens.clone()), q, index_q, new, lens)


def on_host(p: Problem, slots: int) -> HostKV:
    """Copies the keys and values to host memory."""
    p.reset()
    return HostKV.of(p.kv, cache_blocks=slots)


def plan_of(kind: type[DecodePlan], p: Problem) -> Any:
    """Makes a plan of M3's sizes."""
    batch, pages = p.kv.page_table.shape
    return kind(
        max_batch=batch, num_q_heads=Q_HEADS, num_kv_heads=HEADS, head_dim=DIM, page_size=PAGE, max_pages=pages, topk=TOPK,
        certified_keys=False, device=GPU,
    )  # fmt: skip


def stepping(p: Problem, plan: Any, kv: PagedKV | HostKV) -> Callable[[], Tensor]:
    """Returns what appends a token to each sequence and runs a step."""

    def step() -> Tensor:
        p.keys.append(p.new[:, :1])
        kv.append(p.new, p.new)
        out: Tensor = plan.run(p.q, kv, p.index_q, p.keys)
        return out

    return step


def compare() -> int:
    """Runs steps of both ways, with appends, through eager calls and graphs, and raises where a bit differs. Returns their
    number."""
    p, steps = problem(8, 65_536), 0
    for slots in (8 * HEADS * TOPK, 4000):
        host, plan, resident = on_host(p, slots), plan_of(HostDecodePlan, p), plan_of(DecodePlan, p)
        p.reset(host)
        mine, theirs = stepping(p, plan, host), stepping(p, resident, p.kv)
        for way in (lambda run: run, captured):
            runs = [way(mine), way(theirs)]
            p.reset(host)  # Rows behind the lengths are written anew, which slots must notice.
            for _ in range(100):
                for x in (p.q, p.index_q, p.new):
                    x.normal_()
                runs[0]()
                p.keys.seq_lens.sub_(1)
                runs[1]()
                for name in ("_out", "_lse", "_blocks"):
                    if not torch.equal(getattr(plan, name), getattr(resident, name)):
                        raise RuntimeError(f"{name} of step {steps} differs from that of a resident cache")
                steps += 1
        if not torch.equal(host.seq_lens, p.kv.seq_lens):
            raise RuntimeError(f"lengths differ: {host.seq_lens.tolist()}, {p.kv.seq_lens.tolist()}")
        for pool, source in zip(host.pools().values(), p.kv.pools().values(), strict=True):
            here = source.to("cpu")
            assert isinstance(pool, Tensor)
            assert isinstance(here, Tensor)
            if not torch.equal(pool, here):
                raise RuntimeError("appended rows differ in host memory")
        print(f"{steps} steps equal; {slots} slots: {host.statistics()}")
    return steps


def drifting(p: Problem, share: float, steps: int) -> Tensor:
    """Draws selections ``[steps, batch, HEADS, TOPK]`` of which a step keeps a share from the step before; ascending ids, the
    own block last."""
    draw, lens = random.Random(share), p.lens.tolist()
    batch = len(lens)
    chosen = torch.empty(steps, batch, HEADS, TOPK, dtype=torch.int32)
    for b in range(batch):
        for head in range(HEADS):
            ids: list[int] = []
            for t in range(steps):
                own = (lens[b] + t) // PAGE
                ids = [i for i in ids if draw.random() < share]
                while len(ids) < TOPK - 1:
                    i = draw.randrange(own - 1)
                    ids += [i] if i not in ids else []
                chosen[t, b, head] = torch.tensor([*sorted(ids), own], dtype=torch.int32)
    return chosen.to(GPU)


def recorded(p: Problem, ids: Tensor, steps: int) -> Tensor:
    """Places recorded selections of one sequence, int ``[steps, heads, TOPK]``, whose last block is the own one. Their heads
    and steps are dealt to the sequences; blocks keep their distance from the own one."""
    batch, own = p.lens.numel(), (p.lens.cpu()[None, :] + torch.arange(steps)[:, None]) // PAGE
    chosen = torch.empty(steps, batch, HEADS, TOPK, dtype=torch.int32)
    length = ids.shape[0] - steps
    if length < 0:
        raise ValueError(f"recorded selections must have at least {steps} steps, got {ids.shape[0]}")
    for b in range(batch):
        for head in range(HEADS):
            start, of = (b * length) // batch, (b * HEADS + head) % ids.shape[1]
            taken = ids[start : start + steps, of].int()
            chosen[:, b, head] = taken - taken[:, -1:] + own[:, b, None].int()
    if int(chosen.min()) < 0:
        raise ValueError(f"recorded selections must reach back no further than the keys, got block {int(chosen.min())}")
    return chosen.to(GPU)


def give(ids: Tensor) -> None:
    """Puts given ids in the place of what all plans select from here on, which they do all the same."""
    select = decode_kernels.select

    def selects(*arguments: Any) -> None:
        computes("the copy of given selections")  # so that steps are not replayed from recorded launches, which lack it
        select(*arguments)
        blocks = arguments[-1]  # some of the plan's own, from its first on
        start = blocks.storage_offset() // (HEADS * TOPK)
        blocks.copy_(ids[start : start + blocks.shape[0]])

    setattr(decode_kernels, "select", selects)  # noqa: B010 - mypy knows it as a function


class Figures(NamedTuple):
    """Holds the median of the timed steps in seconds, and how many blocks a step missed and how many bytes it fetched."""

    seconds: float
    misses: float = 0.0
    bytes: float = 0.0


def timed(
    p: Problem,
    run: Callable[[], object],
    ids: Tensor,
    all_ids: Tensor,
    host: HostKV | None = None,
) -> Figures:
    """Times `TIMED` steps after `WARM` others, which fill the block cache of `host`."""
    replay = captured(run)
    p.reset(*([host] if host else []))
    if host:
        host.clear()
    clock, seconds = ColdCudaClock(GPU), []
    for t in range(WARM):
        ids.copy_(all_ids[t])
        replay()
    settle(clock)
    before = host.statistics() if host else None
    for t in range(WARM, WARM + TIMED):
        ids.copy_(all_ids[t])
        seconds.append(clock(replay))
    if host is None or before is None:
        return Figures(statistics.median(seconds))
    found = host.statistics()
    each = ((found.misses - before.misses) / TIMED, (found.bytes - before.bytes) / TIMED)
    return Figures(statistics.median(seconds), *each)


def link(p: Problem, host: HostKV) -> dict[str, float]:
    """Measures the host link in bytes a second: a copy of 256 MiB to the GPU, and the append of 16,384 tokens to `host`, over
    what it holds."""
    source = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    target, clock = torch.empty_like(source, device=GPU), ColdCudaClock(GPU)
    seconds = statistics.median(clock(lambda: target.copy_(source, non_blocking=True)) for _ in range(10))
    rates = {"copy": source.numel() / seconds}
    new = torch.randn(p.lens.numel() * 2048, HEADS, DIM, dtype=BF16, device=GPU)
    taken = []
    for _ in range(6):
        host.seq_lens.zero_()
        taken.append(clock(lambda: host.append(new, new)))
    return rates | {"append": 2 * new.numel() * 2 / statistics.median(taken[1:])}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="records are added to this JSONL file")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--keys", type=int, default=262_144)
    parser.add_argument("--cache", type=float, nargs="+", default=[0.1, 0.015], help="shares of the keys that slots hold")
    parser.add_argument(
        "--share", type=float, nargs="+", default=[0.95, 0.9, 0.8, 0.0], help="of blocks kept from step to step"
    )
    parser.add_argument("--recorded", type=Path, help="selections of a real model, torch.save of int [steps, heads, 16]")
    options = parser.parse_args()
    torch.manual_seed(0)
    equal, p = compare(), problem(options.batch, options.keys)
    kinds = {f"{share:.0%} kept": drifting(p, share, WARM + TIMED) for share in options.share}
    if options.recorded:
        kinds["recorded"] = recorded(p, torch.load(options.recorded), WARM + TIMED)
    ids = torch.zeros(options.batch, HEADS, TOPK, dtype=torch.int32, device=GPU)
    plan, host_plan = plan_of(DecodePlan, p), plan_of(HostDecodePlan, p)
    give(ids)
    resident = timed(p, stepping(p, plan, p.kv), ids, next(iter(kinds.values()))).seconds
    least, blocks = options.batch * HEADS * TOPK, options.batch * options.keys // PAGE * HEADS
    host = on_host(p, least)
    rates, records = link(p, host), []
    table = Table("cache", "selections", "step us", "of resident", "misses", "bring us", "GB/s", "step: of link")
    for share in options.cache:
        host = HostKV(host.k, host.v, p.kv.page_table, p.lens.clone(), max(int(share * blocks), least))
        for kind, all_ids in kinds.items():
            run = stepping(p, host_plan, host)
            whole = timed(p, run, ids, all_ids, host)
            if not torch.equal(host_plan.blocks, ids):
                raise RuntimeError("a step must read the given selections, but it read those that it chose itself")
            alone = timed(p, bringing(p, host, ids, host_plan._kernels.step), ids, all_ids, host)
            rate = alone.bytes / alone.seconds
            table.add_row(
                f"{share:.1%}", kind, f"{1e6 * whole.seconds:.1f}", f"{whole.seconds / resident:.2f}", f"{whole.misses:.1f}",
                f"{1e6 * alone.seconds:.1f}", f"{rate / 1e9:.1f}",
                f"{whole.bytes / whole.seconds / rates['copy']:.0%}",
            )  # fmt: skip
            shape = {"batch": options.batch, "keys": options.keys, "cache": share, "slots": host.cache.count, "kind": kind}
            steps = {"whole": whole._asdict(), "bring": alone._asdict()}
            figures = {**steps, "resident_s": resident, "link": rates}
            held = {"device_bytes": host.device_bytes, "host_bytes": host.host_bytes, "steps_equal": equal}
            records.append({"row": "host_kv", **shape, **figures, **held, **environment(GPU)})
    write_records(records, options.out)
    console = Console(width=100)
    console.print(f"a resident step {1e6 * resident:.1f} us; " + ", ".join(f"{k} {v / 1e9:.1f} GB/s" for k, v in rates.items()))
    console.print(table)
    for share in options.cache:
        used = next(r["device_bytes"] for r in records if r["cache"] == share) / (options.batch * options.keys)
        console.print(f"cache {share:.1%}: {used:.0f} bytes of the GPU a token beside index keys; tokens that it holds:")
        for name, index in (("bf16", 2 * DIM), ("e4m3", DIM), ("nvfp4", DIM * 9 // 16)):
            console.print(
                f"  {name} index keys of {index} bytes: {(4 * HEADS * DIM + index) / (used + index):.1f}x resident ones"
            )


def bringing(p: Problem, host: HostKV, ids: Tensor, step: triton_fetch.Step) -> Callable[[], None]:
    """Returns what does nothing but bring the given blocks into slots."""

    def bring() -> None:
        for cache in (host, p.keys):
            cache.seq_lens.add_(1)
        triton_fetch.bring(host, ids, 1, step)

    return bring


if __name__ == "__main__":
    main()
