# SPDX-License-Identifier: MIT
"""The index loss and its gradients are those of autograd in float64, obey their laws, and refuse what they cannot take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openmsa import dense_attention, explain, index_loss, sparse_attention
from openmsa.testing.allocations import PoisonedOutputs, peak_memory
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks, strided
from tests import oracle
from tests.contract import shapes
from tests.index_loss import truth


def differentiated(p, blocks=None, change=lambda x: x, **options):
    """Returns the loss and the gradients of index_q and index_k."""
    leaves = [change(x.detach()).requires_grad_() for x in (p.index_q, p.index_k)]
    with PoisonedOutputs():
        loss = index_loss(change(p.q), change(p.k), *leaves, blocks, p.seqs, **options)
        return truth.Result(loss.detach(), *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@shapes
def test_selected_blocks(shape, dtype, impl):
    """Loss and gradients are right for empty and short sequences, empty rows, ids that see nothing, strided inputs, and one
    index head for all KV heads."""
    p = shape.problem(dtype, index_dim=48)
    blocks = random_blocks(p, shape.topk, shape.block_size, p.index_q.shape[1])
    scale, index_scale = shape.head_dim**-0.5, 48**-0.5
    found = differentiated(p, blocks, strided, block_size=shape.block_size, impl=impl)
    truth.check(found, p, oracle.reads_of_blocks(blocks, shape.block_size), scale, index_scale)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("group", "kv_heads", "index_heads", "key_heads"), [(3, 2, 2, 2), (16, 1, 1, 1), (2, 3, 1, 1), (1, 4, 4, 2)]
)
def test_everything_visible(group, kv_heads, index_heads, key_heads, dtype, impl):
    """Loss and gradients over all visible keys are right, also of queries before position 0 and behind the keys."""
    lens = ((5, 0, 3, 2, 4, 17), (40, 7, 0, 9, 33, 17))
    heads = {"kv_heads": kv_heads, "index_heads": index_heads, "index_key_heads": key_heads, "group": group}
    p = problem(*lens, **heads, dtype=dtype, index_dim=32, offsets=(35, 7, 0, -1, 40, 0))
    options = {"softmax_scale": -0.2, "index_scale": 0.3, "coefficient": 2.5}
    found = differentiated(p, change=strided, impl=impl, **options)
    truth.check(found, p, oracle.reads_everything(p), *options.values())


@pytest.mark.parametrize(("scale", "index_scale", "coefficient"), [(0.0, -0.5, 1.0), (-0.3, 0.0, 0.1), (2.0, 1.5, -1.0)])
def test_scales(scale, index_scale, coefficient):
    p = problem((4, 5, 3), (40, 33, 64), offsets=(-1, 39, 40), dtype=torch.float64)
    blocks = random_blocks(p, 3, 16, 1)
    options = {"softmax_scale": scale, "index_scale": index_scale, "coefficient": coefficient}
    found = differentiated(p, blocks, block_size=16, impl="cpu", **options)
    truth.check(found, p, oracle.reads_of_blocks(blocks, 16), scale, index_scale, coefficient)


@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), max_size=3),
    group=st.integers(1, 3),
    topk=st.integers(0, 4),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=20)
def test_any_lengths(lens, group, topk, seed):
    """The CPU's loss and gradients in float64 equal those of the reference; topk 0 stands for everything visible."""
    p = problem([q for q, _ in lens], [k for _, k in lens], group=group, head_dim=16, dtype=torch.float64, seed=seed)
    blocks = random_blocks(p, topk, 16, 2, seed) if topk else None
    found, expected = (differentiated(p, blocks, block_size=16, impl=impl) for impl in ("cpu", "reference"))
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-11, atol=1e-11)


