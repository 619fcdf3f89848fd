# SPDX-License-Identifier: MIT
"""`openmsa train-index` under torchrun and FSDP2 on two GPUs: the losses are those of one GPU up to rounding, and a run whose
processes are killed goes on to the same bits. It takes less than a minute, most of it imports and the first compilation."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from openmsa.integrations import hugging_face
from openmsa.training import checkpoint
from openmsa.training.log import read_log
from tests.cli.language_model import save_llama

ROOT = Path(__file__).parents[2]
STEPS, WARMUP, SAVED, KILLED = 40, 20, 6, 15
STAGES = ("warmup", "sparse")


def start(model, out, processes, device, *more):
    """Starts a run on one GPU or, under torchrun, on two."""
    alone = [sys.executable, "-m", "openmsa"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    sizes = ["--length", 256, "--steps", STEPS, "--warmup-steps", WARMUP, "--batch", 4, "--save-every", SAVED]
    places = ["--text", model.parent / "text", "--out", out, "--held-out", 0]
    options = [*places, "--device", device, "--dtype", "bfloat16", *sizes, *more]
    command = [*(alone if processes == 1 else [*launcher, "-m", "openmsa"]), "train-index", model, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([str(x) for x in command], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def ended(run):
    said = run.communicate()[1]
    assert run.returncode == 0, said


def children(pid):
    """Returns what processes a process started; workers of torchrun are in sessions of their own, so no group holds them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid:
            found.append(int(stat.parent.name))
    return found


def steps_of(out):
    log = out / "training" / "log.jsonl"
    return [r for r in read_log(log) if "loss" in r] if log.exists() else []


def kill_after(run, out, steps):
    """Kills a run and its workers without warning, once it has logged so many steps and saved a checkpoint."""
    while len(steps_of(out)) < steps or not (out / "training" / checkpoint.FILE).exists():
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.002)
    for pid in [*children(run.pid), run.pid]:
        os.kill(pid, signal.SIGKILL)
    run.communicate()
    done = len(steps_of(out))
    assert steps <= done < STEPS, "the run ended before it was killed"


def check(folder, device):
    save_llama(folder / "plain")
    model = hugging_face.convert(hugging_face_model(folder / "plain"), index_block_size=16, index_topk_blocks=4)
    model.save_pretrained(folder / "plain")
    arguments = (folder / "plain",)
    shutil.copytree(ROOT / "docs", folder / "text", ignore=shutil.ignore_patterns("*.png"))
    outs = {name: folder / name for name in ("one", "two", "killed")}
    one = start(*arguments, outs["one"], 1, device)
    two, killed = (start(*arguments, outs[name], 2, device) for name in ("two", "killed"))
    kill_after(killed, outs["killed"], KILLED)
    ended(start(*arguments, outs["killed"], 2, device, "--resume"))
    ended(one)
    ended(two)

    alone, both, again = (steps_of(outs[name]) for name in ("one", "two", "killed"))
    assert [r["step"] for r in alone] == [r["step"] for r in both] == [r["step"] for r in again] == list(range(STEPS))
    assert both[0]["by_layer"] == pytest.approx(alone[0]["by_layer"], rel=1e-6)  # The weights are still the same.
    apart = {stage: max(apart_by(x, y) for x, y in zip(alone, both, strict=True) if x["stage"] == stage) for stage in STAGES}
    print("losses on two GPUs and on one differ by at most", apart)
    # Weights differ by the order of sums from the first step on, and an index vector or a near tie may then round apart.
    assert apart["warmup"] < 2e-4
    assert apart["sparse"] < 1e-3
    assert [r["by_layer"] for r in again] == [r["by_layer"] for r in both]
    saved = [state(out) for out in outs.values()]
    assert saved[1].keys() == saved[2].keys() == saved[0].keys()
    for name, value in saved[1].items():
        assert torch.equal(saved[2][name], value), name
    trained = [hugging_face.load(out).state_dict() for out in outs.values()]
    assert all(torch.equal(trained[2][name], value) for name, value in trained[1].items())


def apart_by(one, other):
    """Returns the largest relative difference of two steps' losses, by layer."""
    return max(abs(other["by_layer"][layer] / loss - 1) for layer, loss in one["by_layer"].items())


def hugging_face_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def state(out):
    from safetensors.torch import load_file

    return load_file(out / "training" / checkpoint.FILE)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs or more")
def test_a_run_on_two_gpus_is_that_of_one_and_goes_on_where_it_was_killed(tmp_path):
    check(tmp_path, "cuda")
