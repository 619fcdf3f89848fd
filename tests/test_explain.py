# SPDX-License-Identifier: MIT
"""`explain` reports the choice and the reasons for every implementation, and there is no silent fall-back."""

import pytest
import torch

from openmsa import (
    CertifiedKeys,
    block_scores,
    dense_attention,
    explain,
    index_loss,
    msa_attention,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)
from openmsa.explain import STAGES
from openmsa.testing.inputs import paged, problem, random_blocks
from tests.contract import DEVICES, ON_CPU


def calls(device="cpu", dtype=torch.float32):
    """Returns good arguments of every public operation."""
    p = problem((5, 3), (40, 33), dtype=dtype).to(device)
    blocks = random_blocks(p, 3, 16, 2)
    return {
        block_scores: ((p.index_q, p.index_k, p.seqs), {"block_size": 16}),
        select_blocks: ((p.index_q, p.index_k, 3, p.seqs), {"block_size": 16}),
        select_blocks_from_scores: ((torch.zeros(2, 8, 3, device=device), 2, p.seqs), {"block_size": 16}),
        sparse_attention: ((p.q, p.k, p.v, blocks, p.seqs), {"block_size": 16}),
        dense_attention: ((p.q, p.k, p.v, p.seqs), {"block_size": 16}),
        index_loss: ((p.q, p.k, p.index_q, p.index_k, blocks, p.seqs), {"block_size": 16}),
        msa_attention: ((p.q, p.k, p.v, p.index_q, p.index_k, 3, p.seqs), {"block_size": 16}),
    }


def name(function):
    return function.__name__


@pytest.mark.parametrize("function", STAGES, ids=name)
def test_the_default_on_cpu_is_the_fast_one(function):
    args, kwargs = calls()[function]
    explanation = explain(function, *args, **kwargs)
    assert explanation.stage == function.__name__
    assert explanation.chosen == "cpu"
    assert set(explanation.reasons) == {row.name for row in STAGES[function].table} >= set(ON_CPU)
    assert all(explanation.reasons.values()), "every implementation has a reason"
    assert explanation.reasons["reference"] == "could run, but 'cpu' stands before it in the table"
    assert str(explanation).startswith(f"{function.__name__}: cpu\n")


@pytest.mark.parametrize("function", STAGES, ids=name)
def test_an_explicit_choice_is_kept(function):
    args, kwargs = calls()[function]
    explanation = explain(function, *args, impl="reference", **kwargs)
    assert explanation.chosen == "reference"
    assert explanation.reasons["cpu"] == "not asked for: impl='reference'"


def test_the_path_explains_each_stage():
    args, kwargs = calls()[msa_attention]
    path = explain(msa_attention, *args, **kwargs)
    assert [stage.stage for stage in path] == ["select_blocks", "sparse_attention"]
    assert [stage.chosen for stage in path] == ["cpu", "cpu"]
    assert str(path) == f"{path[0]}\n{path[1]}"
    everything = {
        "init_blocks": 1,
        "local_blocks": 1,
        "softmax_scale": 0.3,
        "query_chunk": 7,
        "return_lse": True,
        "check": True,
    }
    assert [stage.chosen for stage in explain(msa_attention, *args, impl="reference", **kwargs, **everything)] == [
        "reference"
    ] * 2


