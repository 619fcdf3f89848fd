#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs a small MiniMax-M3 with random weights in real SGLang engines: with SGLang's own kernels and with ours, in turns.

    python -m benchmarks.engine_sglang -o record.jsonl               # both on one GPU, and their comparison
    python -m benchmarks.engine_sglang --compare record.jsonl        # the table of a record

Both are SGLang's offline engine, its scheduler and model runner in processes of their own, and load the same checkpoint. They
start at the same time and run every row once; then only one of them works at a time, and the processes of the other are
stopped, since a scheduler without requests spins. SGLang's log says which backend serves the sparse layers, and a run in which
another one does ends with an error. --heads 16 --kv-heads 1 is what a rank of four sees.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.engine import KERNELS
from benchmarks.engine_checkpoint import write_checkpoint
from benchmarks.engine_rows import Engine, write
from openmsa.bench.record import checkout_commit

ROWS = ("answers", "prefill", "prefix", "decode")
SERVES = {
    "own": re.compile(r"\[MiniMaxSparse\] Backend initialized.*"),
    "openmsa": re.compile(r"OpenMSA serves the \d+ sparse layers.*"),
}
"""What SGLang's log has where these kernels serve."""
FIGURES = ("wall_s", "step_ms", "forward_ms", "behind_ms", "launch_ms")
"""Fields of rows of which the median over turns counts."""


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-o", "--out", type=Path, default=Path("sglang.jsonl"), help="JSON objects, one a row, are appended")
    p.add_argument("--compare", type=Path, help="print the table of a record and stop")
    p.add_argument("--kernels", choices=KERNELS, nargs="*", default=list(KERNELS))
    p.add_argument("--orders", type=int, help=argparse.SUPPRESS)  # a pipe from which the first process asks for rows
    p.add_argument("--model-dir", type=Path, default=Path("/tmp/openmsa-m3-sglang"), help="where the checkpoint goes")
    for name, default, text in (
        ("layers", 8, ""),
        ("dense", 2, "leading layers with dense attention"),
        ("hidden", 2048, ""),
        ("heads", 16, "query heads"),
        ("kv-heads", 1, "KV heads, and index heads"),
        ("max-len", 65536, ""),
        ("chunk", 8192, "tokens of prompts a step"),
        ("repeat", 5, "times that each row is taken in a turn, of which the median counts"),
        ("turns", 1, "turns of both engines in which each row is measured"),
        ("context", 16384, "tokens of each request that decodes"),
        ("steps", 64, "decode steps that are timed"),
        ("kv-tokens", 600_000, "tokens of the KV cache"),
        ("seconds", 540, "no row is begun later; starting counts"),
        ("start-seconds", 360, "an engine that is not ready by then is ended; SGLang tunes its kernels for minutes"),
    ):
        p.add_argument(f"--{name}", type=int, default=default, help=text)
    p.add_argument("--long", type=int, nargs="*", default=[4096, 32768], help="prompts whose prefill is timed")
    p.add_argument("--prefix", type=int, nargs=2, default=[32768, 512], help="tokens cached, and new ones behind them")
    p.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="requests that decode together")
    p.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, help="rows that are measured")
    p.add_argument("--dense-backend", default="triton", help="of the dense layers")
    p.add_argument("--prefill-graph", default="disabled", help="disabled, or tc_piecewise, which is SGLang's own choice")
    p.add_argument("--eager", action="store_true", help="no CUDA graphs")
    p.add_argument("--memory", type=float, default=0.5, help="share of the free memory that weights and caches may take")
    p.add_argument("--device", default="cuda")
    p.add_argument("--logit-std", type=float, default=3.0, help="of random weights: how peaked attention is")
    p.add_argument("more", nargs="*", help="further arguments of SGLang's engine, name=JSON, behind --")
    return p.parse_args()


def rows_of(a: argparse.Namespace) -> list[tuple[str, tuple[int, ...]]]:
    """Returns what is measured and its sizes."""
    rows: list[tuple[str, tuple[int, ...]]] = [
        ("answers", ()),
        *(("prefill", (n,)) for n in a.long),
        ("prefix", tuple(a.prefix)),
        *(("decode", (n, a.context)) for n in a.batch),
    ]
    return [row for row in rows if row[0] in a.rows]


