# SPDX-License-Identifier: MIT
"""The text of a kernel in PTX becomes a list of instructions."""

from __future__ import annotations

import re
from typing import NamedTuple

FLOAT = re.compile(r"0f[0-9A-Fa-f]{8}")
INTEGER = re.compile(r"-?(0x[0-9A-Fa-f]+|\d+)")


class Address(NamedTuple):
    """An address in memory: a register or name, and how many bytes behind it."""

    base: str
    offset: int


class Instruction(NamedTuple):
    """An instruction. predicate: threads execute it where this register is `expected`, all of them where it is "". name, parts:
    the opcode up to its first point, and what stands between the points behind. operands: names as text, numbers as their
    bits, groups of registers as tuples, addresses as `Address`. text: how it is written."""

    predicate: str
    expected: bool
    name: str
    parts: tuple[str, ...]
    operands: tuple[str | int | tuple[str, ...] | Address, ...]
    text: str


class Program(NamedTuple):
    """A kernel. labels: the place of the instruction that each label stands before."""

    instructions: list[Instruction]
    labels: dict[str, int]


def parse(text):
    """Returns the program of a text with one kernel."""
    instructions, labels = [], {}
    for line in text[text.index("\n{\n") + 3 : text.index("\n}\n")].splitlines():
        line = line.partition("//")[0].strip()
        label = re.fullmatch(r"(\$\w+):", line)
        if label:
            labels[label[1]] = len(instructions)
        elif not line.startswith("."):
            instructions += [_instruction(x.strip()) for x in line.split(";") if x.strip()]
    return Program(instructions, labels)


def _instruction(text):
    predicate, inverted, opcode, rest = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?(\S+)\s*(.*)", text).group(2, 1, 3, 4)
    name, *parts = re.split(r"\.|::", opcode)
    outside = re.split(r",(?![^{\[]*[}\]])", rest) if rest else []
    return Instruction(predicate or "", not inverted, name, tuple(parts), tuple(map(_operand, outside)), text)


def _operand(text):
    text = text.strip()
    if text.startswith("{"):
        return tuple(x.strip() for x in text.strip("{}").split(","))
    if text.startswith("["):
        base, _, offset = text.strip("[]").partition("+")
        return Address(base.strip(), int(offset or "0"))
    if FLOAT.fullmatch(text):
        return int(text[2:], 16)
    return int(text, 0) if INTEGER.fullmatch(text) else text
