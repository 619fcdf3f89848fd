# SPDX-License-Identifier: MIT
"""On a CPU dense attention is a kernel in C, or PyTorch's fused kernel, whose results are made again where it has no largest
logit."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from openmsa import dense_attention
from openmsa.primitives import cpu_blocks
from openmsa.runtime import c_library
from openmsa.runtime.environment import c_compiler
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close
from openmsa.testing.inputs import paged, problem
from tests import instructions

cpu = import_module("openmsa.dense_attention.cpu")


@pytest.fixture(params=["compiled", "compiled, in splits", "PyTorch's operations"])
def made_by(request, monkeypatch):
    """Has either attend, the first also in splits of sixteen keys."""
    if request.param == "PyTorch's operations":
        instructions.use_none(monkeypatch)
    elif c_compiler() is None:
        pytest.skip("the machine has no C compiler")
    if request.param == "compiled, in splits":
        for name, value in (("BLOCK", 16), ("SPLIT_BLOCKS", 1), ("FEW_ROWS", 1 << 20)):
            monkeypatch.setattr(cpu, name, value)


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


@instructions.needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_few_queries_of_long_sequences(causal, in_pages, splits, dtype, monkeypatch):
    """Their keys are cut into splits of some blocks, of which a query sees some, all or none."""
    p = problem((1, 3, 0, 2, 2), (700, 300, 50, 0, 1), kv_heads=2, group=16, head_dim=32, dtype=dtype)
    given, attend = [], cpu_blocks.attend
    monkeypatch.setattr(cpu, "SPLIT_BLOCKS", 1 if splits else 6)
    monkeypatch.setattr(cpu_blocks, "attend", lambda *args: (given.append(args), attend(*args)))
    cache = paged(p, 16)[0] if in_pages else None
    k, v = (cache, None) if in_pages else (p.k, p.v)
    with PoisonedOutputs():
        found = dense_attention(p.q, k, v, p.seqs, causal=causal, return_lse=True, impl="cpu")
    assert [len(args[0]) for args in given] == [len(p.q) * (6 if splits else 1)]
    results = []
    for wide in (False, True):
        x = [t.double() for t in (p.q, p.k, p.v)] if wide else [p.q, p.k, p.v]
        results.append(dense_attention(*x, p.seqs, causal=causal, return_lse=True, impl="reference"))
    for name, mine, honest, truth in zip(("out", "lse"), found, *results, strict=True):
        assert_close(name, mine, honest, truth)


@instructions.needs_compiler
@pytest.mark.parametrize("tiles", ["AMX tiles", "AVX-512 BF16", ""])
@pytest.mark.parametrize(("group", "dim"), [(16, 64), (4, 64), (16, 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pytorch_keeps_what_it_alone_multiplies_on_tiles(dtype, group, dim, tiles, monkeypatch):
    library = c_library.library
    monkeypatch.setattr(c_library, "library", lambda source: replace(library(source), tiles=tiles))
    p, calls = problem((5,), (40,), kv_heads=1, group=group, head_dim=dim, dtype=dtype), []
    monkeypatch.setattr(cpu_blocks, "attend", lambda *args: calls.append(args))
    dense_attention(p.q, p.k, p.v, p.seqs, impl="cpu")
    on_tiles_alone = tiles == "AMX tiles" and dtype == torch.bfloat16 and (group, dim) != (16, 64)
    assert len(calls) == (not on_tiles_alone)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("what", ["query", "NaN", "key", "nothing left", "nothing in front", "overflow"])
@pytest.mark.parametrize("lens", [(1, 40), (3, 40), (5, 5), (40, 100)])
def test_infinite_and_nan_logits(lens, what, dtype, causal, made_by):
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
def test_a_scale_of_zero_hides_no_nan(dtype, causal, made_by):
    """Zero times NaN or infinity is NaN, for the rows that hold it and for no others."""
    p = problem((5,), (40,), dtype=dtype)
    p.q[1, 0, 3], p.q[2, 1, 5] = torch.nan, torch.inf
    options = {"causal": causal, "softmax_scale": 0.0, "return_lse": True}
    found, reference = (dense_attention(p.q, p.k, p.v, p.seqs, impl=impl, **options) for impl in ("cpu", "reference"))
    assert reference[1].isnan().sum() == 2
    tolerance = 1.6e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found, reference, atol=tolerance, rtol=tolerance, equal_nan=True)
