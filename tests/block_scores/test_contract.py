# SPDX-License-Identifier: MIT
"""Every implementation of `block_scores` keeps its contract."""

import functools
import math

import pytest
import torch

from openmsa import Sequences, block_scores
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem
from tests import oracle
from tests.contract import combinations, one_sequence, shapes, stored, subjects

INF, NAN = math.inf, math.nan


@functools.cache
def case(shape, dtype, integer_index=False):
    """Returns a problem, its scores in float64, and those of honest PyTorch."""
    p = shape.problem(dtype, integer_index=integer_index)
    return p, oracle.block_scores(p, shape.block_size), oracle.honest_scores(p, shape.block_size)


@combinations(block_scores)
def test_against_the_truth(subject, shape, storage):
    p, truth, honest = case(shape, subject.dtype)
    p = p.to(subject.device)
    _, index_q, _, index_k = stored(p, storage, shape.page_size)
    scores = subject.run(block_scores, index_q, index_k, p.seqs, block_size=shape.block_size)
    assert_close("scores", scores, honest, truth)


@subjects(block_scores, every_dtype=True)
@shapes
def test_integers_are_exact(subject, shape):
    p, truth, honest = case(shape, subject.dtype, integer_index=True)
    p = p.to(subject.device)
    assert_equal(
        "scores", subject.run(block_scores, p.index_q, p.index_k, p.seqs, block_size=shape.block_size), truth.to(honest.dtype)
    )


@subjects(block_scores)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_heads_share_keys(subject, key_heads):
    p = problem((5, 9), (40, 70), kv_heads=4, index_key_heads=key_heads, dtype=subject.dtype, integer_index=True)
    truth = oracle.block_scores(p, 16).float()
    for storage in ("flat", "paged"):
        _, index_q, _, index_k = stored(p.to(subject.device), storage)
        seqs = p.to(subject.device).seqs
        assert_equal("scores", subject.run(block_scores, index_q, index_k, seqs, block_size=16), truth)


@subjects(block_scores)
@pytest.mark.parametrize("offsets", [(0, 0, 0), (36, -2, 100), (15, 16, 17), (-1, 39, 40)])
def test_offsets_move_the_queries(subject, offsets):
    p = problem((4, 5, 3), (40, 33, 64), offsets=offsets, dtype=subject.dtype, integer_index=True).to(subject.device)
    truth = oracle.block_scores(p.to("cpu"), 16).float()
    for storage in ("flat", "paged"):
        _, index_q, _, index_k = stored(p, storage)
        assert_equal("scores", subject.run(block_scores, index_q, index_k, p.seqs, block_size=16), truth)


@subjects(block_scores)
def test_one_sequence_by_default(subject):
    p = problem((7,), (50,), dtype=subject.dtype, integer_index=True).to(subject.device)
    scores = subject.run(block_scores, p.index_q, p.index_k, block_size=16)
    assert_equal("scores", scores, oracle.block_scores(p.to("cpu"), 16).float())


@subjects(block_scores)
def test_a_loose_bound_adds_empty_blocks(subject):
    p = problem((7, 2), (50, 20), dtype=subject.dtype, integer_index=True).to(subject.device)
    loose = Sequences(p.seqs.cu_seqlens_q, p.seqs.cu_seqlens_k, 9, 100)
    scores = subject.run(block_scores, p.index_q, p.index_k, loose, block_size=16)
    assert_equal("scores", scores, oracle.block_scores(p.to("cpu"), 16, num_blocks=7).float())


@subjects(block_scores)
def test_a_cache_may_be_read_in_part(subject):
    """Keys that exist for another call only (here: NaN) are not read."""
    p = problem((3, 2), (50, 33), dtype=subject.dtype, integer_index=True)
    _, cache = paged(p.to(subject.device), 16)
    first = problem((3, 2), (50, 33), dtype=subject.dtype, integer_index=True)
    shorter = problem((3, 2), (41, 17), dtype=subject.dtype, integer_index=True)
    keys = torch.cat([oracle.keys_of(first.index_k, first, b)[:n] for b, n in enumerate(shorter.k_lens)])
    truth = oracle.block_scores(shorter, 16, q=p.index_q, k=keys).float()
    for b, n in enumerate(shorter.k_lens):
        for j in range(n, first.k_lens[b]):
            cache.keys[cache.page_table[b, j // 16], :, j % 16] = NAN
    seqs = shorter.to(subject.device).seqs
    assert_equal("scores", subject.run(block_scores, p.index_q.to(subject.device), cache, seqs, block_size=16), truth)


@subjects(block_scores)
def test_special_values(subject):
    """NaN products, also from 0 times infinity, count as -inf; infinities are scores like others."""
    q = torch.zeros(4, 1, 16, dtype=subject.dtype, device=subject.device)
    q[:, 0, 0] = torch.tensor([1.0, -1.0, 0.0, NAN])
    k = torch.zeros(64, 1, 16, dtype=subject.dtype, device=subject.device)
    k[:, 0, 0] = 2.0
    k[3, 0, 0], k[20, 0, 0], k[21, 0, 0], k[32:48, 0, 0] = INF, NAN, 5.0, -INF
    scores = subject.run(
        block_scores, q, k, one_sequence(4, 64, subject.device, q_offset=q.new_full((1,), 63).int()), block_size=16
    )
    expected = torch.tensor(
        [[INF, 5.0, -INF, 2.0], [-2.0, -2.0, INF, -2.0], [0.0, 0.0, -INF, 0.0], [-INF, -INF, -INF, -INF]], dtype=torch.float32
    )
    assert_equal("scores", scores[0], expected)


@subjects(block_scores)
@pytest.mark.parametrize(
    ("q_lens", "k_lens"), [((), ()), ((0,), (0,)), ((0, 0), (5, 0)), ((3,), (0,)), ((0, 2), (0, 0)), ((2, 0, 1), (0, 40, 1))]
)
def test_nothing_to_do(subject, q_lens, k_lens):
    p = problem(q_lens, k_lens, dtype=subject.dtype, integer_index=True).to(subject.device)
    truth = oracle.block_scores(p.to("cpu"), 16).float()
    for storage in ("flat", "paged"):
        _, index_q, _, index_k = stored(p, storage)
        assert_equal("scores", subject.run(block_scores, index_q, index_k, p.seqs, block_size=16), truth)


@subjects(block_scores, every_dtype=True)
def test_repeats_are_bitwise_equal(subject):
    p = problem((100, 33), (150, 333), dtype=subject.dtype).to(subject.device)
    first, second = (subject.run(block_scores, p.index_q, p.index_k, p.seqs, block_size=32) for _ in range(2))
    assert_equal("scores", first, second)
