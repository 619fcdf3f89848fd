# SPDX-License-Identifier: MIT
"""Scores of one token on a CPU have the same bits wherever its keys lie."""

import pytest
import torch

from openmsa import PagedIndexKeys, Sequences, block_scores
from openmsa.block_scores import cpu
from openmsa.runtime import matmul
from openmsa.testing.compare import assert_close, assert_equal
from tests import instructions

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


AMD = torch.backends.mkl.is_available() and matmul._is_amd()
ties_there = pytest.mark.skipif(
    not AMD, reason="MKL's code for AMD makes equal products of equal keys, which are multiplied left"
)


@pytest.fixture
def left(monkeypatch):
    """Has keys multiplied as the left factor by PyTorch on any processor, however few they are, a few hundred at a time.
    Returns how many products were made so."""
    instructions.use_none(monkeypatch)
    made, products = [], matmul.products_keys_left
    monkeypatch.setattr(matmul, "_is_amd", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(matmul, "KEYS_LEFT_FROM", 1)
    monkeypatch.setattr(cpu, "KEYS_LEFT_ELEMENTS", 1 << 14)
    monkeypatch.setattr(cpu, "products_keys_left", lambda q, k: (made.append(k.shape), products(q, k))[1])
    return made


def places(keys, page_size):
    """Yields the keys ``[n, 1, dim]`` packed, with gaps, and in pages that lie together and apart."""
    yield keys
    yield torch.cat((keys, keys), 2)[..., : keys.shape[2]]
    first = torch.arange(-(-len(keys) // page_size))
    for pages in (first, first.flip(0), first * 3):
        cache = PagedIndexKeys.allocate(pages.int()[None], 3 * len(first) + 1, 1, page_size, keys.shape[2], dtype=keys.dtype)
        cache.keys.fill_(torch.nan)
        cache.append(keys)
        yield cache


@pytest.mark.parametrize(("block_size", "page_size", "dim"), [(16, 32, 64), (144, 288, 80), (128, 128, 128), (256, 32, 48)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 130, 1000])
def test_keys_as_the_left_factor(left, n, rows, block_size, page_size, dim):
    keys, q = torch.randn(n, 1, dim), torch.randn(1, rows, dim)
    exact = block_scores(q.double(), keys.double(), block_size=block_size)
    honest = torch.nn.functional.pad(keys[:, 0] @ q[0].t(), (0, 0, 0, -n % block_size), value=-torch.inf)
    honest = honest.view(-1, block_size, rows).amax(1).t()[:, None]
    for stored in places(keys, page_size):
        made = len(left)
        assert_close("scores", block_scores(q, stored, block_size=block_size), honest, exact)
        assert len(left) > made


@ties_there
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_keys_as_the_left_factor_are_ties_wherever_they_lie(left, rows):
    keys, q = torch.randn(1497, 1, 128), torch.randn(1, rows, 128)
    block = torch.arange(47)
    keys[32 * block + 7 * block % 25] = 9 * q[0, :1] + torch.randn(128)  # the best of every block, the last of 25 keys, too
    keys[-1] = keys[0]
    expected = block_scores(q, keys, block_size=32)[:, 0]
    assert_equal("scores", expected[:1], expected[:1, :1].expand(1, 47))
    for stored in places(keys, 64):
        assert_equal("scores", block_scores(q, stored, block_size=32)[:, 0], expected)
    assert left


def test_special_values_as_the_left_factor(left):
    """A NaN product counts as -inf, also one of 0 times infinity."""
    keys, q = torch.zeros(600, 1, 16), torch.tensor([1.0, -1.0, 0.0])[None, :, None] * torch.eye(16)[0]
    keys[:, 0, 0] = 2.0
    keys[3, 0, 0], keys[300, 0, 0], keys[301, 0, 0], keys[512:, 0, 0] = torch.inf, torch.nan, 5.0, -torch.inf
    expected = torch.tensor([[torch.inf, 5.0, -torch.inf], [-2.0, -2.0, torch.inf], [0.0, 0.0, -torch.inf]])
    found = block_scores(q, keys, seqs=Sequences.from_lengths([1], [600]), block_size=256)
    assert_equal("scores", found[:, 0], expected)
    assert left


def test_which_keys_go_left(monkeypatch):
    monkeypatch.setattr(matmul, "_is_amd", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    q, k, many = torch.zeros(1, 4, 128), torch.zeros(1, 1, 128), matmul.KEYS_LEFT_FROM // 128
    assert matmul.keys_go_left(q, k, many)
    assert not matmul.keys_go_left(q, k, many - 1)
    assert not matmul.keys_go_left(q, k.bfloat16(), many)
    assert not matmul.keys_go_left(torch.zeros(1, 5, 128), k, many)
    assert not matmul.keys_go_left(torch.zeros(2, 4, 128), k, many)
    monkeypatch.setattr(matmul, "_is_amd", lambda: False)
    assert not matmul.keys_go_left(q, k, many)
