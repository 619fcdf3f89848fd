# SPDX-License-Identifier: MIT
"""The benchmark runner works on tiny shapes: workloads, costs, inputs, peers, records, tables, plots. No time is asserted."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from openmsa import dense_attention
from openmsa.bench import cost, plot, record, report, runner, workloads
from openmsa.bench.ceilings import best_of
from openmsa.bench.dense_peer import _forms, _heads_first, dense_peer
from openmsa.bench.inputs import Inputs
from openmsa.bench.rows import ROWS, with_peers
from openmsa.bench.workloads import WORKLOADS, Workload
from openmsa.testing import timing

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SETTINGS = runner.Settings(CPU, impl="reference", rounds=2, samples=2, budget=0.01, gemm_size=64, buffer_bytes=1 << 16)
SMALL = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32, "index_dim": 16, "block_size": 16, "topk": 3}


def tiny(q_len, context, batch=1, **changes):
    fields = SMALL | {"rows": ("msa_attention", "sdpa"), "dtype": torch.float32} | changes
    return Workload("tiny", "cpu", q_len=q_len, context=context, batch=batch, **fields)


def shrunk(w: Workload) -> Workload:
    """Returns a workload of the table with its rows, at a size that the references run in no time."""
    q_len = {"decode": 1, "prefill": 96, "chunk": 48}[w.kind]
    return dataclasses.replace(w, q_len=q_len, context=96, batch=min(w.batch, 2), dtype=torch.float32, **SMALL)


SHAPES = [tiny(96, 96), tiny(48, 96), tiny(33, 96), tiny(1, 96), tiny(1, 96, batch=3)]


def test_table_is_consistent():
    names = [w.name for w in WORKLOADS]
    assert len(set(names)) == len(names)
    for w in WORKLOADS:
        assert set(w.rows) <= set(ROWS)
        assert w.device in ("cpu", "cuda")
        assert w.context % w.block_size == 0
        assert w.q_len <= w.context
    assert {p for row in ROWS.values() for p in row.peers} <= set(ROWS)


@pytest.mark.parametrize(("name", "batch", "q_len", "context", "heads"), [
    ("prefill-32k", 1, 32768, 32768, (16, 1)),
    ("decode-1m", 1, 1, 1 << 20, (64, 4)),
    ("gpu-chunk-16k-at-1m", 1, 16384, 1 << 20, (64, 4)),
    ("gpu-prefill-1m", 1, 1 << 20, 1 << 20, (64, 4)),
    ("gpu-short-1700-at-128k", 1, 1700, 131072, (64, 4)),
    ("gpu-decode-b64-128k", 64, 1, 131072, (64, 4)),
])  # fmt: skip
def test_promised_workloads(name, batch, q_len, context, heads):
    w = next(w for w in WORKLOADS if w.name == name)
    assert (w.batch, w.q_len, w.context, (w.num_q_heads, w.num_kv_heads)) == (batch, q_len, context, heads)


def test_choosing():
    named = ["prefill-8k", "prefill-32k", "chunk-512-at-128k", "decode-128k", "decode-1m", "bf16-prefill-32k", "bf16-decode-1m"]
    assert [w.name for w, _ in workloads.chosen("cpu")] == named
    assert [w.name for w, _ in workloads.chosen("cpu", ["prefill-32k"])] == ["prefill-32k", "bf16-prefill-32k"]
    assert workloads.chosen("cpu", ["decode-1m/msa*"])[0][1] == ("msa_attention", "msa_attention/paged")
    assert {w.name for w, _ in workloads.chosen("cuda", ["short"])} == {"gpu-short-256-at-128k", "gpu-short-1700-at-128k"}
    assert with_peers(("dense_attention",), ("msa_attention", "dense_attention", "sdpa")) == ("dense_attention", "sdpa")
    with pytest.raises(ValueError, match=r"match must name a workload for cpu .*got 'nothing'"):
        workloads.chosen("cpu", ["nothing"])


@pytest.mark.parametrize("w", SHAPES, ids=str)
def test_costs_against_counting(w):
    """FLOPs from closed forms equal those of counting every visible pair."""
    positions = torch.arange(w.context - w.q_len, w.context).repeat(w.batch)
    seen = positions + 1
    blocks = positions // w.block_size + 1  # visible
    own = positions % w.block_size + 1
    selected = torch.where(blocks <= w.topk, seen, (w.topk - 1) * w.block_size + own)
    assert cost.visible_keys(w) == int(seen.sum())
    assert cost.selected_keys(w) == int(selected.sum())
    assert cost.block_scores(w).flops == 2 * int(seen.sum()) * 2 * 16
    assert cost.dense_attention(w).flops == 4 * int(seen.sum()) * 8 * 32
    assert cost.sparse_attention(w).flops == 4 * int(selected.sum()) * 8 * 32
    assert cost.msa_attention(w).flops == cost.select_blocks(w).flops + cost.sparse_attention(w).flops


def test_costs_of_the_paper():
    """At 1M tokens the useful work falls by the paper's factor of 28.4, and a little more: half of the own block is unseen."""
    w = next(w for w in WORKLOADS if w.name == "gpu-prefill-1m")
    assert cost.dense_attention(w).flops / cost.msa_attention(w).flops == pytest.approx(28.5, abs=0.1)


