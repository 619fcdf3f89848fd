# SPDX-License-Identifier: MIT
"""The gradients of `dense_attention` are those of autograd in float64."""

import pytest
import torch

from openmsa import dense_attention
from openmsa.sparse_attention.cpu_masked import has_tiles
from openmsa.testing.inputs import problem, strided
from tests import gradients, oracle
from tests.sparse_attention.test_gradients import differentiated


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "group", "causal"), [(64, 3, True), (128, 16, True), (96, 1, False), (16, 2, True)])
def test_against_autograd(head_dim, group, causal, dtype, impl):
    """Gradients are those of autograd for sequences without queries or keys, queries before position 0 and behind the keys,
    strided inputs and both results, one of them in float32."""
    if (impl, dtype, head_dim) == ("cpu", torch.float32, 96) and has_tiles():
        pytest.xfail(
            "a known fault: matrix products in float32 sum coarsely here, and weights made again from the saved lse show it"
        )
    lens = ((5, 0, 3, 2, 4, 17), (40, 7, 0, 9, 33, 17))
    p = problem(*lens, group=group, head_dim=head_dim, dtype=dtype, offsets=(35, 7, 0, -1, 40, 0))
    grad_out, grad_lse = gradients.inputs_and_gradients(p)
    grad_lse = None if dtype == torch.float32 else grad_lse
    options = {"causal": causal, "impl": impl, "change": strided, "softmax_scale": -0.2}
    result = differentiated(dense_attention, p, grad_out=grad_out, grad_lse=grad_lse, **options)
    gradients.check(result, p, oracle.reads_everything(p, causal), -0.2, grad_out, grad_lse)


def test_many_tiles():
    p = problem((300,), (1300,), group=4, head_dim=16, kv_heads=1, dtype=torch.float64)
    grad_out, grad_lse = gradients.inputs_and_gradients(p)
    result = differentiated(dense_attention, p, grad_out=grad_out, grad_lse=grad_lse, impl="cpu")
    gradients.check(result, p, oracle.reads_everything(p), 0.25, grad_out, grad_lse)


def test_max_score_has_no_gradient():
    p = problem((5,), (40,))
    with pytest.raises(NotImplementedError, match="no gradients of max_score"):
        dense_attention(p.q.requires_grad_(), p.k, p.v, return_max_score=True, impl="cpu")
