# SPDX-License-Identifier: MIT
"""The compile check finds planted faults, and its calls reach what it knows: ``python -m tests.runtime.compile_checked``.

Triton must not be in interpreter mode.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from openmsa.runtime.launch import launch_kernel
from openmsa.runtime.recording import Launch, recording

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import compile_check
from compile_calls import calls, machine_code
from compile_calls.covering import covering, facts
from compile_calls.known import KNOWN, Known, always


class Cut(NamedTuple):
    """This constexpr has several fields."""

    tile: int
    whole: bool


@triton.jit
def product(x, y, out, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    tl.static_assert(M >= N, "fewer rows than columns")
    m, k, o = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    total = tl.zeros((M, N), tl.float32)
    for i in range(n):
        left, right = tl.load(x + i * M * K + m * K + k[None, :]), tl.load(y + i * N * K + k[:, None] * N + o)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(out + m * N + o, total)


@triton.jit
def choose(x, scale, out, n, CUT: tl.constexpr):
    o = tl.arange(0, CUT.tile)
    tl.store(out + o + n, tl.load(x + o) if scale is None else tl.load(x + o) * tl.load(scale))


def launched(arch: int, dtype: torch.dtype, tile: tuple[int, int, int], precision: str = "tf32", **options: int) -> Launch:
    """Returns the launch of a product of tiles."""
    with recording(arch) as launches:
        x = torch.empty(4096, dtype=dtype, device="cuda")
        launch_kernel(product, (1,), x, x, x.float(), 8, M=tile[0], N=tile[1], K=tile[2], PRECISION=precision, **options)
    return launches[0]


def planted_faults_are_found() -> None:
    """Code without a fault has none; spills, missing matrix instructions, too much shared memory and failures are told."""
    bf16, tile = torch.bfloat16, (64, 64, 64)
    spilling, wide = {"maxnreg": 64, "num_warps": 4, "num_stages": 2}, {"num_warps": 8, "num_stages": 5}
    spills, no_wgmma = r"spills: [1-9]\d* bytes of stack \(0 allowed\), [1-9]\d* reloads", "no HGMMA or QGMMA or IGMMA on sm_90"
    planted: list[tuple[Launch, list[str]]] = []
    for arch in compile_check.ARCHS:
        limit = compile_check.COMPILE_TARGETS[arch].shared_bytes
        planted += [
            (launched(arch, bf16, tile), []),
            (launched(arch, bf16, (128, 64, 64), **spilling), [spills]),
            (launched(arch, bf16, (256, 128, 128), **wide), [rf"needs \d+ bytes of shared memory \(limit {limit}\)"]),
            (launched(arch, torch.float32, (16, 16, 16), "ieee"), [no_wgmma] * (arch == 90) + ["no matrix instruction"]),
        ]
    planted.append((launched(90, bf16, (16, 16, 16), num_warps=1), [no_wgmma]))  # Such few rows take another instruction.
    planted.append((launched(120, bf16, (16, 32, 16)), ["does not compile: .*fewer rows than columns"]))
    KNOWN["product"] = Known(always)
    compile_check._WANTED[:] = [compile_check.Variant(launch, [f"launch {i}"]) for i, (launch, _) in enumerate(planted)]
    results = compile_check.inspect(list(range(len(planted))), None)
    compile_check.judge(results)
    for found, (launch, expected) in zip(results, planted, strict=True):
        assert (found.kernel, found.arch) == ("product", launch.arch)
        assert len(found.faults) == len(expected), (found, expected)
        assert all(re.fullmatch(*pair) for pair in zip(expected, found.faults, strict=True)), (found, expected)
    assert {name for found in results for name in found.matrix} == {"HMMA", "HGMMA", "UTCHMMA"}
    opcodes_have_one_name([launch for launch, expected in planted if "compile" not in str(expected)])


def opcodes_have_one_name(launches: list[Launch]) -> None:
    """What one instruction of an opcode is called, all instructions of that opcode are."""
    for arch in compile_check.ARCHS:
        codes = [machine_code.instructions(launch.compile().asm["cubin"]) for launch in launches if launch.arch == arch]
        named = machine_code.mnemonics(map(machine_code.operations, codes), arch)
        whole = b"".join(codes)
        text = machine_code._read("nvdisasm", whole, "-b", machine_code.MACHINES[arch])
        opcodes = [low & 0xFFF for low in memoryview(whole).cast("H")[::8]]
        assert machine_code.INSTRUCTION.findall(text) == [named[opcode] for opcode in opcodes]
        assert sum(number for code in codes for number, _ in machine_code.operations(code).values()) == len(opcodes)


def the_calls_run(arch: int) -> None:
    """The recorded calls launch every kernel of which the check knows something, and each format of the caches."""
    labels, names, formats = set(), set(), {"write_kernel": set(), "read_kernel": set()}
    for label, call in calls(arch):
        assert label not in labels, label
        labels.add(label)
        with recording(arch) as launches:
            call.run()
        names |= {launch.name for launch in launches}
        for launch in launches:
            if launch.name in formats and label.startswith("Append"):
                formats[launch.name].add(launch.variant)
            if launch.name in KNOWN:
                KNOWN[launch.name].wgmma(launch), KNOWN[launch.name].may_spill(launch)
    assert {name for name in KNOWN if arch == 90 or "sm90" not in name} <= names, set(KNOWN) - names
    assert {name: len(found) for name, found in formats.items()} == {"write_kernel": 6, "read_kernel": 5}


def a_part_of_the_variants_covers_all() -> None:
    """Every constant, every field, what is known of a number or a tensor and every option of some variant is in the part, where
    no variant has only facts of the others."""
    with recording(100) as launches:
        x, cuts = torch.empty(64, dtype=torch.bfloat16, device="cuda"), (Cut(16, False), Cut(16, True), Cut(32, False))
        for cut in cuts:
            for rows, scale, n, warps in (
                (x, None, 1, 1),
                (x[1:], x, 48, 2),
                (x.float(), x, 48, 2),
                (x, x, 3, 1),
                (x, None, 16, 2),
            ):
                launch_kernel(choose, (1,), rows, scale, x, n, CUT=cut, num_warps=warps)
    chosen, every = covering(launches), {fact for launch in launches for fact in facts(launch)}
    assert 3 <= len(chosen) == len(set(chosen)) < len(launches)
    assert {fact for place in chosen for fact in facts(launches[place])} == every
    for left_out in chosen:
        assert {fact for place in chosen if place != left_out for fact in facts(launches[place])} < every
    assert covering(launches[:1]) == [0]
    assert covering([]) == []


def every_variant_of_the_tuned_architecture_is_compiled() -> None:
    """For sm_90 the part is all; for the others it has every fact that some variant of the kernel has there."""
    recorded, failures = compile_check.variants(list(compile_check.ARCHS), "Append")
    assert not failures
    kept = [variant.launch for variant in compile_check.part(recorded)]
    assert {id(v.launch) for v in recorded if v.launch.arch == compile_check.TUNED} <= {id(launch) for launch in kept}
    for name in {v.launch.name for v in recorded}:
        elsewhere = [v.launch for v in recorded if v.launch.name == name and v.launch.arch != compile_check.TUNED]
        part = [launch for launch in kept if launch.name == name and launch.arch != compile_check.TUNED]
        assert {fact for launch in elsewhere for fact in facts(launch)} == {fact for launch in part for fact in facts(launch)}
    assert len(kept) < len(recorded)


def main() -> None:
    for arch in (80, 90):
        the_calls_run(arch)
    a_part_of_the_variants_covers_all()
    every_variant_of_the_tuned_architecture_is_compiled()
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        planted_faults_are_found()


if __name__ == "__main__":
    main()
