# SPDX-License-Identifier: MIT
"""These functions read the machine code of kernels with the binary tools in triton's wheel."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import triton

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", re.MULTILINE)  # the mnemonic behind a predicate
MACHINES = {80: "SM80", 90: "SM90a", 100: "SM100a", 120: "SM120a"}  # nvdisasm has these names for what Triton compiles for.
TOOLS = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"


def _read(tool: str, code: bytes, *options: str) -> str:
    """Returns what one of the tools prints about a file that holds these bytes."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        return subprocess.run([str(TOOLS / tool), *options, file.name], check=True, capture_output=True, text=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Returns the registers and the bytes of stack that a kernel takes."""
    usage = _read("cuobjdump", cubin, "-res-usage")
    registers, stack = (max(map(int, re.findall(rf"{name}:(\d+)", usage)), default=0) for name in ("REG", "STACK"))
    return registers, stack


def instructions(cubin: bytes) -> bytes:
    """Returns the instructions of a cubin, an ELF file: its sections named .text."""
    (start,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    strings = sections[names][4]
    return b"".join(cubin[at : at + n] for name, _, _, _, at, n in sections if cubin[strings + name :].startswith(b".text"))


def operations(code: bytes) -> dict[int, tuple[int, bytes]]:
    """Returns, for each opcode of some instructions, how many have it and the first one that has. An instruction takes 16
    bytes, and its low 12 bits are the opcode."""
    opcodes = [low & 0xFFF for low in memoryview(code).cast("H")[::8]]
    first = {opcode: i for i, opcode in reversed(list(enumerate(opcodes)))}
    return {opcode: (n, code[16 * first[opcode] :][:16]) for opcode, n in Counter(opcodes).items()}


def mnemonics(found: Iterable[Mapping[int, tuple[int, bytes]]], arch: int) -> dict[int, str]:
    """Returns the name of each opcode that `operations` found in codes of an architecture, without what follows a dot. All
    instructions of an opcode have one name, so the disassembler, which takes 0.3 s to start, reads one of each, all at once."""
    examples = {opcode: example for operations in found for opcode, (_, example) in operations.items()}
    text = _read("nvdisasm", b"".join(examples.values()), "-b", MACHINES[arch]) if examples else ""
    return dict(zip(examples, INSTRUCTION.findall(text), strict=True))


def write(folder: Path, names: list[str], asm: Mapping[str, Any]) -> None:
    """Writes the disassembly and, in the order of the launch, the types of the parameters, under every name. asm: the cubin and
    the ptx of a kernel."""
    folder.mkdir(parents=True, exist_ok=True)
    sass = _read("cuobjdump", asm["cubin"], "-sass")
    parameters = re.findall(r"^\s*\.param (.*?) \w+_param_\d+(.*?),?$", asm["ptx"], re.MULTILINE)
    for ending, text in (("sass", sass), ("params", "".join(f"{kind}{size}\n" for kind, size in parameters))):
        first = folder / f"{names[0]}.{ending}"
        first.write_text(text)
        for name in names[1:]:
            (folder / f"{name}.{ending}").unlink(missing_ok=True)
            (folder / f"{name}.{ending}").hardlink_to(first)
