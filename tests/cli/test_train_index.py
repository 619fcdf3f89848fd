# SPDX-License-Identifier: MIT
"""`openmsa train-index` and `openmsa evaluate` run on a tiny model from end to end, and refuse before any work what they cannot
do."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from openmsa.cli import app
from openmsa.integrations import hugging_face
from openmsa.training.log import read_log
from openmsa.training.loop import Trainer
from tests.cli.language_model import save_llama

RUN = ("--length", 64, "--steps", 4, "--warmup-steps", 2, "--batch", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with a model, the converted one, and four texts."""
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "plain")
    result = invoke("convert", folder / "plain", folder / "converted", "--block-size", 16, "--topk", 2)
    assert result.exit_code == 0, result.output
    (folder / "text").mkdir()
    for number in range(4):
        words = " ".join(str((number * 7919 + i * i) % 1000) for i in range(200))
        (folder / "text" / f"{number}.txt").write_text(words)
    return folder


def invoke(command, *arguments):
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def train(place, out, *more):
    return invoke("train-index", place / "converted", "--text", place / "text", "--out", out, *RUN, *more)


def test_a_trained_model_differs_in_its_branches_alone_and_loads(place, tmp_path):
    out = tmp_path / "out"
    result = train(place, out, "--held-out", 0.3)
    assert result.exit_code == 0, result.output
    assert "warmup stage: index loss" in result.stdout
    assert "held-out text: block recall" in result.stdout
    assert sorted(f.name for f in (out / "training").iterdir()) == [
        "checkpoint.safetensors", "log.jsonl", "loss.png", "recall.png"
    ]  # fmt: skip
    before, after = (hugging_face.load(folder).state_dict() for folder in (place / "converted", out))
    for name, value in before.items():
        assert torch.equal(after[name], value) == ("index_branch" not in name), name
    stages = [r["stage"] for r in read_log(out / "training" / "log.jsonl") if "loss" in r]
    assert stages == ["warmup", "warmup", "sparse", "sparse"]


def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on(place, tmp_path):
    arguments = ["train-index", place / "converted", "--text", place / "text", *RUN, "--held-out", 0]
    command = [sys.executable, "-m", "openmsa", *map(str, arguments), "--steps", "60", "--out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([*command, str(tmp_path / "out")], env=environment, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "out" / "training" / "log.jsonl"
    while not log.exists() or len(read_log(log)) < 2:
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    said = run.communicate()[1]
    assert run.returncode == 130
    assert "of 60 steps; the same command with --resume goes on." in said
    done = len(read_log(log))
    assert f"Stopped after {done}" in said
    assert not (tmp_path / "out" / "config.json").exists()
    short = ("--steps", 60, "--out", tmp_path / "out", "--resume", "--batch", 2)
    changed = invoke(*arguments, *short, "--lr", 0.5)
    assert changed.exit_code == 2
    assert "lr must be that of the checkpoint to go on (0.001), got 0.5" in changed.stderr
    resumed = invoke(*arguments, *short)
    assert resumed.exit_code == 0, resumed.output
    assert [r["step"] for r in read_log(log)] == list(range(60))


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    """Returns the folder of a run that has come to its end."""
    out = tmp_path_factory.mktemp("runs") / "out"
    assert train(place, out).exit_code == 0
    return out


@pytest.mark.parametrize("content", [None, ""])
def test_a_run_goes_on_without_its_log(place, finished, tmp_path, content):
    out = shutil.copytree(finished, tmp_path / "out")
    log = out / "training" / "log.jsonl"
    log.unlink()
    if content is not None:
        log.write_text(content)
    resumed = train(place, out, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "The log holds no step." in resumed.stdout


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"\xff{}\n", "bytes that are no text at 0"),
        (b'{"step": 0}\nnonsense\n', "'nonsense'"),
        (b"[1]\n", re.escape("'[1]'")),
        (b"[" * 100_000 + b"\n", re.escape("'[[[[")),
        (b"null\n", "'null'"),
        (b'{"a": 1}\n', "'{\"a\": 1}'"),
        (b'{"step": "0"}\n', '\'{"step": "0"}\''),
        (b'{"step": 0, "loss": 1}\n', '\'{"step": 0, "loss": 1}\''),
    ],
)
def test_a_broken_log_is_refused(place, finished, tmp_path, content, got):
    out = shutil.copytree(finished, tmp_path / "out")
    (out / "training" / "log.jsonl").write_bytes(content)
    resumed = train(place, out, "--resume")
    assert resumed.exit_code == 2, resumed.output
    assert re.search(f"log.jsonl must hold a JSON object of a step a line, got {got}", resumed.stderr), resumed.stderr
    assert "without the file a run goes on as well" in resumed.stderr
    assert (out / "training" / "log.jsonl").read_bytes() == content


