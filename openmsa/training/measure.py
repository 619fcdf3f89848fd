# SPDX-License-Identifier: MIT
"""While index branches train, their selections are measured on held-out text, in the dense model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from openmsa.modules import IndexBranch, MSAConfig
from openmsa.training.branches import dense, index_vectors, selected
from openmsa.training.layers import LayerInputs, attention_by, backbone
from openmsa.training.recall import Recall, block_mass, mean_recall, recall, spaced_rows
from openmsa.training.text import Windows

WINDOWS, ROWS = 2, 128
"""So many held-out windows are read, and so many queries of each are compared."""


class LayerRecall:
    """Is dense attention that compares, in passing, what each index branch would select with what the layer attends to."""

    def __init__(self, branches: Mapping[int, IndexBranch], config: MSAConfig, rows: Tensor) -> None:
        self.branches, self.config, self.rows = branches, config, rows
        self.found: dict[int, list[Recall]] = {}

    def __call__(self, inputs: LayerInputs) -> Tensor:
        if inputs.number in self.branches:
            blocks = selected(inputs, *index_vectors(self.branches[inputs.number], inputs), self.config)
            mass = block_mass(inputs, self.rows, self.config.index_block_size)
            self.found.setdefault(inputs.number, []).append(recall(mass, blocks, self.rows, self.config.index_block_size))
        return dense(inputs)[0]


def measure(
    model: Any, branches: Mapping[int, IndexBranch], config: MSAConfig, windows: Windows, device: torch.device
) -> dict[str, Any]:
    """Returns ``{block_recall, score_recall, mass, by_layer}`` on the first held-out windows: means over layers, and the block
    recall of each layer."""
    watch = LayerRecall(branches, config, spaced_rows(windows.length, ROWS))
    with torch.no_grad(), attention_by(model, watch):
        for number in range(min(WINDOWS, len(windows))):
            backbone(model)(input_ids=windows[number][None].to(device), use_cache=False)
    layers = {number: mean_recall(parts) for number, parts in watch.found.items()}
    whole = mean_recall(list(layers.values()))
    return {
        "block_recall": whole.blocks,
        "score_recall": whole.scores,
        "mass": whole.mass,
        "by_layer": {str(number): found.blocks for number, found in layers.items()},
    }