def test_bytes_by_hand():
    w = tiny(1, 96, batch=3)  # float32, 8 query heads, 2 KV heads, head dim 32, index dim 16, 3 of 6 blocks of 16
    q, index, ids = 3 * 8 * 32 * 4, (3 * 2 + 3 * 96) * 16 * 4, 3 * 2 * 3 * 4
    assert cost.dense_attention(w).bytes == 2 * q + 2 * 3 * 96 * 2 * 32 * 4
    assert cost.sparse_attention(w).bytes == 2 * q + ids + 2 * 3 * 48 * 2 * 32 * 4
    assert cost.block_scores(w).bytes == index + 3 * 2 * 6 * 4
    assert cost.select_blocks(w).bytes == index + ids
    assert cost.msa_attention(w).bytes == 2 * q + index + 2 * 3 * 48 * 2 * 32 * 4


def test_limit_is_the_slower_of_work_and_bytes():
    ceilings = cost.Ceilings(gemm=100.0, copy=10.0, read=20.0, launch=1e-6)
    assert cost.limit_seconds(cost.Cost(1000, 20), ceilings) == (10.0, "flops")
    assert cost.limit_seconds(cost.Cost(1000, 400), ceilings) == (20.0, "bytes")
    quieter = best_of(ceilings, cost.Ceilings(gemm=90.0, copy=30.0, read=20.0, launch=1e-7))
    assert quieter == cost.Ceilings(gemm=100.0, copy=30.0, read=20.0, launch=1e-7)


