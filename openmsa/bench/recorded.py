# SPDX-License-Identifier: MIT
"""Recorded selections are those of a trained model on real text, which benchmarks replay.

A file is what `benchmarks/evidence` writes: numpy arrays ``LENGTH_layerN``, uint16 ``[queries, heads, topk]``, 65535 where
nothing is selected: of the last queries of a string of LENGTH keys, what layer N selects; and ``block_size``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

FILE = Path(__file__).with_name("recorded.npz")
"""This file holds what the byte model (`docs/results/byte-model.md`) selects over 16,384 bytes of code."""
NOTHING = 65535


def recorded(queries: int, length: int, heads: int, topk: int, block_size: int, file: Path = FILE) -> Tensor:
    """Returns the selection of the last `queries` of `length` keys, int32 ``[queries, heads, topk]``. Heads are those of the
    recorded layers, one layer after the other, again and again if there are more.

    Raises ValueError, naming what the file lacks.
    """
    import numpy

    if not file.exists():
        raise ValueError(f"recorded selections must lie in {str(file)!r}, which is missing")
    with numpy.load(file) as kept:
        layers = [torch.from_numpy(kept[name].astype("int32")) for name in kept.files if name.startswith(f"{length}_layer")]
        size = int(kept["block_size"])
    if not layers:
        raise ValueError(f"recorded selections must have some of {length} keys, got none in {str(file)!r}")
    every = torch.cat(layers, 1)  # [recorded queries, layers * heads, topk]
    shape = (every.shape[0], every.shape[2], size)
    if shape[0] < queries or shape[1:] != (topk, block_size):
        raise ValueError(
            f"recorded selections must have {queries} queries, {topk} blocks a query and blocks of {block_size} keys, got "
            f"{shape[0]}, {shape[1]} and {shape[2]} in {str(file)!r}"
        )
    chosen = every[-queries:, torch.arange(heads, device="cpu") % every.shape[1]]
    return chosen.masked_fill(chosen == NOTHING, -1).contiguous()
