# SPDX-License-Identifier: MIT
"""`openmsa demo-bytes` runs on a random byte model from end to end, and refuses what it should before any work."""

import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("safetensors")

from openmsa.cli import app
from openmsa.demo import byte_model
from openmsa.modules import MSAConfig
from openmsa.tiny import ByteConfig, ByteModel, load, store, weights

MSA = MSAConfig(index_n_heads=2, index_head_dim=16, index_block_size=64, index_topk_blocks=4)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    torch.manual_seed(0)
    file = tmp_path / "weights.safetensors"
    store(ByteModel(ByteConfig(48, 2, 4, 2, 16, 40, 8, 1e4, MSA)), file, {"bytes": 1})
    monkeypatch.setattr(weights, "SHIPPED", file)
    monkeypatch.setattr(byte_model, "SHIPPED", file)
    monkeypatch.setattr(byte_model, "NEW_BYTES", 5)
    return file


def invoke(*arguments):
    return CliRunner().invoke(app, ["demo-bytes", *map(str, arguments)])


def test_a_file_of_any_kind(shipped, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_model, "DENSE_MOST", 4096)
    data = bytes(torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(0)).tolist())
    (tmp_path / "file.bin").write_bytes(data)
    result = invoke(tmp_path / "file.bin", "--output", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(row["attention"], row["bytes"]) for row in found["readings"]] == [
        ("dense", 4096),
        ("MSA, 4 blocks", 4096),
        ("MSA, 4 blocks", 5000),
    ]
    assert found["about"] == {"bytes": 1}
    assert (tmp_path / "out" / byte_model.HEAT_MAP).read_bytes().startswith(b"\x89PNG")
    for row in found["readings"]:
        assert 0 < row["attention_seconds"] < row["seconds"]

    # The losses are the model's own, and the continuation is what a prefill would choose.
    model, _ = load(shipped)
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    with torch.no_grad():
        hidden = model(ids)
        assert found["readings"][2]["loss"] == pytest.approx(model.loss(hidden[:-1], ids[1:]).mean().item(), abs=1e-4)
        written = []
        for _ in range(2):
            whole = torch.cat([ids, torch.tensor(written, dtype=torch.int64)])
            written.append(int(model.logits(model(whole)[-1]).argmax()))
    cache = model.cache()
    cache.extend([len(ids)])
    with torch.no_grad():
        logits = model.logits(model(ids, cache=cache)[-1])
    assert [byte for byte, _ in model.generate(logits, cache, 5)][:2] == written
    expected = model.cache()
    expected.extend([len(ids)])
    with torch.no_grad():
        logits = model.logits(model(ids, cache=expected)[-1])
    assert bytes(b for b, _ in model.generate(logits, expected, 5)).decode("utf-8", "replace") == found["continuation"]


def test_table_over_its_own_sources(shipped, tmp_path):
    result = invoke("--bytes", 4096, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    for word in ("The byte model reads 4,096 bytes", "dense", "MSA, 4 blocks", "bytes a second", byte_model.HEAT_MAP):
        assert word in result.stdout.replace("\n", "") or word in result.stdout


def test_control_characters_do_not_reach_the_terminal(shipped, tmp_path):
    (tmp_path / "file.bin").write_bytes(b"\x1b[31m\x07text\n" * 500)
    result = invoke(tmp_path / "file.bin", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "[31m" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_copy_without_weights_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_model, "SHIPPED", tmp_path / "byte-model.safetensors")
    result = invoke("--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "ships no byte model (byte-model.safetensors)" in result.output
    assert not (tmp_path / "out").exists()


def test_a_short_file_is_refused_before_any_work(shipped, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_model, "load", lambda: pytest.fail("nothing may be loaded before this is refused"))
    (tmp_path / "short").write_bytes(b"x" * 4095)
    result = invoke(tmp_path / "short", "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "FILE must hold at least 4096 bytes, got 4095" in result.output


def test_a_folder_that_cannot_be_written_is_refused(shipped, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_model, "load", lambda: pytest.fail("nothing may be loaded before this is refused"))
    (tmp_path / "file").write_text("no folder")
    result = invoke("--output", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "--output must be a place that can be written" in result.output


def test_own_sources_are_enough():
    assert len(byte_model.own_sources(byte_model.MOST)) == byte_model.MOST