@pytest.mark.parametrize("kind", ["random", "clustered"])
@pytest.mark.parametrize("w", [tiny(160, 512), tiny(1, 512, batch=3), tiny(100, 100 * 16, topk=16)], ids=str)
def test_selections(w, kind):
    x = Inputs(w, CPU)
    ids = x.selection(kind)
    assert ids.shape == (w.total_q, w.num_kv_heads, w.topk)
    assert ids.dtype == torch.int32
    position = torch.arange(w.context - w.q_len, w.context).repeat(w.batch)
    own = (position // w.block_size)[:, None, None]
    assert bool((ids <= own).all())
    assert bool((ids == own).sum(-1).eq(1).all())
    filled = ids.masked_fill(ids < 0, 1 << 20)
    assert bool((filled.diff(dim=-1) > 0).logical_or(filled[..., 1:] == 1 << 20).all())  # ascending, distinct, -1 last
    enough = (own >= w.topk - 1).expand(-1, w.num_kv_heads, 1)[..., 0]
    assert bool((ids[enough] >= 0).all())


def test_clustered_neighbours_share_blocks():
    w = tiny(64, 64 * 64, topk=8)
    x = Inputs(w, CPU)
    assert x.selection("clustered")[:, 0].unique().numel() <= 8 + cost.SPARE + 5  # the span's blocks and the own ones
    assert x.selection("random")[:, 0].unique().numel() > 40


def test_pages_hold_the_keys():
    x = Inputs(tiny(1, 96, batch=3), CPU)
    pages = x.pages()
    k, v, cu = pages.kv.gather()
    assert torch.equal(k, x.k)
    assert torch.equal(v, x.v)
    assert torch.equal(pages.index.gather()[0], x.index_k)
    assert cu.tolist() == [0, 96, 192, 288]


@pytest.mark.parametrize("w", SHAPES, ids=str)
def test_every_dense_form_computes_dense_attention(w):
    x = Inputs(w, CPU)
    expected = dense_attention(x.q, x.k, x.v, x.seqs, impl="reference")
    for name, form in _forms(x).items():
        try:
            out = form(*_heads_first(x))()
        except RuntimeError:
            continue
        if w.kind == "decode":
            out = out.reshape(w.batch, w.num_q_heads, 1, w.head_dim)
        torch.testing.assert_close(out.transpose(1, 2).flatten(0, 1), expected, msg=name, atol=1e-5, rtol=1e-4)
    dense_peer(x, timing.wall_seconds)()
    assert x.chosen_forms["sdpa"] in _forms(x)


def one_of_each():
    kinds = {(w.device, w.kind, w.rows): w for w in WORKLOADS}
    return list(kinds.values())


@pytest.mark.parametrize("w", one_of_each(), ids=lambda w: w.name)
def test_every_row_runs_or_says_why_not(w):
    small = shrunk(w)
    lines = list(runner.run([(small, small.rows)], SETTINGS))
    assert [line["row"] for line in lines] == list(small.rows)
    for line in lines:
        if line["row"].startswith("vllm"):
            assert line["error"] == "vLLM's kernels need a GPU"
            continue
        if line["row"].endswith("recorded"):  # what was recorded has one length; tests/benchmarks/test_recorded.py replays it
            assert "recorded selections must have some of" in line["error"]
            continue
        assert line["error"] is None, line["error"]
        check_record(line)
    json.dumps(lines)
    text = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    text.print(report.summary(lines))
    shown = text.export_text()
    for column in ("time", "rate", "per s", "limit", "sdpa", "memory", "limits in this run"):
        assert column in shown
    assert ("spread" in shown) == any(len(line.get("samples", ())) >= report.SPREAD for line in lines)


def check_record(line):
    assert 2 <= len(line["samples"]) <= 4
    assert line["lower_quartile_s"] <= line["median_s"] <= line["upper_quartile_s"]
    assert line["bound"] in ("flops", "bytes")
    assert line["percent_of_limit"] == pytest.approx(100 * line["limit_s"] / line["median_s"])
    assert set(line["times_faster_than"]) <= set(ROWS[line["row"]].peers)
    assert {"gpu", "commit", "date", "device_name", "threads", "versions", "useful_flops", "useful_bytes"} - {"gpu"} <= set(
        line
    )
    assert {"openmsa", "torch", "triton", "python"} <= set(line["versions"])
    ours = not line["row"].startswith("sdpa")
    assert (line["implementation"] is not None) == (ours and not line["row"].startswith("decode_plan"))
    assert (line["form"] is None) == ours
    assert set(line["ceilings"]) == {"gemm", "gemm_fp8", "copy", "read", "launch"}


def test_ratios_are_quotients_of_medians():
    small = tiny(32, 32)
    ours, dense = runner.run([(small, ("msa_attention",))], SETTINGS)
    assert dense["row"] == "sdpa"
    assert ours["times_faster_than"] == {"sdpa": dense["median_s"] / ours["median_s"]}
    assert ours["implementation"] == "select_blocks: reference, sparse_attention: reference"


def test_layers():
    """On a GPU a layer's time is its share of a graph of many layers where launches are a large part of it."""
    modes = {w.name: w.modes for w in workloads.WORKLOADS}
    assert modes["gpu-decode-b1-32k"] == ("eager", "graph", "layers")
    assert modes["gpu-decode-b32-128k"] == ("eager", "graph")
    gpu = dataclasses.replace(SETTINGS, device=torch.device("cuda"))
    decode = next(w for w in workloads.WORKLOADS if w.name == "gpu-decode-b1-32k")
    assert runner._modes(decode, "decode_plan", gpu) == decode.modes
    assert runner._modes(decode, "sdpa", gpu) == ("eager", "graph")
    assert runner._modes(decode, "decode_plan", SETTINGS) == ("eager",)
    assert runner._share(lambda run: run(), lambda: 32.0) == 32.0 / workloads.LAYERS


def test_a_row_that_fails_loses_no_other(monkeypatch):
    def broken(_):
        raise NotImplementedError("no kernel for this")

    monkeypatch.setitem(ROWS, "msa_attention", dataclasses.replace(ROWS["msa_attention"], build=broken))
    ours, dense = runner.run([(tiny(32, 32), ("msa_attention",))], SETTINGS)
    assert ours["error"] == "NotImplementedError: no kernel for this"
    assert "median_s" not in ours
    assert dense["error"] is None


def test_every_row_is_yielded_as_soon_as_it_is_complete(monkeypatch):
    """Peers are measured first, so that no row waits for the end of the others; records keep the order of the workload."""
    built = []
    for row in ("msa_attention", "dense_attention", "sdpa"):
        build = ROWS[row].build
        monkeypatch.setitem(
            ROWS, row, dataclasses.replace(ROWS[row], build=lambda c, row=row, build=build: built.append(row) or build(c))
        )
    small = tiny(32, 32, rows=("msa_attention", "dense_attention", "sdpa"))
    seen = [(line["row"], len(built)) for line in runner.run([(small, small.rows)], dataclasses.replace(SETTINGS, rounds=1))]
    assert built == ["sdpa", "msa_attention", "dense_attention"]
    assert seen == [("msa_attention", 2), ("dense_attention", 3), ("sdpa", 3)]


def test_an_interrupted_run_yields_what_has_samples(monkeypatch):
    build, rounds = ROWS["dense_attention"].build, []

    def interrupted(c):
        rounds.append(1)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return build(c)

    monkeypatch.setitem(ROWS, "dense_attention", dataclasses.replace(ROWS["dense_attention"], build=interrupted))
    small = tiny(32, 32, rows=("msa_attention", "dense_attention", "sdpa"))
    lines = []

    def keep():
        for line in runner.run([(small, small.rows)] * 2, dataclasses.replace(SETTINGS, budget=60.0)):
            lines.append(line)  # noqa: PERF402 - extend may lose the lines before the interrupt

    with pytest.raises(KeyboardInterrupt):
        keep()
    assert [line["row"] for line in lines] == ["msa_attention", "dense_attention", "sdpa"]
    counts = {line["row"]: len(line["samples"]) for line in lines}
    assert counts["dense_attention"] < counts["msa_attention"]
    assert all("sdpa" in line["times_faster_than"] for line in lines[:2])


def test_steps_add_up_to_what_is_expected():
    small = tiny(32, 32, rows=("msa_attention", "dense_attention", "sdpa"))
    steps = []
    work = [(small, small.rows)] * 2
    list(runner.run(work, SETTINGS, lambda text, seconds: steps.append(seconds)))
    assert sum(steps) == pytest.approx(runner.expected_seconds(work, SETTINGS))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_quick_choice_is_a_part_of_the_whole(device):
    whole = dict(workloads.chosen(device))
    quick = workloads.quick(device)
    assert 0 < len(quick) < len(whole)
    for w, rows in quick:
        assert set(rows) <= set(whole[w])
        assert {"sdpa", "dense_attention", "dense_attention/paged"} & set(rows)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks/results").glob("*h200.jsonl")), ids=lambda file: file.name)
def test_tables_fit_80_columns(file):
    text = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    records = record.load(file)
    text.print(report.summary(records))
    shown = text.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "\u2026" not in shown  # no cell is cut
    pieces = {piece for r in records for piece in r["row"].split("/")}  # a long name takes two lines, broken before a slash
    assert all(re.search(rf"\b{piece}\b", shown) for piece in pieces)


@pytest.mark.parametrize(
    ("seconds", "said"), [(1.0, "1.00 s"), (0.9999, "1000 ms"), (0.11, "110 ms"), (0.0123, "12.3 ms"), (2.5e-6, "2.50 us")]
)
def test_times_have_three_digits(seconds, said):
    assert report._time(seconds) == said


def test_rates_have_no_exponents():
    assert report._count(1.31e15, "FLOP/s") == "1.31 PFLOP/s"
    assert report._count(97.6e9, "B") == "97.6 GB"
    assert report._count(2e6, "B") == "2.00 MB"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "must hold at least one record, got an empty file"),
        (b"\n\n", "must hold at least one record"),
        (b"\x89PNG", "got bytes that are no text at 0"),
        (b"[1]\n", r"got '\[1\]' in line 1"),
        (b"[" * 100_000, r"got '\[{40}' in line 1"),
        (b'{"row": "sdpa"}\n', "must hold records of `openmsa bench`; row 1 lacks bound, bytes_per_s"),
    ],
)
def test_other_files_are_refused(tmp_path, content, said):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        record.load(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": None}, "row 1 has 'None' as shape"),
        ({"shape": {}}, "row 1, its shape lacks batch, context, num_kv_heads, num_q_heads, q_len"),
        ({"ceilings": {"gemm": "x", "copy": 1, "read": 1, "launch": 1}}, "row 1, its ceilings has 'x' as gemm"),
        ({"median_s": "fast"}, "row 1 has 'fast' as median_s"),
        ({"median_s": 0.0}, "row 1 has a median_s of 0.0, which must be positive"),
        ({"times_faster_than": {"sdpa": None}}, "row 1, its times_faster_than has 'None' as sdpa"),
        ({"error": True}, "row 1 has 'True' as error"),
    ],
)
def test_records_with_other_values_are_refused(tmp_path, change, said):
    lines = list(runner.run([(tiny(32, 32), ("msa_attention",))], SETTINGS))
    (tmp_path / "file").write_text(json.dumps(lines[0] | change))
    with pytest.raises(ValueError, match=said):
        record.load(tmp_path / "file")


