#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures the first call of each operation, in a process with an empty Triton cache and in a later one. Needs a GPU.

    PYTHONPATH=. python3 scripts/first_call.py [--match TEXT] [--jobs 4] [--output RECORD.jsonl]

Each operation and kind of cache has a process. Its clock starts when torch is imported, the CUDA context exists and the inputs
lie on the device: what counts is the import of openmsa's kernels and of triton, and the call itself up to the end of its work.
Later processes find Python's bytecode, which installers write, and which some images and PYTHONDONTWRITEBYTECODE leave out.
Prints a table and exits with 1 where a call misses its limits: 5 seconds a kernel when everything must be compiled, and 0.3
seconds a kernel from the cache. Most operations are one kernel; sparse prefill is six.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

LIMITS = {"empty": 5.0, "cached": 0.3}
REPORT = "first call: "


def operations() -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Yields the name of each operation and a function that makes its inputs and returns its call."""
    from openmsa import DecodePlan, PagedKV, block_scores, dense_attention, msa_attention, select_blocks, sparse_attention
    from openmsa.bench.inputs import Inputs
    from openmsa.bench.workloads import Workload
    from openmsa.kv_cache import E4M3, NVFP4

    def inputs(q_len: int, context: int, batch: int = 1) -> Inputs:
        return Inputs(Workload("first-call", "cuda", q_len, context, (), batch), torch.device("cuda"))

    def index(q_len: int, context: int, function: Any) -> Callable[[], Any]:
        x = inputs(q_len, context)
        return lambda: function(x.index_q, x.index_k, seqs=x.seqs)

    def path(q_len: int, context: int) -> Callable[[], Any]:
        x = inputs(q_len, context)
        return lambda: msa_attention(x.q, x.k, x.v, x.index_q, x.index_k, seqs=x.seqs)

    def sparse(kind: str) -> Callable[[], Any]:
        x = inputs(8192, 32768)
        blocks = x.selection(kind)
        return lambda: sparse_attention(x.q, x.k, x.v, blocks, x.seqs)

    def plan() -> Callable[[], Any]:
        x = inputs(1, 32768, 8)
        pages = x.pages()
        sizes = {"max_batch": 8, "num_q_heads": 64, "num_kv_heads": 4, "head_dim": 128, "page_size": 128, "max_pages": 256}
        return lambda: DecodePlan(**sizes).run(x.q, pages.kv, x.index_q, pages.index)

    def dense(q_len: int, store: Any = None, paged: bool = False, **options: Any) -> Callable[[], Any]:
        x = inputs(q_len, 32768, 8 if paged else 1)
        kv, v = (x.k, x.v) if not paged else (x.pages().kv, None)
        if store is not None:
            kv = (
                PagedKV(store.quantize(kv.k), store.quantize(kv.v), kv.page_table, kv.seq_lens) if paged else store.quantize(kv)
            )
            v = v if v is None else store.quantize(v)
        return lambda: dense_attention(x.q, kv, v, x.seqs, **options)

    def append(store: Any) -> Callable[[], Any]:
        x = inputs(1, 32768, 8)
        kv = x.pages().kv
        cache = PagedKV(store.quantize(kv.k), store.quantize(kv.v), kv.page_table, kv.seq_lens - 2)
        return lambda: cache.append(x.k[:8], x.v[:8])

    yield "msa_attention, 8K queries at 32K", lambda: path(8192, 32768)
    yield "msa_attention, 256 queries at 128K", lambda: path(256, 131072)
    yield "DecodePlan.run, 8 x 32K", plan
    yield "block_scores, 8K queries at 32K", lambda: index(8192, 32768, block_scores)
    yield "select_blocks, 8K queries at 32K", lambda: index(8192, 32768, select_blocks)
    yield "sparse_attention, random", lambda: sparse("random")
    yield "sparse_attention, clustered", lambda: sparse("clustered")
    yield "dense_attention, 8K queries at 32K", lambda: dense(8192)
    yield "dense_attention, 8 x 32K, one query", lambda: dense(1, paged=True)
    yield "dense_attention, maximum scores", lambda: dense(8192, return_out=False, return_max_score=True)
    for name, store in (("e4m3", E4M3), ("nvfp4", NVFP4)):
        yield f"dense_attention, {name}, 8K queries at 32K", lambda store=store: dense(8192, store)
        yield f"dense_attention, {name}, 8 x 32K, one query", lambda store=store: dense(1, store, paged=True)
        yield f"append, {name}", lambda store=store: append(store)


def measure(name: str) -> dict[str, Any]:
    """Measures, in a process of its own, the seconds of the first and the second call, and lists what was compiled."""
    torch.ones(1, device="cuda").sum().item()
    run = dict(operations())[name]()
    torch.cuda.synchronize()
    start = time.perf_counter()
    import triton

    compiled: list[tuple[str, bool]] = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: compiled.append((src.name, cache_hit))
    imported = time.perf_counter()
    seconds = []
    for _ in range(2):
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - imported - sum(seconds))
    kernels = [kernel for kernel, _ in compiled]
    return {
        "operation": name,
        "import_seconds": imported - start,
        "first_seconds": seconds[0],
        "second_seconds": seconds[1],
        "kernels": kernels,
        "from_cache": sum(hit for _, hit in compiled),
    }


def launch(name: str, cache: Path, kind: str) -> dict[str, Any]:
    """Runs `measure` in a new process, whose bytecode goes beside the caches."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPYCACHEPREFIX": str(cache.parent / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "--child", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    found = [line for line in done.stdout.splitlines() if line.startswith(REPORT)]
    if done.returncode or not found:
        return {"operation": name, "cache": kind, "error": done.stderr.strip().rsplit("\n", 1)[-1][-300:]}
    return json.loads(found[-1].removeprefix(REPORT)) | {"cache": kind}


def late(record: dict[str, Any]) -> bool:
    """Tells whether a call fails or misses its limit."""
    if "error" in record:
        return True
    return record["import_seconds"] + record["first_seconds"] > LIMITS[record["cache"]] * max(len(record["kernels"]), 1)


def row(records: dict[str, dict[str, Any]]) -> str:
    """Formats one operation: the call with an empty cache, then with a full one."""
    cells = []
    for kind in LIMITS:
        record = records[kind]
        if "error" in record:
            cells.append(f"{'error: ' + record['error']:>40}")
            continue
        cells.append(f"{record['import_seconds']:7.3f} {record['first_seconds']:8.3f} {len(record['kernels']):3}")
        cells[-1] += " late" if late(record) else "     "
    second = records["cached"].get("second_seconds", float("nan"))
    return f"{records['empty']['operation']:46} {cells[0]} | {cells[1]} | {second * 1e3:9.2f} ms"


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only operations whose name contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="operations measured at a time; more than one disturbs the times")
    default = Path(os.environ.get("OUT", ".")) / "benchmarks/results/first-call.jsonl"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--commit", help="of the code, where it runs from a copy without history")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(REPORT + json.dumps(measure(options.child)))
        return 0
    from openmsa.bench import record as records

    shared = records.environment(torch.device("cuda"), options.commit) | {"benchmark": "first call", "jobs": options.jobs}
    names = [name for name, _ in operations() if options.match in name]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        caches = [Path(folder) / str(i) for i in range(len(names))]
        found = {kind: list(pool.map(launch, names, caches, [kind] * len(names))) for kind in LIMITS}
    print(f"{'':46} {'empty cache':>21}     | {'later process':>21}     | second call")
    print(f"{'operation':46} {'import':>7} {'call':>8} {'n':>3}      | {'import':>7} {'call':>8} {'n':>3}      |")
    for pair in zip(*found.values(), strict=True):
        print(row(dict(zip(found, pair, strict=True))))
    everything = [record for kind in found.values() for record in kind]
    records.append([shared | record for record in everything], options.output)
    print(
        f"seconds; n: kernels compiled or loaded; limits a kernel: {LIMITS['empty']} s and {LIMITS['cached']} s from the cache"
    )
    return 1 if not names or any(map(late, everything)) else 0


if __name__ == "__main__":
    sys.exit(main())
