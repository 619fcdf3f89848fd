# SPDX-License-Identifier: MIT
"""This module plants key-value lines in windows of text, so that recall over a distance can be learnt and measured.

A line is ``\\n@ab=1234\\n``: a key of two letters and a value of four digits. Each line stands twice in a window, with one key
for one pair; what a model predicts for the digits of the second is what it recalls of the first. The lines overwrite text, so
that a window keeps its length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BYTES_A_PAIR = 128  # A window has one pair for so many bytes, 16 % of them.
SLOT = 16  # A line starts in the first bytes of such a slot, so that lines do not overlap.
LINE = 10  # bytes: line feed, @, 2 letters, =, 4 digits, line feed
DIGITS = slice(5, 9)
KEYS = 26 * 26


class Planted(NamedTuple):
    """Says where the second lines' digits are. second: int64 ``[windows, pairs, 4]``, positions in the window; distance: int64
    ``[windows, pairs]``, how many bytes lie between the two lines' starts."""

    second: Tensor
    distance: Tensor


def plant(windows: Tensor, generator: torch.Generator) -> Planted:
    """Writes pairs into windows, uint8 or int64 ``[windows, length]``, in place. generator: on the windows' device."""
    count, length = windows.shape
    pairs = min(KEYS, length // BYTES_A_PAIR)
    device = windows.device

    def ranks(things: int) -> Tensor:
        """Returns the first numbers of random permutations of `things`."""
        return torch.rand(count, things, generator=generator, device=device).argsort(1)

    slots = ranks(length // SLOT)[:, : 2 * pairs].unflatten(1, (pairs, 2))
    room = SLOT - LINE + 1
    start = slots * SLOT + torch.randint(0, room, slots.shape, generator=generator, device=device)
    start = start.sort(2).values  # [windows, pairs, 2]
    key = ranks(KEYS)[:, :pairs]
    value = torch.randint(0, 10, (count, pairs, 4), generator=generator, device=device)
    fixed = [torch.full_like(key, ord(c)) for c in "\n@=\n"]
    line = torch.stack(
        (fixed[0], fixed[1], ord("a") + key // 26, ord("a") + key % 26, fixed[2], *(ord("0") + value).unbind(2), fixed[3]), 2
    )
    at = start[..., None] + torch.arange(LINE, device=device)  # [windows, pairs, 2, LINE]
    windows.scatter_(1, at.flatten(1), line[:, :, None].expand_as(at).flatten(1).to(windows.dtype))
    return Planted(at[:, :, 1, DIGITS], start[..., 1] - start[..., 0])
