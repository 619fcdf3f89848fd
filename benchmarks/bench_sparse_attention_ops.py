#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times the operations of `fmha_sm100`, dense and sparse, prefill and decode, with the public package's command, on any device.

    python benchmarks/bench_sparse_attention_ops.py --dtype bf16 --sections sparse_prefill,sparse_decode -o result.tsv

Flags, console and TSV columns are those of the public one. This one also has --device, --selection random|clustered (the public
benchmark reads the first blocks for every query, which no model does) and --peaks: MFU and MBU stand against the device's data
sheet where it is known, otherwise against what a matrix product and a copy reach on it in this run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The checkout need not be installed.

import torch

from benchmarks.ops_cases import DTYPES, SECTIONS, Call, Case, cases, prepare
from openmsa.testing.timing import Clock, ColdCudaClock, sample, wall_seconds

COLUMNS = (
    *("q_len", "kv_len", "dtype", "batch_size", "q_head", "kv_head", "head_dim", "latency_ms", "std_ms", "tflops", "gbs"),
    *("mfu_mbu_pct", "predicted_split_speedup_pct"),
)
HEADINGS = (
    "q_len",
    "kv_len",
    "dtype",
    "bsz",
    "h_q",
    "h_kv",
    "dim",
    "lat(ms)",
    "std(ms)",
    "TFLOPs",
    "GB/s",
    "MFU/MBU",
    "split%",
)
WIDTHS = (8, 8, 6, 5, 5, 5, 5, 10, 9, 9, 9, 8, 8)
DATA_SHEET = {  # dense bf16 and fp8 TFLOP/s, GB/s; the first name that is part of the device's name counts
    "H200": (989, 1979, 4800),
    "H100 PCIe": (756, 1513, 2000),
    "H100": (989, 1979, 3350),
    "B300": (2250, 4500, 8000),
    "B200": (2250, 4500, 8000),
    "A100": (312, 312, 2039),
    "L40S": (362, 733, 864),
    "4090": (165, 330, 1008),
}
MOST_SAMPLES = 10_000


def integers(text: str) -> list[int]:
    """Reads whole numbers such as ``"1,2,4"``."""
    values = [int(part) for part in text.split(",") if part.strip()]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"must be positive whole numbers with commas between, got {text!r}")
    return values


def device_name(text: str) -> torch.device:
    """Reads the name of a device such as ``"cuda:1"``."""
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}") from None


def sections(text: str) -> list[str]:
    """Reads the names of sections such as ``"prefill,decode"``, or ``"all"``."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if "all" in names:
        return list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"must be among {', '.join(SECTIONS)}, all; got {', '.join(unknown)}")
    return names


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpu", type=int, default=0, help="index of the GPU")
    p.add_argument(
        "--device", type=device_name, help="cpu, cuda or cuda:N; default: the GPU of --gpu where there is one, else cpu"
    )
    p.add_argument("--output_mode", "--output-mode", choices=("full", "maxscore", "o"), default="o")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="fp8", help="nvfp4: K and V, in sparse_prefill alone")
    p.add_argument("--output", "-o", type=Path, help="write the rows to this file, tab-separated")
    p.add_argument("--sections", type=sections, default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}, all")
    p.add_argument("--seqs", type=integers, default=[8192, 16384, 32768, 65536, 131072], help="prefill lengths")
    p.add_argument(
        "--tp", type=integers, default=[1, 2, 4], help="tensor parallelism of the dense prefill: 64/4, 32/2, 16/1 heads"
    )
    p.add_argument("--decode-k", type=integers, default=[8192, 16384, 32768, 65536])
    p.add_argument("--decode-b", type=integers, default=[32, 64, 128])
    p.add_argument("--topk", type=int, default=16, choices=(4, 8, 16, 32))
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--blk-kv", dest="block_size", type=int, default=128)
    p.add_argument("--dry-run-ms", type=float, default=200, help="warm-up of every row")
    p.add_argument("--repeat-ms", type=float, default=2000, help="measurement of every row")
    p.add_argument("--selection", choices=("first", "random", "clustered"), default="first")
    p.add_argument(
        "--peaks", choices=("auto", "measure"), default="auto", help="auto: the data sheet where the device is known"
    )
    return p


def peaks(device: torch.device, dtype: str, clock: Clock, measure: bool) -> tuple[float, float, str]:
    """Returns FLOP/s, bytes/s, and a sentence that says where they come from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    known = next((peak for part, peak in DATA_SHEET.items() if part in name), None)
    if known is not None and not measure:
        rate = known[0] if dtype == "bf16" else known[1]
        return rate * 1e12, known[2] * 1e9, f"{name}: data sheet, {rate} TFLOP/s, {known[2]} GB/s"
    from openmsa.bench.ceilings import measure_ceilings

    small = {"gemm_size": 1024, "buffer_bytes": 1 << 28} if device.type == "cpu" else {}
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = measure_ceilings(device, kind, clock, **small)
    return (
        found.gemm,
        found.bandwidth,
        (
            f"{name}: measured here, {found.gemm / 1e12:.2f} TFLOP/s ({str(kind).removeprefix('torch.')} product), "
            f"{found.bandwidth / 1e9:.1f} GB/s"
        ),
    )


