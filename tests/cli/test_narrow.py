# SPDX-License-Identifier: MIT
"""What the commands print cuts no number on a terminal of 60 columns, and takes no second part on one of 80."""

import importlib
import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from openmsa.bench.narrow import Narrow
from openmsa.cli import app

RECORDS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.fixture
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def whole(shown, width, *numbers):
    assert max(map(len, shown.splitlines())) <= width
    assert "\u2026" not in shown  # the sign that something is cut
    for number in numbers:
        assert number in shown, shown


def command(name):
    return importlib.import_module(f"openmsa.cli.{name}")


@pytest.mark.parametrize("width", [60, 80], indirect=True)
def test_evaluate(width, capsys):
    from openmsa.training.compare import Row
    from openmsa.training.evaluate import NeedleScore

    bins = [(last // 2, last) for last in (8192, 16384, 32768, 65536, 131072)]
    needles = [NeedleScore(last, 0.25, 0.5, 4) for _, last in bins]
    measured = {"loss": 12.3456, "change": 0.8, "by_position": [12.3456] * 5, "needles": needles}
    rows = [Row("dense", 100, 64, 2048, **measured)]
    rows += [Row("training-free", p, 64, 1024, **measured, block_recall=0.912, score_recall=0.987) for p in (6.25, 12.5)]
    command("evaluate")._print({"windows": 4, "length": 131072, "block_size": 64, "bins": bins}, rows)
    shown = capsys.readouterr().out
    whole(shown, width, "1024", "12.3456", "+6.48%", "0.912", "0.987", "0.250", "0.25", *(str(last) for _, last in bins))
    assert shown.count("attention") == (3 if width == 80 else 5)


@pytest.mark.parametrize("width", [60, 80], indirect=True)
def test_demo(width, capsys):
    pytest.importorskip("transformers")
    from openmsa.demo.run import Result, Row

    rows = [Row("sliding window, 12 %", "window", 12, 128, 12.3456, 0.1234, 123.45, 123.45)]
    command("demo")._print(Result("SmolLM2", 8192, 64, 128, rows, "a.png", 8000, 64, "text ", "more", 1e-5, 1e-3, True, 99))
    whole(capsys.readouterr().out, width, "128", "12.3456", "+0.1234", "123.45", "123.45x", "1.0e-05")


@pytest.mark.parametrize("width", [60, 80], indirect=True)
def test_demo_bytes(width, capsys):
    from openmsa.demo.byte_model import ByteResult, Reading

    readings = [Reading("MSA, 16 blocks", 131072, 1.2345, 1123.4, 1100.1)]
    command("byte_demo")._print(ByteResult(131072, {}, readings, "a.png", "text", "more", 12345, 128 << 20, 99))
    whole(capsys.readouterr().out, width, "131,072", "1.2345", "1123.4", "1100.1", "12345 bytes a second", "128 MiB")


@pytest.mark.parametrize("width", [60, 80], indirect=True)
def test_plan(width):
    result = CliRunner().invoke(app, ["plan", "--batch", "400", "--gpus", "8", "--host-memory", "500"])
    whole(result.stdout, width, "712.50", "58368.00", "500.00", "20,736", "280.39")


@pytest.mark.parametrize("width", [60, 80], indirect=True)
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("2026-11-28-cpu-epyc.jsonl", ("3.20 ms", "58.1 GFLOP", "7.12x", "295")),
        ("2026-11-22-h200.jsonl", ()),
    ],
)
def test_bench(width, name, numbers):
    result = CliRunner().invoke(app, ["bench", "show", str(RECORDS / name)])
    whole(result.stdout, width, *numbers)


@pytest.mark.parametrize("width", [60, 80], indirect=True)
def test_progress_bars(width):
    from openmsa.cli.evaluation_progress import evaluation_bar
    from openmsa.cli.training_progress import training_bar

    def drawn(bar):
        console = Console(width=width, file=io.StringIO())
        bar.tasks[0].start_time -= 5000
        console.print(bar.get_renderable())
        return console.file.getvalue()

    with training_bar(True) as watcher:
        watcher.begin(40000, 12000)
        watcher.recall = ", recall 0.567"
        watcher.step({"stage": "warmup", "loss": 12.3456, "step": 21999})
        whole(drawn(watcher.bar), width, "12.3456", "0.567", "22000/40000", "1:23:2", "1 h 8 min left")
    with evaluation_bar() as watcher:
        watcher.bar.update(watcher.task, total=400, completed=200, description="training-free, 12.5 %: needles")
        whole(drawn(watcher.bar), width, "12.5", "50%", "1:23:2", "1 h 23 min left")
    bar = command("bench")._progress()
    bar.add_task("gpu-rank-16-1-prefill-128k: select_blocks/certified/paged eager", total=100, completed=50)
    whole(drawn(bar), width, "1:23:2", "1 h 23 min left")


def test_a_cell_wider_than_the_terminal_is_folded():
    table = Table("name", "count")
    table.add_row("a", "1234567890" * 3)
    console = Console(width=20, file=io.StringIO())
    console.print(Narrow(table))
    found = "".join(filter(str.isdigit, console.file.getvalue()))
    assert found == "1234567890" * 3
