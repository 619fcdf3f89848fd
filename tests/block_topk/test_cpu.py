# SPDX-License-Identifier: MIT
"""On a CPU queries that see at most topk blocks are not scored, where no score can be NaN or -inf."""

import pytest
import torch

from openmsa import E4M3, Int8, Sequences, select_blocks
from openmsa.block_topk import cpu
from openmsa.testing.inputs import paged, problem

LENGTHS = {
    "prefill": ((100,), (100,)),
    "prefill of more blocks than topk": ((100,), (300,)),
    "short, long and empty sequences": ((40, 90, 0, 7), (40, 200, 30, 64)),
    "a query before position 0": ((70,), (50,)),
    "decode": ((1, 1, 1), (60, 64, 1)),
}


def whole_numbers(q_lens, k_lens):
    """Scores of small whole numbers are exact, and often equal."""
    p = problem(q_lens, k_lens)
    return (p.index_q * 2).round(), (p.index_k * 2).round(), Sequences.from_lengths(q_lens, k_lens)


@pytest.fixture
def scored(monkeypatch):
    """Returns the queries of each call of the scoring stage."""
    queries = []
    run = cpu.SCORING.run
    monkeypatch.setattr(cpu.SCORING, "run", lambda impl, call: queries.append(call.index_q.shape[0]) or run(impl, call))
    return queries


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("forced", [(0, 0), (1, 2)])
def test_the_selection_is_that_of_the_reference(lengths, forced):
    index_q, index_k, seqs = whole_numbers(*lengths)
    options = {"block_size": 16, "init_blocks": forced[0], "local_blocks": forced[1]}
    for topk in (4, 7):
        ours, reference = (select_blocks(index_q, index_k, topk, seqs, impl=x, **options) for x in ("cpu", "reference"))
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e38])
@pytest.mark.parametrize("name", ["index_q", "index_k"])
def test_scores_decide_where_they_may_not_be_finite(bad, name, scored):
    """A block whose score is NaN or -inf is not selected, also by a query that sees few blocks."""
    index_q, index_k, seqs = whole_numbers((60,), (60,))
    {"index_q": index_q, "index_k": index_k}[name][20, 0] = bad
    ours, reference = (select_blocks(index_q, index_k, 4, seqs, block_size=16, impl=x) for x in ("cpu", "reference"))
    assert torch.equal(ours, reference)
    assert scored[0] == 60
    if bad is torch.nan and name == "index_q":
        assert ours[20, 0].tolist() == [1, -1, -1, -1]  # no score of this query is a number: its own block is forced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_only_queries_of_more_blocks_than_topk_are_scored(dtype, scored):
    index_q, index_k, seqs = whole_numbers((40, 90, 20), (40, 90, 20))
    blocks = select_blocks(index_q.to(dtype), index_k.to(dtype), 4, seqs, block_size=16)
    assert scored == [26]  # positions 64 to 89 of the second sequence
    assert blocks[:40, 0].tolist() == [[i if i <= token // 16 else -1 for i in range(4)] for token in range(40)]
    select_blocks(index_q.to(dtype), index_k.to(dtype), 6, seqs, block_size=16)
    assert scored == [26]


def test_a_short_sequence_beside_long_ones_does_not_make_all_keys_read(scored):
    """The magnitudes of all keys would take longer to read than the short sequence takes to score."""
    p = problem((1, 1), (10, 4000))
    select_blocks(p.index_q, p.index_k, 4, p.seqs, block_size=16)
    assert scored == [2]


@pytest.mark.parametrize("stored", ["e4m3", "int8", "paged"])
def test_other_keys_are_scored(stored, scored):
    p = problem((50,), (50,))
    keys = {"e4m3": E4M3.quantize(p.index_k), "int8": Int8.quantize(p.index_k), "paged": paged(p, 16)[1]}[stored]
    seqs = None if stored == "paged" else p.seqs
    assert torch.equal(select_blocks(p.index_q, keys, 4, seqs, block_size=16)[-1, 0], torch.arange(4, dtype=torch.int32))
    assert scored == [50]