@pytest.mark.parametrize("name", ["training/log.jsonl", "training/loss.png", "training/recall.png", "config.json"])
def test_a_file_that_cannot_be_written_is_refused(place, finished, tmp_path, name):
    out = shutil.copytree(finished, tmp_path / "out")
    (out / name).unlink()
    (out / name).mkdir()
    resumed = train(place, out, "--resume")
    assert resumed.exit_code == 2, resumed.output
    assert f"{name}', which is no regular file" in resumed.stderr


@pytest.mark.parametrize("name", ["evaluation.json", "evaluation.png"])
def test_an_evaluation_that_cannot_be_written_is_refused(place, tmp_path, name):
    (tmp_path / name).mkdir()
    done = invoke("evaluate", place / "plain", "--text", place / "text", "--length", 96, "--needles", 0, "--out", tmp_path)
    assert done.exit_code == 2, done.output
    assert f"{name}', which is no regular file" in done.stderr


@pytest.mark.parametrize("place_of_error", ["checkpoint", "model"])
def test_a_full_disk_ends_a_run_in_a_sentence(place, tmp_path, monkeypatch, place_of_error):
    """The same command with --resume goes on."""

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        if place_of_error == "checkpoint":
            changed.setattr("openmsa.training.checkpoint.save", full)
        else:
            changed.setattr("transformers.PreTrainedModel.save_pretrained", full)
        stopped = train(place, tmp_path / "out")
    assert stopped.exit_code == 1, stopped.output
    assert "--out cannot be written to its end" in stopped.stderr
    assert "No space left on device. The same command with --resume goes on from the last checkpoint." in stopped.stderr
    assert train(place, tmp_path / "out", "--resume").exit_code == 0


def test_an_evaluation_on_a_full_disk_is_printed(place, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["openmsa.cli.evaluate"], "_plot", full)
    arguments = ("--text", place / "text", "--length", 96, "--windows", 1, "--needles", 0, "--budget", 34, "--json")
    done = invoke("evaluate", place / "converted", *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["rows"]
    assert "No space left on device. What was measured stands above." in done.stderr


def test_an_evaluation_that_cannot_be_printed_is_written(place, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["openmsa.cli.evaluate"], "_print", full)
    arguments = ("--text", place / "text", "--length", 96, "--windows", 1, "--needles", 0, "--budget", 34)
    assert invoke("evaluate", place / "converted", *arguments, "--out", tmp_path).exit_code == 1
    assert json.loads((tmp_path / "evaluation.json").read_text())["rows"]


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.v_proj.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_model_whose_loss_is_not_finite_is_not_evaluated(place, tmp_path, name):
    shutil.copytree(place / "plain", tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights[name].fill_(float("nan"))
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    done = invoke("evaluate", tmp_path / "model", "--text", place / "text", "--length", 128, "--windows", 1)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.strip() == "MODEL cannot be evaluated: its loss with dense attention must be finite, got nan"


def test_a_loss_of_a_variant_that_is_not_finite_is_said(place, monkeypatch):
    monkeypatch.setattr("openmsa.training.variants.sparse", lambda inputs, *_: (torch.full_like(inputs.q, torch.nan), None))
    arguments = ("--text", place / "text", "--length", 96, "--windows", 1, "--budget", 34, "--needles", 0)
    done = invoke("evaluate", place / "plain", *arguments)
    assert done.exit_code == 0, done.output
    assert "random, 50 %: loss nan, which is not finite" in done.stderr
    strict = {"parse_constant": lambda name: pytest.fail(f"JSON knows no {name}")}
    assert json.loads(invoke("evaluate", place / "plain", *arguments, "--json").stdout, **strict)["model"] == str(
        place / "plain"
    )


def test_numbers_that_are_not_finite_end_a_run_and_leave_its_checkpoint(place, tmp_path, monkeypatch):
    squares = Trainer._gradient_squares
    steps = []

    def overflowing(self):
        steps.append(len(steps))
        return squares(self) * (float("inf") if len(steps) == 3 else 1.0)

    monkeypatch.setattr(Trainer, "_gradient_squares", overflowing)
    stopped = train(place, tmp_path / "out", "--save-every", 2)
    assert stopped.exit_code == 1
    said = (
        "Stopped: the index gradient of layer 0 is not finite at step 2; lower the learning rate. The checkpoint after 2 steps"
    )
    assert said in stopped.stderr
    assert train(place, tmp_path / "out", "--resume").exit_code == 0  # Its numbers are finite this time.
    assert steps == [0, 1, 2, 3, 4]
    steps.clear()
    steps += [0, 0]
    stopped = train(place, tmp_path / "other")
    assert stopped.exit_code == 1
    assert "at step 0; lower the learning rate. There is no checkpoint yet." in stopped.stderr


def test_processes_that_share_a_run_write_one_whole_model(place, tmp_path):
    arguments = ["train-index", place / "converted", "--text", place / "text", "--out", tmp_path / "out", *RUN]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "openmsa"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, [*command, *arguments])], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The trained model:") == 1
    before, after = (hugging_face.load(folder).state_dict() for folder in (place / "converted", tmp_path / "out"))
    for name, value in before.items():
        assert torch.equal(after[name], value) == ("index_branch" not in name), name


