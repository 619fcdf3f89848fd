# SPDX-License-Identifier: MIT
"""Compiled for an H200, all ranks' kernels sum partial results by the same operations: ``python -m tests.parallel.compiled``.

Each rank's kernel is compiled apart. Of ``a * b + c * d`` one product is rounded, and where the source does not say which, the
compiler may choose another one for another rank. Triton must not be in interpreter mode.
"""

import re

import torch

from openmsa.parallel import triton_exchange
from openmsa.runtime.recording import recording

ARITHMETIC = ("add", "sub", "mul", "fma", "div")


def ambiguous(ptx: str) -> list[str]:
    """Returns the additions of two products of which either one could have been the rounded one: a product is added to another
    one, one of whose factors is itself the result of a sum."""
    lines = re.findall(r"^\s*(\w+)(\.[\w.]+)\s+(%\w+), (.*);", ptx, re.MULTILINE)
    made = {result: (operation, [x.strip() for x in operands.split(",")]) for operation, _, result, operands in lines}

    def kind(name: str) -> str:
        return made.get(name, ("", []))[0]

    found = []
    for result, (operation, operands) in made.items():
        if operation == "fma" and kind(operands[2]) == "mul" and any(kind(x) in ARITHMETIC for x in operands[:2]):
            found.append(f"{result} = {operands} + {made[operands[2]]}")
    return found


def main() -> None:
    """Compiles the kernels of all of two to four ranks."""
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            with recording(90) as launches:
                words = torch.zeros(1, dtype=torch.int64, device="cuda")
                mail = triton_exchange.Mailbox(torch.zeros(ranks, dtype=torch.int64, device="cuda"), words, words.clone())
                for dtype in (torch.bfloat16, torch.float16):
                    part = torch.empty(32, 64, 128, dtype=dtype, device="cuda")
                    lse = torch.empty(32, 64, dtype=torch.float32, device="cuda")
                    places = part, lse, part.clone(), lse.clone(), mail, 2048, triton_exchange.Reach(rank, ranks, 10**9)
                    triton_exchange.launch_merge(*places)
                    triton_exchange.launch_blend(*places, pdl=True)
            assert [x.name for x in launches] == 2 * ["merge_kernel", "blend_kernel"]
            for launch in launches:
                ptx = launch.compile().asm["ptx"]
                assert "fma.rn.f32" in ptx
                assert not (found := ambiguous(ptx)), f"rank {rank} of {ranks}, {launch.name}: {found[:3]}"


if __name__ == "__main__":
    main()
    print("the sums of all ranks are rounded alike")
