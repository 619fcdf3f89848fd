# SPDX-License-Identifier: MIT
"""This is the command line of the evidence; the package's docstring explains it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.evidence.run import Run, Setting
from benchmarks.evidence.schedule import Schedule
from openmsa.modules import MSAConfig
from openmsa.tiny import ByteConfig

TOY = ByteConfig(
    64, 2, 4, 2, 32, 96, 16, 1e4, MSAConfig(index_n_heads=2, index_head_dim=32, index_block_size=16, index_topk_blocks=4)
)


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="how long everything may take")
    parser.add_argument("--out", type=Path, required=True, help="folder for records and models")
    parser.add_argument("--work", type=Path, help="folder for checkpoints; OUT/work where it is not given")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --work")
    parser.add_argument("--smoke", action="store_true", help="short windows and few steps, for a first run on a machine")
    parser.add_argument("--toy", action="store_true", help="a tiny model and tiny windows, for a CPU")
    parser.add_argument("--steps", type=int, help="steps an arm; found from --minutes where it is not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    schedule, config, windows, text = Schedule(1, seed=options.seed), ByteConfig(), 24, 200_000_000
    if options.smoke:
        schedule, windows, text = Schedule(1, 16384, ((0.15, 512), (0.4, 2048), (1.0, 8192)), seed=options.seed), 4, 20_000_000
    if options.toy:
        config, windows, text = TOY, 4, 8_000_000
        schedule = Schedule(1, 1024, ((0.4, 128), (1.0, 512)), rise=5, seed=options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    work = options.work or options.out / "work"
    return Run(
        Setting(
            options.out,
            work,
            options.minutes,
            torch.device(options.device),
            config,
            schedule,
            options.steps,
            text,
            windows,
            options.resume,
        )
    ).go()


if __name__ == "__main__":
    sys.exit(main())
