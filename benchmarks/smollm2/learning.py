# SPDX-License-Identifier: MIT
"""Candidates learn together in the warm-up stage, and one by one in the sparse stage."""

from __future__ import annotations

import dataclasses
import json

import torch
from torch import Tensor

from benchmarks.smollm2.candidates import Candidate
from benchmarks.smollm2.setting import Study
from openmsa import index_loss
from openmsa.modules import IndexBranch
from openmsa.training.branches import LayerLosses, dense, index_vectors
from openmsa.training.evaluate import hidden_states
from openmsa.training.layers import LayerInputs
from openmsa.training.settings import TrainSettings


class Together:
    """Is dense attention in which several candidates learn at once from the same teacher. Losses are kept without their
    coefficients."""

    def __init__(self, branches: list[dict[int, IndexBranch]], coefficients: list[float]) -> None:
        self.branches, self.coefficients = branches, coefficients
        self.losses: list[list[Tensor]] = [[] for _ in branches]

    def __call__(self, inputs: LayerInputs) -> Tensor:
        out, lse = dense(inputs)
        for own, coefficient, losses in zip(self.branches, self.coefficients, self.losses, strict=True):
            with torch.enable_grad():
                vectors = index_vectors(own[inputs.number], inputs)
                loss = index_loss(
                    *(inputs.q, inputs.k, *vectors, None, inputs.seqs),
                    softmax_scale=inputs.softmax_scale,
                    coefficient=coefficient,
                    lse=lse,
                )
                loss.backward()
            losses.append(loss.detach() / coefficient)
        return out


def train_together(study: Study, steps: int, until: float) -> tuple[list[dict[int, IndexBranch]], list[float]]:
    """Trains all candidates in the warm-up stage, one window a step; fewer steps where so many would last longer than `until`
    seconds of the run. Returns their branches, and their mean losses in the last tenth of the steps."""
    made = [study.branches(c) for c in study.candidates]
    groups = [[p for b in own.values() for p in b.parameters()] for own in made]
    optimizer = torch.optim.AdamW(
        [{"params": g} for g in groups], betas=(0.9, 0.95), weight_decay=0.0, fused=study.device.type == "cuda"
    )
    step, began, planned = 0, study.used, steps
    ends = torch.zeros(len(made), device=study.device)
    while step < steps:
        if step == 5 and study.used > began:
            began = study.used  # The first steps compile kernels.
        if step == 12:
            each = (study.used - began) / 7
            steps = max(step + 1, min(steps, step + int((until - study.used) / each)))
            study.tell(f"{each:.2f} s a warm-up step, {steps} of {planned} planned steps")
        attend = Together(made, [c.coefficient for c in study.candidates])
        with study.precision():
            hidden_states(study.model, study.train[step % len(study.train)][None].to(study.device), attend)
        for group, candidate in zip(optimizer.param_groups, study.candidates, strict=True):
            group["lr"] = TrainSettings(steps=steps, warmup_steps=0, lr=candidate.lr).learning_rate(step)
            candidate.shorten(group["params"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= steps - max(1, steps // 10):
            ends += torch.stack([torch.stack(x).mean() for x in attend.losses]) / max(1, steps // 10)
        if step % 10 == 0 or step == steps - 1:
            losses = {c.name: torch.stack(x).mean().item() for c, x in zip(study.candidates, attend.losses, strict=True)}
            study.record("warmup", step=step, losses=losses)
            if step % 50 == 0 or step == steps - 1:
                study.tell(f"warm-up step {step}: " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
        step += 1
    reached = dict(zip((c.name for c in study.candidates), ends.tolist(), strict=True))
    study.record("warmup done", steps=steps, planned=planned, tokens=steps * study.length, reached=reached)
    study.tell("mean loss of the last tenth: " + ", ".join(f"{name} {loss:.4f}" for name, loss in reached.items()))
    return made, ends.tolist()


def train_sparse(study: Study, candidate: Candidate, branches: dict[int, IndexBranch], steps: int, until: float) -> None:
    """Trains one candidate in the sparse stage, on windows that the warm-up did not read where there are such."""
    optimizer = torch.optim.AdamW(
        [p for b in branches.values() for p in b.parameters()],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=study.device.type == "cuda",
    )
    planned, step, began = steps, 0, study.used
    while step < steps:
        if step == 3:
            began = study.used
        if step == 8:
            each = (study.used - began) / 5
            steps = max(step + 1, min(steps, step + int((until - study.used) / each)))
            study.tell(f"{candidate.name}: {each:.2f} s a sparse step, {steps} of {planned} planned steps")
        attend = LayerLosses(branches, study.config(candidate), warmup=False, share=candidate.coefficient)
        with study.precision():
            hidden_states(study.model, study.train[-1 - step % len(study.train)][None].to(study.device), attend)
        settings = TrainSettings(steps=steps, warmup_steps=0, lr=candidate.lr * 0.3)
        optimizer.param_groups[0]["lr"] = settings.learning_rate(step)
        candidate.shorten(optimizer.param_groups[0]["params"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == steps - 1:
            loss = torch.stack(list(attend.losses.values())).mean().item() / candidate.coefficient
            study.record("sparse", candidate=candidate.name, step=step, loss=loss)
        step += 1
    study.record("sparse done", candidate=candidate.name, steps=steps, planned=planned, lr=candidate.lr * 0.3)


def goes_on(
    study: Study, made: list[dict[int, IndexBranch]], ends: list[float]
) -> list[tuple[Candidate, dict[int, IndexBranch]]]:
    """Returns the candidates that go on to the sparse stage, with their branches: the one that learnt best among those with the
    first one's dim, seed and start, and the first of each other kind that starts from the layer's keys."""

    def apart_from_rate(candidate: Candidate) -> Candidate:
        return dataclasses.replace(candidate, name="", lr=0.0)

    order = range(len(made))
    rivals = [i for i in order if apart_from_rate(study.candidates[i]) == apart_from_rate(study.candidates[0])]
    chosen = [min(rivals, key=lambda i: ends[i])]
    for i in order:
        candidate = study.candidates[i]
        if candidate.start != "random" and candidate.kind not in {study.candidates[j].kind for j in chosen}:
            chosen.append(i)
    study.record("goes on", candidates=[study.candidates[i].name for i in chosen])
    return [(study.candidates[i], made[i]) for i in chosen]


def save_branches(study: Study, candidate: Candidate, branches: dict[int, IndexBranch], name: str) -> None:
    """Writes a candidate's branches, bfloat16."""
    from safetensors.torch import save_file

    tensors = {
        f"{number}.{name}": p.detach().to("cpu", torch.bfloat16).contiguous()
        for number, branch in branches.items()
        for name, p in branch.named_parameters()
    }
    metadata = {"config": json.dumps(study.config(candidate).to_dict()), "candidate": candidate.name}
    save_file(tensors, study.out / f"{name}.safetensors", metadata=metadata)
