# SPDX-License-Identifier: MIT
"""Launches that are made again (replay.py) write and read in between here."""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """Holds memory that launches write and read in between. It grows, and lives as long as this object; calls that share it
    follow each other. What a CUDA graph has captured the address of is kept beside larger memory, as the graph writes there
    again."""

    def __init__(self) -> None:
        self._held: Tensor | None = None
        self._at = 0
        self._captured = False
        self._outgrown: list[Tensor] = []

    def at(self, size: int, device: int) -> int:
        """Returns the address of so many bytes."""
        if size:
            if self._held is None or self._held.numel() < size:
                if self._held is not None and self._captured:
                    self._outgrown.append(self._held)
                self._held = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
                self._at, self._captured = self._held.data_ptr(), False
            self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        return self._at
