#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks and times the forms of Hopper's union kernel for 16-bit keys, on an H200.

    python scripts/union_forms.py [--skip-tests] [--forms NAME ...]

First the kernel's tests run, and beside them a few cases of each form in a process of its own with a time limit; then the forms
that passed take turns with the Triton kernel in one process. A short table comes last.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FORMS: dict[str, dict[str, Any]] = {
    "main": {},
    "no pin": {"PIN": False},
    "2 stages": {"STAGES": 2},
    "turns": {"TURNS": True},
    "no skip": {"SKIP": False},
    "turns, 2 stages": {"TURNS": True, "STAGES": 2},
    "tile a program": {"grid": True},
}
TEST = "tests/sparse_attention/test_gluon_sm90_attend.py"
CHECK_LIMIT, TEST_LIMIT, TIME_LIMIT = 75, 120, 100  # seconds


def use(form: str) -> None:
    """Makes the kernel run in this form from now on."""
    from openmsa.runtime.devices import facts
    from openmsa.sparse_attention import gluon_sm90_attend

    base = {"STAGES": 3, "SKIP": True, "TURNS": False, "PIN": True}
    options = FORMS[form]
    gluon_sm90_attend.OPTIONS.update(base | {name: value for name, value in options.items() if name != "grid"})
    gluon_sm90_attend.facts = (lambda _: SimpleNamespace(num_sms=1 << 30)) if "grid" in options else facts


def check_form(form: str) -> None:
    """Compares a few cases with the truth. Raises an error where they differ."""
    import torch

    from openmsa.sparse_attention import gluon_sm90_attend, reference, triton_prefill
    from openmsa.testing.compare import assert_close
    from openmsa.types import layout
    from tests.sparse_attention import test_gluon_sm90_attend as tests

    use(form)
    launched: list[Any] = []
    launch = gluon_sm90_attend.launch_sm90_attend
    gluon_sm90_attend.launch_sm90_attend = lambda call: (launched.append(1), launch(call))
    for name in ("odd", "ragged", "pages"):
        checked, expected = tests.case(name, torch.bfloat16)
        for _ in range(3):
            tests.check(tests.run(checked, path="union"), expected)
        print(form, name, "right", flush=True)
    for spread in (4, 60):
        q, k, v, blocks, seqs = tests.long_call((601, 3, 500), (5000, 128, 3001), spread=spread)
        lengths = layout(seqs, len(q), k.shape[0], q.device)
        arguments = (blocks, lengths, tests.BLOCK, 128**-0.5, True)
        truth, _ = reference.sparse_attention(q.double(), k.double(), v.double(), *arguments)
        tuned = triton_prefill._tuned
        triton_prefill._tuned = lambda *_: None
        other, _ = triton_prefill.sparse_attention(q, k, v, *arguments)
        triton_prefill._tuned = tuned
        for _ in range(3):
            out, _ = triton_prefill.sparse_attention(q, k, v, *arguments)
            assert_close("out", out, other, truth)
        print(form, "many tiles", spread, "right", flush=True)
    assert len(launched) == 15, len(launched)


