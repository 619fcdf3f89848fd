# SPDX-License-Identifier: MIT
"""This is a small byte-level language model with MSA, which trains in minutes and reads a file of any kind: `ByteModel` in the
sizes of `ByteConfig`, and `load`, which returns the one that this package ships.

The folder `benchmarks/evidence` trains it; `docs/results` says what came of that, and on which text.
"""

from openmsa.tiny.model import ByteConfig, ByteModel
from openmsa.tiny.weights import SHIPPED, load, store

__all__ = ["SHIPPED", "ByteConfig", "ByteModel", "load", "store"]