def test_many_tiles():
    p = problem((300,), (1300,), group=16, head_dim=16, kv_heads=1, dtype=torch.float64)
    truth.check(differentiated(p, impl="cpu"), p, oracle.reads_everything(p), 0.25, 0.25)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_all_blocks_selected_is_everything_visible(impl):
    p = problem((40, 3), (90, 64), dtype=torch.float64)
    blocks = torch.arange(6, dtype=torch.int32).expand(43, 1, 6)
    found = differentiated(p, blocks, block_size=16, impl=impl), differentiated(p, impl=impl)
    torch.testing.assert_close(*map(tuple, found), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_student_that_matches_its_teacher_has_no_loss_and_no_gradient(impl, selected):
    p = problem((40, 3), (90, 64), group=1, kv_heads=2, index_key_heads=2, dtype=torch.float64)
    p.index_q.copy_(p.q)
    p.index_k.copy_(p.k)
    blocks = random_blocks(p, 3, 16, 2) if selected else None
    for x in differentiated(p, blocks, block_size=16, impl=impl):
        assert x.abs().max() < 1e-14


@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_the_lse_of_the_main_attention_serves(impl, selected):
    p = problem((40, 3), (90, 64), dtype=torch.float64)
    blocks = random_blocks(p, 3, 16, 2) if selected else None
    options = {"block_size": 16, "softmax_scale": 0.3}
    main = (sparse_attention, (blocks,)) if selected else (dense_attention, ())
    _, lse = main[0](p.q, p.k, p.k, *main[1], p.seqs, return_lse=True, **options)
    found = differentiated(p, blocks, impl=impl, **options), differentiated(p, blocks, impl=impl, lse=lse, **options)
    torch.testing.assert_close(*map(tuple, found), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_without_its_value(impl):
    """0 comes back, with the same gradients; without gradients nothing is computed."""
    p = problem((20,), (90,))
    value, *grads = differentiated(p, return_loss=False, impl=impl)
    assert value == 0
    for name, a, b in zip(("dq", "dk"), grads, differentiated(p, impl=impl)[1:], strict=True):
        assert_equal(name, a, b)
    assert index_loss(p.q, p.k, p.index_q, p.index_k, seqs=p.seqs, return_loss=False, impl=impl) == 0


def test_gradients_flow_to_the_index_branch_alone():
    p = problem((5,), (40,))
    for x in (p.q, p.k, p.index_q):
        x.requires_grad_()
    lse = torch.zeros(5, 4, requires_grad=True)
    for impl in ("cpu", "reference"):
        loss = 3 * index_loss(p.q, p.k, p.index_q, p.index_k, lse=lse, impl=impl)
        loss.backward()
        assert p.q.grad is p.k.grad is lse.grad is p.index_k.grad is None
    assert p.index_q.grad.isfinite().all()
    assert not index_loss(p.q, p.k, p.index_q.detach(), p.index_k, impl="cpu").requires_grad


def test_the_gradient_of_the_loss_scales_small_gradients_before_they_are_rounded():
    """A loss that is scaled has scaled gradients, as a gradient scaler needs it for float16."""
    p = problem((600,), (600,), group=1, kv_heads=1, head_dim=16, dtype=torch.float16)
    leaf = p.index_q.requires_grad_()
    options = {"coefficient": 1e-6, "impl": "cpu"}
    plain, scaled = (
        torch.autograd.grad(index_loss(p.q, p.k, leaf, p.index_k, **options) * scale, leaf)[0] for scale in (1.0, 2.0**24)
    )
    assert plain.count_nonzero() < scaled.count_nonzero() / 2


def test_long_inputs_need_little_memory():
    p = problem((3000,), (3000,), kv_heads=1, group=2, head_dim=16)
    for blocks in (None, random_blocks(p, 16, 16, 1)):
        memory = peak_memory(differentiated, p, blocks, block_size=16, impl="cpu")
        assert memory.largest < 3000 * 3000 * 4 / 8


BAD = {
    "pages": (lambda p: {"k": paged(p, 16)[0]}, TypeError, r"k must be a torch.Tensor of shape \[total_k.*PagedKV"),
    "heads": (lambda p: {"index_q": p.index_q.repeat(1, 2, 1)}, ValueError, r"num_kv_heads \(2\) or 1, got 4"),
    "key heads": (lambda p: {"index_k": p.index_k.repeat(1, 3, 1)}, ValueError, "index_key_heads must divide index_heads"),
    "rows": (lambda p: {"index_q": p.index_q[1:]}, ValueError, r"index_q.shape\[0\] must be 8 \(total_q of q\), got 7"),
    "keys": (lambda p: {"index_k": p.index_k[1:]}, ValueError, r"index_k.shape\[0\] must be 73 \(total_k of k\), got 72"),
    "dims": (lambda p: {"index_k": p.index_k[..., :32]}, ValueError, r"index_k.shape\[2\] must be 64"),
    "dtype": (lambda p: {"index_k": p.index_k.half()}, TypeError, "index_k must have the dtype of index_q"),
    "selection": (
        lambda p: {"index_q": p.index_q[:, :1]}, ValueError, r"blocks.shape\[1\] must be index_heads \(1\) or 1, got 2",
    ),
    "lse": (lambda p: {"lse": torch.zeros(8, 3)}, ValueError, r"lse.shape\[1\] must be 4 \(num_q_heads of q\), got 3"),
    "lse dtype": (lambda p: {"lse": torch.zeros(8, 4).half()}, TypeError, "lse must have dtype torch.float32"),
    "scale": (lambda p: {"index_scale": float("nan")}, ValueError, "index_scale must be finite, got nan"),
    "coefficient": (lambda p: {"coefficient": "1"}, TypeError, "coefficient must be a float, got str"),
    "flag": (lambda p: {"return_loss": 1}, TypeError, "return_loss must be True or False, got int"),
    "ids": (lambda p: {"blocks": torch.full((8, 2, 2), 99, dtype=torch.int32), "check": True}, ValueError, "blocks must"),
    "NaN": (lambda p: {"index_k": p.index_k * torch.nan, "check": True}, ValueError, "index_k must hold no NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    change, error, words = BAD[case]
    p = problem((5, 3), (40, 33))
    arguments = {"q": p.q, "k": p.k, "index_q": p.index_q, "index_k": p.index_k, "blocks": random_blocks(p, 3, 16, 2)}
    arguments |= {"seqs": p.seqs, "block_size": 16}
    index_loss(**arguments)  # good before the change
    for function in (index_loss, lambda **options: explain(index_loss, **options)):
        with pytest.raises(error, match=words):
            function(**arguments | change(p))
