# SPDX-License-Identifier: MIT
"""`TrainSettings` says how the index branches of a model are trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from openmsa.runtime import checks

SCHEDULES = ("cosine", "constant")
LARGEST = 1e30  # AdamW divides the learning rate by up to 1 - beta1, and the quotient is a float32.


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Describes a run, apart from the model and its text.

    steps:          optimizer steps of the whole run.
    warmup_steps:   the first of them, in which the index branch learns the main branch's weights on all visible keys; in the
                    others attention is sparse, and it learns those on the selected blocks.
    batch:          windows a step, on all processes together.
    micro_batch:    windows that a process takes through the model at a time.
    lr, schedule:   AdamW's learning rate, reached after `lr_steps` steps of linear growth; "cosine" falls to a tenth of it at
                    the end, "constant" stays.
    weight_decay, beta1, beta2: as in AdamW.
    clip:           the largest norm of a step's gradients, those of all layers together; longer ones are shortened to it, so
                    that no window outweighs the others. None: they stay as they are.
    seed:           of the order of the windows.

    The loss has no coefficient: the backbone is frozen, and AdamW's step is the same whatever the loss is multiplied by
    (measured from 1e-3 to 1e3, `docs/results/smollm2.md`).
    Raises ValueError or TypeError, naming the field, the rule and the value.
    """

    steps: int = 400
    warmup_steps: int = 200
    batch: int = 4
    micro_batch: int = 1
    lr: float = 1e-3
    schedule: str = "cosine"
    lr_steps: int = 10
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float | None = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("steps", self.steps, 1)
        checks.integer("warmup_steps", self.warmup_steps, 0, self.steps)
        checks.integer("batch", self.batch, 1)
        checks.integer("micro_batch", self.micro_batch, 1)
        checks.integer("lr_steps", self.lr_steps, 0)
        checks.integer("seed", self.seed, 0, 2**31 - 1)
        for name, low in (("lr", 0.0), ("weight_decay", -1e-30), ("beta1", -1e-30), ("beta2", -1e-30)):
            if checks.scale(name, getattr(self, name)) <= low:
                raise ValueError(f"{name} must be {'positive' if low == 0 else 'at least 0'}, got {getattr(self, name)}")
        for name in ("lr", "weight_decay"):
            if getattr(self, name) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST:g}, got {getattr(self, name)}")
        if self.clip is not None and checks.scale("clip", self.clip) <= 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be less than 1, got {getattr(self, name)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be {' or '.join(SCHEDULES)}, got {self.schedule!r}")

    def check_machine(self, processes: int, dtype: torch.dtype) -> None:
        """Checks that a batch can be shared by so many processes, and that a model of this dtype can be trained."""
        if self.batch % (processes * self.micro_batch):
            share = f"processes x micro_batch ({processes} x {self.micro_batch})"
            raise ValueError(f"batch must be a multiple of {share}, got {self.batch}")
        if dtype == torch.float16:
            rule = "dtype must be bfloat16 or float32, as gradients of the index loss are too small for float16"
            raise ValueError(f"{rule}, got {dtype}")

    def stage(self, step: int) -> str:
        """Returns "warmup" or "sparse" for a step counted from 0."""
        return "warmup" if step < self.warmup_steps else "sparse"

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step counted from 0."""
        grown = min(1.0, (step + 1) / (self.lr_steps + 1))
        if self.schedule == "constant":
            return self.lr * grown
        part = min(1.0, max(0, step - self.lr_steps) / max(1, self.steps - 1 - self.lr_steps))
        return self.lr * grown * (0.55 + 0.45 * math.cos(math.pi * part))

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain values."""
        return asdict(self)
