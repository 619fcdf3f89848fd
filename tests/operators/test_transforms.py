# SPDX-License-Identifier: MIT
"""`torch.jit.trace` and transforms of `torch.func` are refused in a sentence, or give what autograd gives."""

import pytest
import torch
from torch.func import functionalize, grad, jacrev, jvp, vjp, vmap

import fmha_sm100
from openmsa import block_scores, dense_attention, index_loss, msa_attention, select_blocks, sparse_attention
from tests.operators.test_operators import BLOCK, calls, packed

BLOCKS = torch.zeros(20, 2, 1, dtype=torch.int32)


def of_query(function, **options):
    """Returns a function of q, or of index_q for what has no q, with one sequence of 20 tokens."""
    torch.manual_seed(0)
    _, k, v, index_q, index_k, *_ = packed((20,), (20,))
    given = {"sparse_attention": (k, v, BLOCKS), "dense_attention": (k, v), "msa_attention": (k, v, index_q, index_k, 2)}
    given |= {"index_loss": (k, index_q, index_k), "block_scores": (index_k,), "select_blocks": (index_k, 2)}
    own = {} if function is dense_attention else BLOCK
    return lambda q: function(q, *given[function.__name__], **own, **options)


def query(function):
    torch.manual_seed(1)
    return torch.randn(20, 2 if function in (block_scores, select_blocks) else 4, 32)


EVERY = pytest.mark.parametrize(
    "function", [msa_attention, sparse_attention, dense_attention, index_loss, block_scores, select_blocks]
)
RECORDED = pytest.mark.parametrize("function", [msa_attention, sparse_attention, dense_attention])


@EVERY
def test_tracing_and_mapping_are_refused(function):
    call, q = of_query(function), query(function)
    name = function.__name__
    with pytest.raises(NotImplementedError, match=f"torch.jit.trace cannot record {name}.* torch.compile or torch.export"):
        torch.jit.trace(call, (q,))
    with pytest.raises(NotImplementedError, match=f"torch.func.vmap is not supported by {name}: pack the sequences"):
        vmap(call)(torch.stack((q, q)))
    with pytest.raises(NotImplementedError, match=f"torch.func.functionalize is not supported by {name}"):
        functionalize(call)(q)
    assert call(q) is not None  # Nothing is left behind.


def test_methods_are_refused():
    arguments = calls()["plan_select"]
    with pytest.raises(NotImplementedError, match=r"torch.jit.trace cannot record AttentionPlan.select"):
        torch.jit.trace(lambda index_q: arguments["self"].select(index_q, arguments["index_k"]), (arguments["index_q"],))
    kv, k, v = (calls()["append_kv"][name] for name in ("self", "k", "v"))
    before = kv.seq_lens.clone()
    with pytest.raises(NotImplementedError, match=r"torch.func.vmap is not supported by PagedKV.append"):
        vmap(lambda k: kv.append(k, v))(k[None])
    assert torch.equal(kv.seq_lens, before)


def test_the_drop_in_is_refused():
    scores = torch.randn(2, 3, 4)
    with pytest.raises(NotImplementedError, match="cannot record sparse_topk_select"):
        torch.jit.trace(lambda scores: fmha_sm100.sparse_topk_select(scores, 2), (scores,))


def test_gradients_of_the_index_loss_are_those_of_autograd():
    _, k, _, index_q, index_k, *_ = packed((20,), (20,))
    with pytest.raises(NotImplementedError, match=r"call torch.autograd.grad"):
        grad(lambda index_q: index_loss(query(index_loss), k, index_q, index_k, **BLOCK))(index_q)


@RECORDED
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, q: grad(lambda x: f(x).sum())(q),
        lambda f, q: vjp(f, q),
        lambda f, q: jvp(f, (q,), (q,)),
        lambda f, q: jacrev(f)(q),
    ],
    ids=["grad", "vjp", "jvp", "jacrev"],
)
def test_gradients_of_attention_are_those_of_autograd(function, transform):
    call, q = of_query(function), query(function)
    with pytest.raises(NotImplementedError, match=r"torch.func \(grad.* is not supported here: call torch.autograd.grad"):
        transform(call, q)
    q.requires_grad_()
    assert torch.autograd.grad(call(q).sum(), q)[0].isfinite().all()


@pytest.mark.parametrize(
    ("function", "options"),
    [(f, {"impl": "reference"}) for f in (sparse_attention, dense_attention, msa_attention)] + [(block_scores, {})],
)
def test_what_pytorch_differentiates_has_gradients_of_torch_func(function, options):
    """Scores, which PyTorch differentiates itself, and references have the gradients that autograd computes."""
    call, q = of_query(function, **options), query(function)
    weights = torch.randn_like(call(q)).masked_fill_(call(q).isinf(), 0)
    found = grad(lambda x: (call(x).nan_to_num(neginf=0) * weights).sum())(q)
    _, tangent = jvp(lambda x: (call(x).nan_to_num(neginf=0) * weights).sum(), (q,), (torch.ones_like(q),))
    q.requires_grad_()
    (expected,) = torch.autograd.grad((call(q).nan_to_num(neginf=0) * weights).sum(), q)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(tangent, expected.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [sparse_attention, dense_attention])
def test_a_reference_is_mapped(function):
    call, q = of_query(function, impl="reference"), query(function)
    torch.testing.assert_close(vmap(call)(torch.stack((q, 2 * q))), torch.stack((call(q), call(2 * q))))


def test_a_selection_beside_a_gradient():
    """What needs no gradient serves inside `torch.func.grad`."""
    call, q = of_query(select_blocks), query(select_blocks)
    assert grad(lambda x: (x * call(x.detach())[..., :1]).sum())(q).shape == q.shape
