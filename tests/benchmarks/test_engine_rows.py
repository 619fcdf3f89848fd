# SPDX-License-Identifier: MIT
"""The coordinator of engines asks each for its rows in turns, in bounded time, and goes on where one fails."""

import json
import os
import sys
import threading
from argparse import Namespace
from multiprocessing.connection import Pipe

import pytest

from benchmarks import engine as rows
from benchmarks import engine_rows
from benchmarks.engine import permuted

WORKER = """
import sys
from multiprocessing.connection import Connection
kernels, breaks, orders = sys.argv[1], sys.argv[2], Connection(int(sys.argv[3]))
if breaks == "start":
    sys.exit("RuntimeError: no memory")
orders.send({"start_s": 1.0})
walls = iter([1.0, 5.0, 3.0])
while True:
    order = orders.recv()
    stage = {"gpu_ms": 4.0 if kernels == "own" else 2.0, "host_median_us": 5.0, "calls": 2}
    wall = next(walls, 1.0) if order["do"] == "prefill" else 1.0
    row = {"wall_s": wall, "step_ms": 1.0, "tokens": 8, "batch": 4, "apart": 0.0, "errors": []}
    failed = order["do"] == breaks
    row |= {"seconds": 1, "stages": {"attend": stage, "indexer": stage}}
    orders.send({"failed": "ValueError: bad"} if failed else row)
"""


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Runs the rows with workers in place of engines, of which those of `breaks` fail at an order; returns the record, what was
    left out, and the worker's orders."""

    def run(breaks=None, seconds=60.0, rows=None, turns=1):
        def command(group, kernels, a, orders):
            return [sys.executable, "-c", WORKER, kernels, (breaks or {}).get((group, kernels), "-"), str(orders)]

        monkeypatch.setattr(engine_rows, "engine_command", command)
        out = tmp_path / "rows.jsonl"
        a = Namespace(groups=["rank", "drafts"], out=out, seconds=seconds, start_seconds=60.0, steps=2, more=[])
        a.rows, a.turns = rows, turns
        left = engine_rows.measure(a)
        return [json.loads(line) for line in out.read_text().splitlines()], left

    return run


def test_rows_come_in_turns(measured):
    records, left = measured()
    taken = [(r["group"], r["row"], tuple(r["sizes"]), r["kernels"]) for r in records if r["row"] != "start"]
    wanted = [row for row in engine_rows.ROWS if row[0] in ("rank", "drafts")]
    assert taken == [(*row, kernels) for row in wanted for kernels in engine_rows.KERNELS]
    assert left == []
    text = engine_rows.table(records)
    assert "rank prefill 4096: wall 1e+03 1e+03 1.00x | indexer 4 2 2.00x | attend 4 2 2.00x | both 8 4 2.00x" in text


def test_a_row_is_measured_in_turns(measured):
    records, left = measured(rows=["rank prefill 4096"], turns=3)
    assert [(r["row"], r["kernels"]) for r in records if r["row"] != "start"] == [
        ("prefill", "own"),
        ("prefill", "openmsa"),
    ] * 3
    assert left == []
    text = engine_rows.table(records)
    assert "rank prefill 4096: wall 3e+03 3e+03 1.00x | indexer 4 2 2.00x" in text
    assert text.endswith("| 3 turns")


def test_an_engine_rests_between_orders():
    code = "import sys; from multiprocessing.connection import Connection as C; link = C(int(sys.argv[1]))\n"
    code += "while True: link.recv(); link.send({})"
    engine = engine_rows.Engine("rank", "own", 0, lambda orders: [sys.executable, "-c", code, str(orders)])
    try:
        for _ in range(2):
            assert engine.ask({}, 60.0) == {}
            engine.rest()
            engine.link.send({})
            with pytest.raises(TimeoutError, match="rank own: no answer in 0 s"):
                engine.take(0.3)
            engine.send({})
            assert [engine.take(60.0), engine.take(60.0)] == [{}, {}]
    finally:
        engine.end()
    engine.rest()  # There is nothing left that could be stopped.


