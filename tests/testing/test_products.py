# SPDX-License-Identifier: MIT
"""Honest products of E4M3 operands are right with a matrix unit that is float32 and checks what it is given."""

import pytest
import torch

from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem
from tests import exact, oracle, products
from tests.low_precision import honest_e4m3_attention, stored_problem
from tests.products import FP8, Codes, e4m3_products

CALLS = []


def scaled_mm(a, b, scale_a, scale_b, out_dtype):
    assert a.dtype == b.dtype == FP8
    assert a.is_contiguous()
    assert b.T.is_contiguous()
    assert a.shape[0] % 16 == a.shape[1] % 16 == b.shape[1] % 16 == 0
    CALLS.append((a.shape, b.shape))
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


@pytest.fixture
def unit(monkeypatch):
    """Counts its products."""
    monkeypatch.setattr(products, "multiplies_e4m3", lambda device: True)
    monkeypatch.setattr(exact, "multiplies_e4m3", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    CALLS.clear()
    return CALLS


def whole_numbers(*shape):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).to(FP8)


@pytest.mark.parametrize("sizes", [(1, 1, 16), (128, 129, 64), (17, 300, 48), (3, 0, 64), (0, 5, 40)], ids=str)
def test_padding_changes_nothing(sizes, unit):
    m, n, dim = sizes
    q, k = whole_numbers(m, 4, dim), whole_numbers(n, 2, dim)
    for head in range(4):
        found = e4m3_products(q[:, head], k[:, head // 2])
        assert_equal("products", found, q[:, head].float() @ k[:, head // 2].float().T)
    several = e4m3_products(q.transpose(0, 1), k.transpose(0, 1))
    assert_equal("heads", several, torch.stack([q[:, h].float() @ k[:, h // 2].float().T for h in range(4)]))
    assert len(unit) == 8


def test_only_a_gpu_has_the_unit():
    assert not products.multiplies_e4m3(torch.device("cpu"))
    assert e4m3_products(whole_numbers(3, 16), whole_numbers(2, 16)).shape == (3, 2)


@pytest.mark.parametrize("storage", ["flat", "strided", "paged", "interleaved pages"])
@pytest.mark.parametrize("name", ["e4m3", "e4m3 page"])
def test_codes_stand_for_the_numbers(name, storage, unit):
    p = problem((5, 0, 3), (70, 9, 40), dtype=torch.bfloat16)
    s = stored_problem(p, name, name, storage, 16, "e4m3")
    for operand in ("q", "index_q", "k", "index_k"):
        assert_equal(operand, s.codes[operand].double(), getattr(s.numbers, operand))
    scores = oracle.honest_scores(p, 16, **s.factors("index_q", "index_k", "cpu"))
    torch.testing.assert_close(scores.double(), oracle.block_scores(s.numbers, 16), rtol=1e-5, atol=1e-5)
    reads, factors = oracle.reads_everything(p), s.factors("q", "k", "cpu")
    truth = oracle.attention(s.numbers, reads)
    for honest in (
        honest_e4m3_attention(s.numbers, reads, **factors),
        oracle.honest_attention(s.honest(torch.float32), reads, **factors),
    ):
        torch.testing.assert_close(honest[1].double(), truth[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(honest[0].double(), truth[0], rtol=0.02, atol=0.02)
    assert unit
    assert not stored_problem(p, "nvfp4", q_format="e4m3").factors("q", "k", "cpu")


def test_batches_of_float8(unit):
    batch = exact.random_batch((3, 0, 20), (150, 7, 20), (4, 2), dim=64, dtype=FP8)
    near, right = exact.scores(batch, torch.float32), exact.scores(batch)
    torch.testing.assert_close(near.double(), right, rtol=1e-5, atol=1e-5)
    (_, near), (_, right) = exact.attention(batch, dtype=torch.bfloat16, quantized=True), exact.attention(batch)
    torch.testing.assert_close(near.double(), right, rtol=1e-5, atol=1e-5)
    assert len(unit) == 2 * 3 * 4


def test_scales_of_heads():
    numbers = whole_numbers(5, 2, 16).double()
    scale = torch.tensor([0.5, 3.0])
    assert_equal("numbers", Codes.of(numbers, scale).double(), numbers * scale[:, None].double())
