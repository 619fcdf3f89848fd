# SPDX-License-Identifier: MIT
"""Every implementation of `dense_attention` keeps its contract."""

import functools
import itertools
import math

import pytest
import torch

from openmsa import dense_attention
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem
from tests import oracle
from tests.contract import combinations, stored, subjects

EVERYTHING = {"return_lse": True, "return_max_score": True}


def truth_and_honest(p, block_size, causal=True, scale=None):
    """Returns (out, lse, max_score) in float64, and as honest PyTorch gives them: scores accumulate in float32."""
    reads, options = oracle.reads_everything(p, causal), {"q": p.q, "k": p.k, "causal": causal}
    truth = *oracle.attention(p, reads, scale), oracle.block_scores(p, block_size, **options)
    return truth, (*oracle.honest_attention(p, reads, scale), oracle.honest_scores(p, block_size, **options))


@functools.cache
def case(shape, dtype, causal):
    p = shape.problem(dtype, blocks=4)
    return p, *truth_and_honest(p, shape.block_size, causal)


def check(subject, p, block_size, truth, honest, storage="flat", page_size=16, **options):
    """Runs the subject on the problem and holds all three results against the truth."""
    here = p.to(subject.device)
    q, _, (k, v), _ = stored(here, storage, page_size)
    results = subject.run(dense_attention, q, k, v, here.seqs, block_size=block_size, **(EVERYTHING | options))
    for name, *values in zip(("out", "lse", "max_score"), results, honest, truth, strict=True):
        assert_close(name, *values)


@combinations(dense_attention)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_against_the_truth(subject, shape, storage, causal):
    p, truth, honest = case(shape, subject.dtype, causal)
    check(subject, p, shape.block_size, truth, honest, storage, shape.page_size, causal=causal)


@subjects(dense_attention)
def test_each_result_alone(subject):
    """One result comes as a tensor, several as a tuple in order; asking for more changes no bit of the others."""
    p = problem((9, 4), (40, 33), dtype=subject.dtype).to(subject.device)
    everything = subject.run(dense_attention, p.q, p.k, p.v, p.seqs, block_size=16, **EVERYTHING)
    for wanted in itertools.product([True, False], repeat=3):
        if any(wanted):
            flags = dict(zip(("return_out", "return_lse", "return_max_score"), wanted, strict=True))
            results = subject.run(dense_attention, p.q, p.k, p.v, p.seqs, block_size=16, **flags)
            assert isinstance(results, torch.Tensor) == (sum(wanted) == 1)
            results = (results,) if sum(wanted) == 1 else results
            for result, same in zip(results, itertools.compress(everything, wanted), strict=True):
                assert_equal(str(flags), result, same)


@subjects(dense_attention, every_dtype=True)
@pytest.mark.parametrize("scale", [0.0, 1, 0.3, -0.5])
def test_scale(subject, scale):
    """The maximum score stays unscaled."""
    p = problem((20, 10), (60, 33), dtype=subject.dtype)
    check(subject, p, 16, *truth_and_honest(p, 16, scale=scale), softmax_scale=scale)


@subjects(dense_attention, every_dtype=True)
def test_large_logits(subject):
    p = problem((40, 30), (80, 65), dtype=subject.dtype)
    p.k.add_(11)  # every logit of a row near 1000 or near -1000
    p.q[::2] += 11
    p.q[1::2] -= 11
    check(subject, p, 16, *truth_and_honest(p, 16))


@subjects(dense_attention)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("offsets", [(0, 0, 0), (36, -2, 100), (15, 16, 17), (-1, 39, 40)])
def test_offsets_move_the_queries(subject, offsets, causal):
    p = problem((4, 5, 3), (40, 33, 64), offsets=offsets, dtype=subject.dtype)
    for storage in ("flat", "paged"):
        check(subject, p, 16, *truth_and_honest(p, 16, causal), storage, causal=causal)


@subjects(dense_attention)
def test_a_cache_may_be_read_in_part(subject):
    """Keys that exist for another call only (here: NaN) are not read."""
    p = problem((3, 2), (41, 17), dtype=subject.dtype)
    (truth, honest), here = truth_and_honest(p, 16), p.to(subject.device)
    cache, _ = paged(here, 8)
    cache.seq_lens += torch.tensor([7, 7], dtype=torch.int32, device=subject.device)
    results = subject.run(dense_attention, here.q, cache, None, here.seqs, block_size=16, **EVERYTHING)
    for name, *values in zip(("out", "lse", "max_score"), results, honest, truth, strict=True):
        assert_close(name, *values)


@subjects(dense_attention)
def test_nan_counts_as_lowest_in_max_score(subject):
    q = torch.tensor([1.0, 0.0], dtype=subject.dtype, device=subject.device)[:, None, None].repeat(1, 1, 16)
    k = torch.full((32, 1, 16), 1 / 16, dtype=subject.dtype, device=subject.device)
    k[3], k[20:], k[7, 0, 0] = math.nan, math.nan, math.inf
    options = {"return_out": False, "return_max_score": True, "causal": False, "block_size": 16}
    scores = subject.run(dense_attention, q, k, torch.zeros_like(k), **options)
    assert_equal("max_score", scores, torch.tensor([[[math.inf, 1.0], [0.0, 0.0]]]))


def test_the_reference_keeps_hidden_values_out():
    p = problem((20,), (20,))
    clean = dense_attention(p.q, p.k, p.v, impl="reference")
    p.v[7], p.v[11, 0, 0] = math.nan, math.inf
    out = dense_attention(p.q, p.k, p.v, impl="reference")
    assert_equal("out", out[:7], clean[:7])
    assert out[7:].isnan().all()


@subjects(dense_attention)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("q_lens", "k_lens"), [((), ()), ((0,), (0,)), ((0, 0), (5, 0)), ((3,), (0,)), ((0, 2), (0, 0)), ((2, 0, 1), (0, 40, 1))]
)
def test_nothing_to_do(subject, q_lens, k_lens, causal):
    p = problem(q_lens, k_lens, dtype=subject.dtype)
    for storage in ("flat", "paged"):
        check(subject, p, 16, *truth_and_honest(p, 16, causal), storage, causal=causal)


@subjects(dense_attention, every_dtype=True)
def test_repeats_are_bitwise_equal(subject):
    p = problem((100, 33), (150, 333), dtype=subject.dtype).to(subject.device)
    first, second = (subject.run(dense_attention, p.q, p.k, p.v, p.seqs, block_size=16, **EVERYTHING) for _ in range(2))
    for name, a, b in zip(("out", "lse", "max_score"), first, second, strict=True):
        assert_equal(name, a, b)
