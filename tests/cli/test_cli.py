# SPDX-License-Identifier: MIT
"""The commands print and refuse what they should, and import only what they need."""

import dataclasses
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from typer.testing import CliRunner

from openmsa.bench import record, rows, workloads
from openmsa.bench.workloads import Workload
from openmsa.cli import app
from openmsa.cli.checks import check_writable
from openmsa.cli.progress import Remaining, in_all, told
from openmsa.explain import STAGES

CPU_RECORD = Path(__file__).parents[2] / "benchmarks/results/2026-11-28-cpu-epyc.jsonl"
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
    quick=("msa_attention", "sdpa"),
)
LONG = dataclasses.replace(TINY, name="long-prefill", q_len=128, context=128, quick=())


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def tiny(monkeypatch):
    from openmsa.bench import ceilings

    monkeypatch.setattr(workloads, "WORKLOADS", (TINY, LONG))
    monkeypatch.setitem(ceilings.GEMM_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.BUFFER_BYTES, "cpu", 1 << 16)


COMMANDS = ("doctor", "demo", "demo-bytes", "convert", "generate", "train-index", "evaluate", "plan", "bench")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    assert command in invoke("--help").stdout
    assert invoke(command, "--help").exit_code == 0
    assert invoke(command, "-h").stdout == invoke(command, "--help").stdout


def test_help_leaves_lines_to_the_terminal():
    texts = [info.help for info in app.registered_commands] + [info.typer_instance.info.help for info in app.registered_groups]
    assert len(texts) == len(COMMANDS)
    assert all(text and "\n" not in paragraph for text in texts for paragraph in text.split("\n\n"))


@pytest.mark.parametrize("command", [["bench", "show"], ["bench", "plot"]])
def test_help_of_commands_below(command):
    assert invoke(*command, "-h").exit_code == 0


def test_help_is_quick():
    """Printing help takes the processor at most 0.3 of the time of `import torch`, which is 1.2 s of a usual core."""
    code = """
import contextlib, io, time
start = time.process_time()
import torch
imported = time.process_time()
from openmsa.cli import app
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    app(["--help"], prog_name="openmsa")
print(imported - start, time.process_time() - imported)
"""
    done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    imports, helps = zip(*(map(float, run.stdout.split()) for run in done), strict=True)
    assert min(helps) < 0.3 * min(imports)


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
    assert set(findings["pays"]) == {device["name"].split(":")[0] for device in findings["devices"]}
    on_cpu = [entry for entry in findings["stages"] if entry["device"] == "cpu"]
    assert {entry["stage"] for entry in on_cpu} == {stage.name for stage in STAGES.values()}
    for entry in on_cpu:
        assert entry["chosen"] is not None
        table = next(stage.table for stage in STAGES.values() if stage.name == entry["stage"])
        assert set(entry["reasons"]) == {row.name for row in table}
        assert all(entry["reasons"].values())


@pytest.mark.parametrize(("policy", "said"), [("", "unset, so they spin;"), ("PASSIVE", "PASSIVE")])
def test_doctor_says_how_threads_wait(policy, said, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert f"CPU threads that wait (OMP_WAIT_POLICY): {said}" in invoke("doctor").stdout


def test_doctor_for_people():
    shown = invoke("doctor").stdout
    words = ("torch", "faster than dense attention on cpu: prefill from", "which implementation serves each stage")
    for word in (*words, "select_blocks_from_scores ", "why not the others"):
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
    lines = record.rows(path)
    assert [line["row"] for line in lines] == ["msa_attention", "sdpa"]
    assert {line["commit"] for line in lines} == {"abc"}
    assert "msa_attention" in invoke("bench", "show", str(path)).stdout
    assert "| msa_attention " in invoke("bench", "show", "--markdown", str(path)).stdout


def test_bench_as_json(tiny):
    result = invoke("bench", "--device", "cpu", "--repeat", "1", "--impl", "reference", "--json", "--match", "tiny")
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["workload"] for line in result.stdout.splitlines()] == ["tiny-prefill"] * 2


def test_bench_is_quick_unless_told(tiny):
    options = ("bench", "--device", "cpu", "--impl", "reference", "--json")
    quick = invoke(*options)
    lines = [json.loads(line) for line in quick.stdout.splitlines()]
    assert {line["workload"] for line in lines} == {"tiny-prefill"}
    assert "2 of 4 rows in one pass. openmsa bench --full measures all rows (also long-prefill) in 3 passes" in quick.stderr
    full = invoke(*options, "--full", "--repeat", "1")
    assert {json.loads(line)["workload"] for line in full.stdout.splitlines()} == {"tiny-prefill", "long-prefill"}
    assert "--full" not in full.stderr


