#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compiles the kernels of a preset before they are needed.

    python scripts/warmup_fmha_sm100.py --preset m3-infer -j 8

On a GPU each task runs an operation of `fmha_sm100` on small tensors of the preset's shapes: what compiles is what serving will
launch, whatever its lengths. Without a GPU, --arch records what the same operations would launch there, and compiles that.

Kernels go where TRITON_CACHE_DIR says or, if it is not set, into a folder of our own (OPENMSA_CACHE_DIR/triton), for which the
last line says what to export. --clear removes that folder, never another one, and touches no compiler's temporary files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The checkout need not be installed.

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from openmsa.runtime import kernel_cache

ARCHS = (80, 90, 100, 120)
PRESETS = ("all", "m3-infer", "aime")
M3_HEADS = ((64, 4), (32, 2), (16, 1))  # MiniMax-M3's query and KV heads under tensor parallelism 1, 2, 4
KINDS = ("scores prefill", "scores decode", "selection", "sparse prefill", "sparse decode", "dense prefill", "dense decode")
DECODE_KINDS = ("scores decode", "selection", "sparse decode", "dense decode")
DEVICE = "cuda"
PAGE, DIM, CONTEXT, MANY = 128, 128, 32768, 8192  # MANY queries reach the kernels of long prompts.


@dataclass(frozen=True)
class Task:
    """Describes one operation, to run on a GPU or (arch above 0) to be recorded for that architecture."""

    name: str
    kind: str
    num_q_heads: int = 64
    num_kv_heads: int = 4
    dtype: str = "bf16"
    topk: int = 16
    arch: int = 0


def gpu_tasks(preset: str, sparse_grid: bool) -> list[Task]:
    """Returns the operations of a preset; `sparse_grid` adds sparse attention for every group size and top-k."""
    heads, kinds = (M3_HEADS[:1], DECODE_KINDS) if preset == "aime" else (M3_HEADS, KINDS)
    if preset == "all":
        heads = (*M3_HEADS, (48, 8), (32, 8), (8, 8))
    shapes = [(kind, *pair, dtype, 16) for dtype in ("bf16", "fp8") for pair in heads for kind in kinds]
    if sparse_grid:
        groups = [(4 * group, 4, dtype, topk) for dtype in ("bf16", "fp8") for group in (1, 2, 4, 8, 16) for topk in (8, 16)]
        shapes += [("sparse prefill", *group) for group in groups]
    return [Task(f"{kind} {q}/{kv} {dtype} top-{k}", kind, q, kv, dtype, k) for kind, q, kv, dtype, k in dict.fromkeys(shapes)]


def offline_tasks(tasks: Sequence[Task], archs: Sequence[int]) -> list[Task]:
    """Returns these tasks for each architecture."""
    return [replace(task, name=f"sm_{arch} {task.name}", arch=arch) for arch in archs for task in tasks]


def begin() -> None:
    """Turns Triton's interpreter off in a worker, before triton is imported."""
    os.environ.pop("TRITON_INTERPRET", None)


def run(task: Task) -> float:
    """Runs a task in this process and returns its seconds. Raises RuntimeError with one line that says what failed."""
    start = time.perf_counter()
    try:
        if task.arch:
            _compile(task)
        else:
            with torch.no_grad():
                _call(task)
            torch.cuda.synchronize()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise RuntimeError(f"{type(cause).__name__} {str(cause).strip()[-300:]!r}") from None
    return time.perf_counter() - start


def _compile(task: Task) -> None:
    """Compiles each variant of a task once."""
    from openmsa.runtime.recording import recording

    torch.set_num_threads(1)
    with recording(task.arch) as launches, torch.no_grad():
        _call(task)
    for launch in {(launch.kernel, launch.variant): launch for launch in launches}.values():
        launch.compile()


def _call(task: Task) -> None:
    """Calls the operation of a task, for one request of many queries or for eight of one, on pages."""
    import fmha_sm100

    kind, many = task.kind, task.kind.endswith("prefill")
    batch, q_len = (1, MANY) if many else (8, 1)
    dtype = torch.float8_e4m3fn if task.dtype == "fp8" else torch.bfloat16
    lens = torch.full((batch,), q_len, dtype=torch.int32), torch.full((batch,), CONTEXT, dtype=torch.int32)
    total_q, blocks = batch * q_len, CONTEXT // PAGE
    if kind == "selection":
        scores = torch.zeros(task.num_kv_heads, blocks, total_q, device=DEVICE)
        for layout, values in (("HKT", scores), ("THK", scores.permute(2, 0, 1).contiguous())):
            fmha_sm100.sparse_topk_select(values, task.topk, blocks, force_end_blocks=1, max_score_layout=layout)
        return
    index = kind.startswith("scores")
    q_heads, kv_heads = (task.num_kv_heads, 1) if index else (task.num_q_heads, task.num_kv_heads)
    q = torch.randn(total_q, q_heads, DIM, device=DEVICE).to(dtype)
    cache = torch.zeros(batch * blocks, kv_heads, PAGE, 2 * DIM, device=DEVICE).to(dtype)
    k, v = cache.split(DIM, dim=-1)  # Engines keep them side by side.
    table = torch.arange(batch * blocks, dtype=torch.int32, device=DEVICE)
    options = {"num_kv_heads": kv_heads, "page_size": PAGE, "device": DEVICE, "use_fp8_kvcache": task.dtype == "fp8"}
    if not kind.startswith("sparse"):
        plan = fmha_sm100.fmha_sm100_plan(*lens, q_heads, output_maxscore=index, **options)
        fmha_sm100.fmha_sm100(q, k, v, plan, kv_indices=table, output_o=not index, output_maxscore=index)
        return
    ids = torch.arange(task.topk, dtype=torch.int32, device=DEVICE).expand(total_q, kv_heads, -1).contiguous()
    plan = fmha_sm100.fmha_sm100_plan(*lens, q_heads, kv_block_num=task.topk, **options)
    fmha_sm100.fmha_sm100(q, k, v, plan, kv_indices=table, kv_block_indexes=ids, output_maxscore=False)
    if many:
        _call_by_csr(q, k, v, ids, table.view(batch, blocks))


