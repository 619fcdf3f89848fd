#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares the machine code of two checkouts, launch by launch.

    python scripts/compile_check.py --sass BEFORE        # in one checkout
    python scripts/compile_check.py --sass AFTER         # in the other
    python scripts/same_code.py BEFORE AFTER [--list]

Parameters of a kernel that were bundled or reordered lie at other offsets of the constant bank, which says nothing of the work,
so offsets are left out of the comparison. What ptxas makes of them may still differ, such as one wide load where two parameters
are neighbours, so a launch is one of

    identical   the same instructions in the same order, registers included
    loads       the same opcodes but for loads of parameters, moves and empty slots
    work        other opcodes too, with the difference of the numbers of instructions
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", re.MULTILINE)
CONSTANT = re.compile(r"c\[0x[0-9a-f]+\]\[[^\]]*\]|cx?\[UR\d+\]\[[^\]]*\]")
OVERHEAD = re.compile(r"^(@!?U?P\w+ )?(ULDC|LDCU?|MOV|UMOV|IMAD\.MOV|CS2R|R2UR|NOP|S2U?R|BRA)\b")
KINDS = ("identical", "loads", "work")


def instructions(path: Path) -> list[str]:
    """Returns the instructions of a disassembly without the offsets of parameters."""
    return [CONSTANT.sub("c[]", text) for text in INSTRUCTION.findall(path.read_text())]


def opcodes(code: list[str]) -> Counter[str]:
    """Counts how often each opcode stands in the code, without those that only bring parameters and constants."""
    return Counter(re.sub(r"^@!?U?P\w+ ", "", text).split()[0] for text in code if not OVERHEAD.match(text))


def compared(before: Path, after: Path) -> tuple[str, int]:
    """Returns the kind of difference between two disassemblies, and how many instructions more the second has."""
    old, new = instructions(before), instructions(after)
    if old == new:
        return "identical", 0
    return ("loads" if opcodes(old) == opcodes(new) else "work"), len(new) - len(old)


def main() -> int:
    """Runs the command and returns its exit status: 1 where launches of one folder are missing in the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--list", action="store_true", help="also name every launch whose work differs")
    options = parser.parse_args()
    names = [{path.name for path in folder.glob("*.sass")} for folder in (options.before, options.after)]
    both, rows = sorted(names[0] & names[1]), defaultdict(lambda: Counter[str]())
    most: dict[str, tuple[int, str]] = {}
    for name in both:
        kind, more = compared(options.before / name, options.after / name)
        kernel = next(iter(re.findall(r"Function : (\w+)", (options.after / name).read_text())), name)
        rows[kernel][kind] += 1
        if abs(more) >= abs(most.get(kernel, (0, ""))[0]):
            most[kernel] = (more, name)
        if options.list and kind == "work":
            print(f"{more:+6} {name}")
    print(f"{'kernel':40}" + "".join(f"{kind:>10}" for kind in KINDS) + "  most instructions more or less")
    for kernel, counts in sorted(rows.items()):
        print(f"{kernel:40}" + "".join(f"{counts[kind]:>10}" for kind in KINDS) + f"  {most[kernel][0]:+}")
    print(f"{len(both)} launches in both; {len(names[0] - names[1])} only before, {len(names[1] - names[0])} only after")
    return 1 if names[0] ^ names[1] else 0


if __name__ == "__main__":
    sys.exit(main())
