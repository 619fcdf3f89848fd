# SPDX-License-Identifier: MIT
"""One call of C kernels for a new token gives what the stages give, bit for bit, in short and in long contexts."""

import pytest
import torch

from openmsa import E4M3, DecodePlan, PagedIndexKeys, PagedKV, Sequences, msa_attention, select_blocks, sparse_attention
from openmsa.decode import cpu_step
from openmsa.runtime import c_library
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem, strided
from tests import instructions

pytestmark = instructions.needs_compiler

LENGTHS = (40, 1, 17, 5000, 90)
OPTIONS = {"topk": 5, "block_size": 16}


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Returns the names of the tasks of each run."""
    made, run = [], c_library.run
    monkeypatch.setattr(c_library, "run", lambda *tasks: (made.append([task.name for task in tasks]), run(*tasks))[1])
    return made


def tokens(lengths=LENGTHS, **sizes):
    sizes = {"kv_heads": 2, "group": 3, "head_dim": 48, "index_dim": 32} | sizes
    return problem([1] * len(lengths), lengths, **sizes)


def stages(q, k, v, index_q, index_k, seqs, **options):
    """Runs the stages one after the other."""
    blocks = select_blocks(index_q, index_k, seqs=seqs, impl="cpu", **options)
    return sparse_attention(q, k, v, blocks, seqs, block_size=options["block_size"], return_lse=True, impl="cpu"), blocks


def same(found, expected):
    for name, x, y in zip(("out", "lse"), found, expected, strict=True):
        assert_equal(name, x, y)


@pytest.mark.parametrize("options", [{}, {"local_blocks": 3, "init_blocks": 2}, {"local_blocks": 0}, {"topk": 64}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("index_heads", "index_key_heads"), [(2, 1), (2, 2), (1, 1)])
def test_it_has_the_bits_of_the_stages(index_heads, index_key_heads, dtype, options, processor, runs):
    p = tokens(index_heads=index_heads, index_key_heads=index_key_heads, dtype=dtype)
    kv, index_keys = paged(p, 32)
    each = Sequences(p.seqs.cu_seqlens_q)
    expected, blocks = stages(p.q, p.k, p.v, p.index_q, p.index_k, p.seqs, **OPTIONS | options)
    runs.clear()
    for given in ((p.q, p.k, p.v, p.index_q, p.index_k, p.seqs), (p.q, kv, None, p.index_q, index_keys, each)):
        *tensors, seqs = given
        with PoisonedOutputs():
            same(msa_attention(*tensors, seqs=seqs, return_lse=True, **OPTIONS | options), expected)
    assert {tuple(run) for run in runs} <= {("score_few", "choose", "attend"), ("choose", "attend")}
    assert len(runs) == 2 * len(LENGTHS)
    plan = DecodePlan(
        max_batch=8, num_q_heads=6, num_kv_heads=2, head_dim=48, page_size=32, max_pages=kv.page_table.shape[1], index_dim=32,
        index_heads=index_heads, index_key_heads=index_key_heads, dtype=dtype, device="cpu", **OPTIONS | options,
    )  # fmt: skip
    same((plan.run(p.q, kv, p.index_q, index_keys), plan.lse[: len(LENGTHS)]), expected)
    assert_equal("blocks", plan.blocks[: len(LENGTHS)], blocks)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads, monkeypatch):
    p = tokens((5000,), kv_heads=3)
    given = (p.q, p.k, p.v, p.index_q, p.index_k)
    expected = msa_attention(*given, **OPTIONS, return_lse=True)
    monkeypatch.setattr(c_library, "threads_for", lambda products: threads)
    same(msa_attention(*given, **OPTIONS, return_lse=True), expected)


def test_strides_and_formats(runs):
    """Interleaved pools and views of wider tensors are read where they lie, E4M3 caches as they are stored."""
    p = tokens()
    expected, _ = stages(p.q, p.k, p.v, p.index_q, p.index_k, p.seqs, **OPTIONS)
    views = [strided(x) for x in (p.q, p.k, p.v, p.index_q, p.index_k)]
    kv, index_keys = paged(p, 32, interleaved=True)
    runs.clear()
    same(msa_attention(*views, seqs=p.seqs, return_lse=True, **OPTIONS), expected)
    each = Sequences(p.seqs.cu_seqlens_q)
    same(msa_attention(views[0], kv, None, views[3], index_keys, seqs=each, return_lse=True, **OPTIONS), expected)
    assert len(runs) == 2 * len(LENGTHS)
    k, v, index_k = (E4M3.quantize(x) for x in (p.k, p.v, p.index_k))
    expected, _ = stages(p.q, k, v, p.index_q, index_k, p.seqs, **OPTIONS)
    runs.clear()
    same(msa_attention(p.q, k, v, p.index_q, index_k, seqs=p.seqs, return_lse=True, **OPTIONS), expected)
    assert len(runs) == len(LENGTHS)


def test_sequences_without_a_query_or_keys(runs):
    """A query in front of the keys sees none; one behind them sees all; one in the middle those up to it."""
    p = problem((1, 0, 1, 1, 1), (50, 30, 0, 70, 70), kv_heads=2, group=2, head_dim=32, index_dim=16)
    offset = torch.tensor([80, 5, 0, -1, 33], dtype=torch.int32)
    starts = [torch.tensor(x, dtype=torch.int32).cumsum(0).int() for x in ([0, 1, 0, 1, 1, 1], [0, 50, 30, 0, 70, 70])]
    seqs = Sequences(*starts, q_offset=offset)
    given = (p.q, p.k, p.v, p.index_q, p.index_k)
    expected, _ = stages(*given, seqs, **OPTIONS)
    runs.clear()
    with PoisonedOutputs():
        found = msa_attention(*given, seqs=seqs, return_lse=True, **OPTIONS)
    same(found, expected)
    assert len(runs) == 2
    assert not found[0][1:3].any()
    assert bool((found[1][1:3] == -torch.inf).all())


def test_what_it_does_not_serve(runs):
    p = tokens()
    wide = [x.double() for x in (p.q, p.k, p.v)]
    assert msa_attention(*wide, p.index_q, p.index_k, seqs=p.seqs, **OPTIONS).dtype == torch.float64
    more = problem((2, 1), (40, 60), kv_heads=2, group=3)
    msa_attention(more.q, more.k, more.v, more.index_q, more.index_k, seqs=more.seqs, **OPTIONS)
    q = p.q.clone().requires_grad_()
    msa_attention(q, p.k, p.v, p.index_q, p.index_k, seqs=p.seqs, **OPTIONS).sum().backward()
    assert bool(q.grad.isfinite().all())
    assert all(len(run) == 1 for run in runs)


def test_keys_that_are_nan_are_not_selected():
    """A product that is NaN is no product: a block without others is not selected unless it is forced."""
    p = tokens((200,), index_heads=1)
    p.index_k[16:48] = torch.nan
    options = {"topk": 64, "block_size": 16}
    expected, blocks = stages(p.q, p.k, p.v, p.index_q, p.index_k, p.seqs, **options)
    assert not set(blocks.flatten().tolist()) & {1, 2}
    same(msa_attention(p.q, p.k, p.v, p.index_q, p.index_k, **options, return_lse=True), expected)


def test_pages_that_are_not_there_are_refused():
    p = tokens((100,))
    kv, index_keys = paged(p, 32)
    kv = PagedKV(kv.k, kv.v, kv.page_table.clone(), kv.seq_lens)
    kv.page_table[0, 1] = kv.num_pages
    with pytest.raises(ValueError, match="page_table"):
        msa_attention(p.q, kv, None, p.index_q, PagedIndexKeys(index_keys.keys, kv.page_table, kv.seq_lens), **OPTIONS)


def test_it_is_there_with_a_compiler(monkeypatch):
    assert cpu_step.compiled()
    instructions.use_none(monkeypatch)
    assert not cpu_step.compiled()