def serve(orders: int, a: argparse.Namespace) -> None:
    """Runs in the process of one engine: starts it and measures what is asked for until the pipe closes."""
    from benchmarks.engine_sglang_run import Sglang, measured

    link, begun = Connection(orders), time.perf_counter()
    run = Sglang(a)
    link.send({"start_s": time.perf_counter() - begun, **run.facts()})
    while True:
        try:
            order = link.recv()
        except EOFError:
            run.llm.shutdown()
            return
        try:
            if order["do"] == "warm":
                begun = time.perf_counter()
                for what, sizes in rows_of(a):
                    measured(run, what, (min(2, sizes[0]), sizes[1]) if what == "decode" else sizes, 1, a)
                run.flush()
                link.send({"seconds": time.perf_counter() - begun})
            else:
                link.send(measured(run, order["do"], order["sizes"], a.repeat, a))
        except Exception as e:  # A failure is the engine's answer, and the other one goes on.
            link.send({"failed": f"{type(e).__name__}: {e}"[:1000]})


def served(log: str, kernels: str) -> str:
    """Returns the line of SGLang's log that says which backend serves. Raises RuntimeError unless it is that of `kernels`."""
    found = {name: pattern.findall(log) for name, pattern in SERVES.items()}
    if not found[kernels] or any(lines for name, lines in found.items() if name != kernels):
        raise RuntimeError(f"the sparse layers must be served by {kernels!r}, SGLang's log has {found}")
    return found[kernels][-1]


def command(kernels: str, orders: int) -> list[str]:
    """Returns the command of one engine's process, which has this one's arguments and takes orders from a pipe."""
    given = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    more = sys.argv[len(given) + 1 :]
    head = [sys.executable, "-m", "benchmarks.engine_sglang", *given]
    return [*head, "--kernels", kernels, "--orders", str(orders), "--", *more[bool(more and more[0] == "--") :]]


