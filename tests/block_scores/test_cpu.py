# SPDX-License-Identifier: MIT
"""Scores of one token on a CPU have the same bits wherever its keys lie."""

import pytest
import torch

from openmsa import PagedIndexKeys, block_scores

PAGES, POOL = 47, 200  # pages of the sequence, and of the pool: some tables let it be scored in place, others are copied from


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [4, 8, 12])
@pytest.mark.parametrize("page_size", [32, 128])
def test_places_of_pages_change_no_bit(page_size, rows, dtype):
    keys = torch.randn(PAGES * page_size - 5, 1, 256).to(dtype)
    q = torch.randn(1, rows, 256).to(dtype)
    expected = block_scores(q, keys, block_size=32)
    first = torch.arange(PAGES)
    for pages in (first, first.flip(0), first * 4, first * 2 + first % 2):
        cache = PagedIndexKeys.allocate(pages.int()[None], POOL, 1, page_size, 256, dtype=dtype)
        cache.append(keys)
        assert torch.equal(block_scores(q, cache, block_size=32), expected)
