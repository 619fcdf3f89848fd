# SPDX-License-Identifier: MIT
"""The study of SmolLM2 runs from end to end on a random tiny model, its page is written from its records, and the one index key
that branches can start from is what it says."""

import argparse
import dataclasses
import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.smollm2 import candidates, measuring, page, selections, study
from benchmarks.smollm2.candidates import TOY, named, own_weights
from benchmarks.smollm2.compiling import failures, jobs_of
from benchmarks.smollm2.files import numbers
from benchmarks.smollm2.one_key import Moments, one_key
from benchmarks.smollm2.setting import random_study
from openmsa.modules import IndexBranch, MSAConfig, Rotary
from openmsa.modules.rotary import rotate
from openmsa.training.layers import attention_layers


@pytest.fixture
def tiny(tmp_path):
    """Makes a study of two layers, windows of 256 tokens, and a candidate of each kind of start."""
    made = random_study(argparse.Namespace(out=tmp_path, toy=True, minutes=10.0))
    needles = [dataclasses.replace(made.needles[0], ids=made.needles[0].ids[:256])]
    few = {"train": made.train[:3, :256], "held_out": made.held_out[:1, :256], "needles": needles}
    return dataclasses.replace(made, length=256, sizes=(32, 16), candidates=TOY[:2] + TOY[3:], **few)


def test_a_whole_study_and_its_page(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "check_gradients", lambda device: None)
    monkeypatch.setattr(measuring, "FORMATS", {"int8": measuring.FORMATS["int8"]})
    monkeypatch.setattr(measuring, "PERCENTS", (12.5, 25.0))
    study.everything(tiny, (2, 1))
    records = page.Records(tmp_path / "smollm2.jsonl")
    assert records.all("goes on")[0]["candidates"] == ["32", "own keys", "one key", "one key 64 and norms"]
    assert not records.all("refused")
    loss = records.variants("loss")
    assert loss.keys() - {"dense"} == records.variants("recall").keys()
    assert all(torch.tensor(r["loss"]).isfinite() for r in loss.values())
    assert {r["kind"] for r in loss.values()} >= {"trained one key + sparse", "trained own keys", "window", "random"}
    written = {file.name for file in tmp_path.glob("*.safetensors")}
    assert written == {"branches-one-key.safetensors", "branches-own-keys.safetensors"}
    arguments = [str(tmp_path / "smollm2.jsonl"), "--out", str(tmp_path / "docs"), "--name", "tiny"]
    facts = {"device_name": "a GPU", "commit": "c0ffee", "date": "2026-11-24"}
    facts["candidates"] = [dataclasses.asdict(candidate) for candidate in tiny.candidates]
    swept = [line | facts if line["what"] == "environment" else line for line in records.lines]
    (tmp_path / "swept.jsonl").write_text("\n".join(json.dumps(line) for line in swept))
    monkeypatch.setattr("sys.argv", ["page", *arguments, "--coefficients", str(tmp_path / "swept.jsonl")])
    page.main()
    written = (tmp_path / "docs/tiny.md").read_text()
    assert "trained one key 64 and norms + sparse" in written
    assert "| untrained one key |  |" in written
    assert "| random | 10 | 1 |" in written
    for name in ("tiny-loss.png", "tiny-training.png"):
        assert (tmp_path / "docs" / name).read_bytes()[:4] == b"\x89PNG"


def test_kernels_can_be_compiled_beforehand(tiny):
    assert failures(tiny, jobs_of(tiny)) == {}


