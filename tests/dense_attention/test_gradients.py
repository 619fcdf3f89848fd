# SPDX-License-Identifier: MIT
"""The gradients of `dense_attention` are those of autograd in float64."""

import pytest
import torch

from openmsa import Sequences, dense_attention
from openmsa.testing.compare import assert_close
from openmsa.testing.inputs import problem, strided
from tests import gradients, oracle
from tests.sparse_attention.test_gradients import differentiated


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "group", "causal"), [(64, 3, True), (128, 16, True), (96, 1, False), (16, 2, True)])
def test_against_autograd(head_dim, group, causal, dtype, impl):
    """Gradients are those of autograd for sequences without queries or keys, queries before position 0 and behind the keys,
    strided inputs and both results, one of them in float32."""
    lens = ((5, 0, 3, 2, 4, 17), (40, 7, 0, 9, 33, 17))
    p = problem(*lens, group=group, head_dim=head_dim, dtype=dtype, offsets=(35, 7, 0, -1, 40, 0))
    grad_out, grad_lse = gradients.inputs_and_gradients(p)
    grad_lse = None if dtype == torch.float32 else grad_lse
    options = {"causal": causal, "impl": impl, "change": strided, "softmax_scale": -0.2}
    result = differentiated(dense_attention, p, grad_out=grad_out, grad_lse=grad_lse, **options)
    gradients.check(result, p, oracle.reads_everything(p, causal), -0.2, grad_out, grad_lse)


def multiplied_and_summed(q, k, v, scale, grad_out):
    """Returns dq, dk and dv of causal attention whose products PyTorch makes element by element and adds up in several partial
    sums, as libraries do where rows are few; their error is a half to a quarter of that of products of many rows."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(shared, 1).transpose(0, 1)[:, None] for x in (k, v))  # [heads, 1, k_len, dim]
    logits = (q.transpose(0, 1)[:, :, None] * keys).sum(-1) * scale
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    out = (weights[..., None] * values).sum(2).transpose(0, 1)
    return torch.autograd.grad(out, (q, k, v), grad_out)


@pytest.mark.parametrize(("q_len", "k_len", "head_dim"), [(1, 40, 256), (2, 600, 128), (5, 1500, 256), (17, 33, 128)])
def test_few_queries_are_as_exact_as_partial_sums(q_len, k_len, head_dim):
    """The logits are large and add up coarsely, so that weights made with an lse of other products would show it."""
    for seed in range(4):
        p = problem((q_len,), (k_len,), group=2, head_dim=head_dim, seed=seed)
        grad_out, _ = gradients.inputs_and_gradients(p, seed)
        result = differentiated(dense_attention, p, grad_out=grad_out, softmax_scale=0.3, impl="cpu")
        honest = multiplied_and_summed(p.q, p.k, p.v, 0.3, grad_out)
        exact = multiplied_and_summed(*(x.double() for x in (p.q, p.k, p.v)), 0.3, grad_out.double())
        for name, x, near, right in zip(("dq", "dk", "dv"), result, honest, exact, strict=True):
            assert_close(f"{name} of seed {seed}", x, near, right)


def test_many_tiles():
    p = problem((300,), (1300,), group=4, head_dim=16, kv_heads=1, dtype=torch.float64)
    grad_out, grad_lse = gradients.inputs_and_gradients(p)
    result = differentiated(dense_attention, p, grad_out=grad_out, grad_lse=grad_lse, impl="cpu")
    gradients.check(result, p, oracle.reads_everything(p), 0.25, grad_out, grad_lse)


def test_max_score_has_no_gradient():
    p = problem((5,), (40,))
    with pytest.raises(NotImplementedError, match="no gradients of max_score"):
        dense_attention(p.q.requires_grad_(), p.k, p.v, return_max_score=True, impl="cpu")


@pytest.mark.parametrize("size", [1e8, 1e10, 1e12, 1e18])
def test_logits_beyond_what_an_lse_can_follow(size):
    """Rounding of large logits exceeds what an exponential can hold, so weights come from each row's own largest logit."""
    torch.manual_seed(3)
    q, k, v = ((torch.randn(n, 2, 64) * scale).requires_grad_() for n, scale in ((5, size), (30, 1.0), (30, 1.0)))
    seqs = Sequences.from_lengths([5], [30])
    out = dense_attention(q, k, v, seqs, softmax_scale=0.125)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads)
    # All weight lies on one key a row, so that gradients of values count the rows that chose them.
    logits = torch.einsum("thd,shd->hts", q.detach().double(), k.detach().double())
    logits.masked_fill_(torch.ones(5, 30, dtype=torch.bool).triu(26), -torch.inf)
    expected = torch.nn.functional.one_hot(logits.argmax(-1), 30).double().sum(1).mT[..., None].expand(30, 2, 64)
    torch.testing.assert_close(grads[2].double(), expected, rtol=1e-5, atol=1e-5)