def measured(call: Call, clock: Clock, dry_run_ms: float, repeat_ms: float) -> tuple[float, float]:
    """Returns the median and the standard deviation of a call's time, in seconds."""
    sample(call.run, clock, MOST_SAMPLES, dry_run_ms / 1e3)
    samples = sample(call.run, clock, MOST_SAMPLES, repeat_ms / 1e3)
    return statistics.median(samples), statistics.stdev(samples) if len(samples) > 1 else 0.0


def row(case: Case, call: Call, seconds: float, deviation: float, limits: tuple[float, float]) -> tuple[object, ...]:
    """Returns the values of `COLUMNS` for a case."""
    flops, rate = call.flops / seconds, call.bytes / seconds
    share = flops / limits[0] if case.prefill else rate / limits[1]
    shape = (case.q_len, case.kv_len, case.dtype, case.batch, case.num_q_heads, case.num_kv_heads, case.head_dim)
    figures = (
        f"{seconds * 1e3:.4f}",
        f"{deviation * 1e3:.4f}",
        f"{flops / 1e12:.3f}",
        f"{rate / 1e9:.2f}",
        f"{share * 100:.2f}",
    )
    return *shape, *figures, f"{(call.predicted_speedup - 1) * 100:.1f}"


def line(values: Sequence[object]) -> str:
    """Formats one line of the console's table."""
    return " ".join(f"{value!s:>{width}}" for value, width in zip(values, WIDTHS, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    p = parser()
    options = p.parse_args(arguments)
    device = torch.device(options.device or (f"cuda:{options.gpu}" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        p.error(f"--device must be cpu where PyTorch finds no GPU, got {device}")
    if options.dtype == "nvfp4" and options.sections != ["sparse_prefill"]:
        if options.sections != list(SECTIONS):
            p.error(f"--sections must be sparse_prefill for --dtype nvfp4, got {','.join(options.sections)}")
        options.sections = ["sparse_prefill"]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    clock: Clock = ColdCudaClock(device) if device.type == "cuda" else wall_seconds
    *limits, source = peaks(device, options.dtype, clock, options.peaks == "measure")
    print(f"{source}; selection {options.selection}, top-k {options.topk}, output {options.output_mode}", flush=True)
    lines, last, failed = ["\t".join(COLUMNS)], None, 0
    for case in cases(options):
        if case.table != last:
            print(f"\n{case.table}\n{line(HEADINGS)}")
        last = case.table
        try:
            with torch.no_grad():
                call = prepare(case, device)
                found = measured(call, clock, options.dry_run_ms, options.repeat_ms)
        except (torch.OutOfMemoryError, NotImplementedError) as error:
            failed += 1
            print(f"{case.q_len:>8} {case.kv_len:>8} not measured: {str(error).splitlines()[0]}", flush=True)
            continue
        values = row(case, call, *found, (limits[0], limits[1]))
        lines.append("\t".join(map(str, values)))
        print(line(values) + ("  sparse" if case.section == "sparse_decode" else ""), flush=True)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n")
        print(f"\nwrote {options.output}")
    return 1 if failed and len(lines) == 1 else 0


if __name__ == "__main__":
    sys.exit(main())
