# SPDX-License-Identifier: MIT
"""This module says what each arm of the comparison does at each part of its training, and with which learning rate."""

from __future__ import annotations

from dataclasses import dataclass

Windows = tuple[tuple[float, int], ...]
WINDOWS: Windows = ((0.15, 512), (0.4, 2048), (1.0, 16384))
"""Until which part of the tokens windows are so long."""
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
    """Holds what is equal for all arms: how many steps each takes, of how many bytes, in windows of which lengths."""

    steps: int
    tokens: int = 65536
    windows: Windows = WINDOWS
    rate: float = 2e-3
    final: float = 0.05  # of the rate
    rise: int = 20  # steps
    seed: int = 0

    @property
    def longest(self) -> int:
        """Returns the length of the last windows."""
        return self.windows[-1][1]

    def context(self, step: int) -> int:
        """Returns the length of a window."""
        return next(length for until, length in self.windows if step < until * self.steps)

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
