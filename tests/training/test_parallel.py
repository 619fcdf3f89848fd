# SPDX-License-Identifier: MIT
"""Processes that share a run end as they should, and models are let go of."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

pytest.importorskip("transformers")

from openmsa.training.layers import attention_by
from openmsa.training.parallel import World
from tests.training.tiny import tiny_llama, windows


def test_a_process_of_its_own_goes_on():
    World(0, 1, torch.device("cpu")).close(3)


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_shared_a_run_leaves_at_once(code):
    """What it printed is written before, and nothing runs behind."""
    script = f"""
import torch
from openmsa.training.parallel import World

print("printed", end="")
World(0, 2, torch.device("cpu")).close({code})
print("behind")
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (code, "printed")


class Attend:
    """Attention that copies values, and what only it refers to."""

    def __init__(self):
        self.held = torch.nn.Linear(1, 1)

    def __call__(self, inputs):
        return inputs.v.repeat_interleave(inputs.q.shape[1] // inputs.v.shape[1], 1)


def test_attention_is_let_go_of():
    """What attention refers to, such as cut layers with their groups of processes, does not outlive its context."""
    model, attend = tiny_llama(), Attend()
    held = weakref.ref(attend.held)
    with torch.no_grad(), attention_by(model, attend):
        model(input_ids=windows().drawn(0, 1), use_cache=False)
    del attend
    gc.collect()
    assert held() is None
