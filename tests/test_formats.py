# SPDX-License-Identifier: MIT
"""Every stage agrees, on every format, with float64 on the numbers that the stored codes and scales stand for."""

import functools
from dataclasses import replace
from itertools import product

import pytest
import torch

from openmsa import (
    E4M3,
    MXFP4,
    NVFP4,
    Int8,
    PagedKV,
    block_scores,
    dense_attention,
    explain,
    msa_attention,
    select_blocks,
    sparse_attention,
)
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import problem, random_blocks
from tests import oracle
from tests.contract import SHAPES, all_subjects, param, subjects
from tests.low_precision import (
    INDEX_FORMATS,
    KEY_FORMATS,
    STORAGES,
    codes_of,
    exact_index,
    honest_e4m3_attention,
    stored_problem,
)

FEW = [SHAPES[n] for n in (1, 2, 3, 8, 9, 10, 11)]  # block sizes 48, 32, 128, 48, 32, 256, 16; odd pages, shared selections


def cases(function, formats, every_dtype=False):
    """Returns a test for each implementation, format, storage and kind of queries; the shape changes from one to the next."""
    rows = []
    for subject in all_subjects(function, every_dtype):
        options = product(formats, STORAGES, ("plain", "e4m3") if not every_dtype else ("plain",))
        for n, (name, storage, q_format) in enumerate(options):
            shape = FEW[(7 * n + 3 * (n // len(STORAGES))) % len(FEW)]
            if every_dtype and storage not in ("flat", "paged"):
                continue
            rows.append(param(subject, shape, name, storage, q_format))
    return pytest.mark.parametrize(("subject", "shape", "name", "storage", "q_format"), rows)


@functools.lru_cache(maxsize=256)
def main_case(shape, dtype, name, storage, q_format, device):
    """Returns the problem, block ids, and (out, lse) of sparse and dense attention: the truth, and honest PyTorch in
    `dtype`."""
    p = shape.problem(dtype, blocks=3)
    s = stored_problem(p, name, "plain", storage, shape.page_size, q_format)
    blocks = random_blocks(p, min(shape.topk, 4), shape.block_size, 1 if shape.shared_selection else shape.kv_heads)
    results = []
    for reads in (oracle.reads_of_blocks(blocks, shape.block_size), oracle.reads_everything(p)):
        results += [oracle.attention(s.numbers, reads), honest_attention(s, reads, dtype, name, q_format, device)]
    return s, blocks, results


def honest_attention(s, reads, dtype, name, q_format, device):
    """Returns honest attention in the dtype of the queries; of E4M3 queries in bfloat16, and on a GPU with E4M3 weights where
    all else is E4M3."""
    if q_format == "e4m3" and name.startswith("e4m3") and device != "cpu":
        return honest_e4m3_attention(s.numbers, reads, **s.factors("q", "k", device))
    return oracle.honest_attention(s.honest(torch.bfloat16 if q_format == "e4m3" else dtype), reads)


def assert_both(results, honest, truth):
    for name, tested, h, t in zip(("out", "lse"), results, honest, truth, strict=True):
        assert_close(name, tested, h, t)


@cases(sparse_attention, KEY_FORMATS)
def test_sparse_attention(subject, shape, name, storage, q_format):
    s, blocks, (truth, honest, _, _) = main_case(shape, subject.dtype, name, storage, q_format, subject.device)
    here = s.to(subject.device)
    blocks, options = blocks.to(subject.device), {"block_size": shape.block_size, "return_lse": True}
    results = subject.run(sparse_attention, here.q, *here.kv, blocks, here.seqs, **options)
    assert_both(results, honest, truth)


@subjects(sparse_attention)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", KEY_FORMATS)
def test_many_queries_a_block(subject, name, storage):
    """Results are right for keys that 64 queries or more read, alike or not, and with a scale below 0."""
    p = problem((67, 0, 40), (70, 0, 75), kv_heads=2, group=3, head_dim=48, dtype=subject.dtype, offsets=(3, 0, 30))
    s = stored_problem(p, name, "plain", storage, 7)
    blocks = random_blocks(p, 12, 16, 2)
    blocks[80:] = blocks[80:81]
    reads = oracle.reads_of_blocks(blocks, 16)
    truth, honest = oracle.attention(s.numbers, reads, -0.2), oracle.honest_attention(s.honest(subject.dtype), reads, -0.2)
    here, options = s.to(subject.device), {"block_size": 16, "softmax_scale": -0.2, "return_lse": True}
    results = subject.run(sparse_attention, here.q, *here.kv, blocks.to(subject.device), here.seqs, **options)
    assert_both(results, honest, truth)


@cases(dense_attention, KEY_FORMATS)
def test_dense_attention(subject, shape, name, storage, q_format):
    s, _, (_, _, truth, honest) = main_case(shape, subject.dtype, name, storage, q_format, subject.device)
    here = s.to(subject.device)
    results = subject.run(dense_attention, here.q, *here.kv, here.seqs, return_lse=True)
    assert_both(results, honest, truth)


@cases(sparse_attention, ("e4m3", "nvfp4"), every_dtype=True)
def test_queries_of_any_dtype(subject, shape, name, storage, q_format):
    """Queries of float64 make a float64 result from float64 numbers."""
    s, blocks, (truth, honest, _, _) = main_case(shape, subject.dtype, name, storage, q_format, subject.device)
    here = s.to(subject.device)
    options = {"block_size": shape.block_size, "return_lse": True}
    results = subject.run(sparse_attention, here.q, *here.kv, blocks.to(subject.device), here.seqs, **options)
    assert_both(results, honest, truth)


@cases(block_scores, INDEX_FORMATS)
def test_block_scores(subject, shape, name, storage, q_format):
    p = shape.problem(subject.dtype, blocks=3, index_dim=shape.head_dim // 32 * 32 or 32, index_key_heads=1)
    s = stored_problem(p, "plain", name, storage, shape.page_size, q_format)
    truth = oracle.block_scores(s.numbers, shape.block_size)
    rounded = s.honest(torch.bfloat16 if q_format == "e4m3" else subject.dtype)
    honest = oracle.honest_scores(rounded, shape.block_size, **s.factors("index_q", "index_k", subject.device))
    here = s.to(subject.device)
    scores = subject.run(block_scores, here.index_q, here.index_k, here.seqs, block_size=shape.block_size)
    assert_close("scores", scores, honest.float(), truth)


@cases(select_blocks, INDEX_FORMATS)
def test_exact_scores_select_exactly(subject, shape, name, storage, q_format):
    """Where the format holds the numbers and their products are exact, scores and selections are equal, ties included."""
    topk, local = min(shape.topk, 4), {"init_blocks": 0, "local_blocks": 1}
    p = exact_index(shape.problem(subject.dtype, blocks=6, index_dim=64, index_key_heads=1), name)
    scale = {"e4m3": 0.5, "nvfp4": 1.0}.get(name.split()[0])
    s = stored_problem(p, "plain", name, storage, shape.page_size, "plain", scale)
    if q_format == "e4m3":
        s = replace(s, index_q=E4M3.quantize(p.index_q, 0.5))
    truth = oracle.block_scores(replace(s.numbers, index_q=p.index_q.double()), shape.block_size)
    here = s.to(subject.device)
    scores = subject.run(block_scores, here.index_q, here.index_k, here.seqs, block_size=shape.block_size)
    assert_equal("scores", scores, truth.float())
    chosen = subject.run(select_blocks, here.index_q, here.index_k, topk, here.seqs, block_size=shape.block_size, **local)
    assert_equal("blocks", chosen, oracle.select_blocks(p, truth, shape.block_size, topk, **local))


@subjects(dense_attention)
@pytest.mark.parametrize("name", KEY_FORMATS)
def test_max_scores(subject, name):
    p = problem((5, 3), (70, 40), dtype=subject.dtype)
    s = stored_problem(p, name, storage="paged")
    truth = oracle.block_scores(s.numbers, 32, s.numbers.q, s.numbers.k)
    honest = s.honest(subject.dtype)
    here = s.to(subject.device)
    options = {"return_out": False, "return_max_score": True, "block_size": 32}
    scores = subject.run(dense_attention, here.q, *here.kv, here.seqs, **options)
    assert_close("max_score", scores, oracle.honest_scores(honest, 32, honest.q, honest.k), truth)


@subjects(sparse_attention)
@pytest.mark.parametrize("factor", [2.0**-6, 1.0, 2.0**5])
def test_every_scale_is_honoured(subject, factor):
    """A larger scale of q or k is a larger scale of the softmax, one of v larger results: in out and in lse, bit for bit."""
    p = problem((9, 2), (90, 40), dtype=subject.dtype).to(subject.device)
    blocks = random_blocks(p, 3, 16, 2)
    q, k, v = (E4M3.quantize(x, per="head") for x in (p.q, p.k, p.v))
    options = {"block_size": 16, "return_lse": True}

    def whole(x, by):
        return E4M3(x.data, x.scale * by)

    base = subject.run(sparse_attention, p.q, k, v, blocks, p.seqs, softmax_scale=0.125 * factor, **options)
    scaled = subject.run(sparse_attention, p.q, whole(k, factor), v, blocks, p.seqs, softmax_scale=0.125, **options)
    assert_equal("out, k", scaled[0], base[0])
    assert_equal("lse, k", scaled[1], base[1])
    scaled = subject.run(sparse_attention, p.q, k, whole(v, factor), blocks, p.seqs, softmax_scale=0.125 * factor, **options)
    assert_equal("out, v", scaled[0], base[0] * factor)
    assert_equal("lse, v", scaled[1], base[1])
    base = subject.run(sparse_attention, q, k, v, blocks, p.seqs, softmax_scale=0.125 * factor, **options)
    scaled = subject.run(sparse_attention, whole(q, factor), k, v, blocks, p.seqs, softmax_scale=0.125, **options)
    assert_equal("out, q", scaled[0], base[0])
    assert_equal("lse, q", scaled[1], base[1])


@subjects(msa_attention)
@pytest.mark.parametrize(("name", "index_name"), [("e4m3", "int8"), ("nvfp4", "mxfp4"), ("e4m3 page", "certified")])
@pytest.mark.parametrize("q_format", ["plain", "e4m3"])
def test_the_whole_path(subject, name, index_name, q_format):
    """The whole path is right, in chunks too, and of queries in E4M3 too."""
    p = exact_index(problem((40, 1, 3), (90, 33, 3), dtype=subject.dtype, index_dim=64, shared_prefix=16), index_name)
    s = stored_problem(p, name, index_name, "paged", 16)
    if q_format == "e4m3":
        q = E4M3.quantize(p.q, per="head")
        numbers = replace(s.numbers, q=q.dequantize(torch.float64))
        s = replace(s, q=q, index_q=E4M3.quantize(p.index_q, 1.0), numbers=numbers, codes=s.codes | {"q": codes_of(q)})
    blocks = oracle.select_blocks(p, oracle.block_scores(s.numbers, 16), 16, 3)
    reads = oracle.reads_of_blocks(blocks, 16)
    truth = oracle.attention(s.numbers, reads)
    honest = honest_attention(s, reads, subject.dtype, name, q_format, subject.device)
    here = s.to(subject.device)
    for chunk in (None, 7):
        options = {"block_size": 16, "return_lse": True, "query_chunk": chunk}
        out, lse = subject.run(msa_attention, here.q, *here.kv, here.index_q, here.index_k, 3, here.seqs, **options)
        assert_both((out, lse), honest, truth)


X = torch.ones(20, 2, 64)
BAD = {
    "mxfp4 values": (TypeError, ("k ", "e4m3 or nvfp4", "mxfp4"), (X, MXFP4.quantize(X), MXFP4.quantize(X))),
    "int8 values": (TypeError, ("k ", "e4m3 or nvfp4", "int8"), (X, Int8.quantize(X), Int8.quantize(X))),
    "two formats": (TypeError, ("v ", "stored as k (e4m3)", "nvfp4 linear"), (X, E4M3.quantize(X), NVFP4.quantize(X))),
    "one format": (TypeError, ("v ", "stored as k (e4m3)", "plain"), (X, E4M3.quantize(X), X)),
    "queries": (TypeError, ("q ", "e4m3", "nvfp4"), (NVFP4.quantize(X), X, X)),
    "plain dtypes": (TypeError, ("k ", "dtype of q", "float16"), (X, X.half(), X.half())),
    "head_dim": (ValueError, ("k.shape[2]", "64", "32"), (X, *(E4M3.quantize(X[..., :32]) for _ in "kv"))),
    "rank": (
        ValueError,
        ("k ", "[total_k, num_kv_heads, head_dim]", "(1, 20, 2, 64)"),
        (X, *(E4M3.quantize(X[None]) for _ in "kv")),
    ),
    "device": (ValueError, ("k ", "device of q", "meta"), (X, *(E4M3.quantize(X).to("meta") for _ in "kv"))),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("function", [dense_attention, sparse_attention])
def test_bad_formats(function, case):
    error, words, (q, k, v) = BAD[case]
    blocks = (torch.zeros(20, 1, 1, dtype=torch.int32),) if function is sparse_attention else ()
    with pytest.raises(error) as caught:
        function(q, k, v, *blocks)
    for word in words:
        assert word in str(caught.value)


def test_check_reads_numbers():
    bad = E4M3.quantize(X)
    bad.write((3, 1), torch.full((64,), torch.nan))
    with pytest.raises(ValueError, match=r"k must hold no NaN, got NaN at \(3, 1, 0\)"):
        dense_attention(X, bad, bad, check=True)
    with pytest.raises(ValueError, match=r"index_k must hold no NaN, got NaN at \(3, 1, 0\)"):
        block_scores(X, bad, check=True)
    with pytest.raises(ValueError, match=r"q must hold no NaN"):
        dense_attention(bad, X.bfloat16(), X.bfloat16(), check=True)


def test_explain_names_the_format():
    text = str(explain(dense_attention, X, NVFP4.quantize(X), NVFP4.quantize(X)))
    assert "dense_attention: cpu" in text
    cache = PagedKV(*(E4M3.allocate((4, 2, 16, 64)) for _ in "kv"), torch.zeros(1, 2).int(), torch.tensor([20]).int())
    assert "dense_attention: cpu" in str(explain(dense_attention, X, cache))
