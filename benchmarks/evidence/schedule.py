# SPDX-License-Identifier: MIT
"""This module says what each arm of the comparison does at each part of its training, and with which learning rate."""

from __future__ import annotations

from dataclasses import dataclass

SHORT_UNTIL = 0.4  # of the tokens are read in short windows
STAGES: dict[str, tuple[tuple[float, str], ...]] = {
    "dense": ((1.0, "dense"),),
    # The index branch learns from all keys while windows are short, and for a while after they have grown.
    "msa": ((0.45, "warmup"), (1.0, "sparse")),
    "dense_then_msa": ((0.7, "dense"), (0.75, "warmup"), (1.0, "sparse")),
}
"""Of each arm: until which part of the tokens it is in which stage of `openmsa.modules.IndexBranch`."""
FORK = STAGES["dense_then_msa"][0][0]
"""Until here dense_then_msa is the arm dense, step for step."""


@dataclass(frozen=True)
class Schedule:
    """Holds what is equal for all arms. A step reads `tokens` bytes in windows of `short` or, later, `long` bytes. Each arm
    takes `steps` steps."""

    steps: int
    tokens: int = 65536
    short: int = 2048
    long: int = 16384
    rate: float = 2e-3
    final: float = 0.05  # of the rate
    rise: int = 20  # steps
    seed: int = 0

    def context(self, step: int) -> int:
        """Returns the length of a window."""
        return self.short if step < SHORT_UNTIL * self.steps else self.long

    def stage(self, arm: str, step: int) -> str:
        """Returns the stage of an arm's index branches."""
        return next(stage for until, stage in STAGES[arm] if step < until * self.steps)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate, which rises linearly and then falls linearly."""
        left = 1 - step / self.steps
        return self.rate * min((step + 1) / self.rise, self.final + (1 - self.final) * left)

    def shares(self, arm: str, start: int = 0) -> dict[tuple[int, str], int]:
        """Returns how many steps from `start` on an arm takes with each window and stage."""
        found: dict[tuple[int, str], int] = {}
        for step in range(start, self.steps):
            key = self.context(step), self.stage(arm, step)
            found[key] = found.get(key, 0) + 1
        return found