def test_the_path_on_caches():
    p = problem((5, 3), (40, 33))
    kv, index_keys = paged(p, 16)
    path = explain(msa_attention, p.q, kv, None, p.index_q, index_keys, 3, p.seqs, block_size=16)
    assert [stage.chosen for stage in path] == ["cpu", "cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [*STAGES, msa_attention], ids=name)
def test_what_is_explained_is_what_runs(device, function):
    args, kwargs = calls(device, torch.float32 if device == "cpu" else torch.bfloat16)[function]
    names = ON_CPU if function is msa_attention else (row.name for row in STAGES[function].table)
    for impl in ("auto", *names):
        explanation = explain(function, *args, impl=impl, **kwargs)
        stages = explanation if function is msa_attention else (explanation,)
        if any(stage.chosen is None for stage in stages):
            with pytest.raises(NotImplementedError, match=f"impl='{impl}' cannot serve"):
                function(*args, impl=impl, **kwargs)
        else:
            function(*args, impl=impl, **kwargs)


@pytest.mark.parametrize("function", [block_scores, sparse_attention, dense_attention], ids=name)
def test_gradients_are_not_lost_in_silence(function):
    """An input that requires a gradient goes to an implementation that computes it; any other refuses, also by name."""
    args, kwargs = calls()[function]
    args = (args[0].requires_grad_(), *args[1:])
    explanation = explain(function, *args, **kwargs)
    assert explanation.chosen == ("reference" if function is block_scores else "cpu")
    out = function(*args, **kwargs)
    out.masked_fill(out == -torch.inf, 0).sum().backward()
    assert args[0].grad is not None
    assert args[0].grad.isfinite().all()
    with torch.no_grad():
        assert explain(function, *args, **kwargs).chosen == "cpu"


def test_what_computes_no_gradients_says_so():
    function = block_scores
    args, kwargs = calls()[function]
    args = (args[0].requires_grad_(), *args[1:])
    assert "no gradients" in explain(function, *args, **kwargs).reasons["cpu"]
    with pytest.raises(NotImplementedError) as caught:
        function(*args, impl="cpu", **kwargs)
    for word in ("impl='cpu'", function.__name__, "no gradients", "torch.no_grad()", "reference: not asked for"):
        assert word in str(caught.value)


@pytest.mark.parametrize("function", [*STAGES, msa_attention], ids=name)
def test_an_unknown_implementation(function):
    args, kwargs = calls()[function]
    for call in (function, lambda *a, **k: explain(function, *a, **k)):
        with pytest.raises(ValueError, match=r"impl must be 'auto' or one of \[.*'cpu', 'reference'\].*got 'fastest'"):
            call(*args, impl="fastest", **kwargs)


@pytest.mark.parametrize("impl", ["triton", "triton_decode"])
def test_a_path_needs_a_name_of_every_stage(impl):
    """An implementation that some stage lacks is refused before the first stage runs, so that no long selection is thrown
    away."""
    p = problem((5,), (40,))
    for call in (msa_attention, lambda *a, **k: explain(msa_attention, *a, **k)):
        with pytest.raises(ValueError, match=rf"impl must be 'auto' or one of .* got '{impl}'"):
            call(p.q, p.k, p.v, p.index_q, p.index_k, impl=impl)


def test_bad_arguments_raise_what_the_call_raises():
    args, kwargs = calls()[sparse_attention]
    with pytest.raises(ValueError, match=r"block_size must be from 16 to 256, got 15"):
        explain(sparse_attention, *args, block_size=15)
    with pytest.raises(ValueError, match=r"function must be one of block_scores, .*msa_attention, got .*explain"):
        explain(explain, *args, **kwargs)


@pytest.mark.parametrize("function", [None, 3, [], "dense_attention"], ids=str)
def test_what_is_no_operation_is_refused(function):
    with pytest.raises(ValueError, match=r"function must be one of block_scores, .*msa_attention, got "):
        explain(function)


def test_a_certified_call_is_checked_whole():
    p = problem((5,), (40,))
    arguments = {"index_q": p.index_q, "index_k": CertifiedKeys.quantize(p.index_k), "topk": 2}
    assert explain(select_blocks, **arguments, certified=True).stage == "select_blocks(certified=True)"
    for changes, words in (
        ({"certified": True, "rescored": torch.zeros(4, 2, dtype=torch.int32)}, r"rescored.shape\[0\] must be 5"),
        ({"rescored": torch.zeros(5, 2, dtype=torch.int32)}, "rescored must be None unless certified is True, got Tensor"),
    ):
        for call in (select_blocks, lambda **k: explain(select_blocks, **k)):
            with pytest.raises(ValueError, match=words):
                call(**arguments, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"index_q": torch.zeros(5, 4, 64)}, ValueError, r"index_q.shape\[1\] must be num_kv_heads \(2\) or 1, got 4"),
        ({"query_chunk": 0}, ValueError, "query_chunk must be at least 1, got 0"),
        ({"colour": "red"}, TypeError, "unexpected keyword argument 'colour'"),
    ],
    ids=["heads", "chunk", "keyword"],
)
def test_the_path_raises_what_the_call_raises(changes, error, words):
    p = problem((5,), (40,))
    arguments = {name: getattr(p, name) for name in ("q", "k", "v", "index_q", "index_k")} | changes
    for call in (msa_attention, lambda **k: explain(msa_attention, **k)):
        with pytest.raises(error, match=words):
            call(**arguments)


def test_explaining_runs_nothing():
    """Values that make a run fail or change are not touched: explaining a call on meta tensors, too, is just a look."""
    args, kwargs = calls()[dense_attention]
    args = [x.to("meta") if isinstance(x, torch.Tensor) else None for x in args]
    explanation = explain(dense_attention, *args, **kwargs)
    assert explanation.chosen is None
    assert explanation.reasons["cpu"] == "it needs CPU tensors, got meta"
    assert "impl='reference'" in explanation.reasons["reference"]
    assert str(explanation).startswith("dense_attention: no implementation can run")
