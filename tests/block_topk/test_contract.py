# SPDX-License-Identifier: MIT
"""Every implementation of `select_blocks` and `select_blocks_from_scores` keeps its contract."""

import functools
import math

import pytest
import torch

from openmsa import Sequences, select_blocks, select_blocks_from_scores
from openmsa.testing.compare import assert_equal, compare
from openmsa.testing.inputs import problem
from tests import oracle
from tests.contract import combinations, one_sequence, shapes, stored, subjects

INF, NAN = math.inf, math.nan
FORCED = [(0, 1), (0, 0), (1, 0), (1, 1), (2, 3), (0, 5)]  # init_blocks, local_blocks


@functools.cache
def case(shape, dtype, integer_index):
    p = shape.problem(dtype, integer_index=integer_index)
    return p, oracle.block_scores(p, shape.block_size), oracle.honest_scores(p, shape.block_size)


@functools.cache
def truth_of(shape, init_blocks, local_blocks):
    p, scores, _ = case(shape, torch.float32, True)
    return oracle.select_blocks(p, scores, shape.block_size, shape.topk, init_blocks, local_blocks)


@combinations(select_blocks)
def test_integers_are_selected_exactly(subject, shape, storage):
    """Whole dot products are exact in every dtype and often tie: every bit of the selection is determined."""
    p, _, _ = case(shape, subject.dtype, True)
    p = p.to(subject.device)
    _, index_q, _, index_k = stored(p, storage, shape.page_size)
    blocks = subject.run(select_blocks, index_q, index_k, shape.topk, p.seqs, block_size=shape.block_size)
    assert_equal("blocks", blocks, truth_of(shape, 0, 1))


@subjects(select_blocks)
@shapes
@pytest.mark.parametrize(("init_blocks", "local_blocks"), FORCED)
def test_forced_blocks_stand_inside_the_k(subject, shape, init_blocks, local_blocks):
    local_blocks = min(local_blocks, shape.topk - min(init_blocks, shape.topk))
    init_blocks = min(init_blocks, shape.topk)
    p, _, _ = case(shape, subject.dtype, True)
    p = p.to(subject.device)
    options = {"block_size": shape.block_size, "init_blocks": init_blocks, "local_blocks": local_blocks}
    blocks = subject.run(select_blocks, p.index_q, p.index_k, shape.topk, p.seqs, **options)
    assert_equal("blocks", blocks, truth_of(shape, init_blocks, local_blocks))


@subjects(select_blocks, every_dtype=True)
@shapes
def test_floats_select_the_best(subject, shape):
    """No block left out scores above one that was chosen, beyond the rounding that honest PyTorch shows."""
    p, truth, honest = case(shape, subject.dtype, False)
    _, index_q, _, index_k = stored(p.to(subject.device), "paged", shape.page_size)
    blocks = subject.run(select_blocks, index_q, index_k, shape.topk, p.to(subject.device).seqs, block_size=shape.block_size)
    slack = 2 * compare(honest, honest, truth).bound
    for row, _, last in oracle.rows(p):
        own = last // shape.block_size
        for head in range(blocks.shape[1]):
            ids = blocks[row, head].tolist()
            chosen = [b for b in ids if b >= 0]
            assert ids == sorted(set(chosen)) + [-1] * (shape.topk - len(chosen))
            assert len(chosen) == min(shape.topk, own + 1)
            assert own < 0 or chosen[-1] == own
            scores = truth[head, row].tolist()
            left_out = [scores[b] for b in range(own + 1) if b not in chosen]
            assert max(left_out, default=-INF) <= min([scores[b] for b in chosen if b != own], default=INF) + slack


