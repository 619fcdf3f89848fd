# SPDX-License-Identifier: MIT
"""The public benchmark command works at tiny shapes on the CPU: flags, console, TSV, and the useful work it counts."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_sparse_attention_ops as command
from benchmarks.ops_cases import SECTIONS, Case, cases, prepare, selection, work
from openmsa.bench.inputs import Inputs

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--seqs", "256", "--tp", "4", "--decode-k", "512", "--decode-b", "2", "--topk", "4"]
TINY += ["--dry-run-ms", "1", "--repeat-ms", "1"]
HEADER = [
    *("q_len", "kv_len", "dtype", "batch_size", "q_head", "kv_head", "head_dim", "latency_ms", "std_ms", "tflops", "gbs"),
    *("mfu_mbu_pct", "predicted_split_speedup_pct"),
]


@pytest.fixture(autouse=True)
def known_peaks(monkeypatch):
    """Measuring the machine takes a second."""
    monkeypatch.setattr(command, "peaks", lambda *_: (1e12, 1e11, "test"))


def table(tmp_path, *flags):
    assert command.main([*TINY, "-o", str(tmp_path / "rows.tsv"), *flags]) == 0
    lines = (tmp_path / "rows.tsv").read_text().splitlines()
    assert lines[0].split("\t") == HEADER
    return [dict(zip(HEADER, line.split("\t"), strict=True)) for line in lines[1:]]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_section_gives_its_rows(tmp_path, dtype, capsys):
    rows = table(tmp_path, "--dtype", dtype, "--sections", "all", "--selection", "random")
    shapes = [[int(r[name]) for name in ("q_len", "kv_len", "batch_size", "q_head", "kv_head")] for r in rows]
    prefill = [[256, 256, 1, 16, 1], [256, 256, 1, 64, 4], [256, 256, 1, 64, 4]]
    assert shapes == [*prefill, [4, 512, 2, 64, 4], [4, 512, 2, 64, 4], [8, 512, 2, 64, 4], [8, 512, 2, 64, 4]]
    for r in rows:
        assert r["dtype"] == dtype
        assert float(r["latency_ms"]) > 0
        assert "," not in "".join(r.values())
    printed = capsys.readouterr().out
    assert all(f"\n{section}\n" in printed for section in SECTIONS)
    assert "MFU/MBU" in printed


@pytest.mark.parametrize("flags", [["--dtype", "nvfp4"], ["--dtype", "bf16", "--sections", "decode", "--output_mode", "full"]])
def test_other_modes(tmp_path, flags):
    assert len(table(tmp_path, *flags)) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "nvfp4", "--sections", "decode"], "--sections must be sparse_prefill"),
        (["--sections", "everything"], "must be among"),
        (["--seqs", "0"], "positive whole numbers"),
        (["--device", "nonsense"], "must be cpu, cuda or cuda:N, got 'nonsense'"),
        (["--topk", "5"], "invalid choice"),
    ],
)
def test_wrong_flags_say_what_is_wrong(flags, message, capsys):
    with pytest.raises(SystemExit):
        command.main([*TINY, *flags])
    assert message in capsys.readouterr().err


def test_the_command_stands_alone():
    """The command runs as a script from another folder, and its help says the default of every number."""
    script = ROOT / "benchmarks" / "bench_sparse_attention_ops.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    for flag in ("--gpu", "--output_mode", "--dtype", "--output", "--sections", "--seqs", "--tp", "--decode-k", "--decode-b"):
        assert flag in done.stdout
    options = command.parser().parse_args([])
    assert (options.dtype, options.output_mode, options.topk, options.head_dim, options.block_size) == (
        "fp8",
        "o",
        16,
        128,
        128,
    )
    rows = list(cases(options))
    assert len(rows) == 5 * 3 + 5 + 5 + 4 * 3 * (1 + 1 + 2)


@pytest.mark.parametrize("kind", ["first", "random", "clustered"])
def test_useful_work_is_what_queries_see(kind):
    case = Case("sparse_prefill", "sparse_prefill", 1, 384, 384, 8, 2, "bf16", topk=2, head_dim=16, selection=kind)
    inputs = Inputs(case.workload(), torch.device("cpu"))
    blocks = selection(case, inputs)
    pairs, named = 0, set()
    for token in range(384):
        for head in range(2):
            for block in blocks[token, head].tolist():
                if block >= 0:
                    named.add((head, block))
                    pairs += 4 * sum(key <= token for key in range(block * 128, block * 128 + 128))
    flops, moved = work(case, inputs, blocks)
    assert flops == pairs * 4 * 16
    assert moved == 384 * 8 * 16 * 4 + len(named) * 128 * 2 * 16 * 2
    assert bool(((blocks * 128 <= torch.arange(384)[:, None, None]) | (blocks < 0)).all())


def test_a_sparse_call_computes_attention():
    """What is timed is the operation itself."""
    case = Case("sparse_prefill", "sparse_prefill", 1, 256, 256, 8, 2, "bf16", topk=2, head_dim=64)
    out, _ = prepare(case, torch.device("cpu")).run()
    inputs = Inputs(case.workload(), torch.device("cpu"))
    q, k, v = (x.transpose(0, 1)[None].double() for x in (inputs.q, inputs.k, inputs.v))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    assert float((out - truth).abs().max()) < 0.02  # two blocks are all there are
