# SPDX-License-Identifier: MIT
"""Index branches learn; a run that is killed goes on as if it had never stopped; processes share a run."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

transformers = pytest.importorskip("transformers")

from openmsa import index_loss  # noqa: E402
from openmsa.training import checkpoint  # noqa: E402
from openmsa.training.branches import LayerLosses, dense, index_vectors, selected, sparse  # noqa: E402
from openmsa.training.fingerprint import backbone_fingerprint  # noqa: E402
from openmsa.training.layers import attention_by, backbone  # noqa: E402
from openmsa.training.log import Log, read_log  # noqa: E402
from openmsa.training.loop import Watcher  # noqa: E402
from openmsa.training.report import loss_plot, recall_plot  # noqa: E402
from openmsa.training.settings import TrainSettings  # noqa: E402
from tests.training.tiny import CONFIG, LAYERS, SETTINGS, tiny_branches, tiny_llama, trainer, windows  # noqa: E402


def start(folder, pause=0.0):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tests.training.tiny", str(folder), str(pause)], env=environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run in one go."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    assert start(folder).wait() == 0
    return folder


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / checkpoint.FILE)


def without_times(folder):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in read_log(folder / "log.jsonl")]


def test_a_killed_run_goes_on_bit_for_bit(whole, tmp_path):
    """Killed without warning at a random step; weights, optimizer and log are those of a run in one go."""
    broken = tmp_path / "broken"
    steps = random.Random().randrange(1, SETTINGS.steps)
    run = start(broken, 0.3)
    while not (broken / "log.jsonl").exists() or sum("lr" in r for r in read_log(broken / "log.jsonl")) < steps:
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert start(broken).wait() == 0
    expected, found = weights(whole), weights(broken)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected), f"killed after {steps} steps"
    assert without_times(broken) == without_times(whole)


def test_two_processes_learn_what_one_learns(whole, tmp_path):
    """Two processes that share a run by FSDP2 over gloo see the same windows a step, so their losses and weights are the same,
    up to the order of sums."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "-m", "tests.training.tiny", str(tmp_path / "two")], env=environment, check=True)
    one, two = without_times(whole), without_times(tmp_path / "two")
    assert [r["step"] for r in one] == [r["step"] for r in two]
    for mine, theirs in zip(one, two, strict=True):
        if "loss" in mine:
            assert theirs["by_layer"] == pytest.approx(mine["by_layer"], rel=1e-5)
            assert theirs["gradient_norm"] == pytest.approx(mine["gradient_norm"], rel=1e-5)
    assert {r["gradient_norm"] > SETTINGS.clip for r in one if "loss" in r} == {False, True}
    expected, found = weights(whole), weights(tmp_path / "two")  # A checkpoint holds whole tensors whatever wrote it.
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    sums = [json.loads((folder / "sums.json").read_text()) for folder in (whole, tmp_path / "two")]
    assert sums[1] == pytest.approx(sums[0], rel=1e-4)  # The model gets the trained weights.


def test_the_loss_falls_and_the_backbone_stays(tmp_path):
    model, branches = tiny_llama(), tiny_branches()
    before = {name: p.clone() for name, p in model.named_parameters()}
    started = {name: p.clone() for name, p in branches[1].named_parameters()}
    one = windows(0, 1)
    settings = TrainSettings(steps=40, warmup_steps=40, batch=1, lr=1e-2, schedule="constant")
    run = trainer(tmp_path, model=model, branches=branches, settings=settings, data=one)
    run.run(0, save_every=40, measure_every=40)
    losses = [r["loss"] for r in read_log(tmp_path / "log.jsonl") if "loss" in r]
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    trained = dict(branches[1].named_parameters())
    assert all(not torch.equal(trained[name], started[name]) for name in started)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("warmup", [True, False])
def test_gradients_are_those_of_the_layers_losses_alone(warmup):
    """What a forward differentiates layer by layer agrees with one graph through all index losses, in float64."""
    model, branches = tiny_llama().double(), {n: b.double() for n, b in tiny_branches().items()}
    ids = windows().drawn(0, 2)
    seen = []

    def keep(inputs):
        seen.append(inputs)
        return dense(inputs)[0] if warmup or inputs.number not in LAYERS else sparse_out(inputs)

    def sparse_out(inputs):
        blocks = selected(inputs, *index_vectors(branches[inputs.number], inputs), CONFIG)
        return sparse(inputs, blocks, CONFIG.index_block_size)[0]

    with torch.no_grad(), attention_by(model, keep):
        backbone(model)(input_ids=ids, use_cache=False)
    total = torch.zeros((), dtype=torch.float64)
    for inputs in seen[1:]:
        vectors = index_vectors(branches[inputs.number], inputs)
        blocks = None if warmup else selected(inputs, *vectors, CONFIG)
        scale = {"softmax_scale": inputs.softmax_scale, "block_size": CONFIG.index_block_size, "impl": "reference"}
        total = total + 0.25 * index_loss(inputs.q, inputs.k, *vectors, blocks, inputs.seqs, **scale)
    parameters = [p for b in branches.values() for p in b.parameters()]
    expected = torch.autograd.grad(total, parameters)
    attend = LayerLosses(branches, CONFIG, warmup=warmup, share=0.25)
    with torch.no_grad(), attention_by(model, attend):
        backbone(model)(input_ids=ids, use_cache=False)
    torch.testing.assert_close([p.grad for p in parameters], list(expected), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sum(attend.losses.values()), total.detach())