def test_selections_and_stored_keys(tmp_path, monkeypatch):
    """The selections of a random model are described, and what is written of them is whole."""
    monkeypatch.setattr("sys.argv", ["selections", "--toy", "--out", str(tmp_path / "record.jsonl")])
    selections.main()
    rows = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    described = [r for r in rows if r["what"] == "selection"]
    assert [(r["layer"], r["topk"]) for r in described] == [(0, 2), (0, 4), (1, 2), (1, 4)]  # of 16 blocks
    for r in described:
        assert r["union"]["4"] >= r["topk"]
        assert sum(r["distance"]) == pytest.approx(1, abs=1e-3)
        assert r["block_recall"] <= r["score_recall"] <= 1
    losses = {(r["stored"], r["topk"]): r["change"] for r in rows if r["what"] == "loss"}
    assert losses.keys() == {(name, topk) for name in selections.FORMATS for topk in (0, 4)}
    assert all((change == 0) == (name == "as they are") for (name, _), change in losses.items())
    monkeypatch.setattr("sys.argv", ["selections", "--page", str(tmp_path / "record.jsonl"), "--folder", str(tmp_path)])
    selections.main()
    assert "| 1, 4 blocks |" in (tmp_path / "smollm2-selections.md").read_text()
    assert (tmp_path / "smollm2-selections.png").read_bytes()[:4] == b"\x89PNG"


def test_candidates_are_refused_by_name():
    assert [c.name for c in named(["one key", "own keys"])] == ["one key", "own keys"]
    assert named(None) == candidates.CANDIDATES
    with pytest.raises(ValueError, match=r"--candidates must be among '64', .*, got '65'"):
        named(["65", "own keys"])
    for names in (["own keys", "64"], ["64", "one key"]):
        with pytest.raises(ValueError, match="--candidates must begin with one of one index key head and hold 'own keys'"):
            named(names)


HEADS, DIM, HIDDEN, TOKENS = 3, 16, 80, 90


def scores(queries, keys, hidden, base=100.0):
    """Returns products of the groups' mean queries with the heads' keys, ``[heads, tokens, tokens]``, as attention has them."""
    cos, sin = Rotary(DIM, base)(torch.arange(TOKENS))
    q, k = (rotate(torch.einsum("gdh,th->tgd", w, hidden), cos, sin) for w in (queries, keys))
    return torch.einsum("qgd,kgd->gqk", q, k) / DIM**0.5


def index_scores(branch, hidden, base=100.0):
    cos, sin = Rotary(DIM, base)(torch.arange(TOKENS))
    with torch.no_grad():
        q, k = branch(hidden, cos, sin)
    return torch.einsum("qgd,kd->gqk", q, k[:, 0]) / branch.config.index_head_dim**0.5


def moments(queries, keys, hidden):
    q, k = (torch.complex(*torch.einsum("gdh,th->tgd", w, hidden).double().chunk(2, -1)) for w in (queries, keys))
    return Moments(torch.einsum("tgi,thi->igh", k, k.conj()) / TOKENS, q.abs().square().mean(0).T)


def started(queries, keys, hidden, dim, length=TOKENS, base=100.0, norm=False):
    branch = IndexBranch(HIDDEN, MSAConfig(HEADS, index_head_dim=dim, index_topk_blocks=2, index_norm=norm))
    with torch.no_grad():
        one_key(branch, queries, keys, moments(queries, keys, hidden), base, length)
    return branch


@pytest.fixture
def random_layer():
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, DIM, HIDDEN), (HEADS, DIM, HIDDEN), (TOKENS, HIDDEN))
    return [torch.randn(shape, generator=generator) * 0.3 for shape in shapes]


def test_one_key_is_exact_where_heads_are_turned_copies_of_one(random_layer):
    queries, keys, hidden = random_layer
    first, second = keys[0].chunk(2)
    for head, angle, size in ((1, 0.7, 2.0), (2, -2.0, 0.5)):
        a, b = size * torch.tensor(angle).cos(), size * torch.tensor(angle).sin()
        keys[head] = torch.cat((a * first - b * second, a * second + b * first))
    branch = started(queries, keys, hidden, DIM)
    torch.testing.assert_close(index_scores(branch, hidden), scores(queries, keys, hidden), rtol=1e-4, atol=1e-4)


