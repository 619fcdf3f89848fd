# SPDX-License-Identifier: MIT
"""Where packed sequences start, in PyTorch and by a launch."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa.runtime import triton_starts
from openmsa.runtime.lengths import starts_of
from tests.contract import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [0, 1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("step", [1, 3])
def test_starts(batch, step, device):
    lengths, most = torch.randint(-50, 5000, (batch * step,), dtype=torch.int32, device=device)[::step], 4000
    expected = [0]
    for length in lengths.tolist():
        expected.append(expected[-1] + min(max(length, 0), most))
    for found in (starts_of(lengths, most), starts_of(lengths.clamp(0, most)), triton_starts.starts_of(lengths, most)):
        assert found.dtype == torch.int32
        assert found.tolist() == expected
