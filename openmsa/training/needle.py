# SPDX-License-Identifier: MIT
"""The needle test hides a number in a long text and asks for it at the end, at several distances."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmsa.runtime import checks

COLOURS = ("amber", "blue", "copper", "green", "orange", "purple", "silver", "white")
THINGS = ("bridge", "door", "engine", "garden", "island", "library", "station", "tower")


@dataclass(frozen=True)
class Needle:
    """Holds one trial. ids: int64 ``[length]``, the text with its needle, the question and the answer; answer: how many tokens
    at the end are the answer; distance: tokens between the needle's end and the question."""

    ids: Tensor
    answer: int
    distance: int


def make_needles(tokenizer: Any, filler: Tensor, length: int, distances: Sequence[int], trials: int, seed: int) -> list[Needle]:
    """Makes `trials` needles for each distance, of `length` tokens each, from a filler of at least that many.

    Distances that some trial has no room for are made the largest that all trials have room for.
    """
    for distance in distances:
        checks.integer("distances", distance, 0)
    if filler.numel() < length:
        raise ValueError(f"filler must have length ({length}) tokens at least, got {filler.numel()}")
    generator, drawn = random.Random(seed), []
    for distance in distances:
        for _ in range(trials):
            question = f"\nThe secret number of the {generator.choice(COLOURS)} {generator.choice(THINGS)} is"
            number = f" {generator.randrange(10_000, 100_000)}"
            needle, asked, answer = (
                torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int64, device="cpu")
                for text in (f"{question}{number}.\n", question, number)
            )
            added = len(needle) + len(asked) + len(answer)
            room = length - added
            if room < 1:
                rule = f"--length must leave room for the needle and the question ({added + 1})"
                raise ValueError(f"{rule}, got {length}: --needles 0 hides none")
            start = generator.randrange(max(1, filler.numel() - room + 1))
            drawn.append((distance, filler[start : start + room], needle, asked, answer))
    most = min((len(text) for _, text, *_ in drawn), default=0)
    return [_hidden(min(distance, most), *parts) for distance, *parts in drawn]


def _hidden(distance: int, text: Tensor, needle: Tensor, asked: Tensor, answer: Tensor) -> Needle:
    ids = torch.cat((text[: len(text) - distance], needle, text[len(text) - distance :], asked, answer))
    return Needle(ids, len(answer), distance)


def needle_distances(length: int) -> list[int]:
    """Returns an eighth, a quarter, a half, three quarters of a length, and nearly all of it, ascending."""
    return sorted({length // 8, length // 4, length // 2, length * 3 // 4, max(1, length * 31 // 32 - 64)})