def run_all(a: argparse.Namespace) -> None:
    """Starts the engines together, has them measured in turns, and records the rows. An engine that fails stops no other; where
    one did, raises RuntimeError at the end."""
    begun, failed = time.monotonic(), []
    write_checkpoint(a, a.device)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"checkpoint written in {time.monotonic() - begun:.0f} s", flush=True)
    engines = [Engine("sglang", k, i, functools.partial(command, k)) for i, k in enumerate(a.kernels)]

    def answer(e: Engine, seconds: float, starts: bool = False) -> dict[str, Any]:
        """Returns what an engine answers within so many seconds of this run's start; where it fails, ends it and returns
        nothing. starts: whether its log must say by now who serves."""
        try:
            row = e.take(begun + seconds - time.monotonic())
            return row | ({"serves": served(e.log.read_text(errors="replace"), e.kernels)} if starts else {})
        except (RuntimeError, TimeoutError) as error:
            e.end()
            engines.remove(e)
            failed.append(str(error))
            print(f"--- the end of {e.log}", *e.log.read_text(errors="replace").splitlines()[-60:], sep="\n", flush=True)
            return {}

    started = list(engines)
    try:
        for e in started:
            e.send({"do": "warm"})  # An engine begins when it stands, and waits for no other.
        for e in started:
            if facts := answer(e, a.start_seconds, starts=True):
                print(f"{e.kernels}: {facts['engine']} started in {facts['start_s']:.0f} s; {facts['serves']}", flush=True)
                record = {"row": "start", "kernels": e.kernels, "commit": checkout_commit(), **facts}
                write(a.out, record | {"arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}})
        for e in list(engines):
            if warm := answer(e, a.seconds):
                print(f"{e.kernels}: all rows once in {warm['seconds']:.0f} s", flush=True)
        for e in engines:
            e.rest()
        for what, sizes in (row for row in rows_of(a) for _ in range(a.turns)):
            if time.monotonic() - begun > a.seconds - 20:
                failed.append(f"no time for {what} {sizes}")
                continue
            for e in list(engines):
                e.send({"do": what, "sizes": sizes})
                if row := answer(e, a.seconds + 20):
                    e.rest()
                    write(a.out, {"row": what, "sizes": sizes, "kernels": e.kernels, **row})
    finally:
        for e in started:
            e.end()
            shutil.copy(e.log, a.out.with_suffix(f".{e.kernels}.log"))
    print(f"measured in {time.monotonic() - begun:.0f} s", flush=True)
    if failed:
        raise RuntimeError("; ".join(failed))


def table(records: list[dict[str, Any]]) -> str:
    """Returns a table of a record: SGLang's own kernels, ours, times faster; and how far their answers are apart."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, list[dict[str, Any]]]] = {}
    for r in records:
        found.setdefault((r["row"], tuple(r.get("sizes", ()))), {}).setdefault(r["kernels"], []).append(r)
    lines = []
    for (what, sizes), turns in found.items():
        name = f"{what} {' x '.join(map(str, sizes))}".strip()
        pair = {k: medians(rows) for k, rows in turns.items()}
        if what == "start":
            lines += [f"{r['engine']}, {k}: {r['gpu']}, {r['serves']}" for k, r in pair.items()]
        elif what == "answers":
            lines += [
                f"{k}, {e['prompt']} tokens, from PyTorch: prompt mean {e['prompt_mean']:.4f} max {e['prompt_max']:.3f}, "
                f"answer mean {e['decode_mean']:.4f} max {e['decode_max']:.3f}, same argmax {e['same_argmax']:.2f}"
                for k, r in pair.items()
                for e in r.get("errors", [])
            ]
            lines += apart(pair["own"], pair["openmsa"]) if set(pair) == set(KERNELS) else []
        else:
            ms = {k: r["step_ms"] if what == "decode" else 1e3 * r["wall_s"] for k, r in pair.items()}
            times = f", {ms['own'] / ms['openmsa']:.2f} times faster" if set(ms) == set(KERNELS) else ""
            cached = f"; cached {[r['cached'] for r in pair.values()]}" if what != "decode" else ""
            if what != "decode" and times:
                same = [x == y for x, y in zip(pair["own"]["first"], pair["openmsa"]["first"], strict=True)]
                cached += f", {sum(same)} of {len(same)} first tokens are equal"
            anew = f", cached and anew apart {[r['apart'] for r in pair.values()]}" if what == "prefix" else ""
            lines.append(f"{name} ms: " + ", ".join(f"{k} {x:.3f}" for k, x in ms.items()) + times + cached + anew)
            forward = {k: r["forward_ms"] for k, r in pair.items() if "forward_ms" in r}
            if set(forward) == set(KERNELS):
                faster = f"{forward['own'] / forward['openmsa']:.3f} times faster"
                apiece = ", ".join(f"{k} {x:.4f}" for k, x in forward.items())
                lines.append(f"{name}, forward on the GPU, ms: {apiece}, {faster}")
            for figure, title in (
                ("behind_ms", "GPU idle behind a forward"),
                ("launch_ms", "host's call that launches a graph"),
            ):
                if apiece := ", ".join(f"{k} {r[figure]:.4f}" for k, r in pair.items() if figure in r):
                    lines.append(f"{name}, {title}, ms: {apiece}")
    return "\n".join(lines)


def medians(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a row's last turn, with the medians of all turns."""
    return turns[-1] | {x: statistics.median(row[x] for row in turns) for x in FIGURES if all(x in row for row in turns)}


def apart(own: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Returns lines that say how far two engines' answers to the same prompts are apart; of an answer's log-probabilities those
    of tokens before which all are equal."""
    lines = []
    for x, y in zip(own["alone"], ours["alone"], strict=True):
        same = [i == j for i, j in zip(x["tokens"], y["tokens"], strict=True)]
        first = same.index(False) if False in same else len(same)
        far = [abs(i - j) for i, j in zip(x["prompt_logprobs"], y["prompt_logprobs"], strict=True) if i is not None]
        answer = [abs(i - j) for i, j in zip(x["logprobs"][:first], y["logprobs"][:first], strict=True)]
        lines.append(
            f"prompt of {x['prompt']}: {first} leading of {len(same)} answer tokens are equal, {sum(same) / len(same):.2f} of "
            f"all; log-probabilities apart: prompt mean {statistics.mean(far):.4f} max {max(far):.3f}, "
            f"equal answer max {max(answer, default=0):.3f}"
        )
    return lines


def main() -> None:
    """Runs what the command line says."""
    a = arguments()
    if a.orders is not None:
        serve(a.orders, a)
        return
    try:
        if not a.compare:
            run_all(a)
    finally:
        if (a.compare or a.out).is_file():
            print(table([json.loads(line) for line in (a.compare or a.out).read_text().splitlines()]), flush=True)


if __name__ == "__main__":
    main()