def test_an_evaluation_is_printed_recorded_and_drawn(place, tmp_path):
    arguments = ("--text", place / "text", "--length", 96, "--windows", 2, "--needles", 0, "--device", "cpu")
    result = invoke("evaluate", place / "converted", *arguments, "--out", tmp_path, "--budget", 34, "--budget", 100)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    record = json.loads((tmp_path / "evaluation.json").read_text())
    assert [(row["kind"], row["topk"]) for row in record["rows"]] == [
        ("dense", 0), *((kind, topk) for kind in ("MSA", "window", "random") for topk in (2, 6))
    ]  # fmt: skip
    assert all(abs(row["change"]) < 1e-4 for row in record["rows"] if row["topk"] in (0, 6))
    assert record["block_size"] == 16
    assert record["windows"] == 2
    assert (tmp_path / "evaluation.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_model_may_be_called_anything_in_a_plot(place, tmp_path):
    folder = shutil.copytree(place / "converted", tmp_path / r"m$\frac$")
    arguments = ("--text", place / "text", "--length", 96, "--windows", 1, "--needles", 0, "--budget", 34)
    result = invoke("evaluate", folder, *arguments, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "evaluation.png").exists()


def test_a_model_without_branches_is_evaluated_by_its_own_keys(place):
    """A model without branches is evaluated as what conversion without training makes of it."""
    arguments = ("--text", place / "text", "--length", 192, "--windows", 1, "--needles", 1, "--json", "--device", "cpu")
    plain, converted = (
        json.loads(invoke("evaluate", place / name, *arguments, "--block-size", 16, "--budget", 34).stdout)["rows"][1]
        for name in ("plain", "converted")
    )
    assert (plain.pop("kind"), converted.pop("kind")) == ("training-free", "MSA")
    for mine, theirs in zip(plain.pop("needles"), converted.pop("needles"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert plain.pop("by_position") == pytest.approx(converted.pop("by_position"), rel=1e-3)
    assert plain == pytest.approx(converted, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--text", "nowhere"), "--text must name files or folders that exist, got 'nowhere'"),
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--warmup-steps", "9"), "--warmup-steps must be from 0 to 4, got 9"),
        (("--lr", "0"), "--lr must be positive, got 0.0"),
        (("--lr", "1e35"), "--lr must be at most 1e+30, got 1e+35"),
        (("--lr", "1e300"), "--lr must be finite in float32, got 1e+300"),
        (("--schedule", "linear"), "--schedule must be cosine or constant, got 'linear'"),
        (("--length", "1000"), "--length must be at most what the model reads (512 tokens), got 1000"),
        (("--micro-batch", "3"), "batch must be a multiple of processes x micro_batch (1 x 3), got 2"),
        (("--held-out", "1"), "--held-out must be from 0 to less than 1, got 1.0"),
        (("--dtype", "float16"), "dtype must be bfloat16 or float32"),
        (("--device", "tpu"), "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_what_cannot_be_trained_is_refused(place, tmp_path, wrong, words):
    result = train(place, tmp_path / "out", *wrong)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert not (tmp_path / "out" / "training" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--micro-batch", "3"), "--batch must be a multiple of processes x micro_batch (1 x 3), got 2"),
        (("--dtype", "float16"), "--dtype must be bfloat16 or float32"),
    ],
)
def test_numbers_are_refused_before_the_model_is_loaded(place, tmp_path, wrong, words, monkeypatch):
    monkeypatch.setattr(sys.modules["openmsa.cli.train_index"], "load_model", None)
    result = train(place, tmp_path / "out", *wrong)
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_places_that_hold_something_are_refused(place, tmp_path):
    result = train(place, place / "plain")
    assert result.exit_code == 2
    assert "which holds a model" in result.stderr
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "checkpoint.safetensors").write_bytes(b"something")
    assert "--resume goes on with it" in train(place, tmp_path).stderr
    assert "must be a checkpoint" in train(place, tmp_path, "--resume").stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ("--text", "text/0.txt", "--length", 64),
            "Note: recall is not measured, as a single file with text cannot be held out.",
        ),
        (("--text", "text", "--length", 32), "as a query reads 32 tokens, and a window has 32 (--length): there is nothing to"),
    ],
)
def test_a_run_without_recall_says_why(place, tmp_path, monkeypatch, more, said):
    monkeypatch.chdir(place)
    arguments = (*more, "--steps", 1, "--warmup-steps", 1, "--batch", 1, "--device", "cpu")
    done = invoke("train-index", "converted", "--out", tmp_path, *arguments)
    assert done.exit_code == 0, done.output
    assert said in done.stderr
    assert not any("measured" in record for record in read_log(tmp_path / "training" / "log.jsonl"))


