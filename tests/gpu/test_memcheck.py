# SPDX-License-Identifier: MIT
"""compute-sanitizer finds no access out of bounds in any kernel, and would have found one."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TOOL = shutil.which("compute-sanitizer")
SUMMARY = "ERROR SUMMARY:"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="compute-sanitizer needs an NVIDIA GPU"),
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not on the PATH: install NVIDIA's CUDA toolkit"),
]


def memcheck(part):
    """Returns what the tool and a part of `tests.gpu.every_kernel` print. Each tensor has an allocation of its own, so that its
    end is known to the tool."""
    command = [TOOL, "--tool", "memcheck", sys.executable, "-m", "tests.gpu.every_kernel", part]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    return done.stdout + done.stderr


def launched(printed):
    lines = [line for line in printed.splitlines() if line.startswith("launched:")]
    assert len(lines) == 1, printed[-3000:]
    return set(lines[0].split()[1:])


def test_every_kernel_stays_in_bounds(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import compile_calls

    from openmsa.runtime.recording import recording
    from tests.gpu.every_kernel import PARTS

    with ThreadPoolExecutor(max(1, min(len(PARTS), (os.cpu_count() or 2) // 2))) as pool:
        printed = dict(zip(PARTS, pool.map(memcheck, PARTS), strict=True))
    for part, text in printed.items():
        print(f"--- {part}", *(line for line in text.splitlines() if line.startswith(("ran:", "refused:", "====="))), sep="\n")
        assert f"{SUMMARY} 0 errors" in text, f"{part}: {text[-3000:]}"
    with recording(arch := torch.cuda.get_device_capability()[0] * 10) as launches:
        for _, call in compile_calls.calls(arch):
            call.run()
    kernels = {launch.name for launch in launches}
    found = set().union(*map(launched, printed.values()))
    assert kernels <= found, f"not launched: {kernels - found}"


def test_an_access_out_of_bounds_is_reported():
    printed = memcheck("fault")
    assert SUMMARY in printed, printed[-3000:]
    assert f"{SUMMARY} 0 errors" not in printed
    assert "Invalid __global__ write" in printed
