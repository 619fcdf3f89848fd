# SPDX-License-Identifier: MIT
"""Laws hold for every implementation and any lengths: some changes must not change a result, some results must be equal."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openmsa import block_scores, dense_attention, msa_attention, select_blocks, sparse_attention
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import packed_order, paged, problem, random_blocks
from tests import oracle
from tests.contract import subjects

BOTH = {"return_lse": True}
SCALED = {"block_size": 16, "return_lse": True}


@st.composite
def ragged(draw, block_size=16, most=4):
    """Draws up to four sequences of lengths around 0, 1 and the block; queries at the end, or somewhere, of their keys."""
    edges = [0, 1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 5]
    pairs = draw(st.lists(st.tuples(st.sampled_from(edges[:7]), st.sampled_from(edges)), min_size=1, max_size=most))
    moved = draw(st.booleans())
    offsets = [draw(st.integers(-2, k + 2)) for _, k in pairs] if moved else None
    return [q for q, _ in pairs], [k for _, k in pairs], offsets


def law(examples=12, **strategies):
    """Makes a test check a property over a few drawn examples, which are the same in every run."""
    options = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: options(given(**strategies)(test))


def assert_results_equal(results, others):
    for name, a, b in zip(("out", "lse"), results, others, strict=True):
        assert_equal(name, a, b)


@functools.lru_cache(maxsize=64)
def dense_truth(q_lens, k_lens, offsets, dtype):
    p = problem(q_lens, k_lens, offsets=offsets, dtype=dtype)
    return p, oracle.attention(p, oracle.reads_everything(p)), oracle.honest_attention(p, oracle.reads_everything(p))


@subjects(sparse_attention)
@law(lengths=ragged(), seed=st.integers(0, 99))
def test_all_blocks_are_dense(subject, lengths, seed):
    """Sparse attention over every block, in any order, is dense attention."""
    q_lens, k_lens, offsets = lengths
    p, truth, honest = dense_truth(tuple(q_lens), tuple(k_lens), offsets and tuple(offsets), subject.dtype)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(len(p.q), 2, 5, generator=generator).argsort(-1).int()  # every block of 16 and ids past the end
    p, blocks = p.to(subject.device), blocks.to(subject.device)
    out, lse = subject.run(sparse_attention, p.q, p.k, p.v, blocks, p.seqs, **SCALED)
    assert_close("out", out, honest[0], truth[0])
    assert_close("lse", lse, honest[1], truth[1])


@subjects(msa_attention)
@law(lengths=ragged())
def test_selecting_all_blocks_is_dense(subject, lengths):
    """The whole path with a topk that no sequence exhausts is dense attention."""
    q_lens, k_lens, offsets = lengths
    p, truth, honest = dense_truth(tuple(q_lens), tuple(k_lens), offsets and tuple(offsets), subject.dtype)
    p = p.to(subject.device)
    out, lse = subject.run(msa_attention, p.q, p.k, p.v, p.index_q, p.index_k, 5, p.seqs, **SCALED)
    assert_close("out", out, honest[0], truth[0])
    assert_close("lse", lse, honest[1], truth[1])


@subjects(dense_attention)
@law(lengths=ragged())
def test_dense_of_any_lengths(subject, lengths):
    q_lens, k_lens, offsets = lengths
    p, truth, honest = dense_truth(tuple(q_lens), tuple(k_lens), offsets and tuple(offsets), subject.dtype)
    p = p.to(subject.device)
    for storage in ("flat", "paged"):
        k, v = (p.k, p.v) if storage == "flat" else (paged(p, 8)[0], None)
        out, lse = subject.run(dense_attention, p.q, k, v, p.seqs, **BOTH)
        assert_close(f"out, {storage}", out, honest[0], truth[0])
        assert_close(f"lse, {storage}", lse, honest[1], truth[1])


@subjects(msa_attention)
@law(lengths=ragged(), page_size=st.sampled_from([1, 7, 16, 40]), topk=st.sampled_from([1, 2, 5]))
def test_the_path_of_any_lengths(subject, lengths, page_size, topk):
    """The path agrees with the truth for any lengths, flat and paged, with whole index values."""
    p = problem(*lengths[:2], offsets=lengths[2], dtype=subject.dtype, integer_index=True, shared_prefix=16)
    blocks = oracle.select_blocks(p, oracle.block_scores(p, 16), 16, topk)
    reads = oracle.reads_of_blocks(blocks, 16)
    truth, honest, p = oracle.attention(p, reads), oracle.honest_attention(p, reads), p.to(subject.device)
    kv, index_keys = paged(p, page_size)
    for k, v, index_k in ((p.k, p.v, p.index_k), (kv, None, index_keys)):
        assert_equal("blocks", subject.run(select_blocks, p.index_q, index_k, topk, p.seqs, block_size=16), blocks)
        out, lse = subject.run(msa_attention, p.q, k, v, p.index_q, index_k, topk, p.seqs, **SCALED)
        assert_close("out", out, honest[0], truth[0])
        assert_close("lse", lse, honest[1], truth[1])


@subjects(msa_attention)
@law(lengths=ragged(), seeds=st.tuples(st.integers(0, 9), st.integers(10, 19)), page_size=st.sampled_from([8, 16, 40]))
def test_where_pages_lie_changes_nothing(subject, lengths, seeds, page_size):
    """After another permutation of the pages every result is the same, bit for bit."""
    p = problem(*lengths[:2], offsets=lengths[2], dtype=subject.dtype, shared_prefix=16).to(subject.device)
    (kv, index_keys), (kv2, index_keys2) = (paged(p, page_size, seed=seed) for seed in seeds)
    scores = [subject.run(block_scores, p.index_q, keys, p.seqs, block_size=16) for keys in (index_keys, index_keys2)]
    assert_equal("scores", *scores)
    results = [
        subject.run(msa_attention, p.q, cache, None, p.index_q, keys, 2, p.seqs, **SCALED)
        for cache, keys in ((kv, index_keys), (kv2, index_keys2))
    ]
    assert_results_equal(*results)
    assert_results_equal(*(subject.run(dense_attention, p.q, cache, None, p.seqs, **BOTH) for cache in (kv, kv2)))


@subjects(msa_attention)
@law(lengths=ragged(), data=st.data())
def test_batch_order_changes_nothing(subject, lengths, data):
    """The sequences in another order give the same results in that order, bit for bit."""
    order = data.draw(st.permutations(range(len(lengths[0]))))
    p = problem(*lengths[:2], offsets=lengths[2], dtype=subject.dtype)
    rows, p, moved = packed_order(p.q_lens, order), p.to(subject.device), p.permuted(order).to(subject.device)
    chosen, chosen_moved = (subject.run(select_blocks, x.index_q, x.index_k, 2, x.seqs, block_size=16) for x in (p, moved))
    assert_equal("blocks", chosen_moved, chosen[rows])
    results, results_moved = (
        subject.run(msa_attention, x.q, x.k, x.v, x.index_q, x.index_k, 2, x.seqs, **SCALED) for x in (p, moved)
    )
    assert_results_equal(results_moved, [x[rows] for x in results])
    results, results_moved = (subject.run(dense_attention, x.q, x.k, x.v, x.seqs, **BOTH) for x in (p, moved))
    assert_results_equal(results_moved, [x[rows] for x in results])


def selections(subject, p, topk, chunk, block_size=16):
    """Returns the selection in chunks of queries, as the public path makes it: it is read off a value that names its block."""
    names = torch.arange(len(p.k), device=p.device) // block_size
    v = torch.nn.functional.one_hot(names, 64).to(p.k.dtype)[:, None].expand(-1, p.k.shape[1], -1)
    options = {"block_size": block_size, "query_chunk": chunk, "softmax_scale": 0.0}
    return subject.run(msa_attention, p.q, p.k, v, p.index_q, p.index_k, topk, p.seqs, **options) > 0


@subjects(msa_attention, every_dtype=True)
@pytest.mark.parametrize("keys", ["random", "repeated"])
def test_chunks_of_queries_select_the_same(subject, keys):
    """Chunks of every size select the same, bit for bit; also where the blocks repeat the same keys in another order, so that
    equal scores tie only if a product does not depend on the rows beside it."""
    p = problem((150, 20), (150, 700), dtype=subject.dtype)
    if keys == "repeated":
        order = torch.cat([torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(60)])
        p.index_k.copy_(p.index_k[order[: len(p.index_k)]])
    p = p.to(subject.device)
    whole = selections(subject, p, 4, None)
    assert whole.any(-1).all()
    for chunk in (1, 7, 64, 1000):
        assert_equal(f"blocks in chunks of {chunk}", selections(subject, p, 4, chunk), whole)


@subjects(block_scores)
@pytest.mark.parametrize("tokens", [3, 40])
def test_nan_of_a_query_changes_no_other_score(subject, tokens):
    """NaN of a query changes no other score, also where rounding alone tells keys apart."""
    numbers = torch.randn(64, generator=torch.Generator().manual_seed(1))
    order = torch.rand(600, 64, generator=torch.Generator().manual_seed(2)).argsort(-1)
    index_k = numbers[order][:, None].to(subject.device, subject.dtype)
    index_q = torch.full((tokens, 2, 64), 1 / 3, dtype=subject.dtype, device=subject.device)
    scores = subject.run(block_scores, index_q, index_k, block_size=16)
    index_q[-1, 0, 3] = float("nan")
    assert_equal("scores", subject.run(block_scores, index_q, index_k, block_size=16)[:, :-1], scores[:, :-1])


@subjects(msa_attention)
@law(lengths=ragged(), chunk=st.sampled_from([1, 2, 7, 17, 64]), topk=st.sampled_from([1, 2, 5]))
def test_chunks_of_queries_give_the_same(subject, lengths, chunk, topk):
    p = problem(*lengths[:2], offsets=lengths[2], dtype=subject.dtype, integer_index=True)
    reads = oracle.reads_of_blocks(oracle.select_blocks(p, oracle.block_scores(p, 16), 16, topk), 16)
    truth, honest, p = oracle.attention(p, reads), oracle.honest_attention(p, reads), p.to(subject.device)
    options = SCALED | {"query_chunk": chunk}
    out, lse = subject.run(msa_attention, p.q, p.k, p.v, p.index_q, p.index_k, topk, p.seqs, **options)
    assert_close("out", out, honest[0], truth[0])
    assert_close("lse", lse, honest[1], truth[1])


@subjects(sparse_attention, every_dtype=True)
def test_identical_rows_give_identical_results(subject):
    """Equal queries at equal positions of equal sequences, wherever they stand in the batch, and equal rows of one sequence
    that read the same blocks give the same bits. Of the reference, whose library rounds rows differently, this holds within one
    product."""
    p = problem((33,), (130,), dtype=subject.dtype)
    blocks = random_blocks(p, 4, 16, 2)
    copies = [getattr(p, name).repeat(3, 1, 1).to(subject.device) for name in ("q", "k", "v")]
    seqs = problem((33,) * 3, (130,) * 3).to(subject.device).seqs
    results = subject.run(sparse_attention, *copies, blocks.repeat(3, 1, 1).to(subject.device), seqs, **SCALED)
    dense = subject.run(dense_attention, *copies, seqs, **BOTH) if subject.device == "cpu" else results
    for out, lse in (results, dense):
        for first in (33, 66):
            assert_results_equal((out[first : first + 33], lse[first : first + 33]), (out[:33], lse[:33]))

    q = p.q[:1].expand(33, -1, -1).to(subject.device)
    blocks = torch.tensor([3, -1, 0, 5], dtype=torch.int32, device=subject.device).expand(33, 2, 4)
    out, lse = subject.run(sparse_attention, q, p.k.to(subject.device), p.v.to(subject.device), blocks, **SCALED)
    same = torch.testing.assert_close if subject.impl == "reference" else assert_results_equal
    same((out, lse), (out[:1].expand_as(out), lse[:1].expand_as(lse)))


@subjects(sparse_attention)
@law(lengths=ragged(), seed=st.integers(0, 99))
def test_parts_merge_to_the_whole(subject, lengths, seed):
    """Two halves of a selection, weighted by their lse, are the selection."""
    p = problem(*lengths[:2], offsets=lengths[2], dtype=subject.dtype)
    blocks = random_blocks(p, 4, 16, 2, seed)
    reads = oracle.reads_of_blocks(blocks, 16)
    truth, honest, p = oracle.attention(p, reads), oracle.honest_attention(p, reads), p.to(subject.device)
    halves = [half.to(subject.device) for half in blocks.split(2, dim=2)]
    outs, lses = zip(*(subject.run(sparse_attention, p.q, p.k, p.v, ids, p.seqs, **SCALED) for ids in halves), strict=True)
    lse = torch.stack(lses).logsumexp(0)
    weights = [(part - lse.clamp(min=-1e30)).exp()[..., None] for part in lses]
    out = sum(weight * part for weight, part in zip(weights, outs, strict=True))
    assert_close("out", out.to(subject.dtype), honest[0], truth[0])
    assert_close("lse", lse, honest[1], truth[1])


@subjects(block_scores)
@law(lengths=ragged(), step=st.integers(1, 5))
def test_a_prefix_of_the_keys_scores_the_same(subject, lengths, step):
    """Whole products make scores exact: more keys behind a query, or queries one by one, change none of them."""
    q_lens, k_lens, _ = lengths
    p = problem(q_lens, k_lens, offsets=[max(k - q - step, 0) for q, k in zip(q_lens, k_lens, strict=True)], integer_index=True)
    truth = oracle.block_scores(p, 16)
    p = p.map(lambda x: x.to(subject.dtype)).to(subject.device)
    assert_equal("scores", subject.run(block_scores, p.index_q, p.index_k, p.seqs, block_size=16), truth.float())