def test_a_run_does_not_go_on_with_other_settings_or_text(tmp_path):
    settings = TrainSettings(steps=2, warmup_steps=1, batch=1)
    run = trainer(tmp_path, settings=settings)
    run.run(run.resume(), save_every=1, measure_every=2)
    assert trainer(tmp_path, settings=settings).resume() == 2
    with pytest.raises(ValueError, match=r"lr must be that of the checkpoint to go on \(0.001\), got 0.5"):
        trainer(tmp_path, settings=TrainSettings(steps=2, warmup_steps=1, batch=1, lr=0.5)).resume()
    with pytest.raises(ValueError, match="the text, its windows' length and the seed"):
        trainer(tmp_path, settings=settings, data=windows(1)).resume()
    other = trainer(tmp_path, settings=settings)
    other.model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype must be that of the checkpoint to go on \(float32\), got bfloat16"):
        other.resume()
    others = tiny_branches()
    with torch.no_grad():
        others[1].q_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match="the model must be that of the checkpoint to go on"):
        trainer(tmp_path, settings=settings, branches=others).resume()
    other = trainer(tmp_path, settings=settings)
    other.held_out = windows(3)
    with pytest.raises(ValueError, match="the held-out text must be that of the checkpoint to go on"):
        other.resume()
    other = trainer(tmp_path, settings=settings)
    other.model.config.rms_norm_eps *= 2
    with pytest.raises(ValueError, match=r"the model's config\.json must be that of the checkpoint to go on"):
        other.resume()
    (tmp_path / checkpoint.FILE).write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="must be a checkpoint"):
        trainer(tmp_path, settings=settings).resume()


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "file"
    file.write_text("before")

    def fail(path):
        path.write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        checkpoint.write_atomically(file, fail)
    assert [f.read_text() for f in tmp_path.iterdir()] == ["before"]


def test_what_a_killed_run_had_begun_to_write_goes(tmp_path):
    """A run that goes on, and one that begins again, leaves no part of a file behind, and touches no other file."""
    settings = TrainSettings(steps=2, warmup_steps=1, batch=1, micro_batch=1)
    for _ in range(2):
        for name in (".checkpoint.safetensors.123", ".log.jsonl.7", ".checkpoint.safetensors.mine"):
            (tmp_path / name).write_text("half")
        run = trainer(tmp_path, settings=settings)
        run.run(run.resume(), save_every=1, measure_every=2)
        found = sorted(file.name for file in tmp_path.iterdir())
        assert found == [".checkpoint.safetensors.mine", "checkpoint.safetensors", "log.jsonl"]


def test_a_log_forgets_what_came_after_the_checkpoint(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    for record in ({"step": 0, "measured": {}}, {"step": 0}, {"step": 1}, {"step": 2, "measured": {}}, {"step": 2}):
        log.append(record)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 3')  # killed while it wrote
    log.keep_before(2)
    assert read_log(tmp_path / "log.jsonl") == [
        {"step": 0, "measured": {}},
        {"step": 0},
        {"step": 1},
        {"step": 2, "measured": {}},
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 5, "warmup_steps": 6}, "warmup_steps must be from 0 to 5, got 6"),
        ({"lr": 0.0}, "lr must be positive, got 0.0"),
        ({"lr": float("nan")}, "lr must be finite, got nan"),
        ({"beta2": 1.0}, "beta2 must be less than 1, got 1.0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        ({"clip": 0.0}, "clip must be positive or None, got 0.0"),
        ({"schedule": "linear"}, "schedule must be cosine or constant, got 'linear'"),
    ],
)
def test_wrong_settings_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        TrainSettings(**wrong)


