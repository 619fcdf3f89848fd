# SPDX-License-Identifier: MIT
"""This module trains one arm of the comparison, step by step, so that it can be stopped after any step and go on from there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.evidence.recall import plant
from benchmarks.evidence.schedule import Schedule
from openmsa.modules import index_branches, set_stage
from openmsa.tiny import ByteConfig, ByteModel
from openmsa.types import Sequences

LOGGED = 10  # steps between two lines of the log


class Trainer:
    """Trains the model of one arm. What a step reads depends on the seed and the step alone, so that all arms read the same and
    a resumed run is an uninterrupted one.

    text:  uint8, on the device of the training.
    """

    def __init__(self, arm: str, config: ByteConfig, schedule: Schedule, text: Tensor) -> None:
        self.arm, self.schedule, self.text, self.step = arm, schedule, text, 0
        torch.manual_seed(schedule.seed)  # All arms start from the same weights.
        self.model = ByteModel(config).to(text.device)
        index = {id(p) for branch in index_branches(self.model) for p in branch.parameters()}
        everything = list(self.model.parameters())
        self.parts = [[p for p in everything if (id(p) in index) == own] for own in (False, True)]
        groups = [
            {"params": [p for part in self.parts for p in part if (p.ndim > 1) == matrix], "weight_decay": decay}
            for matrix, decay in ((True, 0.1), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=text.is_cuda)

    def batch(self) -> tuple[Tensor, Tensor, Sequences]:
        """Returns the bytes that the step reads and those to predict, int64 ``[tokens]``, and their windows."""
        context, device = self.schedule.context(self.step), self.text.device
        count = max(1, self.schedule.tokens // context)
        generator = torch.Generator(device).manual_seed(self.schedule.seed * 1_000_003 + self.step)
        start = torch.randint(0, self.text.numel() - context - 1, (count, 1), generator=generator, device=device)
        windows = self.text[start + torch.arange(context + 1, device=device)].long()
        plant(windows, generator)
        seqs = Sequences.from_lengths([context] * count, [context] * count, device)
        return windows[:, :-1].flatten(), windows[:, 1:].flatten(), seqs

    def take_step(self) -> tuple[Tensor, Tensor]:
        """Takes one step. Returns the loss in nats a byte and, of each layer, the index loss (0 where there is none)."""
        set_stage(self.model, self.schedule.stage(self.arm, self.step))
        rate = self.schedule.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        ids, targets, seqs = self.batch()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            loss = self.model.loss(self.model(ids, seqs), targets).mean()
        loss.backward()
        # The index loss trains the index branches alone, so its gradients are clipped apart: neither side disturbs the other.
        for part in self.parts:
            nn.utils.clip_grad_norm_([p for p in part if p.grad is not None], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        none = loss.new_zeros(())
        own = [none if b.index_loss is None else b.index_loss.float() for b in index_branches(self.model)]
        return loss.detach(), torch.stack(own)

    def run(self, until: int, deadline: float, log: Callable[[dict[str, Any]], None]) -> bool:
        """Takes steps up to number `until`, or until time.monotonic() passes `deadline`; says whether it came to the end.

        log receives a record at every multiple of `LOGGED` and at the end: losses are means over the steps since the last one,
        milliseconds one step's, stage and context those of the last step.
        """
        kept: list[tuple[Tensor, Tensor]] = []
        before = time.perf_counter()
        while self.step < until:
            if time.monotonic() > deadline:
                return False
            stage, context = self.schedule.stage(self.arm, self.step), self.schedule.context(self.step)
            kept.append(self.take_step())
            if self.step % LOGGED == 0 or self.step == until:
                loss = torch.stack([x for x, _ in kept]).mean().item()  # waits for the device
                index = torch.stack([x for _, x in kept]).mean(0).tolist()
                now = time.perf_counter()
                log(
                    {
                        "arm": self.arm,
                        "step": self.step,
                        "tokens": self.step * self.schedule.tokens,
                        "stage": stage,
                        "context": context,
                        "loss": round(loss, 5),
                        "index_loss": [round(x, 6) for x in index],
                        "milliseconds": round(1e3 * (now - before) / len(kept), 3),
                    }
                )
                if loss != loss:
                    raise FloatingPointError(f"the loss of arm {self.arm} is NaN at step {self.step}")
                kept, before = [], now
        return True

    def state(self) -> dict[str, Any]:
        """Returns what `load_state` needs to go on from here."""
        return {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def save(state: dict[str, Any], file: Path) -> None:
    """Writes a checkpoint so that the file is whole at any moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, file)
