# SPDX-License-Identifier: MIT
"""On a CPU dense attention is PyTorch's fused kernel, whose results are made again where it has no largest logit."""

import pytest
import torch

from openmsa import dense_attention
from openmsa.testing.inputs import problem


def spoilt(p, what):
    """Puts infinite and NaN numbers in queries and keys: some products of a head are then infinite or NaN."""
    if what == "query":
        p.q[-1, 0, 3] = torch.inf
    elif what == "NaN":
        p.q[0, 0, 3] = p.k[1, 1, 3] = torch.nan
    elif what == "key":
        p.q[..., 3] = 1
        p.k[2, 0, 3], p.k[3, 1, 5] = torch.inf, -torch.inf
    elif what == "nothing left":
        p.q[..., 3], p.k[:, 0, 3] = 1, -torch.inf
    elif what == "nothing in front":
        p.q[..., 3], p.k[: len(p.k) - len(p.q), 0, 3] = 1, -torch.inf
    else:
        p.q[-1, 0], p.k[1, 0] = 3e37, 3e3
    return p


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("what", ["query", "NaN", "key", "nothing left", "nothing in front", "overflow"])
@pytest.mark.parametrize("lens", [(1, 40), (3, 40), (5, 5), (40, 100)])
def test_infinite_and_nan_logits(lens, what, dtype, causal):
    """A logit of inf or NaN gives NaN, and -inf counts for nothing, as in the reference: 0 and lse -inf where all are."""
    if what == "overflow" and dtype in (torch.float16, torch.float64):
        pytest.skip("3e37 overflows float16, and its products none of float64")
    p = spoilt(problem((lens[0],), (lens[1],), dtype=dtype), what)
    options = {"causal": causal, "return_lse": True}
    found, reference = (dense_attention(p.q, p.k, p.v, p.seqs, impl=impl, **options) for impl in ("cpu", "reference"))
    assert what == "nothing in front" or not bool(reference[1].isfinite().all())
    tolerance = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}.get(dtype, 2e-5)
    torch.testing.assert_close(found, reference, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_scale_of_zero_hides_no_nan(dtype, causal):
    """Zero times NaN or infinity is NaN, for the rows that hold it and for no others."""
    p = problem((5,), (40,), dtype=dtype)
    p.q[1, 0, 3], p.q[2, 1, 5] = torch.nan, torch.inf
    options = {"causal": causal, "softmax_scale": 0.0, "return_lse": True}
    found, reference = (dense_attention(p.q, p.k, p.v, p.seqs, impl=impl, **options) for impl in ("cpu", "reference"))
    assert reference[1].isnan().sum() == 2
    tolerance = 1.6e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found, reference, atol=tolerance, rtol=tolerance, equal_nan=True)