@pytest.mark.parametrize("markdown", [False, True])
def test_rows_are_printed_as_they_are_called(markdown):
    lines = list(runner.run([(tiny(32, 32), ("msa_attention",))], SETTINGS))
    text = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    text.print(report.summary([line | {"row": "[red]a[/b]", "error": None} for line in lines], markdown))
    assert "[red]a[/b]" in text.export_text().replace("\n", "").replace(" ", "")


def test_devices_are_written_as_they_are_called(tmp_path):
    pytest.importorskip("matplotlib")
    lines = list(runner.run([(tiny(32, 32), ("msa_attention",))], SETTINGS))
    plot.plot([line | {"device_name": r"a $\frac$"} for line in lines], tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000


def test_kinds_and_modes_that_are_not_known_are_not_drawn():
    lines = list(runner.run([(tiny(32, 32), ("msa_attention",))], SETTINGS))
    assert plot.series(lines)
    assert not plot.series([line | {"kind": "other"} for line in lines] + [line | {"mode": "other"} for line in lines])


def test_records_travel(tmp_path):
    path = tmp_path / "folder" / "record.jsonl"
    settings = dataclasses.replace(SETTINGS, commit="abc")
    lines = [r for n in (32, 64) for r in runner.run([(tiny(n, n), ("msa_attention",))], settings)]
    for line in lines:
        record.append([line], path)
    assert record.load(path) == json.loads(json.dumps(lines))
    said = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum("shared" in line for line in said) == 2  # one for each run
    assert not any(set(line) & set(record.SHARED) for line in said)
    assert {line["commit"] for line in record.load(path)} == {"abc"}
    assert [c for c, _ in plot.series(lines)["whole prefill (msa_attention)"]] == [32, 64]
    graphs = [line | {"mode": "graph", "row": "decode_plan"} for line in lines if line["row"] == "msa_attention"]
    assert list(plot.series(lines + graphs)) == ["whole prefill (decode_plan, CUDA graph)"]
    batches = [lines[0] | {"kind": "decode", "shape": lines[0]["shape"] | {"batch": n}} for n in (8, 32, 1)]
    assert [label.split(" (")[0] for label in plot.series(batches)] == [f"decode, batch {n}" for n in (1, 8, 32)]
    assert plot.labelled([(32, 2.0), (32, 1.9), (32, 1.5), (64, 1.9)]) == [(64, 1.9), (32, 2.0), (32, 1.5)]
    pytest.importorskip("matplotlib")
    plot.plot(lines, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="records must hold a row of decode_plan"):
        plot.plot([], tmp_path / "nothing.png")


def test_sampling_policy():
    ticks = iter([0.5, 0.4, 0.3, 0.2])
    assert timing.sample(lambda: None, lambda run: next(ticks), most=3, budget=10.0) == [0.5, 0.4, 0.3]
    assert timing.sample(lambda: None, lambda run: 3.0, most=9, budget=2.0) == [3.0]
    assert timing.sample(lambda: None, lambda run: 1.0, most=9, budget=2.0, first=5.0) == [5.0]
    assert timing.quartiles([2.0]) == (2.0, 2.0, 2.0)
    assert timing.quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)


