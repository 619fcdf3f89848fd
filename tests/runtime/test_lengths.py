# SPDX-License-Identifier: MIT
"""Where packed sequences start, and which queries a chunk has, in PyTorch and by a launch."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa.runtime import triton_starts
from openmsa.runtime.lengths import chunk_of, starts_of
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [0, 1, 2, 255, 256, 300])
@pytest.mark.parametrize("has_offset", [False, True])
def test_chunks(batch, has_offset, device):
    """Queries of a chunk keep their sequences and positions, and a sequence without any begins where it would go on."""
    q_lens, k_lens = (torch.randint(0, 40, (batch,), dtype=torch.int32) for _ in range(2))
    cu_q, cu_k = starts_of(q_lens), starts_of(k_lens)
    offset = torch.randint(-9, 99, (batch,), dtype=torch.int32) if has_offset else None
    first = k_lens - q_lens if offset is None else offset
    total = int(cu_q[-1])
    position = [int(first[b]) + i for b in range(batch) for i in range(int(q_lens[b]))]
    sequence = [b for b in range(batch) for _ in range(int(q_lens[b]))]
    given = [x if x is None else x.to(device) for x in (cu_q, cu_k, offset)]
    for start, stop in ((0, total), (0, total + 7), (total // 3, total // 2), (total // 2, total), (total // 5, total // 5)):
        for found in (chunk_of(*given, start, stop), triton_starts.chunk_of(*given, start, stop)):
            starts, offsets = (x.tolist() for x in found)
            pairs = [(b, offsets[b] + i) for b in range(batch) for i in range(starts[b + 1] - starts[b])]
            assert pairs == list(zip(sequence[start:stop], position[start:stop], strict=True))
            before = [min(max(start - int(cu_q[b]), 0), int(q_lens[b])) for b in range(batch)]
            assert offsets == [int(first[b]) + before[b] for b in range(batch)]
            assert [x.dtype for x in found] == [torch.int32, torch.int32]
