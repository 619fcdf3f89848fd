# SPDX-License-Identifier: MIT
"""Variants of the kernel that takes the blocks of a decode step best first are compiled: ``python -m tests.ptx.compiled FILE``.
Triton must not be in interpreter mode."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from openmsa.decode.gluon_sm90_best import launch
from openmsa.runtime.recording import recording
from tests.decode.test_gluon_sm90_best import CASES, partials_of, step_of


class Variant(NamedTuple):
    """A step, as `tests.decode.test_gluon_sm90_best` has them in CASES, and how programs share it."""

    case: tuple
    pairs: int
    splits: int
    handed: bool


VARIANTS = {
    "three programs a row": Variant(((0, 1, 129, 1100), 1, 1, 16, 128, 128, 8, 0, 1, 1, "bf16", ""), 2, 3, False),
    "four programs a row": Variant(((700, 1300), 1, 1, 16, 128, 128, 10, 0, 1, 1, "bf16", "absent"), 2, 4, False),
    "two programs a row, handed on": Variant(((1, 129, 0, 1100), 1, 1, 16, 128, 128, 6, 0, 1, 1, "bf16", ""), 2, 2, True),
    "two pairs": Variant(((0, 1, 129, 1100), 1, 1, 16, 128, 128, 4, 0, 1, 1, "bf16", "ties"), 2, 1, False),
    "one pair, handed on": Variant(((129, 1100), 1, 1, 16, 128, 128, 4, 0, 1, 1, "bf16", "absent"), 1, 1, True),
    "nothing forced": Variant(((0, 1, 129, 1300), 1, 1, 16, 128, 128, 4, 0, 0, 1, "bf16", "holes"), 2, 2, False),
    "tokens and heads": Variant(((2, 700), 2, 2, 5, 128, 128, 3, 1, 1, 2, "bf16", ""), 2, 1, True),
    "far": Variant(((33_000, 300), 1, 1, 16, 128, 128, 4, 0, 1, 1, "bf16", ""), 2, 2, True),
    "ragged": Variant(CASES["ragged"], 2, 2, True),
}


def flat(value):
    """Returns the fields of a parameter, or of all, one after the other."""
    return [y for x in value for y in flat(x)] if isinstance(value, tuple) else [value]


def compiled(variant):
    """Returns the types of the fields of a variant's parameters, how many bytes of shared memory it has, and its PTX."""
    sizes, scores, step = step_of(*variant.case)
    with recording(90) as launches:
        partials = partials_of(sizes, step, variant.splits)
        launch(sizes, scores, step, True, variant.pairs, variant.splits, partials, variant.handed)
    kernel = launches[-1].compile()
    return flat(tuple(launches[-1].signature.values())), kernel.metadata.shared, kernel.asm["ptx"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({name: compiled(variant) for name, variant in VARIANTS.items()}))