def test_peak_memory_of_a_known_allocation():
    size = 64 << 20

    def run():
        first = torch.ones(size, dtype=torch.uint8)
        return first + 1

    peak, seconds = timing.peak_extra_memory(run, CPU)
    assert seconds > 0
    if peak is not None:
        assert 2 * size * 0.9 < peak < 2 * size * 1.5


@pytest.mark.parametrize("entry", [["-m", "benchmarks"], ["-c", "from openmsa.cli import app; app()", "bench"]], ids=str)
def test_both_entries_list_the_workloads(entry):
    done = subprocess.run([sys.executable, *entry, "--list", "--json"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == [w.name for w in WORKLOADS]


@pytest.mark.parametrize(("name", "measured"), [("msa_attention", "again"), ("sdpa", "the first")])
def test_a_first_call_that_may_compile_is_not_measured(name, measured, monkeypatch):
    """A call that takes longer than `LONG` is made once a round, but ours are made again, since the first one compiles kernels
    on a machine that has none."""
    calls = []
    row = dataclasses.replace(ROWS[name], build=lambda c: lambda: calls.append(None), peers=())
    monkeypatch.setitem(ROWS, name, row)
    monkeypatch.setattr(runner, "peak_extra_memory", lambda call, device: (call(), (0, 2 * runner.LONG))[1])
    w, settings = tiny(48, 96, rows=(name,)), dataclasses.replace(SETTINGS, rounds=1)
    (task,) = runner.measure(w, [runner.Task(name, "eager")], settings, settings.clock(), lambda text, seconds: None)
    assert task.error is None
    assert (task.samples == [2 * runner.LONG]) == (measured == "the first")
    assert (len(calls) == 1) == (measured == "the first")
