# SPDX-License-Identifier: MIT
"""Counts what a block cache misses on recorded selections, and how many of the misses could be foreseen.

    python scripts/recorded_misses.py [--slots 16 26 64] [--first 10240]

The selections are those of `openmsa.bench.recorded`: every layer and head of the byte model, query after query of one text of
16,384 bytes, 128 blocks. A layer has a block cache of so many slots a head, and the blocks unused for the longest time leave
it. Prediction A takes the blocks that the layer in front has just chosen, B the neighbours of those that the layer chose last;
both only where no slot holds them. "found" is the share of the misses that a prediction holds, "right" the share of the
prediction that is missed.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from typing import NamedTuple

import numpy
from rich.console import Console
from rich.table import Table

from openmsa.bench.recorded import FILE, NOTHING

LENGTH, STEPS = 16_384, 6_144
Block = tuple[int, int]  # head and block


class Counts(NamedTuple):
    """Counts over steps: chosen and missed blocks, and for each prediction how many blocks it names and how many are missed."""

    chosen: int
    missed: int
    named: tuple[int, int]
    found: tuple[int, int]


def selections() -> list[list[list[set[int]]]]:
    """Returns the chosen blocks by layer, query and head."""
    with numpy.load(FILE) as kept:
        layers = [kept[name] for name in sorted(kept.files) if name.startswith(f"{LENGTH}_layer")]
    return [[[{int(x) for x in head if x != NOTHING} for head in query] for query in layer] for layer in layers]


def walk(layer: list[list[set[int]]], before: list[list[set[int]]] | None, slots: int, first: int) -> Counts:
    """Runs the steps of a layer; those from `first` on count. before: the layer in front."""
    held: OrderedDict[Block, None] = OrderedDict()
    heads, chosen, missed, named, found = len(layer[0]), 0, 0, [0, 0], [0, 0]
    for t in range(first - 2048, min(first + STEPS, len(layer))):
        wanted = [(head, block) for head in range(heads) for block in sorted(layer[t][head])]
        misses = {x for x in wanted if x not in held}
        if t >= first:
            chosen, missed = chosen + len(wanted), missed + len(misses)
            in_front = set().union(*before[t]) if before else set()
            guesses: tuple[set[Block], set[Block]] = (
                {(head, block) for head in range(heads) for block in in_front},
                {(head, block + side) for head in range(heads) for block in layer[t - 1][head] for side in (-1, 1)},
            )
            for i, guess in enumerate(guesses):
                guess -= held.keys()
                named[i], found[i] = named[i] + len(guess), found[i] + len(guess & misses)
        for x in wanted:
            held[x] = None
            held.move_to_end(x)
        while len(held) > slots * heads:
            held.popitem(last=False)
    return Counts(chosen, missed, (named[0], named[1]), (found[0], found[1]))


def main() -> None:
    """Prints a row for each layer and number of slots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 26, 40, 64, 128])
    parser.add_argument("--first", type=int, default=10_240, help="the first query that counts, at least 2049")
    options = parser.parse_args()
    layers, table = selections(), Table("slots a head", "layer", "missed", "A: found", "right", "B: found", "right")
    for slots in options.slots:
        for i, layer in enumerate(layers):
            c = walk(layer, layers[i - 1] if i else None, slots, options.first)
            shares = [(f"{f / max(c.missed, 1):.0%}", f"{f / max(n, 1):.0%}") for f, n in zip(c.found, c.named, strict=True)]
            table.add_row(str(slots), str(i), f"{c.missed / c.chosen:.2%}", *(x for pair in shares for x in pair))
    Console(width=90).print(table)


if __name__ == "__main__":
    main()