def test_bench_interrupted(tiny, tmp_path, monkeypatch):
    def interrupted(c):
        raise KeyboardInterrupt

    monkeypatch.setitem(rows.ROWS, "msa_attention", dataclasses.replace(rows.ROWS["msa_attention"], build=interrupted))
    path = tmp_path / "record.jsonl"
    result = invoke("bench", "--device", "cpu", "--impl", "reference", "--output", str(path))
    assert result.exit_code == 130
    assert [line["row"] for line in record.rows(path)] == ["sdpa"]
    assert " sdpa " in result.stdout
    assert f"Interrupted: 1 rows have samples and stand in {path}." in result.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--output", "{}/file/record.jsonl"), "--output"),
        (("plot", str(CPU_RECORD), "--output", "{}/file/speed.png"), "--output"),
    ],
)
def test_bench_checks_its_output_before_any_work(tiny, tmp_path, monkeypatch, arguments, option):
    monkeypatch.setattr("openmsa.bench.runner.run", lambda *_: pytest.fail("nothing is measured before this is refused"))
    (tmp_path / "file").write_text("no folder")
    result = invoke("bench", *(argument.format(tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert f"{option} must be a place that can be written, got" in result.stderr
    assert (tmp_path / "file").read_text() == "no folder"


def full(*arguments, **options):
    raise OSError(28, "No space left on device")


def test_bench_on_a_full_disk_prints_what_it_has(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "append", full)
    path = tmp_path / "record.jsonl"
    result = invoke("bench", "--device", "cpu", "--impl", "reference", "--output", str(path))
    assert result.exit_code == 1
    assert f"--output cannot be written to its end, '{path}': [Errno 28] No space left on device. Its last" in result.stderr
    assert " msa_attention " in result.stdout


def test_bench_plot_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("matplotlib.figure").Figure, "savefig", full)
    result = invoke("bench", "plot", str(CPU_RECORD), "-o", str(tmp_path / "speed.png"))
    assert result.exit_code == 1
    assert "speed.png': [Errno 28] No space left on device. What may stand there is no whole image." in result.stderr


def test_a_check_leaves_files_as_they_are(tmp_path):
    (tmp_path / "old").write_text("kept")
    check_writable("--output", tmp_path / "old")
    check_writable("--output", tmp_path / "folder" / "new")
    assert (tmp_path / "old").read_text() == "kept"
    assert [x.name for x in tmp_path.iterdir()] == ["old"]


def test_remaining_time():
    now = 100.0
    bar = Progress(Remaining(), get_time=lambda: now)
    task = bar.add_task("", total=40, began=60.0)
    assert str(Remaining().render(bar.tasks[task])) == ""
    bar.update(task, completed=10)
    assert str(Remaining().render(bar.tasks[task])) == "2 min left"  # 40 s for a quarter
    bar.update(task, completed=30)
    assert str(Remaining().render(bar.tasks[task])) == "13 s left"
    assert told(3900) == "1 h 5 min"


@pytest.mark.parametrize(
    ("load", "threads", "policy", "said"),
    [(7.5, 4, "", True), (5.9, 4, "", False), (7.5, 1, "", False), (7.5, 4, "PASSIVE", False)],
)
def test_a_busy_cpu_is_told_where_threads_spin(load, threads, policy, said, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    found = in_all(93.4)
    assert found.startswith("93 s in all.")
    assert ("(a load of 7.5 on 4 cores)" in found and "OMP_WAIT_POLICY=passive" in found) == said
    assert (found == "93 s in all.") != said


def test_bench_lists_for_people():
    shown = invoke("bench", "--list", "--device", "cuda").stdout
    assert "gpu-decode-b64-128k" in shown
    assert "decode_plan" in shown
    assert not re.search(r"(?<!gpu)(?<!\d)-prefill-32k |^ ?prefill-32k ", shown, re.MULTILINE)


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
        (("--list", "--device", "tpu"), "device must be cpu or cuda, got 'tpu'"),
        (("--list", "--match", "nothing"), "match must name a workload or one of its rows, got 'nothing'"),
        (("--threads", "100000"), "--threads must be at most 1024, got 100000"),
        (("--match", ""), "--match must name a workload, or a part of its name, got ''"),
        (("--full", "--match", "decode"), "--full measures everything: leave it out, or --match"),
        (("decode-128k",), "to measure a workload: openmsa bench --match decode-128k"),
        (("--device", "cpu", "show", __file__), "openmsa bench show takes no --device"),
        (("--json", "show", __file__), "openmsa bench show takes no --json"),
        (("plot", str(CPU_RECORD), "-o", "speed"), "--output must end as an image does (.png, .svg, .pdf), got 'speed'"),
        (("--device", "cpu", "--output", __file__), "--output must be a new file or one of records, as"),
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
