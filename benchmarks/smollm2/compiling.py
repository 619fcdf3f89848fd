# SPDX-License-Identifier: MIT
"""Every attention of the study runs on random tensors first, which compiles its kernels and finds those that fail."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.smollm2.learning import Together
from benchmarks.smollm2.measuring import attentions, index_of
from benchmarks.smollm2.setting import Study
from openmsa import Sequences
from openmsa.training.branches import LayerLosses
from openmsa.training.layers import Attend, LayerInputs
from openmsa.training.variants import Index, group_mean


def random_inputs(study: Study) -> LayerInputs:
    """Returns what a layer might hand over, with the strides that it does."""
    config, device, n = study.model.config, study.device, study.length
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    torch.manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)

    starts = torch.tensor([0, n], dtype=torch.int32, device=device)
    angles = torch.zeros(n, dim, device=device)
    # The position embedding leaves queries and keys with heads first.
    turned = (rows(heads, n, dim).transpose(0, 1), rows(kv_heads, n, dim).transpose(0, 1))
    hidden, seqs = rows(n, config.hidden_size), Sequences(starts, starts, n, n)
    return LayerInputs(0, hidden, angles.cos(), angles.sin(), *turned, rows(n, kv_heads, dim), seqs, dim**-0.5)


def jobs_of(study: Study) -> dict[str, Attend]:
    """Returns every attention that the study runs, with branches that have learnt nothing."""
    jobs: dict[str, Attend] = {}
    indexes: dict[str, Index] = {"training-free": group_mean}
    for candidate in study.candidates:
        branches = study.branches(candidate)
        jobs[f"warm-up of {candidate.name}"] = Together([branches], [candidate.coefficient])
        if candidate.start != "random" or candidate is study.candidates[0]:
            jobs[f"sparse stage of {candidate.name}"] = LayerLosses(branches, study.config(candidate), warmup=False)
            indexes[f"trained {candidate.kind} + sparse"] = index_of(branches)
        indexes[f"~trained {candidate.name}"] = index_of(branches)
    return {**jobs, **attentions(study, indexes)}


def failures(study: Study, jobs: dict[str, Attend]) -> dict[str, str]:
    """Runs each job on random tensors, which compiles its kernels, and returns the errors of those that fail."""
    inputs, found = random_inputs(study), {}
    for name, job in jobs.items():
        try:
            with torch.no_grad(), study.precision():
                job(inputs)
            if study.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # noqa: PERF203 - a job that fails must not end the others
            found[name] = f"{type(error).__name__}: {error}"
            print(f"{name} fails: {found[name]}", flush=True)
    return found