def test_one_key_is_nearer_than_the_mean_of_the_heads(random_layer):
    queries, keys, hidden = random_layer
    queries[2] *= 5
    whole = scores(queries, keys, hidden)
    mean = scores(queries, keys.mean(0, keepdim=True).expand(HEADS, -1, -1), hidden)
    found = index_scores(started(queries, keys, hidden, DIM), hidden)
    more = index_scores(started(queries, keys, hidden, 2 * DIM, base=1e6), hidden, 1e6)
    errors = [(x - whole).square().mean() / whole.square().mean() for x in (mean, found)]
    assert errors[1] < 0.6 * errors[0]
    slow = scores(queries, keys, hidden, 1e6)
    less = index_scores(started(queries, keys, hidden, DIM), hidden, 1e6)
    errors = [(x - slow).square().mean() for x in (less, more)]
    assert errors[1] < 0.5 * errors[0]


def test_one_key_of_all_elements_is_exact_where_nothing_turns(random_layer):
    queries, keys, hidden = random_layer
    branch = started(queries, keys, hidden, HEADS * DIM, length=1)
    still = torch.ones(TOKENS, DIM), torch.zeros(TOKENS, DIM)
    with torch.no_grad():
        index_q, index_k = branch(hidden, *still)
    q, k = (torch.einsum("gdh,th->tgd", w, hidden) for w in (queries, keys))
    expected = torch.einsum("qgd,kgd->gqk", q, k) / DIM**0.5
    found = torch.einsum("qgd,kd->gqk", index_q, index_k[:, 0]) / (HEADS * DIM) ** 0.5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"the index dim must be at most 48, what all keys have, got 64"):
        started(queries, keys, hidden, 64)
    wide = torch.ones(HEADS, 32, HIDDEN)
    with pytest.raises(ValueError, match=r"the index dim must be even and at least the head dim \(32\), got 16"):
        started(wide, wide, hidden, 16)


@pytest.mark.parametrize("dim", [DIM, 2 * DIM])
def test_norms_keep_the_size_of_what_they_norm(random_layer, dim):
    queries, keys, hidden = random_layer
    plain, normed = (started(queries, keys, hidden, dim, norm=norm) for norm in (False, True))
    for name in ("q", "k"):
        size = getattr(plain, f"{name}_proj")(hidden).square().mean().sqrt()
        torch.testing.assert_close(getattr(normed, f"{name}_norm").weight, size.expand(dim), rtol=1e-3, atol=0)


def test_own_keys_select_as_the_group_mean_does(tiny):
    """The weights that branches start from are the layer's, in the order of its heads."""
    layer = attention_layers(tiny.model)[0]
    queries, keys = own_weights(layer, 2, 32)
    assert torch.equal(keys.flatten(0, 1), layer.k_proj.weight)
    torch.testing.assert_close(queries[1], layer.q_proj.weight.view(2, 3, 32, -1)[1].mean(0))
    branch = tiny.branches(TOY[1])[0]
    assert torch.equal(branch.k_proj.weight, layer.k_proj.weight)


def test_blocks_of_ggml_stand_for_numbers():
    codes = torch.arange(-16, 16, dtype=torch.int8)
    scale = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    eight = torch.cat((scale, codes.view(torch.uint8)))
    assert torch.equal(numbers(eight, "Q8_0", [32]), codes.float() / 2)
    least = torch.tensor([-1.0], dtype=torch.float16).view(torch.uint8)
    four = torch.cat((scale, least, torch.arange(16, dtype=torch.uint8) | 0x30))
    expected = torch.cat((torch.arange(16) / 2 - 1, torch.full((16,), 0.5)))
    assert torch.equal(numbers(four, "Q4_1", [32]), expected)
    with pytest.raises(ValueError, match="a tensor's format must be F32, Q8_0 or Q4_1, got Q2_K"):
        numbers(four, "Q2_K", [32])


def test_a_record_is_one_line_of_json(tiny, tmp_path):
    tiny.record("something", value=1 / 3, inside=[{"a": 2 / 3}])
    line = json.loads((tmp_path / "smollm2.jsonl").read_text())
    assert line == {"what": "something", "value": 0.33333, "inside": [{"a": 0.66667}], "at_s": line["at_s"]}
