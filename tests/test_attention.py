# SPDX-License-Identifier: MIT
"""`msa_attention`, the whole path, agrees with the truth, in chunks too, while decoding, and in bounded memory."""

import enum
import functools

import numpy as np
import pytest
import torch

from openmsa import PagedIndexKeys, PagedKV, Sequences, dense_attention, msa_attention, select_blocks, sparse_attention
from openmsa.testing.allocations import peak_memory
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import WILD_IDS, paged, problem
from tests import oracle
from tests.contract import combinations, stored, subjects

MIB = 1 << 20


@functools.cache
def case(shape, dtype):
    """Returns a problem of whole index values, so that the selection is exact in every dtype, and out and lse in float64 and as
    honest PyTorch gives them."""
    p = shape.problem(dtype, integer_index=True)
    blocks = oracle.select_blocks(p, oracle.block_scores(p, shape.block_size), shape.block_size, shape.topk)
    reads = oracle.reads_of_blocks(blocks, shape.block_size)
    return p, oracle.attention(p, reads), oracle.honest_attention(p, reads)


def assert_both_close(results, honest, truth):
    for name, *values in zip(("out", "lse"), results, honest, truth, strict=True):
        assert_close(name, *values)


@combinations(msa_attention)
def test_against_the_truth(subject, shape, storage):
    p, truth, honest = case(shape, subject.dtype)
    p = p.to(subject.device)
    q, index_q, (k, v), index_k = stored(p, storage, shape.page_size)
    options = {"block_size": shape.block_size, "return_lse": True}
    results = subject.run(msa_attention, q, k, v, index_q, index_k, shape.topk, p.seqs, **options)
    assert_both_close(results, honest, truth)
    in_chunks = subject.run(msa_attention, q, k, v, index_q, index_k, shape.topk, p.seqs, query_chunk=7, **options)
    assert_both_close(in_chunks, honest, truth)


@subjects(msa_attention)
@pytest.mark.parametrize(("init_blocks", "local_blocks"), [(0, 0), (1, 2), (3, 0)])
@pytest.mark.parametrize("offsets", [None, (0, -2, 100)])
def test_options_reach_their_stage(subject, init_blocks, local_blocks, offsets):
    p = problem((9, 5, 3), (100, 33, 64), offsets=offsets, dtype=subject.dtype, integer_index=True)
    scores = oracle.block_scores(p, 16)
    reads = oracle.reads_of_blocks(oracle.select_blocks(p, scores, 16, 3, init_blocks, local_blocks), 16)
    here, options = p.to(subject.device), {"init_blocks": init_blocks, "local_blocks": local_blocks, "softmax_scale": 0.3}
    _, index_q, (k, v), index_k = stored(here, "paged", 8)
    options |= {"block_size": 16, "return_lse": True}
    results = subject.run(msa_attention, here.q, k, v, index_q, index_k, 3, here.seqs, **options)
    assert_both_close(results, oracle.honest_attention(p, reads, 0.3), oracle.attention(p, reads, 0.3))


@subjects(msa_attention)
def test_the_stages_by_hand(subject):
    """The path is its two stages, one after the other; out comes alone unless the lse is asked for."""
    p = problem((70, 5), (90, 33), dtype=subject.dtype).to(subject.device)
    blocks = subject.run(select_blocks, p.index_q, p.index_k, 2, p.seqs, block_size=16)
    options = {"block_size": 16, "return_lse": True}
    by_hand = subject.run(sparse_attention, p.q, p.k, p.v, blocks, p.seqs, **options)
    results = subject.run(msa_attention, p.q, p.k, p.v, p.index_q, p.index_k, 2, p.seqs, **options)
    for name, a, b in zip(("out", "lse"), results, by_hand, strict=True):
        assert_equal(name, a, b)
    assert_equal("out", subject.run(msa_attention, p.q, p.k, p.v, p.index_q, p.index_k, 2, p.seqs, block_size=16), by_hand[0])