def test_the_learning_rate_grows_and_falls():
    settings = TrainSettings(steps=100, warmup_steps=0, lr=1.0, lr_steps=9)
    rates = [settings.learning_rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert TrainSettings(steps=100, warmup_steps=0, lr=1.0, schedule="constant").learning_rate(99) == 1.0


def test_long_gradients_are_shortened_together(tmp_path):
    """The norm that the log holds is that of all layers before they were shortened."""
    lengths = {}
    for clip in (None, 1e-3, 1e6):
        run = trainer(tmp_path / str(clip), settings=TrainSettings(steps=1, warmup_steps=1, batch=1, clip=clip))
        found = run.step(0)["gradient_norm"]
        parts = [p.grad.norm() for p in run.branches.parameters()]
        lengths[clip] = found, torch.stack(parts).norm().item()
    assert lengths[None][0] > 2e-3
    assert lengths[None] == lengths[1e6] == pytest.approx((lengths[None][0],) * 2, rel=1e-5)
    assert lengths[1e-3] == pytest.approx((lengths[None][0], 1e-3), rel=1e-5)


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"batch must be a multiple of processes x micro_batch \(1 x 3\), got 4"):
        trainer(tmp_path, settings=TrainSettings(batch=4, micro_batch=3))


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    branches = tiny_branches()
    with torch.no_grad():
        branches[2].q_proj.weight.fill_(float("nan"))
    run = trainer(tmp_path, branches=branches, settings=TrainSettings(steps=1, warmup_steps=1, batch=1))
    with pytest.raises(FloatingPointError, match="the index loss of layer 2 is nan at step 0"):
        run.step(0)


def test_a_gradient_that_is_no_number_ends_the_run_before_the_step(tmp_path, monkeypatch):
    """The loss of the step is finite, its gradient is not: weights, optimizer and checkpoint stay those of the step before."""
    run = trainer(tmp_path)
    run.run(run.resume(), save_every=2, measure_every=9, watcher=StopAfter(3))
    kept = (tmp_path / checkpoint.FILE).read_bytes()
    before = checkpoint.training_state(run.branches, run.optimizer)
    forward = run._forward

    def poisoned(parts, attend):
        forward(parts, attend)
        run.by_layer[2].k_proj.weight.grad[0, 0] = float("nan")

    monkeypatch.setattr(run, "_forward", poisoned)
    words = "the index gradient of layer 2 is not finite at step 3; lower the learning rate"
    with pytest.raises(FloatingPointError, match=words):
        run.run(3, save_every=1, measure_every=9)
    after = checkpoint.training_state(run.branches, run.optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / checkpoint.FILE).read_bytes() == kept
    assert checkpoint.read_facts(tmp_path / checkpoint.FILE)["step"] == 3
    assert [r["step"] for r in read_log(tmp_path / "log.jsonl") if "loss" in r] == [0, 1, 2]


class StopAfter(Watcher):
    def __init__(self, steps):
        self.left = steps

    def stop(self):
        self.left -= 1
        return self.left == 0


def test_a_run_does_not_go_on_with_another_backbone(tmp_path):
    settings = TrainSettings(steps=2, warmup_steps=1, batch=1)
    run = trainer(tmp_path, settings=settings)
    run.run(run.resume(), save_every=1, measure_every=2)
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1.001
    with pytest.raises(ValueError, match=r"the model must be that of the checkpoint to go on \(weights \w+\), got one with"):
        trainer(tmp_path, settings=settings, model=model).resume()


def test_the_fingerprint_of_a_backbone_is_that_of_names_shapes_dtypes_and_numbers():
    found = backbone_fingerprint(tiny_llama())
    assert found == backbone_fingerprint(tiny_llama())
    renamed, shaped, changed = tiny_llama(), tiny_llama(), tiny_llama()
    renamed.model.other = renamed.model.norm
    del renamed.model.norm
    shaped.lm_head.weight = torch.nn.Parameter(shaped.lm_head.weight.view(32, 96))
    with torch.no_grad():
        changed.model.norm.weight[-1] += 0.5
    others = [backbone_fingerprint(model) for model in (renamed, shaped, changed, tiny_llama().double())]
    assert len({found, *others}) == 5
    same = tiny_llama()
    assert backbone_fingerprint(changed, {changed.model.norm.weight}) == backbone_fingerprint(same, {same.model.norm.weight})


def test_the_report_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run = trainer(tmp_path, settings=TrainSettings(steps=3, warmup_steps=2, batch=1))
    run.run(run.resume(), save_every=3, measure_every=1)
    records = read_log(tmp_path / "log.jsonl")
    for draw, name in ((loss_plot, "loss.png"), (recall_plot, "recall.png")):
        draw(records, tmp_path / name)
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.filterwarnings("error::UserWarning")
def test_losses_of_zero_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run = trainer(tmp_path, settings=TrainSettings(steps=1, warmup_steps=1, batch=1))
    run.run(run.resume(), save_every=3, measure_every=1)
    records = [r for r in read_log(tmp_path / "log.jsonl") if "loss" in r]
    loss_plot([r | {"loss": 0.0, "by_layer": dict.fromkeys(r["by_layer"], 0.0)} for r in records], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()