@subjects(select_blocks)
@pytest.mark.parametrize("offsets", [(0, 0, 0), (36, -2, 100), (15, 16, 17), (-1, 39, 40)])
def test_offsets_move_the_own_block(subject, offsets):
    p = problem((4, 5, 3), (40, 33, 64), offsets=offsets, dtype=subject.dtype, integer_index=True).to(subject.device)
    scores = oracle.block_scores(p.to("cpu"), 16)
    for storage in ("flat", "paged"):
        _, index_q, _, index_k = stored(p, storage)
        blocks = subject.run(select_blocks, index_q, index_k, 2, p.seqs, block_size=16)
        assert_equal("blocks", blocks, oracle.select_blocks(p, scores, 16, 2))


@subjects(select_blocks, every_dtype=True)
@pytest.mark.parametrize("value", ["ones", "one random key"])
def test_equal_keys_tie_to_the_lower_id(subject, value):
    """Equal keys have equal products, whatever their rounding: the first blocks win, beside the query's own."""
    p = problem((300,), (300,), kv_heads=1, index_dim=128, dtype=subject.dtype)
    keys = torch.ones_like(p.index_k) if value == "ones" else p.index_k[:1].expand_as(p.index_k)
    blocks = subject.run(select_blocks, p.index_q.to(subject.device), keys.to(subject.device), 5, block_size=16)
    expected = [[oracle.select([0.0] * 19, i // 16 + 1, 5)] for i in range(300)]
    assert_equal("blocks", blocks, torch.tensor(expected, dtype=torch.int32))


@subjects(select_blocks)
def test_special_products(subject):
    """NaN counts as lowest, also from 0 times infinity; -inf is chosen only where it is forced; +inf wins."""
    q = torch.zeros(4, 1, 16, dtype=subject.dtype, device=subject.device)
    q[:, 0, 0] = torch.tensor([1.0, -1.0, 0.0, NAN])
    k = torch.zeros(96, 1, 16, dtype=subject.dtype, device=subject.device)
    values = (2.0, NAN, -INF, INF, 1.0, 3.0)  # one a block
    k[:, 0, 0] = torch.tensor(values).repeat_interleave(16)
    seqs = one_sequence(4, 96, subject.device, q_offset=torch.full((1,), 95, dtype=torch.int32, device=subject.device))
    blocks = subject.run(select_blocks, q, k, 4, seqs, block_size=16, local_blocks=0)
    assert blocks[:, 0].tolist() == [[0, 3, 4, 5], [0, 2, 4, 5], [0, 4, 5, -1], [-1, -1, -1, -1]]
    blocks = subject.run(select_blocks, q, k, 4, seqs, block_size=16, init_blocks=2, local_blocks=1)
    assert blocks[:, 0].tolist() == [[0, 1, 3, 5], [0, 1, 2, 5], [0, 1, 4, 5], [0, 1, 5, -1]]


@subjects(select_blocks)
@pytest.mark.parametrize(
    ("q_lens", "k_lens"), [((), ()), ((0,), (0,)), ((0, 0), (5, 0)), ((3,), (0,)), ((0, 2), (0, 0)), ((2, 0, 1), (0, 40, 1))]
)
def test_nothing_to_do(subject, q_lens, k_lens):
    p = problem(q_lens, k_lens, dtype=subject.dtype, integer_index=True).to(subject.device)
    truth = oracle.select_blocks(p, oracle.block_scores(p.to("cpu"), 16), 16, 3)
    for storage in ("flat", "paged"):
        _, index_q, _, index_k = stored(p, storage)
        assert_equal("blocks", subject.run(select_blocks, index_q, index_k, 3, p.seqs, block_size=16), truth)


@subjects(select_blocks, every_dtype=True)
def test_repeats_are_bitwise_equal(subject):
    p = problem((100, 33), (150, 333), dtype=subject.dtype).to(subject.device)
    first, second = (subject.run(select_blocks, p.index_q, p.index_k, 5, p.seqs, block_size=16) for _ in range(2))
    assert_equal("blocks", first, second)


def nasty_scores(heads, rows, num_blocks, dtype, seed=0):
    """Returns scores with many ties, both zeros, both infinities, NaN; one row each of nothing but one of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, -0.0, 1.0, 1.0, 2.0, -3.0, INF, -INF, NAN, 0.5], dtype=dtype)
    scores = values[torch.randint(len(values), (heads, rows, num_blocks), generator=generator)]
    for row, value in zip(range(rows), (-INF, NAN, INF, -0.0, 0.0), strict=False):
        scores[0, row] = value
    return scores


@subjects(select_blocks_from_scores, every_dtype=True)
@pytest.mark.parametrize("topk", [1, 5, 16, 64])
@pytest.mark.parametrize("num_blocks", [0, 1, 4, 16, 63, 64, 65, 300, 1025])
def test_given_scores(subject, topk, num_blocks):
    """The best are selected from strided scores of any float dtype, too; blocks past the visible ones never are, whatever they
    hold."""
    scores = nasty_scores(2, 9, num_blocks, subject.dtype)
    visible = torch.tensor([0, 1, num_blocks, num_blocks // 2, 2**31 - 1, 3, -5, 64, num_blocks - 1], dtype=torch.int32)
    storage = scores.permute(2, 0, 1).contiguous().to(subject.device).permute(1, 2, 0)  # blocks outermost
    for init_blocks, local_blocks in FORCED:
        if init_blocks + local_blocks > topk:
            continue
        expected = [
            [oracle.select(scores[h, t].tolist(), max(int(visible[t]), 0), topk, init_blocks, local_blocks) for h in range(2)]
            for t in range(9)
        ]
        options = {"visible_blocks": visible.to(subject.device), "init_blocks": init_blocks, "local_blocks": local_blocks}
        blocks = subject.run(select_blocks_from_scores, storage, topk, **options)
        assert_equal("blocks", blocks, torch.tensor(expected, dtype=torch.int32).view(9, 2, topk))


@subjects(select_blocks_from_scores)
def test_given_scores_of_sequences(subject):
    """The lengths say which block is each query's own; without them one sequence fills all blocks."""
    p = problem((3, 0, 5), (40, 7, 64))
    scores = nasty_scores(2, 8, 4, subject.dtype)
    blocks = subject.run(select_blocks_from_scores, scores.to(subject.device), 3, p.to(subject.device).seqs, block_size=16)
    assert_equal("blocks", blocks, oracle.select_blocks(p, scores, 16, 3))
    alone = subject.run(select_blocks_from_scores, scores.to(subject.device), 3, block_size=16)
    assert_equal("blocks", alone, oracle.select_blocks(problem((8,), (64,)), scores, 16, 3))


@subjects(select_blocks_from_scores)
def test_zeros_of_both_signs_tie(subject):
    scores = torch.tensor([[[-0.0, 0.0, -0.0, 0.0, -0.0]]], dtype=subject.dtype, device=subject.device)
    assert subject.run(select_blocks_from_scores, scores, 3, local_blocks=0).tolist() == [[[0, 1, 2]]]


@subjects(select_blocks_from_scores, every_dtype=True)
def test_extreme_scores_order(subject):
    """Subnormal, largest and smallest numbers keep their order; neighbours in the last place are told apart."""
    info = torch.finfo(subject.dtype)
    one = 1 + info.eps
    values = [-info.max, info.max, 1.0, one, info.tiny, info.tiny / 2, -info.tiny / 2, 0.0, -one, -1.0, -INF, INF]
    scores = torch.tensor(values, dtype=subject.dtype)
    order = sorted(range(12), key=lambda b: (-float(scores[b]), b))
    for k in range(1, 12):
        blocks = subject.run(select_blocks_from_scores, scores.view(1, 1, 12).to(subject.device), k, local_blocks=0)
        assert blocks.flatten().tolist() == sorted(order[:k])


@subjects(select_blocks_from_scores)
def test_no_given_scores(subject):
    scores = torch.empty(2, 0, 3, dtype=subject.dtype, device=subject.device)
    assert subject.run(select_blocks_from_scores, scores, 2).shape == (0, 2, 2)
    empty = Sequences.from_lengths([], [], subject.device)
    assert subject.run(select_blocks_from_scores, scores[..., :0], 2, empty).shape == (0, 2, 2)
