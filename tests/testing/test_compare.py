# SPDX-License-Identifier: MIT
"""The tolerance rule refuses what it must refuse, and the oracle agrees with PyTorch's own attention."""

import math

import pytest
import torch

from openmsa.testing.compare import assert_close, assert_equal, compare
from openmsa.testing.inputs import problem
from tests import oracle

TRUTH = torch.linspace(-1, 1, 101, dtype=torch.float64).view(1, 101)
HONEST = TRUTH.bfloat16()


def test_honest_rounding_passes():
    assert compare(HONEST, HONEST, TRUTH).ok
    assert compare(TRUTH.float(), TRUTH.float(), TRUTH).ok
    assert compare(TRUTH, TRUTH, TRUTH).ok
    assert compare(HONEST[:, :0], HONEST[:, :0], TRUTH[:, :0]).ok


def test_a_sum_that_cancels_may_err_as_its_terms_do():
    """Honest PyTorch may be right by luck where a sum ends near 0. A thousandth of the terms' magnitudes is found there, too,
    and sums that do not cancel keep their bound."""
    terms, eps = torch.tensor([20.0, -20.0, 0.25], dtype=torch.float64), torch.finfo(torch.float32).eps
    truth, magnitudes = terms.sum()[None], terms.abs().sum()[None]
    rounded = (truth + magnitudes * eps).float()
    assert not compare(rounded, truth.float(), truth).ok
    assert compare(rounded, truth.float(), truth, magnitudes=magnitudes).ok
    for wrong in (truth + 3 * eps * magnitudes, truth + 1e-3 * magnitudes, -truth):
        assert not compare(wrong.float(), truth.float(), truth, magnitudes=magnitudes).ok
    whole = TRUTH.abs() * 40
    assert compare(whole.float(), whole.float(), whole, magnitudes=4 * whole) == compare(whole.float(), whole.float(), whole)


@pytest.mark.parametrize("wrong", [1.02, math.nan, math.inf, -math.inf])
def test_one_wrong_element_is_found(wrong):
    tested = HONEST.clone()
    tested[0, 7] = tested[0, 7] * wrong
    comparison = compare(tested, HONEST, TRUTH)
    assert not comparison.ok
    assert comparison.where == (0, 7)
    with pytest.raises(AssertionError, match=r"out: error .* worst at \(0, 7\)"):
        assert_close("out", tested, HONEST, TRUTH)


def test_noise_everywhere_is_found():
    """Errors are refused of which no element is past the bound of the maximum, but all are twice as wrong as honest ones at
    their worst."""
    worst = float((HONEST.double() - TRUTH).abs().max())
    comparison = compare((TRUTH + 1.9 * worst).float(), HONEST.float(), TRUTH)
    assert comparison.error <= comparison.bound
    assert not comparison.ok


def test_values_that_are_not_finite_must_match():
    truth = torch.tensor([-math.inf, math.inf, math.nan, 0.0], dtype=torch.float64)
    assert compare(truth.float(), truth.float(), truth).ok
    for position, value in ((0, math.inf), (0, -1e30), (1, math.nan), (2, 0.0)):
        tested = truth.float()
        tested[position] = value
        assert not compare(tested, truth.float(), truth).ok


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_honest_results_set_a_bound(wrong):
    """An infinite bound would pass any result."""
    honest = HONEST.clone()
    honest[0, 7] = wrong
    with pytest.raises(
        ValueError, match=rf"honest must be finite where the truth is .*, got {wrong} at \(0, 7\) where the truth"
    ):
        compare(HONEST, honest, TRUTH)


@pytest.mark.parametrize("cut", [slice(0, 0), slice(0, 1), slice(1)], ids=str)
def test_shapes_are_not_spread(cut):
    rows = HONEST.expand(4, -1)
    assert compare(rows, rows, TRUTH.expand(4, -1)).ok
    for given in ((rows[cut], rows, rows), (rows, rows[cut], rows), (rows, rows, rows[cut])):
        with pytest.raises(ValueError, match=r"tested, honest and truth must have one shape, got "):
            compare(*given)


def test_shape_and_dtype_count():
    with pytest.raises(AssertionError, match=r"float32 \(1, 101\) where torch.bfloat16 \(1, 101\) is expected"):
        assert_close("out", HONEST.float(), HONEST, TRUTH)
    with pytest.raises(AssertionError, match=r"\(101,\) where"):
        assert_equal("out", HONEST[0], HONEST)


def test_equality_is_bitwise_but_for_nan():
    x = torch.tensor([math.nan, 1.0, -math.inf])
    assert_equal("x", x, x.clone())
    with pytest.raises(AssertionError, match=r"1 of 3 elements differ, first at \(1,\): 1.0000001"):
        assert_equal("x", x.nextafter(torch.tensor(2.0)).where(torch.tensor([False, True, False]), x), x)


@pytest.mark.parametrize("causal", [True, False])
def test_the_oracle_is_attention(causal):
    """On one sequence the oracle agrees with PyTorch's own attention in float64, and its scores with a masked matrix."""
    p = problem((9,), (9,), dtype=torch.float64)
    q, k, v = (x.transpose(0, 1)[None] for x in (p.q, p.k, p.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)
    for attention in (oracle.attention, oracle.honest_attention):
        out, lse = attention(p, oracle.reads_everything(p, causal))
        torch.testing.assert_close(out, expected)
        assert (lse[0] if causal else lse[:1]).isfinite().all()
    whole = torch.einsum("qhd,kd->hqk", p.index_q, p.index_k[:, 0])
    whole = whole.masked_fill(torch.ones(9, 9).triu(1).bool() & torch.tensor(causal), -math.inf)
    for scores in (oracle.block_scores, oracle.honest_scores):
        torch.testing.assert_close(scores(p, 4, causal=causal)[..., 2], whole[..., 8])
        torch.testing.assert_close(scores(p, 4, causal=causal)[..., 0], whole[..., :4].amax(-1))
