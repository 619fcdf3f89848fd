# SPDX-License-Identifier: MIT
"""This module makes a tiny random Llama whose index branches are trained; as a program it is a run that a test kills, resumes
or spreads over processes:

    python -m tests.training.tiny FOLDER [PAUSE]
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers

from openmsa.modules import IndexBranch, MSAConfig
from openmsa.training.loop import Trainer, Watcher
from openmsa.training.parallel import join
from openmsa.training.settings import TrainSettings
from openmsa.training.text import Windows

LAYERS, LENGTH = (1, 2), 80  # layer 0 stays dense
CONFIG = MSAConfig(index_n_heads=2, index_head_dim=16, index_block_size=16, index_topk_blocks=2)
# The gradients of half of the steps are clipped.
SETTINGS = TrainSettings(steps=8, warmup_steps=4, batch=4, micro_batch=1, lr=1e-2, lr_steps=2, clip=0.6)


def tiny_llama(**changes):
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
        initializer_range=0.2,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tiny_branches(config=CONFIG):
    torch.manual_seed(1)
    return {number: IndexBranch(48, config) for number in LAYERS}


def windows(seed=0, count=9):
    generator = torch.Generator().manual_seed(seed)
    return Windows(torch.randint(0, 64, (count * LENGTH + 7,), generator=generator), LENGTH, seed)


def trainer(folder, world=None, model=None, branches=None, settings=SETTINGS, data=None):
    folder.mkdir(exist_ok=True)
    world = world or join(torch.device("cpu"))
    model, branches = model or tiny_llama(), branches or tiny_branches()
    return Trainer(model, branches, CONFIG, data or windows(), settings, folder, world, windows(5, 2))


class Pause(Watcher):
    def __init__(self, seconds):
        self.seconds = seconds

    def step(self, record):
        time.sleep(self.seconds)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    world = join(torch.device("cpu"))
    run = trainer(folder, world)
    run.run(run.resume(), save_every=2, measure_every=3, watcher=Pause(float(sys.argv[2]) if len(sys.argv) > 2 else 0))
    if world.first:
        sums = {name: p.double().sum().item() for b in run.originals.values() for name, p in b.named_parameters()}
        (folder / "sums.json").write_text(json.dumps(sums))
    world.close()