@subjects(msa_attention, every_dtype=True)
@pytest.mark.parametrize("step", [1, 3, 20])
def test_appended_decode_is_prefill(subject, step):
    """Two sequences grow by `step` tokens a call, the first from nothing, the second behind a prompt: what each call gives is
    what one prefill gives, on pages that were assigned in any order."""
    p = problem((40, 40), (40, 73), dtype=subject.dtype, integer_index=True)
    blocks = oracle.select_blocks(p, oracle.block_scores(p, 16), 16, 3)
    reads = oracle.reads_of_blocks(blocks, 16)
    truth, honest = oracle.attention(p, reads), oracle.honest_attention(p, reads)
    p = p.to(subject.device)

    table = torch.tensor([[13, 2, 7, 4, 11, -1, -1], [0, 9, 5, 12, 1, 10, 3]], dtype=torch.int32, device=subject.device)
    table = torch.cat([table, torch.tensor([[-1] * 3, [6, 14, 8]], dtype=torch.int32, device=subject.device)], 1)
    kv = PagedKV.allocate(table, 15, 2, 8, 64, subject.dtype)
    index_keys = PagedIndexKeys.allocate(table, 15, 1, 8, 64, subject.dtype)
    prompt = torch.tensor([0, 0, 33], dtype=torch.int32, device=subject.device)
    kv.append(p.k[40:73], p.v[40:73], prompt)
    index_keys.append(p.index_k[40:73], prompt)

    collected = []
    for start in range(0, 40, step):
        n = min(step, 40 - start)
        keys = torch.cat([torch.arange(first + start, first + start + n) for first in (0, 73)])
        rows = torch.cat([torch.arange(first + start, first + start + n) for first in (0, 40)])
        kv.append(p.k[keys], p.v[keys])
        index_keys.append(p.index_k[keys])
        seqs = Sequences(torch.tensor([0, n, 2 * n], dtype=torch.int32, device=subject.device), None, n, 73)
        options = {"block_size": 16, "return_lse": True}
        chosen = subject.run(select_blocks, p.index_q[rows], index_keys, 3, seqs, block_size=16)
        assert_equal("blocks", chosen, blocks[rows])
        collected.append(
            (rows, subject.run(msa_attention, p.q[rows], kv, None, p.index_q[rows], index_keys, 3, seqs, **options))
        )
    order = torch.cat([rows for rows, _ in collected]).argsort()
    results = [torch.cat([result[i] for _, result in collected])[order.to(subject.device)] for i in range(2)]
    assert_both_close(results, honest, truth)


@subjects(msa_attention)
@pytest.mark.parametrize(("q_lens", "k_lens"), [((), ()), ((0,), (0,)), ((0, 0), (5, 0)), ((3,), (0,)), ((0, 2), (0, 0))])
def test_nothing_to_do(subject, q_lens, k_lens):
    p = problem(q_lens, k_lens, dtype=subject.dtype).to(subject.device)
    for storage in ("flat", "paged"):
        q, index_q, (k, v), index_k = stored(p, storage)
        options = {"block_size": 16, "return_lse": True, "query_chunk": 1}
        out, lse = subject.run(msa_attention, q, k, v, index_q, index_k, 3, p.seqs, **options)
        assert_equal("out", out, torch.zeros_like(q))
        assert_equal("lse", lse, torch.full(lse.shape, -torch.inf))


@pytest.mark.parametrize("storage", ["flat", "paged"])
def test_memory_is_bounded(storage):
    """The default on CPU keeps within the workspace that it promises (OPENMSA_CPU_WORKSPACE_MIB) and its results, on 8192
    tokens, where dense logits would take 1 GiB and all index scores 256 MiB."""
    p = problem((8192,), (8192,), kv_heads=1, group=4)
    q, index_q, (k, v), index_k = (p.q, p.index_q, (p.k, p.v), p.index_k) if storage == "flat" else stored(p, "paged", 64)
    memory = peak_memory(msa_attention, q, k, v, index_q, index_k, 8, block_size=64)
    results = 8192 * 4 * (64 + 1) * 4
    assert memory.peak <= 256 * MIB + results
    assert memory.largest <= 128 * MIB


