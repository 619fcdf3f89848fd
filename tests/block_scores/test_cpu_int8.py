# SPDX-License-Identifier: MIT
"""Scores of few rows on int8 keys that are read as stored are closer to the truth than float32 sums, or exact."""

import pytest
import torch

from openmsa import Int8, PagedIndexKeys, Sequences, block_scores
from openmsa.block_scores import cpu_int8

pytestmark = pytest.mark.skipif(not cpu_int8.is_exact(), reason="this CPU's int8 products are slow or saturate")


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Returns a list that grows with each call in which int8 keys are read as stored, which they are from one key on."""
    calls = []
    function = cpu_int8.block_maxima
    monkeypatch.setattr(cpu_int8, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(cpu_int8, "TILE_KEYS", 96)
    monkeypatch.setattr(cpu_int8, "block_maxima", lambda *a: calls.append(1) or function(*a))
    return calls


def truth(q, keys, block_size):
    """Returns the scores of one token in float64, ``[heads, blocks]``."""
    x = keys.dequantize(torch.float64).repeat_interleave(q.shape[1] // keys.shape[1], 1)
    products = torch.einsum("hd,nhd->hn", q[0].double(), x)
    padded = torch.nn.functional.pad(products, (0, -x.shape[0] % block_size), value=-torch.inf)
    return padded.unflatten(1, (-1, block_size)).amax(2)


def paged(keys, size, order):
    """Returns the same keys in a pool of shuffled pages, whose other rows are NaN."""
    n, heads, dim = keys.shape
    pool = Int8.allocate((len(order) + 2, heads, size, dim))
    pool.scale.fill_(torch.nan)
    for at, page in enumerate(order):
        rows = slice(at * size, min(at * size + size, n))
        count = rows.stop - rows.start
        pool.data[page, :, :count], pool.scale[page, :, :count] = keys.data[rows].transpose(0, 1), keys.scale[rows].T
    return PagedIndexKeys(pool, torch.tensor([order], dtype=torch.int32), torch.tensor([n], dtype=torch.int32))


@pytest.mark.parametrize(
    ("n", "heads", "key_heads", "dim", "block_size"), [(1, 1, 1, 16, 16), (333, 4, 1, 128, 32), (700, 6, 3, 64, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_closer_than_float32(n, heads, key_heads, dim, block_size, dtype, served):
    keys = Int8.quantize(torch.randn(n, key_heads, dim))
    q = torch.randn(1, heads, dim).to(dtype)
    expected = truth(q, keys, block_size)
    order = torch.randperm(-(-n // block_size)).tolist()
    for given in (keys, paged(keys, block_size, order)):
        found = block_scores(q, given, block_size=block_size)[:, 0]
        bound = 2.0**-22 * q.abs().amax().item() * keys.dequantize().abs().sum(2).max().item()
        assert (found - expected).abs().max().item() <= bound
    assert len(served) == 2


def test_integers_are_exact_and_equal_keys_equal(served):
    keys = Int8(
        torch.randint(-127, 128, (450, 1, 96), dtype=torch.int8), torch.ones(450, 1).bfloat16(), torch.zeros(450, 1).bfloat16()
    )
    keys.data[200:] = keys.data[7]
    q = torch.randint(-100, 100, (1, 2, 96)).float()
    found = block_scores(q, keys, block_size=16)[:, 0]
    assert torch.equal(found.double(), truth(q, keys, 16))
    assert all(len(of.unique()) == 1 for of in block_scores(torch.randn(1, 2, 96), keys, block_size=16)[:, 0, 13:])
    assert len(served) == 2


def test_rows_of_zeros_and_several_tokens(served):
    keys = Int8.quantize(torch.randn(150, 1, 32))
    q = torch.randn(3, 2, 32)
    q[1] = 0
    seqs = Sequences(torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 150], dtype=torch.int32), 3, 150)
    found = block_scores(q, keys, seqs, block_size=16)
    assert bool((found[:, 1, :9] == 0).all())
    for t in (0, 2):
        seen = Int8(*(x[: 148 + t] for x in (keys.data, keys.scale, keys.error)))
        torch.testing.assert_close(found[:, t].double(), truth(q[t : t + 1], seen, 16), atol=1e-5, rtol=1e-6)
    assert len(served) == 3


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30, 1e-30])
def test_leaves_queries_outside_of_its_range_to_float32(value, served):
    keys = Int8.quantize(torch.randn(64, 1, 32))
    q = torch.zeros(1, 1, 32)
    q[0, 0, 3] = value
    block_scores(q, keys, block_size=16)
    assert not served


def test_keys_of_nan_are_skipped_as_before(served, monkeypatch):
    keys = Int8.quantize(torch.randn(64, 1, 32).index_fill_(0, torch.tensor([5]), torch.nan))
    q = torch.randn(1, 2, 32)
    found = block_scores(q, keys, block_size=16)
    assert served
    monkeypatch.setattr(cpu_int8, "serves", lambda *_: False)
    torch.testing.assert_close(found, block_scores(q, keys, block_size=16), atol=1e-5, rtol=1e-6, equal_nan=True)
