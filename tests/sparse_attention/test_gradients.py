# SPDX-License-Identifier: MIT
"""The gradients of `sparse_attention` are those of autograd in float64, and their calls keep the contract."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openmsa import dense_attention, msa_attention, sparse_attention
from openmsa.sparse_attention import STAGE
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks, strided
from tests import gradients, oracle
from tests.contract import shapes


def differentiated(function, p, *args, grad_out, grad_lse=None, change=lambda x: x, **options):
    """Returns dq, dk and dv of a public function."""
    leaves = [change(x.detach()).requires_grad_() for x in (p.q, p.k, p.v)]
    results = function(*leaves, *args, p.seqs, return_lse=grad_lse is not None, **options)
    if grad_lse is None:
        return torch.autograd.grad(results, leaves, grad_out)
    out, lse = results
    some = lse.isfinite()
    return torch.autograd.grad((out, lse[some]), leaves, (grad_out, grad_lse[some]))


@functools.cache
def case(shape, dtype):
    p = shape.problem(dtype)
    return p, random_blocks(p, shape.topk, shape.block_size, 1 if shape.shared_selection else shape.kv_heads)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@shapes
def test_against_autograd(shape, dtype, impl):
    """Gradients are right for empty and short sequences, empty rows, ids that see nothing, strided inputs and both results, one
    of them in float32."""
    p, blocks = case(shape, dtype)
    grad_out, grad_lse = gradients.inputs_and_gradients(p)
    grad_lse = None if dtype == torch.float32 else grad_lse
    options = {"block_size": shape.block_size, "impl": impl, "change": strided}
    result = differentiated(sparse_attention, p, blocks, grad_out=grad_out, grad_lse=grad_lse, **options)
    reads = oracle.reads_of_blocks(blocks, shape.block_size)
    gradients.check(result, p, reads, p.q.shape[2] ** -0.5, grad_out, grad_lse)


@pytest.mark.parametrize("scale", [0.0, 0.3, -0.5])
@pytest.mark.parametrize("offsets", [(36, -2, 100), (-1, 39, 40)])
def test_scales_and_offsets(scale, offsets):
    p = problem((4, 5, 3), (40, 33, 64), offsets=offsets, dtype=torch.float64)
    blocks = random_blocks(p, 3, 16, 2)
    grad_out, _ = gradients.inputs_and_gradients(p)
    options = {"block_size": 16, "softmax_scale": scale, "impl": "cpu"}
    result = differentiated(sparse_attention, p, blocks, grad_out=grad_out, **options)
    gradients.check(result, p, oracle.reads_of_blocks(blocks, 16), scale, grad_out, None)


@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=3),
    group=st.integers(1, 3),
    topk=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=20)
def test_any_lengths(lens, group, topk, seed):
    """The CPU's backward in float64 equals autograd of the reference."""
    p = problem(*zip(*lens, strict=True), group=group, head_dim=16, dtype=torch.float64, seed=seed)
    blocks = random_blocks(p, topk, 16, 2, seed)
    grad_out, grad_lse = gradients.inputs_and_gradients(p, seed)
    found, expected = (
        differentiated(sparse_attention, p, blocks, grad_out=grad_out, grad_lse=grad_lse, block_size=16, impl=impl)
        for impl in ("cpu", "reference")
    )
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=name)


def test_all_blocks_selected_is_dense():
    p = problem((40, 3), (90, 64), dtype=torch.float64)
    blocks = torch.arange(6, dtype=torch.int32).expand(43, 1, 6)
    grad_out, grad_lse = gradients.inputs_and_gradients(p)
    options = {"grad_out": grad_out, "grad_lse": grad_lse, "impl": "cpu"}
    sparse = differentiated(sparse_attention, p, blocks, block_size=16, **options)
    dense = differentiated(dense_attention, p, **options)
    for name, a, b in zip(("dq", "dk", "dv"), sparse, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=name)


def test_gradcheck():
    """Gradients pass autograd's own check by finite differences, in float64."""
    p = problem((5,), (37,), group=2, kv_heads=1, head_dim=16, dtype=torch.float64)
    blocks = random_blocks(p, 2, 16, 1)
    blocks[0] = torch.tensor([0, -1])  # every query reads something: the lse of the others is -inf

    def function(q, k, v):
        out, lse = sparse_attention(q, k, v, blocks, block_size=16, return_lse=True, impl="cpu")
        return out, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in (p.q, p.k, p.v)])


def test_nothing_is_kept_but_inputs_and_results():
    """Between forward and backward no tensor lives that is larger than q."""
    p = problem((200,), (200,), group=8)
    blocks = random_blocks(p, 4, 16, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = sparse_attention(p.q.requires_grad_(), p.k.requires_grad_(), p.v, blocks, block_size=16)
    assert max(x.numel() for x in kept) <= p.q.numel()
    assert len(kept) == 6
    out.sum().backward()  # an expanded gradient
    assert p.v.grad is None
    assert p.q.grad.shape == p.q.shape


def test_checkpointing_gives_the_same_gradients():
    p = problem((30,), (70,), dtype=torch.bfloat16)
    blocks = random_blocks(p, 3, 16, 2)
    grads = []
    for again in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v)]
        run = functools.partial(sparse_attention, block_size=16)
        recorded = functools.partial(torch.utils.checkpoint.checkpoint, run, use_reentrant=False) if again else run
        out = recorded(*leaves, blocks)
        out.float().square().sum().backward()
        grads.append([x.grad for x in leaves])
    for name, a, b in zip(("dq", "dk", "dv"), *grads, strict=True):
        assert_equal(name, a, b)


def test_the_whole_path_in_chunks():
    """`msa_attention` gives the same gradients in chunks of queries as at once."""
    p = problem((50, 20), (90, 64), dtype=torch.float64)
    grads = []
    for chunk in (None, 16):
        leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
        out = msa_attention(*leaves, p.index_q, p.index_k, 3, p.seqs, block_size=16, query_chunk=chunk)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


def test_given_places_have_no_gradients():
    p = problem((5,), (40,))
    call = STAGE.check(p.q.requires_grad_(), p.k, p.v, random_blocks(p, 2, 16, 2), p.seqs, block_size=16)
    call = call.writing(torch.empty_like(p.q), None)
    with pytest.raises(NotImplementedError, match="no gradients of results that are written to given tensors"):
        STAGE.run("cpu", call)


def test_pages_have_no_gradients():
    p = problem((5,), (40,))
    cache, _ = paged(p, 16)
    blocks = random_blocks(p, 2, 16, 2)
    with pytest.raises(NotImplementedError, match="gradients for packed tensors alone, got a PagedKV"):
        sparse_attention(p.q.requires_grad_(), cache, None, blocks, p.seqs, block_size=16, impl="cpu")