def test_memory_does_not_grow_with_the_square():
    """Twice the tokens take about twice the memory."""
    peaks = []
    for n in (4096, 8192):
        p = problem((n,), (n,), kv_heads=1, group=4)
        peaks.append(peak_memory(msa_attention, p.q, p.k, p.v, p.index_q, p.index_k, 8, block_size=64, query_chunk=1024).peak)
    assert peaks[1] <= 2.2 * peaks[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_memory_is_bounded_on_a_gpu():
    """A call of 32K tokens takes at most 4 GiB, where scores would take 2 GiB and partials 8 GiB if nothing were chunked."""
    p = problem((32768,), (32768,), kv_heads=4, group=16, index_heads=4, head_dim=128, dtype=torch.bfloat16).to("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    msa_attention(p.q, p.k, p.v, p.index_q, p.index_k)
    assert torch.cuda.max_memory_allocated() - before <= 4 << 30


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_wild_pages_harm_no_other_sequence():
    """On a GPU page ids are not checked unless asked: a wrong one is not followed, and other sequences do not notice."""
    p = problem((4, 1, 3), (100, 90, 64), dtype=torch.bfloat16).to("cuda")
    kv, index_keys = paged(p, 16)
    arguments = (p.q, kv, None, p.index_q, index_keys, 3, p.seqs)
    right = msa_attention(*arguments, block_size=16)
    kv.page_table[1] = torch.tensor(WILD_IDS * 2, device="cuda")[: kv.page_table.shape[1]]
    wrong = msa_attention(*arguments, block_size=16)
    torch.cuda.synchronize()
    for rows in (slice(0, 4), slice(5, 8)):
        assert_equal("out", wrong[rows], right[rows])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_wild_lengths_harm_no_other_sequence():
    """A length past the page table counts as all that the table holds, one below 0 as none, and other sequences do not
    notice."""
    p = problem((4, 1, 3, 2), (100, 90, 64, 20), dtype=torch.bfloat16).to("cuda")
    kv, index_keys = paged(p, 16)
    seqs = Sequences(p.seqs.cu_seqlens_q)
    right = msa_attention(p.q, kv, None, p.index_q, index_keys, 3, seqs, block_size=16)
    for lens in (kv.seq_lens, index_keys.seq_lens):
        lens[1], lens[3] = 2**30, -5
    wrong = msa_attention(p.q, kv, None, p.index_q, index_keys, 3, seqs, block_size=16)
    torch.cuda.synchronize()
    for rows in (slice(0, 4), slice(5, 8)):
        assert_equal("out", wrong[rows], right[rows])
    assert not wrong[8:].any()


@subjects(msa_attention)
def test_caches_stay_as_they_are(subject):
    p = problem((5, 2), (40, 33), dtype=subject.dtype).to(subject.device)
    kv, index_keys = paged(p, 16)
    before = [x.clone() for x in (*vars(kv).values(), *vars(index_keys).values())]
    subject.run(msa_attention, p.q, kv, None, p.index_q, index_keys, 3, p.seqs, block_size=16)
    for now, then in zip((*vars(kv).values(), *vars(index_keys).values()), before, strict=True):
        assert_equal("cache", now, then)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("in_pages", [False, True], ids=["packed", "paged"])
def test_known_calls_follow_lengths_that_are_read(in_pages):
    """Stages and the whole path make launches of earlier calls again. Where maxima are left to be read, lengths may change in
    tensors of the same shapes: every result is that of the host's code."""
    for lengths in (((100, 300), (900, 1100)), ((10, 390), (1500, 500)), ((100, 300), (900, 1100)), ((399, 1), (399, 1601))):
        p = problem(*lengths, kv_heads=2, group=4, index_heads=2, dtype=torch.bfloat16).to("cuda")
        seqs = Sequences(p.seqs.cu_seqlens_q, None if in_pages else p.seqs.cu_seqlens_k)
        k, v, index_k = (
            (p.k, p.v, p.index_k) if not in_pages else (lambda kv, index_keys: (kv, None, index_keys))(*paged(p, 16))
        )
        torch.full((1 << 22,), torch.nan, device="cuda")  # This is freed again, so that what no launch writes holds NaN.
        blocks = select_blocks(p.index_q, index_k, 4, seqs, block_size=16, check=True)
        calls = {
            "blocks": functools.partial(select_blocks, p.index_q, index_k, 4, seqs),
            "whole path": functools.partial(msa_attention, p.q, k, v, p.index_q, index_k, 4, seqs),
            "out": functools.partial(sparse_attention, p.q, k, v, blocks, seqs),
            "lse": functools.partial(sparse_attention, p.q, k, v, blocks, seqs, return_lse=True),
            "dense": functools.partial(dense_attention, p.q, k, v, seqs),
            "dense and lse": functools.partial(dense_attention, p.q, k, v, seqs, return_lse=True),
        }
        for name, call in calls.items():
            expected, *known = (call(block_size=16, check=check) for check in (True, False, False))
            for result in known:
                for mine, host in zip(*((x,) if torch.is_tensor(x) else x for x in (result, expected)), strict=True):
                    assert_equal(name, mine, host)


def calls_on_a_gpu():
    """Returns a problem on a GPU, calls of both attentions and of the whole path on it, and a selection without its count."""
    p = problem((40,), (500,), kv_heads=2, group=4, index_heads=2, dtype=torch.bfloat16).to("cuda")
    blocks = select_blocks(p.index_q, p.index_k, 4, block_size=16)
    attention = (
        functools.partial(msa_attention, p.q, p.k, p.v, p.index_q, p.index_k, 4),
        functools.partial(sparse_attention, p.q, p.k, p.v, blocks),
        functools.partial(dense_attention, p.q, p.k, p.v),
    )
    return p, attention, functools.partial(select_blocks, p.index_q, p.index_k)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_known_calls_are_of_one_number():
    """Numbers of subclasses belong to the kind of a call, and those of other types are refused, known or not."""
    count = enum.IntEnum("Count", {"few": 2, "more": 4})
    p, attention, selection = calls_on_a_gpu()
    for call in attention:
        for scale in (np.float64(0.1), np.float64(0.4), 0.1, 0.4):
            expected = call(block_size=16, softmax_scale=float(scale), check=True)
            for _ in range(2):
                assert_equal("out", call(block_size=16, softmax_scale=scale), expected)
    for topk in (count.few, count.more, 2, 4, 1):
        expected = selection(int(topk), block_size=16, check=True)
        for _ in range(2):
            assert_equal("blocks", selection(topk, block_size=16), expected)
    for call, wrong in ((selection, {"topk": True}), *((x, {"return_lse": 0}) for x in attention)):
        for argument, value in {**wrong, "check": 0, "block_size": 16.0}.items():
            with pytest.raises(TypeError, match=argument):
                call(**{"block_size": 16, argument: value})
    for q in (p.q.to_sparse(), torch.nested.nested_tensor(list(p.q))):
        with pytest.raises(TypeError, match="q must be a dense tensor"):
            dense_attention(q, p.k, p.v)
        with pytest.raises(TypeError, match="q must be a dense tensor"):
            msa_attention(q, p.k, p.v, p.index_q, p.index_k)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("offset", [None, 100])
def test_references_compute_every_time(offset):
    _, attention, selection = calls_on_a_gpu()
    seqs = Sequences(q_offset=None if offset is None else torch.tensor([offset], dtype=torch.int32, device="cuda"))
    for call in (*attention, functools.partial(selection, 4)):
        expected, *others = (call(seqs=seqs, block_size=16, impl="reference", check=check) for check in (True, False, False))
        for other in others:
            assert_equal("result", other, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_known_calls_of_stages_on_streams_and_in_graphs():
    """Known calls run on the current stream, write to new memory, and are captured."""
    _, attention, selection = calls_on_a_gpu()
    for stage in (*attention, functools.partial(selection, 4)):
        call = functools.partial(stage, block_size=16)
        expected = call(check=True)
        first, second = call(), call()
        assert len({x.data_ptr() for x in (expected, first, second)}) == 3, "results are new memory"
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            third = call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        captured.fill_(0)
        graph.replay()
        for result in (first, second, third, captured):
            assert_equal("result", result, expected)