def test_an_interrupted_run_leaves_no_engine_that_rests(measured, monkeypatch):
    begun, started = [], engine_rows.started
    monkeypatch.setattr(engine_rows, "started", lambda *given: begun.append(started(*given)) or begun[0])
    monkeypatch.setattr(engine_rows, "asked", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        measured()
    assert len(begun[0]) == 4
    assert all(engine.process.poll() is not None for engine in begun[0].values())


def test_a_row_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine_rows", "--groups", "rank", "--rows", "half prefill 4096"])
    with pytest.raises(SystemExit):
        engine_rows.main()
    assert "--rows must name rows of --groups, such as 'rank prefill 4096', got 'half prefill 4096'" in capsys.readouterr().err


def test_an_engine_that_fails_takes_no_other_with_it(measured):
    records, left = measured({("rank", "own"): "start", ("drafts", "openmsa"): "prefix"})
    assert {(r["group"], r["kernels"]) for r in records if r["row"] == "prefill"} == {("rank", "openmsa")}
    assert "drafts prefix 32768 x 512, openmsa: drafts openmsa: ValueError: bad" in left
    assert "drafts decode 1 x 32768, openmsa: no engine" in left
    assert all("no engine" in line for line in left if line.startswith("rank"))


def test_rows_without_time_are_named(measured):
    records, left = measured(seconds=0.0)
    assert {r["row"] for r in records} == {"start"}
    assert len(left) == 2 * sum(row[0] in ("rank", "drafts") for row in engine_rows.ROWS)
    assert all(line.endswith("no time") for line in left)


def test_where_no_engine_gets_ready_all_rows_are_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engine_rows, "engine_command", lambda *rest: [sys.executable, "-c", "raise RuntimeError('no memory')"])
    monkeypatch.setattr(sys, "argv", ["engine_rows", "--groups", "drafts", "-o", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit) as ended:
        engine_rows.main()
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "not ready: drafts own: the engine ended; RuntimeError: no memory" in said
    assert (
        said.count("left out: drafts") == said.count(": no engine\n") == 2 * sum(row[0] == "drafts" for row in engine_rows.ROWS)
    )


def test_an_engine_serves_orders_until_the_pipe_closes(monkeypatch):
    calls = []
    for name in ("prefill", "decode", "prefix"):
        monkeypatch.setattr(rows, name, lambda engine, *rest, name=name: calls.append((name, rest)) or {"row": name})
    monkeypatch.setattr(rows, "answers", lambda e, a, config, record: record.update(alone=[], together=[], errors=[1]))
    near, far = Pipe()
    a = Namespace(repeat=3)
    thread = threading.Thread(target=engine_rows.serve, args=(os.dup(far.fileno()), "engine", {}, {"start_s": 2.0}, a))
    thread.start()
    assert near.recv() == {"start_s": 2.0}
    near.send({"do": "warm", "rows": [("prefill", (64,)), ("decode", (128, 16384)), ("answers", ())]})
    assert near.recv()["seconds"] < 60
    near.send({"do": "prefix", "sizes": (64, 5)})
    assert near.recv() == {"row": "prefix"}
    near.send({"do": "answers", "sizes": ()})
    assert near.recv() == {"alone": [], "together": [], "errors": [1]}
    monkeypatch.setattr(rows, "prefill", lambda *rest: 1 / 0)
    near.send({"do": "prefill", "sizes": (64,)})
    assert near.recv() == {"failed": "ZeroDivisionError: division by zero"}
    assert calls == [("prefill", (64, 1)), ("decode", (2, 8192, a)), ("prefix", (64, 5, 3))]
    near.close()
    far.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_every_token_of_a_permuted_prompt_is_found_again():
    prompt = permuted(40000, 3)
    assert sorted(prompt[:31990]) == list(range(10, 32000))
    assert len(prompt) == 40000


def test_a_step_that_compiled_a_kernel_does_not_decide_a_row():
    def row(kernels, mean, middle):
        forward = {"calls": 4, "gpu_ms": 4 * mean, "gpu_median_ms": middle}
        same = {"group": "rank", "row": "decode", "sizes": [8, 16384], "step_ms": 2.0, "tokens": 8, "batch": 8}
        return {**same, "kernels": kernels, "stages": {"forward": forward}}

    assert "| forward 1 0.8 1.25x |" in engine_rows.table([row("own", 1.0, 1.0), row("openmsa", 500.0, 0.8)])


def test_answers_that_are_not_compared_with_pytorch_are_no_lines():
    """Engines with drafts or prefix caching say no log-probabilities of prompts."""
    answers = [{"group": "drafts", "row": "answers", "sizes": [], "kernels": k} for k in engine_rows.KERNELS]
    assert engine_rows.table(answers) == "row: own, ours, times faster"
