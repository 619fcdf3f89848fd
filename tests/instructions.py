# SPDX-License-Identifier: MIT
"""C kernels are tested for the instructions of this processor and for those of older ones."""

import ctypes
import platform
from pathlib import Path

import pytest

from openmsa.runtime import c_library
from openmsa.runtime.environment import c_compiler

OLDER = ("-march=x86-64-v3", "-march=x86-64") if platform.machine() == "x86_64" else ()


def _known() -> set[str]:
    """Returns the flags of this processor as Linux names them."""
    try:
        return set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return set()


def runs(flag: str) -> bool:
    """Says whether this processor has the instructions that a flag of the compiler names."""
    return flag != "-march=x86-64-v3" or {"avx2", "fma", "bmi2", "f16c"} <= _known()


def allows_tiles() -> bool:
    """Says whether the kernel lets a process use the tiles of a processor that has them; it is asked as tiles.h asks it."""
    return "amx_bf16" in _known() and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


_AMX, _PAIRS = allows_tiles(), "avx512_bf16" in _known()
WIDENED = "-mno-amx-bf16 -mno-avx512bf16" if _AMX else "-mno-avx512bf16"
TILES = {
    "-DEMULATED_TILES": "avx512f" in _known(),  # Products of tiles are computed number by number.
    "-mno-amx-bf16": _AMX and _PAIRS,  # A processor that has tiles multiplies pairs, as those do that have these alone,
    WIDENED: _AMX or _PAIRS,  # or vectors of float32, as all others do.
}
"""These are further flags beside those of this processor, and whether it can run what they make."""
ALL = [c_library.NATIVE, *(f"{c_library.NATIVE} {flag}" for flag, can in TILES.items() if can), *filter(runs, OLDER)]
SERVES = "AMX tiles" if _AMX else "AVX-512 BF16" if _PAIRS else ""
"""This multiplies tiles of bfloat16 on this processor."""
needs_tiles = pytest.mark.skipif(not SERVES, reason="the processor has neither tiles nor products of pairs")
needs_compiler = pytest.mark.skipif(c_compiler() is None, reason="the machine has no C compiler")


def use(monkeypatch, flag: str) -> None:
    """Has C kernels compiled for the instructions that a flag names, or some flags with a space between them."""
    library, native = c_library.library, c_library.FLAGS.index(c_library.NATIVE)
    flags = (*c_library.FLAGS[:native], *flag.split(), *c_library.FLAGS[native + 1 :])
    monkeypatch.setattr(c_library, "library", lambda source: library(source, flags))


def use_none(monkeypatch) -> None:
    """Has PyTorch's operations do what C kernels do."""
    monkeypatch.setattr(c_library, "library", lambda source: c_library.Library(None, "off"))