def _call_by_csr(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> None:
    """Calls `build_k2q_csr` and `sparse_atten_func`, flat and paged, for one request."""
    from fmha_sm100.sparse import build_k2q_csr, sparse_atten_func

    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (q.shape[0], CONTEXT))
    longest = {"max_seqlen_q": q.shape[0], "max_seqlen_k": CONTEXT}
    group, lengths = q.shape[1] // k.shape[1], {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **longest}
    csr = build_k2q_csr(ids.transpose(0, 1), cu_q, cu_k, PAGE, total_k=CONTEXT, qhead_per_kv=group, **longest)
    paged = {"page_table": table, "seqused_k": cu_k.diff()}
    flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v))
    for keys, values, more in ((k, v, paged), (flat_k, flat_v, {})):
        sparse_atten_func(q, keys, values, *csr[:2], ids.shape[2], blk_kv=PAGE, causal=True, **lengths, **more)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-j", "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes that compile (%(default)s)")
    p.add_argument(
        "--preset", choices=PRESETS, default="m3-infer", help="m3-infer: TP 1, 2, 4; aime: short prompts, long decode"
    )
    p.add_argument("--include-sparse-aot", action="store_true", help="also sparse attention for groups 1 to 16 and top-k 8, 16")
    p.add_argument("--clear", action="store_true", help="first remove our own cache folder")
    p.add_argument("--all", action="store_true", help="--clear --include-sparse-aot --preset all")
    p.add_argument("--dry-run", action="store_true", help="list the tasks, change nothing")
    p.add_argument("--info", action="store_true", help="say what the cache folder holds, and stop")
    p.add_argument("--match", default="", help="only tasks whose name contains this text")
    p.add_argument("--arch", type=int, nargs="+", choices=ARCHS, help="compile offline for these; needs no GPU")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    p, console = parser(), Console(soft_wrap=True, highlight=False)
    options = p.parse_args(arguments)
    if options.jobs < 1:
        p.error(f"-j must be at least 1, got {options.jobs}")
    if options.all:
        options.clear, options.include_sparse_aot, options.preset = True, True, "all"
    elsewhere = os.environ.get("TRITON_CACHE_DIR")
    target = Path(elsewhere) if elsewhere else kernel_cache.folder()
    if options.clear:
        try:
            held = kernel_cache.info() if options.dry_run else kernel_cache.clear()
        except FileExistsError as refusal:
            p.error(f"--clear: {refusal}")
        console.print(f"{'would clear' if options.dry_run else 'cleared'} {_told(held)}")
    if options.info:
        console.print(_told(kernel_cache.info(target)))
        return 0
    if not options.arch and not torch.cuda.is_available():
        console.print("PyTorch finds no GPU here: nothing to warm up. --arch 90 (or 80, 100, 120) compiles without one.")
        if not options.dry_run:
            return 0
    tasks = gpu_tasks(options.preset, options.include_sparse_aot)
    tasks = offline_tasks(tasks, options.arch) if options.arch else tasks
    tasks = [task for task in tasks if options.match in task.name]
    if options.dry_run:
        for task in tasks:
            console.print(f"  {task.name}")
        console.print(f"{len(tasks)} tasks, {options.jobs} processes, into {target}")
        return 0
    if not elsewhere:
        os.environ["TRITON_CACHE_DIR"] = str(kernel_cache.prepare())
    failed = warm(tasks, options.jobs, console)
    console.print(f"{_told(kernel_cache.info(target))}; {len(tasks) - failed} tasks done, {failed} failed")
    if not elsewhere:
        console.print(f"to use them: export TRITON_CACHE_DIR={target}")
    return 1 if failed else 0


def warm(tasks: Sequence[Task], jobs: int, console: Console) -> int:
    """Runs the tasks under a progress bar, and returns how many failed."""
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(jobs, context, begin) as pool:
        bar = progress.add_task("compiling", total=len(tasks))
        running: dict[Future[float], Task] = {pool.submit(run, task): task for task in tasks}
        for done in as_completed(running):
            name, error = running[done].name, done.exception()
            failed += error is not None
            if error is not None:
                console.print(f"failed {name}: {error}", markup=False)
            progress.update(bar, advance=1, description=name)
    return failed


def _told(held: kernel_cache.Info) -> str:
    return f"{held.folder}: {held.kernels} kernels, {held.bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
