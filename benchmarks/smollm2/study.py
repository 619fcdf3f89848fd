# SPDX-License-Identifier: MIT
"""Trains index branches for SmolLM2-135M, whose weights stay as they are, and measures what they are worth at 8K tokens.

    python -m benchmarks.smollm2.study --data FOLDER --out FOLDER [--minutes 7] [--commit ID]
    python -m benchmarks.smollm2.study --toy --out FOLDER        # seconds on a CPU: a random model of 2 layers, 512 tokens

FOLDER is what `python -m benchmarks.smollm2.files` made. First the index loss is held against float64 on this device; a wrong
gradient ends the run. Then all candidates (index dims, learning rates, seeds, and what index branches start from) learn
together in one pass over the dense model, as nothing flows back into it. Some of them go on in the sparse stage, at a quarter
of the blocks: the first one or its rival of another learning rate, and each kind that starts from the layer's keys. Then come
recall of blocks in the dense model, held-out loss and needles of every index, budget and block size, and of stored index keys.
Records are appended to OUT/smollm2.jsonl as they come; the two branches go to OUT/branches-*.safetensors; a table ends the
output.
The coefficient of the loss is swept where --candidates names candidates that differ in it.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.smollm2 import files
from benchmarks.smollm2.candidates import named
from benchmarks.smollm2.compiling import failures, jobs_of
from benchmarks.smollm2.gradients import check_gradients
from benchmarks.smollm2.learning import goes_on, save_branches, train_sparse, train_together
from benchmarks.smollm2.measuring import attentions, index_of, measure, show
from benchmarks.smollm2.setting import Study, load, random_study
from openmsa.training.variants import Index, group_mean


def everything(study: Study, steps: tuple[int, int]) -> None:
    """Runs the study."""
    study.record("environment", **study.facts)
    check_gradients(study.device)
    study.tell("index loss and gradients hold against float64")
    made, ends = train_together(study, steps[0], 0.45 * study.seconds)
    indexes: dict[str, Index] = {"training-free": group_mean}
    going_on = goes_on(study, made, ends)
    for place, (candidate, branches) in enumerate(going_on):
        before = copy.deepcopy(branches)
        train_sparse(study, candidate, branches, steps[1], study.seconds * (0.45 + 0.15 * (place + 1) / len(going_on)))
        indexes[f"trained {candidate.kind} + sparse"] = index_of(branches)
        indexes[f"~trained {candidate.name}"] = index_of(before)
    save_branches(study, *going_on[0], "branches-one-key")
    save_branches(study, *next(x for x in going_on if x[0].own), "branches-own-keys")
    for candidate, branches in zip(study.candidates, made, strict=True):
        indexes.setdefault(f"~trained {candidate.name}", index_of(branches))
    started = {c.kind: c for c in reversed(study.candidates) if c.start.startswith("one key")}
    for kind, candidate in sorted(started.items()):
        indexes[f"~untrained {kind}"] = index_of(study.branches(candidate))
    variants = attentions(study, indexes)
    for name, error in failures(study, {n: a for n, a in variants.items() if a.variant.kind != "dense"}).items():
        study.record("refused", variant=name, error=error)
        del variants[name]
    rows = measure(study, variants)
    show(rows)
    study.tell("done")


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="what `python -m benchmarks.smollm2.files` made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--warmup-steps", type=int, default=400)
    parser.add_argument("--sparse-steps", type=int, default=150)
    parser.add_argument("--candidates", nargs="+", help="train these alone, by name (see benchmarks/smollm2/candidates.py)")
    parser.add_argument("--length", type=int, default=files.LENGTH, help="shorter windows, for a trial: no needles then")
    parser.add_argument("--windows", type=int, default=20, help="held-out windows")
    parser.add_argument("--compilers", type=int, default=14, help="processes that compile kernels beforehand; 0: none")
    parser.add_argument("--commit", help="what is recorded as the commit")
    parser.add_argument("--toy", action="store_true", help="a random model of 2 layers on the CPU")
    parser.add_argument("--compile-only", action="store_true", help="compile kernels and stop")
    parser.add_argument("--compile-share", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.toy or options.compile_only or options.compile_share or options.data):
        parser.error("--data must name what `python -m benchmarks.smollm2.files` made, or --toy be given")
    try:
        named(options.candidates)
    except ValueError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    if options.compile_share:
        share, of = options.compile_share
        study = random_study(options)
        sys.exit(len(failures(study, dict(list(jobs_of(study).items())[share::of]))))
    began = time.monotonic()
    if options.compilers and not options.toy:
        own = [sys.executable, "-m", "benchmarks.smollm2.study", "--out", str(options.out), "--device", options.device]
        own += ["--candidates", *options.candidates] if options.candidates else []
        shares = [["--compile-share", str(i), str(options.compilers)] for i in range(options.compilers)]
        running = [subprocess.Popen(own + share) for share in shares]
        failed = sum(process.wait() != 0 for process in running)
        print(f"kernels are compiled after {time.monotonic() - began:.0f} s; jobs failed in {failed} processes", flush=True)
    if options.compile_only:
        check_gradients(torch.device(options.device))
        print(f"index loss and gradients hold against float64; {time.monotonic() - began:.0f} s", flush=True)
    else:
        study = random_study(options) if options.toy else load(options)
        study.began = began
        everything(study, (20, 10) if options.toy else (options.warmup_steps, options.sparse_steps))


if __name__ == "__main__":
    main()
