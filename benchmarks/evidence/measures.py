# SPDX-License-Identifier: MIT
"""This module measures a trained byte model on held-out text: its loss by position, its recall of planted lines by distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.evidence.recall import plant
from benchmarks.evidence.ways import Way, attending
from openmsa.tiny import ByteModel
from openmsa.types import Sequences


def windows(text: Tensor, length: int, most: int) -> Tensor:
    """Returns up to `most` windows of `length` + 1 bytes, evenly spread over uint8 `text` without overlap, int64."""
    count = min(most, (text.numel() - 1) // length)
    if not count:
        raise ValueError(f"the held-out text must have more than {length} bytes, got {text.numel()}")
    starts = torch.arange(count, device=text.device) * ((text.numel() - 1) // count)
    return text[starts[:, None] + torch.arange(length + 1, device=text.device)].long()


def losses(model: ByteModel, text: Tensor, way: Way) -> tuple[Tensor, Tensor]:
    """Returns, of windows ``[count, length + 1]``, the loss of each byte after the first, in nats, float32 ``[count, length]``,
    and whether the model's first choice is right, bool ``[count, length]``. A window is read at a time."""
    found, right = [], []
    with attending(model, way), torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
        for row in text:
            length = row.numel() - 1
            hidden = model(row[:-1], Sequences.from_lengths([length], [length], row.device))
            found.append(model.loss(hidden, row[1:]))
            right.append(torch.cat([model.logits(part).argmax(-1) for part in hidden.split(16384)]) == row[1:])
    return torch.stack(found), torch.stack(right)


def held_out(model: ByteModel, text: Tensor, way: Way, parts: int = 16) -> dict[str, Any]:
    """Returns the mean loss of windows, each window's, and that of each of `parts` equal spans of positions."""
    found, _ = losses(model, text, way)
    spans = [part.mean().item() for part in found.tensor_split(parts, 1)]
    return {
        "loss": round(found.mean().item(), 5),
        "windows": [round(x, 5) for x in found.mean(1).tolist()],
        "by_position": [round(x, 5) for x in spans],
        "length": found.shape[1],
    }


def recall(model: ByteModel, text: Tensor, way: Way, seed: int = 1) -> dict[str, Any]:
    """Plants lines into a copy of the windows and returns, by distance in octaves, how many second lines there were, the share
    whose four digits are all the model's first choice, and the digits' mean loss in nats (a guess has 2.30)."""
    text = text.clone()
    second, distance = plant(text[:, :-1], torch.Generator(text.device).manual_seed(seed))
    found, right = losses(model, text, way)
    before = (second - 1).flatten(1)  # The byte at position p is predicted at position p - 1.
    whole = right.gather(1, before).view_as(second).all(2)
    nats = found.gather(1, before).view_as(second).mean(2)
    octave = distance.clamp(min=1).log2().floor().int()
    rows = []
    for i in range(int(octave.min()), int(octave.max()) + 1):
        at = octave == i
        if count := int(at.sum()):
            exact, nat = whole[at].float().mean().item(), nats[at].mean().item()
            rows.append({"from": 1 << i, "lines": count, "recalled": round(exact, 5), "nats_a_digit": round(nat, 5)})
    return {"length": found.shape[1], "recalled": round(whole.float().mean().item(), 5), "by_distance": rows}