def test_tokens_that_the_model_does_not_know_are_refused(place, tmp_path):
    save_llama(tmp_path / "model", vocab_size=40)
    done = invoke("convert", tmp_path / "model", tmp_path / "converted", "--block-size", 16, "--topk", 2)
    assert done.exit_code == 0, done.output
    text = ("--text", place / "text", "--length", 64)
    for command in (
        ("generate", tmp_path / "model", "--prompt", "abc"),
        ("evaluate", tmp_path / "model", *text, "--needles", 0),
        ("train-index", tmp_path / "converted", *text, "--out", tmp_path / "out"),
    ):
        done = invoke(*command)
        assert done.exit_code == 2, done.output
        assert "MODEL must know the tokens of its tokenizer, got a model of 40 tokens and a text with number " in done.stderr


def test_files_without_text_are_neither_trained_on_nor_held_out(place, tmp_path):
    """The only file that holds text is trained on, however many others there are."""
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(b"" if number % 2 else b"\xff\xfe\0")
    (tmp_path / "text.txt").write_bytes((place / "text/0.txt").read_bytes())
    arguments = ("--out", tmp_path / "out", "--length", 64, "--steps", 1, "--warmup-steps", 1, "--batch", 1, "--device", "cpu")
    done = invoke("train-index", place / "converted", "--text", tmp_path, "--held-out", 0.6, *arguments)
    assert done.exit_code == 0, done.output
    assert "as a single file with text cannot be held out" in done.stderr
    assert "Left out, as no UTF-8 text: 4 files" in done.stderr


def test_a_text_longer_than_the_models_positions_is_noted(place):
    arguments = ("--text", place / "text", "--length", 520, "--windows", 1, "--needles", 0, "--budget", 25, "--device", "cpu")
    result = invoke("evaluate", place / "converted", *arguments)
    assert result.exit_code == 0, result.output
    assert "Note: 520 tokens (--length) are more than the 512 positions of the model." in result.stderr


def test_only_the_first_process_looks_at_the_place_for_results(place, monkeypatch):
    """The others would meet the file that it tries to write."""
    monkeypatch.setenv("RANK", "1")
    result = train(place, place / "plain", "--text", "nowhere")
    assert "--text must name files or folders that exist" in result.stderr
    assert "which holds a model" not in result.stderr


def test_a_model_without_branches_cannot_be_trained(place, tmp_path):
    result = invoke("train-index", place / "plain", "--text", place / "text", "--out", tmp_path / "out", *RUN)
    assert result.exit_code == 2
    assert "must have index branches to train" in result.stderr


def test_a_text_too_short_for_a_window_is_refused(place, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    result = invoke("evaluate", place / "plain", "--text", tmp_path / "short.txt", "--length", 64, "--device", "cpu")
    assert result.exit_code == 2
    assert "the text must hold at least 64 tokens (--length), got 10" in result.stderr


@pytest.mark.parametrize("command", ["train-index", "evaluate"])
def test_help_teaches(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
