# SPDX-License-Identifier: MIT
"""Index branches are trained here: the backbone is frozen, and each layer's loss is differentiated as soon as it runs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openmsa.modules import IndexBranch, MSAConfig
from openmsa.training import checkpoint
from openmsa.training.branches import LayerLosses
from openmsa.training.fingerprint import backbone_fingerprint, check_same, config_fingerprint, fingerprint
from openmsa.training.layers import attention_by, attention_layers, backbone
from openmsa.training.log import Log
from openmsa.training.measure import measure
from openmsa.training.parallel import World, local, shard, whole
from openmsa.training.settings import TrainSettings
from openmsa.training.text import Windows


class Watcher:
    """Receives what a run does and ignores it; a progress bar overrides its methods."""

    def begin(self, steps: int, done: int) -> None:
        """Receives how many steps the run has and how many of them a checkpoint has done."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Receives what was logged of a step."""

    def measured(self, record: Mapping[str, Any]) -> None:
        """Receives what was logged of a measurement on held-out text."""

    def stop(self) -> bool:
        """Is asked after each step; True ends the run there, with a checkpoint."""
        return False


class Trainer:
    """Trains copies of a model's index branches, in float32.

    model:       a causal language model; its weights are frozen.
    branches:    its index branches by layer number; they get the trained weights at the end of `run`.
    config:      how blocks are selected.
    windows:     the text. held_out: the text on which recall is measured, or None.
    folder:      where log and checkpoint are written.
    """

    def __init__(
        self,
        model: Any,
        branches: Mapping[int, IndexBranch],
        config: MSAConfig,
        windows: Windows,
        settings: TrainSettings,
        folder: Path,
        world: World,
        held_out: Windows | None = None,
    ) -> None:
        settings.check_machine(world.size, model.dtype)
        self.model, self.originals, self.config, self.settings = model.requires_grad_(False).eval(), branches, config, settings
        self.windows, self.held_out, self.folder, self.world = windows, held_out, folder, world
        self.by_layer = {n: copy.deepcopy(b).to(world.device, torch.float32).requires_grad_() for n, b in branches.items()}
        self.branches = nn.ModuleDict({str(n): b for n, b in self.by_layer.items()})
        for branch in branches.values():
            branch.to(world.device)
        own = {p for b in branches.values() for p in b.parameters()}
        self.began, self.weights = fingerprint(branches), backbone_fingerprint(model, own)
        shard(world, backbone(model), self._decoder_layers(), self.branches.values(), own)
        self.optimizer = torch.optim.AdamW(
            self.branches.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            foreach=False,
        )
        # The optimizer knows these parameters; a branch that is cut among processes has others while it is whole.
        self.learning = {n: list(b.parameters()) for n, b in self.by_layer.items()}
        if world.first:
            folder.mkdir(parents=True, exist_ok=True)
        self.log = Log(folder / "log.jsonl", world.first)

    def _decoder_layers(self) -> list[nn.Module]:
        attention = set(attention_layers(self.model).values())
        return [m for m in self.model.modules() if any(child in attention for child in m.children())]

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same when a run goes on."""
        settings, config = self.settings.to_dict(), asdict(self.config)
        dtype = str(self.model.dtype).removeprefix("torch.")
        numbers = {"text": self.windows.digest(), "model": self.began, "backbone": self.weights, "dtype": dtype}
        numbers["held_out"] = "none" if self.held_out is None else self.held_out.digest()
        return {"settings": settings, "config": config, **numbers, "computation": config_fingerprint(self.model.config)}

    def resume(self) -> int:
        """Takes the checkpoint of the folder, if there is one, and returns how many steps it has done. Raises ValueError where
        it belongs to a run with other settings, another text or another model. What a killed run had begun to write goes."""
        file, step = self.folder / checkpoint.FILE, 0
        if file.exists():
            saved = checkpoint.read_facts(file)
            check_same(saved, self.facts())
            checkpoint.restore(file, self.branches, self.optimizer)
            step = int(saved["step"])
        if self.world.first:
            for written in (file, self.log.file):
                checkpoint.remove_parts(written)
        self.log.keep_before(step)
        return step

    def save(self, step: int) -> None:
        """Writes a checkpoint after `step` steps."""
        tensors = checkpoint.training_state(self.branches, self.optimizer)
        if self.world.first:
            checkpoint.save(self.folder / checkpoint.FILE, tensors, self.facts() | {"step": step})
        self.world.wait()

    def run(self, start: int, *, save_every: int, measure_every: int, watcher: Watcher | None = None) -> int:
        """Runs the steps from `start` on, with a checkpoint after every `save_every` and at the end, and a measurement after
        every `measure_every`. Returns how many steps are done, fewer than the settings say where the watcher stopped it."""
        watcher, settings = watcher or Watcher(), self.settings
        watcher.begin(settings.steps, start)
        if start == 0:
            self._measure(0, watcher)
        done, stopped = start, False
        while done < settings.steps and not stopped:
            record = self.step(done)
            self.log.append(record)
            watcher.step(record)
            done += 1
            stopped = self.world.any(watcher.stop())
            if done % measure_every == 0 or done == settings.steps or done == settings.warmup_steps:
                self._measure(done, watcher)
            if done % save_every == 0 or done == settings.steps or stopped:
                self.save(done)
        self._give_back()
        return done

    def step(self, number: int) -> dict[str, Any]:
        """Takes one optimizer step and returns what the log holds of it. Raises FloatingPointError, and leaves weights and
        optimizer as they were, where a loss or a gradient is not finite."""
        began, settings = time.perf_counter(), self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate(number)
        self.optimizer.zero_grad(set_to_none=True)
        mine = self.windows.drawn(number * settings.batch, settings.batch)[self.world.share(settings.batch)]
        parts = mine.split(settings.micro_batch)
        warmup = settings.stage(number) == "warmup"
        attend = LayerLosses(self.by_layer, self.config, warmup=warmup, share=1 / len(parts))
        self._forward(parts, attend)
        own = torch.stack([attend.losses[n] for n in self.by_layer]).double()
        losses, squares = self.world.mean(torch.stack((own, self._gradient_squares()))).tolist()
        for what, values in (("loss", losses), ("gradient", squares)):
            for layer, value in zip(self.by_layer, values, strict=True):
                if not math.isfinite(value):
                    told = f"the index {what} of layer {layer} is {'not finite' if what == 'gradient' else value}"
                    raise FloatingPointError(f"{told} at step {number}; lower the learning rate")
        norm = math.sqrt(sum(squares) * self.world.size)
        if settings.clip is not None:
            learning = itertools.chain(*self.learning.values())
            nn.utils.clip_grads_with_norm_(learning, settings.clip, torch.tensor(norm, device="cpu"), foreach=False)
        self.optimizer.step()
        return {
            "step": number,
            "stage": settings.stage(number),
            "lr": settings.learning_rate(number),
            "gradient_norm": norm,
            "loss": sum(losses) / len(losses),
            "by_layer": {str(n): loss for n, loss in zip(self.by_layer, losses, strict=True)},
            "seconds": time.perf_counter() - began,
        }

    def _gradient_squares(self) -> Tensor:
        """Returns the sum of squares of each layer's gradients as far as this process holds them, float64 ``[layers]``."""
        return torch.stack(
            [
                torch.stack([local(p.grad).double().square().sum() for p in learning if p.grad is not None]).sum()
                for learning in self.learning.values()
            ]
        )

    def _forward(self, parts: tuple[Tensor, ...], attend: Callable[..., Tensor]) -> None:
        with torch.no_grad(), self.precision(), attention_by(self.model, attend):
            for ids in parts:
                backbone(self.model)(input_ids=ids.to(self.world.device), use_cache=False)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which forwards run: products of index branches in the dtype of a bfloat16 model on a GPU,
        otherwise in float32."""
        if self.world.device.type == "cuda" and self.model.dtype == torch.bfloat16:
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()

    def _measure(self, done: int, watcher: Watcher) -> None:
        if self.held_out is not None:
            with self.precision():
                found = measure(self.model, self.by_layer, self.config, self.held_out, self.world.device)
            record = {"step": done, "measured": found}
            self.log.append(record)
            watcher.measured(record)

    def _give_back(self) -> None:
        for number, branch in self.originals.items():
            own = dict(branch.named_parameters())
            for name, parameter in self.by_layer[number].named_parameters():
                with torch.no_grad():
                    own[name].copy_(whole(parameter))
