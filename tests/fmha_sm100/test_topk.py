# SPDX-License-Identifier: MIT
"""`sparse_topk_select` agrees with the oracle's list of the best."""

import pytest
import torch

from fmha_sm100 import sparse_topk_select
from tests import oracle
from tests.contract import DEVICES

devices = pytest.mark.parametrize("device", DEVICES)
HEADS, TOKENS = 3, 7


def stored(scores, layout, device):
    """Returns [heads, tokens, tiles] as a view in the layout, with other numbers around it."""
    order = {"HKT": (0, 2, 1), "THK": (1, 0, 2)}[layout]
    values = scores.permute(order)
    around = torch.full([n + 2 for n in values.shape], 1e30, device=device)
    view = around[1:-1, 1:-1, 1:-1]
    view.copy_(values)
    return view


def expected(scores, topk, valid, begin=0, end=0):
    rows = [[oracle.select(scores[h, t].tolist(), valid[t], topk, begin, end) for h in range(HEADS)] for t in range(TOKENS)]
    return torch.tensor(rows, dtype=torch.int32)


def random_scores(tiles, ties=False):
    generator = torch.Generator().manual_seed(tiles)
    scores = torch.randn(HEADS, TOKENS, tiles, generator=generator)
    return (scores * 2).round() if ties else scores


@devices
@pytest.mark.parametrize("layout", ["HKT", "THK"])
@pytest.mark.parametrize("topk", [1, 4, 16, 33, 64])
@pytest.mark.parametrize("tiles", [3, 16, 128, 300])
def test_the_best(device, layout, topk, tiles):
    """The best tiles are found with ties, mixed lengths, forced tiles, -inf and NaN."""
    scores = random_scores(tiles, ties=True)
    scores[:, 1, ::2], scores[:, 2, 1::3] = -torch.inf, torch.nan
    valid = [tiles, tiles, tiles + 5, 0, 1, min(17, tiles), tiles - 1]
    begin, end = (1, 2) if topk > 3 else (0, 1)
    pages = torch.tensor(valid, dtype=torch.int32, device=device)
    output = torch.full((HEADS, TOKENS, topk + 1), 5, dtype=torch.int32, device=device)[..., 1:].transpose(0, 1)
    found = sparse_topk_select(stored(scores, layout, device), topk, pages, output, begin, end, max_score_layout=layout)
    assert found is output
    assert torch.equal(found.cpu(), expected(scores, topk, valid, begin, end))


@devices
def test_one_number_for_all(device):
    scores = random_scores(40)
    contiguous = scores.transpose(1, 2).contiguous().to(device)
    for pages, valid in ((None, 40), (25, 25), (64, 40), (0, 0)):
        found = sparse_topk_select(contiguous, 16, num_valid_pages=pages)
        assert (found.dtype, found.device.type, tuple(found.shape)) == (torch.int32, device, (TOKENS, HEADS, 16))
        assert torch.equal(found.cpu(), expected(scores, 16, [valid] * TOKENS))
    int64 = torch.full((TOKENS,), 25, device=device)
    assert torch.equal(sparse_topk_select(contiguous, 16, int64).cpu(), expected(scores, 16, [25] * TOKENS))


@devices
def test_no_tiles(device):
    assert bool((sparse_topk_select(torch.zeros(2, 0, 3, device=device), 4) == -1).all())
    assert sparse_topk_select(torch.zeros(2, 9, 0, device=device), 4).shape == (0, 2, 4)


SCORES = torch.zeros(HEADS, 20, TOKENS)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"max_score": SCORES.double()}, TypeError, "max_score must have dtype torch.float32"),
        ({"max_score": SCORES[0]}, ValueError, "max_score must have shape"),
        ({"topk": 0}, ValueError, "topk must be from 1 to 64, got 0"),
        ({"topk": 65}, ValueError, "topk must be from 1 to 64, got 65"),
        ({"num_valid_pages": -1}, ValueError, "num_valid_pages must be at least 0, got -1"),
        ({"num_valid_pages": 2.0}, TypeError, "num_valid_pages must be an int"),
        ({"num_valid_pages": torch.ones(3, dtype=torch.int32)}, ValueError, r"num_valid_pages.shape\[0\] must be 7"),
        ({"num_valid_pages": torch.ones(TOKENS)}, TypeError, "num_valid_pages must have dtype"),
        ({"force_begin_blocks": -1}, ValueError, "force_begin_blocks must be at least 0"),
        ({"force_begin_blocks": 9, "force_end_blocks": 8}, ValueError, r"at most topk \(16\), got 9 \+ 8"),
        ({"output": torch.zeros(TOKENS, HEADS, 16)}, TypeError, "output must have dtype torch.int32"),
        ({"output": torch.zeros(TOKENS, HEADS, 8).int()}, ValueError, r"output must have shape \(7, 3, 16\)"),
        ({"max_score_layout": "TKH"}, ValueError, "max_score_layout must be 'HKT' or 'THK', got 'TKH'"),
    ],
)
def test_misuse(changes, error, words):
    with pytest.raises(error, match=words):
        sparse_topk_select(**({"max_score": SCORES, "topk": 16} | changes))
