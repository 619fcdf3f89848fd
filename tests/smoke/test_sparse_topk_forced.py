# SPDX-License-Identifier: MIT
"""`sparse_topk_select` works with forced blocks. This is also a command: python tests/smoke/test_sparse_topk_forced.py"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch

from fmha_sm100 import sparse_topk_select
from tests.exact import DEVICES

TOPK = 16
device = pytest.mark.parametrize("device", DEVICES)
shape = pytest.mark.parametrize(("tiles", "total_q"), [(256, 4), (256, 32), (512, 8), (4096, 4), (4096, 32)])


def scores(tiles, total_q, device, heads=4):
    """Draws distinct values, so that there is one right answer."""
    generator = torch.Generator().manual_seed(tiles + total_q)
    rows = [torch.randperm(tiles, generator=generator) for _ in range(heads * total_q)]
    return torch.stack(rows).float().view(heads, total_q, tiles).transpose(1, 2).contiguous().to(device)


def right(values, pages, begin, end):
    """Returns, row by row, the forced blocks and the best of the others, ascending."""
    heads, tiles, total_q = values.shape
    expected = torch.full((total_q, heads, TOPK), -1, dtype=torch.int32)
    for token in range(total_q):
        count = min(pages[token], tiles)
        forced = {*range(min(begin, count)), *range(max(count - end, 0), count)}
        for head in range(heads):
            row = values[head, :, token].tolist()
            others = sorted((b for b in range(count) if b not in forced), key=lambda b: -row[b])
            ids = sorted(forced | set(others[: TOPK - len(forced)]))
            expected[token, head, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return expected


@device
@shape
@pytest.mark.parametrize(("begin", "end"), [(1, 0), (0, 1), (2, 3), (8, 8), (0, 16)])
def test_forced_blocks_are_selected_beside_the_best(tiles, total_q, begin, end, device):
    values = scores(tiles, total_q, device)
    ids = sparse_topk_select(values, TOPK, num_valid_pages=tiles - 5, force_begin_blocks=begin, force_end_blocks=end)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.cpu(), right(values.cpu(), [tiles - 5] * total_q, begin, end))


@device
@shape
def test_nothing_forced_changes_no_bit(tiles, total_q, device):
    values = scores(tiles, total_q, device)
    plain = sparse_topk_select(values, TOPK, num_valid_pages=tiles)
    assert torch.equal(plain, sparse_topk_select(values, TOPK, tiles, force_begin_blocks=0, force_end_blocks=0))
    assert torch.equal(plain.cpu(), right(values.cpu(), [tiles] * total_q, 0, 0))


@device
def test_the_last_blocks_are_those_of_each_query(device):
    """Each token's last blocks are those that its own num_valid_pages counts, as with requests of different lengths."""
    values, pages = scores(256, 8, device), [1, 2, 15, 16, 17, 40, 255, 256]
    valid = torch.tensor(pages, dtype=torch.int32, device=device)
    ids = sparse_topk_select(values, TOPK, valid, force_begin_blocks=1, force_end_blocks=1)
    assert torch.equal(ids.cpu(), right(values.cpu(), pages, 1, 1))
    for token, count in enumerate(pages):
        assert bool((ids[token] == count - 1).any(-1).all())
        assert int(ids[token].max()) < count


@device
def test_the_given_buffer_is_written(device):
    values = scores(256, 4, device)
    buffer = torch.full((4, 4, TOPK), 99, dtype=torch.int32, device=device)
    assert sparse_topk_select(values, TOPK, 256, output=buffer, force_end_blocks=1) is buffer
    assert torch.equal(buffer.cpu(), right(values.cpu(), [256] * 4, 0, 1))


def test_too_many_forced_blocks_are_refused():
    with pytest.raises(ValueError, match="at most topk"):
        sparse_topk_select(scores(256, 4, "cpu"), TOPK, 256, force_begin_blocks=9, force_end_blocks=8)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *([] if torch.cuda.is_available() else ["-m", "not gpu"])]))
