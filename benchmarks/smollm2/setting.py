# SPDX-License-Identifier: MIT
"""`Study` holds what is studied: the model, its text, the candidates, and what the run may cost."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.smollm2 import files
from benchmarks.smollm2.candidates import TOY, Candidate, configuration, initial_branches, named
from benchmarks.smollm2.one_key import Moments, collecting
from openmsa.bench.record import environment
from openmsa.modules import IndexBranch, MSAConfig
from openmsa.training.evaluate import hidden_states
from openmsa.training.needle import Needle


@dataclasses.dataclass
class Study:
    """Holds the model, its data, and what the run may cost."""

    model: Any
    device: torch.device
    length: int
    sizes: tuple[int, int]  # block sizes; the first is that of training
    train: Tensor  # [windows, length]
    held_out: Tensor
    needles: list[Needle]
    candidates: tuple[Candidate, ...]
    out: Path
    seconds: float
    facts: dict[str, Any]
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def used(self) -> float:
        """Returns the seconds that have gone by."""
        return time.monotonic() - self.began

    def tell(self, text: str) -> None:
        """Prints a line with the time."""
        print(f"[{self.used:6.1f} s] {text}", flush=True)

    def record(self, what: str, **values: Any) -> None:
        """Appends one record."""
        with (self.out / "smollm2.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounded({"what": what, **values, "at_s": round(self.used, 1)})) + "\n")

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of forwards: bfloat16 products on a GPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else contextlib.nullcontext()

    def config(self, candidate: Candidate) -> MSAConfig:
        """Returns the index branch's configuration."""
        return configuration(candidate, self.model, self.length, self.sizes[0])

    def branches(self, candidate: Candidate) -> dict[int, IndexBranch]:
        """Makes a candidate's index branches, float32, by layer."""
        moments = self.moments if candidate.start.startswith("one key") else {}
        return initial_branches(candidate, self.model, self.config(candidate), moments)

    @cached_property
    def moments(self) -> dict[int, Moments]:
        """Returns the moments of keys and queries on one window, by layer."""
        found: dict[int, Moments] = {}
        ids = self.train[-1] if len(self.train) else torch.arange(self.length) % self.model.config.vocab_size
        with self.precision():
            hidden_states(self.model, ids[None].to(self.device), collecting(found))
        return found


def rounded(value: Any) -> Any:
    """Returns a record whose numbers have five decimals."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: rounded(inside) for key, inside in value.items()}
    return [rounded(inside) for inside in value] if isinstance(value, (list, tuple)) else value


def random_study(options: argparse.Namespace) -> Study:
    """Returns a study of a random model: a small one with random tokens, or one as SmolLM2 is, for compilation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    out: Path = options.out
    if not options.toy:
        config = LlamaConfig(**files.CONFIG | {"num_hidden_layers": 1})
        device = torch.device(options.device)
        model: Any = LlamaForCausalLM(config)
        model = model.to(device).eval().requires_grad_(False)
        nothing = torch.empty(0, files.LENGTH)
        return Study(model, device, files.LENGTH, (128, 64), nothing, nothing, [], named(options.candidates), out, 0.0, {})
    else:
        torch.manual_seed(0)
        small = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.2}
        config = LlamaConfig(**files.CONFIG | small | heads)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        tokens = torch.randint(0, 96, (14, 512))
        needles = [Needle(tokens[i], 5, 100 * (1 + i % 2)) for i in range(4)]
        data = (tokens[:8], tokens[8:10], needles)
        return Study(model, torch.device("cpu"), 512, (32, 16), *data, TOY, out, 60 * options.minutes, {"toy": True})


def load(options: argparse.Namespace) -> Study:
    """Returns the study that the options describe."""
    from safetensors import safe_open

    device = torch.device(options.device)
    model = files.load_model(options.data, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    with safe_open(options.data / "tokens.safetensors", "pt") as opened:
        train, held_out, needle_ids = (opened.get_tensor(k).long() for k in ("train", "held_out", "needles"))
        told = opened.metadata()
    needles = [Needle(ids, *pair) for ids, pair in zip(needle_ids, json.loads(told["needles"]), strict=True)]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    facts = environment(device, options.commit) | {"text": {k: json.loads(v) for k, v in told.items() if k.startswith("files")}}
    facts |= {"windows": [len(train), len(held_out)], "candidates": [dataclasses.asdict(c) for c in named(options.candidates)]}
    if options.length < files.LENGTH:
        train, held_out, needles = train[:, : options.length], held_out[:, : options.length], []
    sizes = (128, 64) if options.length == files.LENGTH else (options.length // 32, options.length // 64)
    data = (train[order], held_out[: options.windows], needles)
    return Study(
        model, device, options.length, sizes, *data, named(options.candidates), options.out, 60 * options.minutes, facts
    )
