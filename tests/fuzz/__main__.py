# SPDX-License-Identifier: MIT
"""Runs rounds of the fuzz (``python -m tests.fuzz --rounds 2000 --seed 7``), or one case again (``--case "Case(...)"``)."""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import traceback
from collections import Counter

import torch

if "--interpret" in sys.argv:
    import tests.conftest  # noqa: F401  (It sets the interpreter up before triton is imported.)
from tests.fuzz.cases import Case, draw_case
from tests.fuzz.checks import check_case, interpreter


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="cases to draw")
    parser.add_argument("--seed", type=int, default=None, help="of the first case; case n is drawn from seed + n")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop when so many are spent")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--products", type=int, default=None, help="query heads x queries x keys of a case, at most about")
    parser.add_argument("--case", default=None, help="a case as a failure printed it, instead of drawn ones")
    parser.add_argument("--interpret", action="store_true", help="the kernels alone, in Triton's interpreter, on small cases")
    options = parser.parse_args()
    with interpreter() if options.interpret else contextlib.nullcontext():
        return run(options)


def run(options: argparse.Namespace) -> int:
    """Draws cases, prints what failed, and sums up; returns 1 where something failed."""
    sizes = {"products": 2000, "longest": 150, "dims": (16, 32, 48, 80)} if options.interpret else {}
    if options.products is not None:
        sizes["products"] = options.products
    first = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {first} on {options.device}, torch {torch.__version__}", flush=True)
    compared, failures, start, rounds = Counter(), [], time.perf_counter(), 0
    for seed in [None] if options.case else range(first, first + options.rounds):
        if time.perf_counter() - start > options.seconds:
            break
        case = eval(options.case, {"Case": Case}) if options.case else draw_case(random.Random(seed), options.device, **sizes)
        try:
            compared += check_case(case, options.device, options.interpret)
        except Exception as error:
            failures.append(case)
            kind = "" if isinstance(error, AssertionError) else "".join(traceback.format_exception(error))
            again = f"python -m tests.fuzz --device {options.device}{' --interpret' * options.interpret} --case {str(case)!r}"
            print(f"FAILED: {kind}{error}\n  {again}", flush=True)
        rounds += 1
        if rounds % 50 == 0:
            print(f"{rounds} rounds, {len(failures)} failures, {time.perf_counter() - start:.0f} s", flush=True)
    for (function, impl), count in sorted(compared.items()):
        print(f"{function:26} {impl:10} {count:6} comparisons")
    print(f"{rounds} rounds, {len(failures)} failures, {time.perf_counter() - start:.0f} s, seed {first}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