def time_forms(forms: list[str]) -> None:
    """Prints the times of these forms and of today's kernel."""
    import torch

    from openmsa import PagedKV, Sequences
    from openmsa.sparse_attention import gluon_sm90_attend, triton_prefill
    from openmsa.testing.timing import captured
    from openmsa.types import layout

    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    start_event, stop_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    tuned = triton_prefill._tuned

    def clock(run: Any, count: int) -> float:
        run()
        start_event.record()
        for _ in range(count):
            run()
        stop_event.record()
        stop_event.synchronize()
        return start_event.elapsed_time(stop_event) / count

    def in_turns(runs: dict[str, Any], rounds: int = 7, count: int = 3) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(clock(run, count))
        return {name: statistics.median(x) for name, x in times.items()}

    def selection(queries: int, keys: int, heads: int, spare: int, kind: str) -> Any:
        own = torch.arange(keys - queries, keys, device=device) // 128
        below = int(own[0])
        if kind == "random":
            others = torch.rand(queries, heads, below, device=device).topk(15, -1).indices
        else:
            spans = torch.rand(-(-queries // 64), heads, below, device=device).topk(min(16 + spare, below), -1).indices
            base = spans.repeat_interleave(64, 0)[:queries]
            others = base.gather(-1, torch.rand(base.shape, device=device).topk(15, -1).indices)
        return torch.cat((others, own[:, None, None].expand(-1, heads, 1)), -1).sort(-1).values.int().contiguous()

    def problem(queries: int, keys: int, heads: int, group: int, dim: int, pages: bool, spare: int, kind: str) -> Any:
        q = torch.randn(queries, heads * group, dim, device=device).bfloat16()
        k, v = (torch.randn(keys, heads, dim, device=device).bfloat16() for _ in "kv")
        seqs = Sequences.from_lengths([queries], [keys], device)
        blocks = selection(queries, keys, heads, spare, kind)
        if pages:
            order = torch.randperm(keys // 128, device=device)
            pools = [x.unflatten(0, (-1, 128)).transpose(1, 2).contiguous() for x in (k, v)]
            pools = [torch.empty_like(x).index_copy_(0, order, x) for x in pools]
            lens = torch.tensor([keys], dtype=torch.int32, device=device)
            paged = PagedKV(pools[0], pools[1], order.int()[None], lens)
            return q, paged, None, blocks, layout(seqs, queries, None, device, paged.seq_lens, paged.capacity)
        return q, k, v, blocks, layout(seqs, queries, keys, device)

    def call_of(p: Any, ours: bool) -> Any:
        """The call that the union kernel gets, and the union's size."""
        found: list[Any] = []
        launches = gluon_sm90_attend.launch_sm90_attend, triton_prefill.launch_union
        gluon_sm90_attend.launch_sm90_attend = triton_prefill.launch_union = lambda call: found.append(call)
        triton_prefill._tuned = tuned if ours else lambda *_: None
        triton_prefill.sparse_attention(*p, 128, p[0].shape[2] ** -0.5, True)
        gluon_sm90_attend.launch_sm90_attend, triton_prefill.launch_union = launches
        triton_prefill._tuned = tuned
        return found[0] if found else None

    def ran(form: str, call: Any) -> Any:
        def run() -> None:
            use(form)
            gluon_sm90_attend.launch_sm90_attend(call)

        return run

    x = torch.randn(8192, 8192, device=device).bfloat16()
    gemm = 2 * 8192**3 / clock(lambda: x @ x, 20) / 1e9
    print(f"GEMM 8192: {gemm:.0f} TFLOP/s", flush=True)
    few = [form for form in forms if form in ("main", "turns", "no pin")]  # The others would have to be compiled here.
    shapes = {  # queries, keys, heads, group, dim, pages, spare, forms
        "64/4 16K x 128K clustered": (16384, 131072, 4, 16, 128, False, 8, forms),
        "the same, pages": (16384, 131072, 4, 16, 128, True, 8, forms[:1]),
        "the same, unions of 40 in 8, 35 in 4": (16384, 131072, 4, 16, 128, False, 24, forms),
        "16/1 16K x 48K clustered": (16384, 49152, 1, 16, 128, False, 8, forms),
        "64/4 16K x 128K, dim 64": (16384, 131072, 4, 16, 64, False, 8, few),
        "32/8 (groups of 4)": (16384, 131072, 8, 4, 128, False, 8, forms[:1]),
    }
    table = []
    for name, (*shape, here) in shapes.items():
        p = problem(*shape, "clustered")
        theirs, ours = call_of(p, False), call_of(p, True)
        runs = {"today": lambda call=theirs: triton_prefill.launch_union(call)}
        steps = 0.0
        if ours is not None:
            runs |= {form: ran(form, ours) for form in here}
            bits, sizes = ours.lists.union.bits, ours.lists.union.sizes.view(-1, 2)[:, 0]
            entries = torch.arange(ours.plan.limits.capacity, device=device)
            lists = bits[: sizes.numel() * len(entries)].view(-1, len(entries))
            listed = entries < sizes[:, None]
            half = ours.config.union_tokens // 2
            own = [((lists >> side * half & (1 << half) - 1) != 0) & listed for side in range(2)]
            steps = float(sum(x.sum() for x in own)) * ours.plan.parts
            print(f"{name}: unions {float(sizes[sizes > 0].float().mean()):.1f}, steps a half {steps / 2 / sizes.numel():.1f}")
        found = in_turns(runs)
        flops = steps * 64 * 128 * shape[4] * 4
        for form, ms in found.items():
            table.append(f"{name:40} {form:16} {ms:7.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s raw  {found['today'] / ms:5.2f}x")
            print(table[-1], flush=True)
        del p, theirs, ours, runs
    print("whole calls in graphs, Triton's union kernel and the main form in turns", flush=True)
    for name, (queries, keys, heads, kind) in {
        "64/4 clustered": (16384, 131072, 4, "clustered"),
        "64/4 random": (16384, 131072, 4, "random"),
        "16/1 48K clustered": (16384, 49152, 1, "clustered"),
        "16/1 48K random": (16384, 49152, 1, "random"),
        "64/4 1,024 queries clustered": (1024, 131072, 4, "clustered"),
        "64/4 256 queries clustered": (256, 131072, 4, "clustered"),
    }.items():
        p = problem(queries, keys, heads, 16, 128, False, 8, kind)
        use("main")
        runs = {}
        for form in ("today", "main"):
            triton_prefill._tuned = tuned if form == "main" else lambda *_: None
            runs[form] = captured(lambda p=p: triton_prefill.sparse_attention(*p, 128, 128**-0.5, True))
        triton_prefill._tuned = tuned
        found = in_turns(runs, count=3 if queries > 2000 else 20)
        table.append(f"{name:40} whole call  today {found['today']:.3f}  main {found['main']:.3f} ms")
        print(table[-1], flush=True)
        if queries == 16384 and kind == "clustered":
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(3):
                    triton_prefill.sparse_attention(*p, 128, 128**-0.5, True)
                torch.cuda.synchronize()
            kernels = [(e.key[:40], e.device_time_total / 3) for e in profile.key_averages() if e.device_time_total > 0]
            line = ", ".join(f"{key} {us:.0f}" for key, us in sorted(kernels, key=lambda x: -x[1])[:9])
            table.append(f"  main, us by kernel: {line}")
            print(table[-1], flush=True)
        del p, runs
    print("\n" + "=" * 60 + f"\nGEMM 8192: {gemm:.0f} TFLOP/s\n" + "\n".join(table))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", help="check this form in this process, and do nothing else")
    parser.add_argument("--time", nargs="+", help="time these forms in this process, and do nothing else")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    options = parser.parse_args()
    if options.check:
        check_form(options.check)
        return
    if options.time:
        time_forms(options.time)
        return
    start = time.perf_counter()
    logs = Path("/tmp/union_forms")
    logs.mkdir(exist_ok=True)
    commands = {form: [sys.executable, __file__, "--check", form] for form in options.forms}
    limits = dict.fromkeys(commands, CHECK_LIMIT)
    if not options.skip_tests:
        commands["tests"] = [sys.executable, "-m", "pytest", "-q", "-n", "6", "-m", "gpu", "-p", "no:cacheprovider", TEST]
        limits["tests"] = TEST_LIMIT
    running = {}
    for name, command in commands.items():
        with (logs / name).open("w") as log:
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    passed = []
    for name, process in running.items():
        try:
            code = process.wait(max(1.0, limits[name] - (time.perf_counter() - start)))
        except subprocess.TimeoutExpired:
            subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=False)
            code = -1
        text = (logs / name).read_text()
        print(f"--- {name}: {'passed' if code == 0 else 'ran past its limit' if code == -1 else 'FAILED'}", flush=True)
        print("\n".join(text.strip().splitlines()[-2 if code == 0 else -25 :]), flush=True)
        if code == 0 and name != "tests":
            passed.append(name)
    print(f"checked in {time.perf_counter() - start:.0f} s; timing {passed}", flush=True)
    if passed:
        timing = subprocess.Popen([sys.executable, __file__, "--time", *passed], cwd=ROOT, start_new_session=True)
        try:
            timing.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            subprocess.run(["kill", "-9", "--", f"-{timing.pid}"], check=False)
            print("timing ran past its limit", flush=True)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
