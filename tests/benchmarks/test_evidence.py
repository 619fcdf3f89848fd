# SPDX-License-Identifier: MIT
"""The evidence does what it says: planted lines, schedules, resumed training, statistics of selections, and a whole run."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import corpus, gradients, measures, recall, report, selections, ways
from benchmarks.evidence.__main__ import TOY
from benchmarks.evidence.records import read
from benchmarks.evidence.run import Run, Setting
from benchmarks.evidence.schedule import FORK, STAGES, Schedule
from benchmarks.evidence.train import Trainer
from openmsa import index_loss
from openmsa.testing.inputs import problem, random_blocks
from openmsa.tiny import ByteModel, load

TEXT = torch.randint(32, 127, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SCHEDULE = Schedule(10, 256, ((0.4, 64), (1.0, 128)), rise=2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_each_line_stands_twice():
    windows = TEXT[: 3 * 1024].view(3, 1024).clone()
    before = windows.clone()
    planted = recall.plant(windows, generator())
    assert planted.second.shape == (3, 1024 // recall.BYTES_A_PAIR, 4)
    for row, old, second, distance in zip(windows, before, planted.second, planted.distance, strict=True):
        text, touched, keys = bytes(row.tolist()), torch.zeros(1024, dtype=torch.bool), set()
        for digits, back in zip(second, distance.tolist(), strict=True):
            start = int(digits[0]) - recall.DIGITS.start
            line = text[start : start + recall.LINE]
            assert line[:2] == b"\n@"
            assert line[4:5] == b"="
            assert line[5:9].isdigit()
            assert back > 0
            assert text[start - back : start - back + recall.LINE] == line
            assert bytes(row[digits].tolist()) == line[5:9]
            keys.add(line[2:4])
            for at in (start, start - back):
                assert not touched[at : at + recall.LINE].any(), "lines overlap"
                touched[at : at + recall.LINE] = True
        assert len(keys) == len(second)
        assert torch.equal(row[~touched], old[~touched])


def test_arms_share_what_they_should():
    schedule = dataclasses.replace(SCHEDULE, steps=100)
    assert all(schedule.stage("dense", step) == "dense" for step in range(100))
    assert [schedule.stage("msa", step) for step in (0, 44, 45, 99)] == ["warmup", "warmup", "sparse", "sparse"]
    fork = int(FORK * 100)
    assert {schedule.stage("dense_then_msa", step) for step in range(fork)} == {"dense"}
    assert schedule.stage("dense_then_msa", fork) == "warmup"
    assert [schedule.context(step) for step in (0, 39, 40, 99)] == [64, 64, 128, 128]
    for arm in STAGES:
        assert sum(schedule.shares(arm).values()) == 100
    rates = [schedule.learning_rate(step) for step in range(100)]
    assert rates[0] == schedule.rate / 2
    assert rates[-1] < 0.1 * schedule.rate
    assert rates[2:] == sorted(rates[2:], reverse=True)


@pytest.mark.parametrize("stopped", [3, 7])
def test_a_resumed_run_is_an_uninterrupted_one(stopped):
    lines = []
    whole = Trainer("msa", TOY, SCHEDULE, TEXT)
    assert whole.run(10, time.monotonic() + 600, lines.append)
    first = Trainer("msa", TOY, SCHEDULE, TEXT)
    first.run(stopped, time.monotonic() + 600, lines.append)
    second = Trainer("msa", TOY, SCHEDULE, TEXT)
    second.load_state(first.state())
    second.run(10, time.monotonic() + 600, lines.append)
    for (name, a), b in zip(whole.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert lines[-1]["step"] == 10
    assert not Trainer("msa", TOY, SCHEDULE, TEXT).run(10, time.monotonic() - 1, lines.append)


def test_arms_read_the_same():
    arms = [Trainer(arm, TOY, SCHEDULE, TEXT) for arm in STAGES]
    for a, b in zip(arms[0].batch()[:2], arms[1].batch()[:2], strict=True):
        assert torch.equal(a, b)
    states = [arm.model.state_dict() for arm in arms]
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in states[0])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ByteModel(TOY).eval()


def test_all_blocks_are_dense_attention(model):
    text = measures.windows(TEXT, 200, 2)
    dense, _ = measures.losses(model, text, ways.dense)
    sparse, right = measures.losses(model, text, ways.sparse(13))
    window, _ = measures.losses(model, text, ways.window(13))
    fewer, _ = measures.losses(model, text, ways.sparse(2))
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(window, dense, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(fewer, dense, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        hidden = model(text[0, :-1])
    assert torch.equal(right[0], model.logits(hidden).argmax(-1) == text[0, 1:]) or right.shape == (2, 200)


def test_recall_counts_what_a_model_knows(model, monkeypatch):
    text = measures.windows(TEXT, 1024, 3)
    planted = text.clone()
    second, _ = recall.plant(planted[:, :-1], generator(1))

    def knows(model, text, way):
        right = torch.zeros(3, 1024, dtype=torch.bool)
        right[:2].scatter_(1, (second[:2] - 1).flatten(1), True)  # all digits in two windows of three
        right[2].scatter_(0, second[2, :, 0] - 1, True)  # the first digits alone
        assert torch.equal(text, planted)
        return torch.full((3, 1024), 0.5), right

    monkeypatch.setattr(measures, "losses", knows)
    found = measures.recall(model, text, ways.dense)
    assert found["recalled"] == pytest.approx(2 / 3, abs=1e-4)
    assert sum(row["lines"] for row in found["by_distance"]) == second.shape[0] * second.shape[1]
    assert {row["nats_a_digit"] for row in found["by_distance"]} == {0.5}


def test_statistics_by_counting():
    size, topk = 16, 3
    p = problem((150,), (150,), kv_heads=2)
    blocks = random_blocks(p, topk, size, 2).sort(-1).values
    found = selections.statistics(blocks, size)
    rows = [(i, h) for i in range(topk * size, 150) for h in range(2)]
    sets = {(i, h): {x for x in blocks[i, h].tolist() if 0 <= x <= i // size} for i, h in rows}
    for lag in (1, 16):
        shares = [len(sets[i, h] & sets[i + lag, h]) / len(sets[i, h]) for i, h in rows if (i + lag, h) in sets and sets[i, h]]
        assert found["shared_after"][str(lag)] == pytest.approx(sum(shares) / len(shares), abs=1e-5)
    tiles = [range(start, start + 8) for start in range(topk * size, 150 - 7, 8)]
    unions = [len(set().union(*(sets[i, h] for i in tile))) for tile in tiles for h in range(2)]
    assert found["union"]["8"] == pytest.approx(sum(unions) / len(unions), abs=1e-5)
    assert found["first_block"] == pytest.approx(sum(0 in s for s in sets.values()) / len(sets), abs=1e-5)
    assert sum(found["distance"]) == pytest.approx(1)
    own = sum(i // size in sets[i, h] for i, h in rows) / sum(map(len, sets.values()))
    assert found["distance"][0] == pytest.approx(own, abs=1e-5)
    assert selections.statistics(blocks[: topk * size], size) == {}


def test_quality_by_counting():
    size, topk = 16, 2
    p = problem((130,), (130,), kv_heads=2, group=2, head_dim=16)
    blocks = random_blocks(p, topk, size, 2)
    found = selections.quality(p.q, p.k, blocks, size, 0.3)
    recalls, scores = [], []
    for i in range(topk * size, 130):
        if i not in torch.linspace(topk * size, 129, min(selections.SAMPLED, 130 - topk * size)).long().tolist():
            continue
        for head in range(2):
            logits = torch.stack([p.k[: i + 1, head].double() @ p.q[i, h].double() * 0.3 for h in (2 * head, 2 * head + 1)])
            weights = logits.softmax(-1).mean(0)
            mass = {b: part.sum().item() for b, part in enumerate(weights.split(size))}
            best = sorted(mass, key=mass.get, reverse=True)[:topk]
            hit = set(best) & set(blocks[i, head].tolist())
            recalls.append(len(hit) / topk)
            scores.append(sum(mass[b] for b in hit) / sum(mass[b] for b in best))
    assert found["block_recall"] == pytest.approx(sum(recalls) / len(recalls), abs=1e-4)
    assert found["score_recall"] == pytest.approx(sum(scores) / len(scores), abs=1e-4)


def test_corpus_is_split_by_files():
    found = corpus.gather(6_000_000)
    assert found.train.size > 10 * found.held_out.size > 0
    assert found.train.size + found.held_out.size >= 6_000_000
    assert found.sources[0]["name"] == "python standard library"
    again = corpus.gather(6_000_000)
    assert (found.train == again.train).all()
    assert (found.held_out == again.held_out).all()


@pytest.mark.parametrize(
    ("licence", "taken"),
    [
        ("MIT", True),
        ("BSD-3-Clause", True),
        ("GPL-3.0", False),
        ("Apache-2.0 OR GPL-2.0", False),
        ("LicenseRef-Proprietary", False),
    ],
)
def test_licences(licence, taken):
    assert bool(corpus.PERMISSIVE.search(licence) and not corpus.COPYLEFT.search(licence)) == taken


@pytest.fixture
def run(monkeypatch):
    noise = torch.randint(32, 127, (30_000,), dtype=torch.uint8, generator=generator()).numpy()
    monkeypatch.setattr(corpus, "gather", lambda most: corpus.Corpus(noise[:20_000], noise[20_000:], [{"name": "noise"}]))

    def go(folder, minutes, resume=False):
        setting = Setting(folder, folder / "work", minutes, torch.device("cpu"), TOY, SCHEDULE, 5, 0, 1, resume)
        return Run(setting).go()

    return go


def test_a_whole_run_and_its_resumption(run, tmp_path):
    assert run(tmp_path / "whole", 5) == 0
    records = read(tmp_path / "whole")
    kinds = {record["kind"] for record in records}
    assert kinds == {"run", "gradients", "corpus", "plan", "step", "held_out", "recall", "selections", "end"}
    assert records[-1] == {"kind": "end", "at": records[-1]["at"], "skipped": [], "failed": []}
    assert {r["arm"] for r in records if r["kind"] == "held_out"} == set(STAGES)
    for arm in STAGES:
        assert load(tmp_path / "whole" / f"{arm}.safetensors")[1]["arm"] == arm

    # Time is over after the plan, and the run goes on later from what it wrote.
    assert run(tmp_path / "parts", 0) == 3
    assert run(tmp_path / "parts", 5, resume=True) == 0
    for arm in STAGES:
        models = [load(tmp_path / name / f"{arm}.safetensors")[0].state_dict() for name in ("whole", "parts")]
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0]), arm


RECORDS = Path(__file__).parents[2] / "benchmarks/results/2026-11-23-byte-model.jsonl"


def test_the_page_is_that_of_its_records():
    files = [RECORDS, *sorted(RECORDS.parent.glob(f"{RECORDS.stem}-seed-*"))]
    page = report.page([read(file) for file in files], [file.name for file in files])
    assert page == Path("docs/results/byte-model.md").read_text(encoding="utf-8")


def test_several_seeds_make_one_page(tmp_path, monkeypatch):
    """Two more runs are made from the first, with losses that are higher by 0.02 and 0.04 but for the dense arm's."""
    pytest.importorskip("matplotlib")
    files = [RECORDS]
    for seed in (1, 2):
        lines = []
        for record in read(RECORDS):
            if record["kind"] == "plan":
                record["seed"] = seed
            if record["kind"] == "held_out" and record["arm"] == "msa":
                record["loss"] += 0.02 * seed
                record["windows"] = [x + 0.02 * seed for x in record["windows"]]
            lines.append(json.dumps(record) + "\n")
        files.append(tmp_path / f"seed-{seed}.jsonl")
        files[-1].write_text("".join(lines))
    monkeypatch.setattr("sys.argv", ["report", *map(str, files), str(tmp_path / "docs")])
    report.main()
    page = (tmp_path / "docs/byte-model.md").read_text()
    assert "There are 3 seeds" in page
    assert "seed 0), 131,072,000 bytes (2000 steps of 65,536, seed 1) and 131,072,000 bytes" in page
    assert (
        "| dense | dense | 0.6680 ± 0.0000 | +0.00 ± 0.00 % | +0.00, +0.00, +0.00 | +0.0000 ± 0.0000 | 99.6 ± 0.0 % |" in page
    )
    # -0.0032, 0.0168 and 0.0368 nats above 0.6680
    assert "| msa 16 | 0.6848 ± 0.0200 | +2.52 ± 2.99 % | -0.48, +2.52, +5.51 | +0.0168 ± 0.0200 | 99.7 ± 0.0 % |" in page
    assert "| index int8, kv bf16 | 0.6848 ± 0.0200 | -0.01 ± 0.00 % | -0.0000 ± 0.0000 | 99.7 %" in page
    assert "| MSA from the start, 16,384 bytes, layer 0 | 0.851 ± 0.000 | 0.990 ± 0.000 | 0.949 of 0.953 | 86.1 % |" in page
    for name in ("training", "held-out", "selections"):
        assert (tmp_path / f"docs/byte-model-{name}.png").read_bytes()[:4] == b"\x89PNG"
    other = read(RECORDS)
    with pytest.raises(ValueError, match="records must have seeds of their own, got seeds 0 and 0"):
        report.check_alike([other, read(RECORDS)])
    next(r for r in other if r["kind"] == "plan")["seed"] = 1
    next(r for r in other if r["kind"] == "run")["config"]["num_layers"] = 5
    with pytest.raises(ValueError, match="records must be those of one model and of windows of the same lengths"):
        report.check_alike([read(RECORDS), other])


def test_a_wrong_gradient_ends_a_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "wrong", lambda config, device: ["it is wrong"])
    assert run(tmp_path, 5) == 1
    assert [record["kind"] for record in read(tmp_path)] == ["run", "gradients"]


def test_gradients_that_are_wrong_are_found(monkeypatch):
    assert gradients.wrong(TOY, torch.device("cpu")) == []

    def other(q, k, index_q, index_k, *rest, **options):
        return index_loss(q, k, index_q, index_k, *rest, **options) * 1.5

    monkeypatch.setattr(gradients, "index_loss", other)
    found = gradients.wrong(TOY, torch.device("cpu"))
    assert [sentence.split(":")[0] for sentence in found] == ["index loss over selected blocks", "index loss over all keys"]
