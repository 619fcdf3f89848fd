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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BASE: dict[str, Any] = {"HEADS_OUTER": False, "HOLD": False, "PIN": True, "SHADOW": False}
FORMS: dict[str, dict[str, Any]] = {
    "main": {},
    "no pin": {"PIN": False},
    "shadow": {"SHADOW": True},
    "hold": {"HOLD": True},
    "hold, shadow": {"HOLD": True, "SHADOW": True},
    "heads outer": {"HEADS_OUTER": True},
}
TESTS = [f"tests/sparse_attention/test_gluon_sm90_{name}.py" for name in ("attend", "union")]
CHECK_LIMIT, TEST_LIMIT, TIME_LIMIT = 70, 75, 70  # seconds


def use(form: str) -> None:
    """Makes the kernel run in this form from now on."""
    from openmsa.sparse_attention import gluon_sm90_attend

    gluon_sm90_attend.OPTIONS.update(BASE | FORMS[form])


def check_form(form: str) -> None:
    """Compares a few cases with the truth. Raises an error where they differ."""
    import torch

    from openmsa.sparse_attention import gluon_sm90_attend, reference, triton_prefill
    from openmsa.testing.compare import assert_close
    from openmsa.types import layout
    from tests.sparse_attention import test_gluon_sm90_attend as tests

    use(form)
    triton_prefill.FEWEST_TILES, triton_prefill.few_queries = 0, lambda *sizes: False
    launched: list[Any] = []
    launch = gluon_sm90_attend.launch_sm90_attend
    gluon_sm90_attend.launch_sm90_attend = lambda *given: (launched.append(1), launch(*given))
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

    from openmsa import E4M3, PagedKV, Sequences
    from openmsa.sparse_attention import gluon_sm90_attend, triton_prefill
    from openmsa.testing.timing import captured
    from openmsa.types import layout

    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    start_event, stop_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    tuned = triton_prefill._tuned

    def clock(run: Any, count: int) -> float:
        """Milliseconds a run: of so many behind another, or of one (count 0)."""
        if count:
            run()
        start_event.record()
        for _ in range(max(1, count)):
            run()
        stop_event.record()
        stop_event.synchronize()
        return start_event.elapsed_time(stop_event) / max(1, count)

    def in_turns(runs: dict[str, Any], rounds: int = 7, count: int = 3) -> dict[str, tuple[float, float]]:
        """The time of each run, and the clock rate in GHz right behind it."""
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append((clock(run, count), 4e-1 / clock(lambda: torch.cuda._sleep(400_000), 0)))
        return {name: tuple(statistics.median(x) for x in zip(*found, strict=True)) for name, found in times.items()}

    def selection(queries: int, keys: int, heads: int, spare: int, kind: str) -> Any:
        own = torch.arange(keys - queries, keys, device=device) // 128
        below = 64 if kind == "close" else int(own[0])  # "close": all that is read stays in L2
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

    def call_of(p: Any, ours: bool, **options: Any) -> Any:
        """What the launch of the union kernel gets."""
        found: list[Any] = []
        launches = gluon_sm90_attend.launch_sm90_attend, triton_prefill.launch_union
        gluon_sm90_attend.launch_sm90_attend = triton_prefill.launch_union = lambda *given: found.append(given)
        triton_prefill._tuned = tuned if ours else lambda *_: None
        triton_prefill.sparse_attention(*p, 128, p[0].shape[2] ** -0.5, True, **options)
        gluon_sm90_attend.launch_sm90_attend, triton_prefill.launch_union = launches
        triton_prefill._tuned = tuned
        return found[0] if found else None

    def ran(form: str, call: Any) -> Any:
        def run() -> None:
            use(form)
            gluon_sm90_attend.launch_sm90_attend(*call)

        return run

    x = torch.randn(8192, 8192, device=device).bfloat16()

    def gemm(ms: float) -> float:
        return 2 * 8192**3 / ms / 1e9

    def product() -> Any:
        return x @ x

    cold = gemm(clock(product, 20))
    print(f"GEMM 8192 at first: {cold:.0f} TFLOP/s", flush=True)
    few = [form for form in forms if form in ("main", "heads outer")]
    shapes = {  # queries, keys, heads, group, dim, pages, spare, kind, forms
        "64/4 16K x 128K clustered": (16384, 131072, 4, 16, 128, False, 8, "clustered", forms),
        "the same, 64 blocks a head": (16384, 131072, 4, 16, 128, False, 8, "close", few),
        "16/1 16K x 48K clustered": (16384, 49152, 1, 16, 128, False, 8, "clustered", forms),
        "64/4 16K x 128K, pages": (16384, 131072, 4, 16, 128, True, 8, "clustered", few[:1]),
        "64/4 16K x 128K, dim 64": (16384, 131072, 4, 16, 64, False, 8, "clustered", few[:1]),
        "32/8 (groups of 4)": (16384, 131072, 8, 4, 128, False, 8, "clustered", few[:1]),
    }
    table = []
    for name, (*shape, here) in shapes.items():
        p = problem(*shape)
        theirs, ours = call_of(p, False), call_of(p, True)
        runs = {"GEMM": product, "today": lambda call=theirs: triton_prefill.launch_union(*call)}
        steps = 0.0
        if ours is not None:
            runs |= {form: ran(form, ours) for form in here}
            sizes = ours[-1].lists.union.sizes.view(-1, 2)[:, 0]
            steps = float(sizes.clamp(min=0).sum()) * 2 * ours[-1].plan.parts
            print(f"{name}: unions {float(sizes[sizes > 0].float().mean()):.1f}")
        found = in_turns(runs)
        flops = steps * 64 * 128 * shape[4] * 4
        for form, (ms, rate) in found.items():
            work = gemm(ms) if form == "GEMM" else flops / ms / 1e9
            times = f"{found['today'][0] / ms:5.2f}x" if form != "GEMM" else ""
            table.append(f"{name:40} {form:16} {ms:7.3f} ms {work:6.0f} TFLOP/s raw {rate:5.2f} GHz  {times}")
            print(table[-1], flush=True)
        del p, theirs, ours, runs

    def whole(p: Any, form: str | None, **options: Any) -> Any:
        """A graph of a whole call in this form (None: with Triton's union kernel)."""
        triton_prefill._tuned = tuned if form else lambda *_: None
        use(form or "main")
        graph = captured(lambda: triton_prefill.sparse_attention(*p, 128, p[0].shape[2] ** -0.5, True, **options))
        triton_prefill._tuned = tuned
        return graph

    print("whole calls in graphs, in turns", flush=True)
    for name, (queries, keys, heads, kind) in {
        "64/4 clustered": (16384, 131072, 4, "clustered"),
        "64/4 random": (16384, 131072, 4, "random"),
        "16/1 48K clustered": (16384, 49152, 1, "clustered"),
        "16/1 48K random": (16384, 49152, 1, "random"),
        "64/4 1,024 queries clustered": (1024, 131072, 4, "clustered"),
        "64/4 256 queries clustered": (256, 131072, 4, "clustered"),
    }.items():
        p = problem(queries, keys, heads, 16, 128, False, 8, kind)
        forms_here = forms if name == "64/4 clustered" else few[:1]
        runs = {"today": whole(p, None)} | {form: whole(p, form) for form in forms_here}
        found = in_turns(runs, count=3 if queries > 2000 else 20)
        table.append(f"{name:40} whole call  " + "  ".join(f"{form} {ms:.3f}" for form, (ms, _) in found.items()) + " ms")
        print(table[-1], flush=True)
        if name == "64/4 clustered":
            coded = (p[0], E4M3.quantize(p[1]), E4M3.quantize(p[2]), *p[3:])
            pair = in_turns({"e4m3": whole(coded, "main"), "16 bits": whole(p, "main")})
            table.append(f"{name:40} whole call  " + "  ".join(f"{form} {ms:.3f}" for form, (ms, _) in pair.items()) + " ms")
            use("main")
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(3):
                    triton_prefill.sparse_attention(*p, 128, 128**-0.5, True)
                torch.cuda.synchronize()
            kernels = [(e.key[:40], e.device_time_total / 3) for e in profile.key_averages() if e.device_time_total > 0]
            line = ", ".join(f"{key} {us:.0f}" for key, us in sorted(kernels, key=lambda x: -x[1])[:9])
            table.append(f"  main, us by kernel: {line}")
            print(table[-1], flush=True)
        del p, runs
    print("whole calls by path; union_limit should be where the lines cross", flush=True)
    for keys, heads in ((131072, 4), (49152, 1)):
        for base in (15, 23, 31, 39, 47):
            p = problem(16384, keys, heads, 16, 128, False, base - 16, "clustered")
            size = call_of(p, True, path="union")[-1].lists.union.sizes.view(-1, 2)[:, 0].clamp(min=0).float()
            runs = {path: whole(p, "main", path=path) for path in ("union", "outer", "auto")}
            found = in_turns(runs, rounds=3)
            mean = float(size[size > 0].mean())
            line = "  ".join(f"{path} {ms:.3f}" for path, (ms, _) in found.items())
            table.append(f"{16 * heads}/{heads} {keys // 1024}K, unions of {mean:4.1f} in 8 {'':12} whole call  {line} ms")
            print(table[-1], flush=True)
            del p, runs
    hot = gemm(clock(product, 20))
    print("\n" + "=" * 60 + f"\nGEMM 8192: {cold:.0f} TFLOP/s at first, {hot:.0f} at last\n" + "\n".join(table))


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
        commands["tests"] = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-m", "gpu", "-p", "no:cacheprovider", *TESTS]
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
