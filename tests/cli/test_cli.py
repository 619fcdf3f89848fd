# SPDX-License-Identifier: MIT
"""The commands print and refuse what they should, and import only what they need."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from typer.testing import CliRunner

from openmsa.bench import workloads
from openmsa.bench.workloads import Workload
from openmsa.cli import app
from openmsa.explain import STAGES

TINY = Workload(
    *("tiny-prefill", "cpu"),
    q_len=64,
    context=64,
    rows=("msa_attention", "sdpa"),
    num_q_heads=4,
    num_kv_heads=1,
    head_dim=16,
    index_dim=16,
    block_size=16,
    topk=2,
    dtype=torch.float32,
)


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def tiny(monkeypatch):
    from openmsa.bench import ceilings

    monkeypatch.setattr(workloads, "WORKLOADS", (TINY,))
    monkeypatch.setitem(ceilings.GEMM_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.BUFFER_BYTES, "cpu", 1 << 16)


@pytest.mark.parametrize("command", ["demo", "doctor", "bench"])
def test_help(command):
    assert command in invoke("--help").stdout
    assert invoke(command, "--help").exit_code == 0


def test_version():
    assert invoke("--version").stdout == f"openmsa {version('openmsa')}\n"
    done = subprocess.run([sys.executable, "-m", "openmsa", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"openmsa {version('openmsa')}\n"


def test_help_imports_neither_models_nor_plots():
    heavy = ("transformers", "matplotlib", "gguf", "openmsa.bench.runner")
    code = f"import sys; import openmsa.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_doctor_as_json():
    result = invoke("doctor", "--json")
    assert result.exit_code == 0, result.output
    findings = json.loads(result.stdout)
    assert findings["devices"][0]["name"] == "cpu"
    assert findings["devices"][0]["threads"] >= 1
    assert findings["versions"]["torch"] == torch.__version__
    on_cpu = [entry for entry in findings["stages"] if entry["device"] == "cpu"]
    assert {entry["stage"] for entry in on_cpu} == {stage.name for stage in STAGES.values()}
    for entry in on_cpu:
        assert entry["chosen"] is not None
        table = next(stage.table for stage in STAGES.values() if stage.name == entry["stage"])
        assert set(entry["reasons"]) == {row.name for row in table}
        assert all(entry["reasons"].values())


def test_doctor_for_people():
    shown = invoke("doctor").stdout
    for word in ("torch", "which implementation serves each stage", "select_blocks_from_scores ", "why not the others"):
        assert word in shown


def test_doctor_finds_an_implementation_that_cannot_be_imported(monkeypatch):
    from openmsa.runtime.dispatch import Implementation

    def broken(self):
        raise ImportError(f"no module for {self.name}")

    monkeypatch.setattr(Implementation, "load", broken)
    entry = json.loads(invoke("doctor", "--json").stdout)["stages"][0]
    assert entry["chosen"] is None
    assert any("cannot be imported" in reason for reason in entry["reasons"].values())


def test_bench_records_and_prints(tiny, tmp_path):
    path = tmp_path / "record.jsonl"
    options = ("--device", "cpu", "--repeat", "1", "--impl", "reference", "--commit", "abc", "--output", str(path))
    result = invoke("bench", *options)
    assert result.exit_code == 0, result.output
    assert "msa_attention" in result.stdout
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["msa_attention", "sdpa"]
    assert {line["commit"] for line in lines} == {"abc"}
    assert "msa_attention" in invoke("bench", "show", str(path)).stdout
    assert "| msa_attention " in invoke("bench", "show", "--markdown", str(path)).stdout


def test_bench_as_json(tiny):
    result = invoke("bench", "--device", "cpu", "--repeat", "1", "--impl", "reference", "--json", "--match", "tiny")
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["workload"] for line in result.stdout.splitlines()] == ["tiny-prefill"] * 2


def test_bench_lists_for_people():
    shown = invoke("bench", "--list", "--device", "cuda").stdout
    assert "gpu-decode-b64-128k" in shown
    assert "decode_plan" in shown
    assert "prefill-32k " not in shown.replace("gpu-prefill-32k", "")


def test_bench_plots(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    path, image = tmp_path / "record.jsonl", tmp_path / "speed.png"
    invoke("bench", "--device", "cpu", "--repeat", "1", "--impl", "reference", "--output", str(path))
    assert invoke("bench", "plot", str(path), "-o", str(image)).exit_code == 0
    assert image.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--device", "tpu"), "device must be cpu or cuda, got 'tpu'"),
        (("--device", "cpu", "--match", "nothing"), "match must name a workload for cpu"),
        (("--device", "cpu", "--impl", "fastest"), "impl must be auto or one of triton, cpu, reference"),
        (("show", __file__), "test_cli.py must hold one JSON record a line"),
        (("plot", __file__, "-o", "no.png"), "test_cli.py must hold one JSON record a line"),
    ],
)
def test_bench_refuses_with_a_sentence(arguments, sentence):
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert sentence in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_bench_refuses_a_missing_gpu():
    assert "finds no GPU" in invoke("bench", "--device", "cuda").output
