# SPDX-License-Identifier: MIT
"""Every implementation of `sparse_attention` keeps its contract."""

import functools
import math

import pytest
import torch

from openmsa import sparse_attention
from openmsa.runtime.dispatch import Implementation, Stage
from openmsa.sparse_attention import STAGE
from openmsa.sparse_attention.refusals import DECODE_QUERIES
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import WILD_IDS, paged, problem, random_blocks
from tests import oracle
from tests.contract import SHAPES, combinations, one_sequence, shapes, stored, subjects


def truth_and_honest(p, blocks, block_size, scale=None):
    """Returns (out, lse) in float64, and as honest PyTorch gives them in the dtype of the inputs."""
    reads = oracle.reads_of_blocks(blocks, block_size)
    return oracle.attention(p, reads, scale), oracle.honest_attention(p, reads, scale)


@functools.cache
def case(shape, dtype):
    p = shape.problem(dtype)
    blocks = random_blocks(p, shape.topk, shape.block_size, 1 if shape.shared_selection else shape.kv_heads)
    return p, blocks, *truth_and_honest(p, blocks, shape.block_size)


def check(subject, p, blocks, block_size, truth, honest, storage="flat", page_size=16, **options):
    """Runs the subject on the problem and holds both results against the truth."""
    here = p.to(subject.device)
    q, _, (k, v), _ = stored(here, storage, page_size)
    blocks = blocks.to(subject.device)
    options = {"block_size": block_size, "return_lse": True} | options
    out, lse = subject.run(sparse_attention, q, k, v, blocks, here.seqs, **options)
    assert_close("out", out, honest[0], truth[0])
    assert_close("lse", lse, honest[1], truth[1])


@combinations(sparse_attention)
def test_against_the_truth(subject, shape, storage):
    p, blocks, truth, honest = case(shape, subject.dtype)
    check(subject, p, blocks, shape.block_size, truth, honest, storage, shape.page_size)


@subjects(sparse_attention)
@shapes
def test_wild_ids_read_nothing(subject, shape):
    """Any id that names no visible block is skipped, wherever it stands, also one that would overflow when multiplied."""
    p, blocks, _, _ = case(shape, subject.dtype)
    p, blocks = p.to(subject.device), blocks.to(subject.device)
    gaps = (blocks < 0).nonzero()
    wild = blocks.clone()
    ids = [i for i in (*WILD_IDS, -7, 2**24 + 1, 2**27) for _ in range(2)]
    for n, (row, head, slot) in enumerate(gaps.tolist()):
        wild[row, head, slot] = ids[n % len(ids)]
    for storage in ("flat", "paged"):
        q, _, (k, v), _ = stored(p, storage, shape.page_size)
        options = {"block_size": shape.block_size, "return_lse": True}
        expected = subject.run(sparse_attention, q, k, v, blocks, p.seqs, **options)
        for name, result, same in zip(
            ("out", "lse"), subject.run(sparse_attention, q, k, v, wild, p.seqs, **options), expected, strict=True
        ):
            assert_equal(name, result, same)


@subjects(sparse_attention, every_dtype=True)
def test_the_order_of_ids_is_free(subject):
    """Ascending, descending and shuffled ids give the same, with the gaps anywhere, from views of any strides."""
    shape = SHAPES[2]
    p, blocks, truth, honest = case(shape, subject.dtype)
    wide = torch.full((*blocks.shape[:2], 2 * shape.topk), 0, dtype=torch.int32)
    wide[..., ::2] = blocks.sort(-1).values
    for ids in (blocks.sort(-1).values, blocks.sort(-1, descending=True).values, blocks.flip(-1), wide[..., ::2]):
        check(subject, p, ids, shape.block_size, truth, honest)


@subjects(sparse_attention)
def test_one_selection_for_all_heads(subject):
    p = problem((9,), (80,), kv_heads=3, dtype=subject.dtype).to(subject.device)
    blocks = random_blocks(p, 3, 16, 1)
    options = {"block_size": 16, "return_lse": True}
    shared = subject.run(sparse_attention, p.q, p.k, p.v, blocks, **options)
    each = subject.run(sparse_attention, p.q, p.k, p.v, blocks.expand(-1, 3, -1), **options)
    for name, a, b in zip(("out", "lse"), shared, each, strict=True):
        assert_equal(name, a, b)


@subjects(sparse_attention)
def test_nothing_selected(subject):
    """A row of -1, a row whose blocks all lie ahead, and a row before position 0 give 0 and an lse of -inf."""
    p = problem((3, 3), (40, 1), dtype=subject.dtype).to(subject.device)
    blocks = torch.full((6, 2, 2), -1, dtype=torch.int32, device=subject.device)
    blocks[1], blocks[3:, :, 0] = 3, 0
    for storage in ("flat", "paged"):
        q, _, (k, v), _ = stored(p, storage)
        out, lse = subject.run(sparse_attention, q, k, v, blocks, p.seqs, block_size=16, return_lse=True)
        assert_equal("out", out[:5], torch.zeros_like(out[:5]))
        assert_equal("lse", lse[:5], torch.full_like(lse[:5], -math.inf))
        assert lse[5].isfinite().all()


@subjects(sparse_attention, every_dtype=True)
@pytest.mark.parametrize("scale", [0.0, 1, 0.3, -0.5])
def test_scale(subject, scale):
    p = problem((20, 10), (60, 33), dtype=subject.dtype)
    blocks = random_blocks(p, 3, 16, 2)
    check(subject, p, blocks, 16, *truth_and_honest(p, blocks, 16, scale), softmax_scale=scale)


@subjects(sparse_attention, every_dtype=True)
def test_large_logits(subject):
    p = problem((40, 30), (80, 65), dtype=subject.dtype)
    p.k.add_(11)  # every logit of a row near 1000 or near -1000
    p.q[::2] += 11
    p.q[1::2] -= 11
    blocks = random_blocks(p, 4, 16, 2)
    check(subject, p, blocks, 16, *truth_and_honest(p, blocks, 16))


@subjects(sparse_attention)
@pytest.mark.parametrize("offsets", [(0, 0, 0), (36, -2, 100), (15, 16, 17), (-1, 39, 40)])
def test_offsets_move_the_queries(subject, offsets):
    p = problem((4, 5, 3), (40, 33, 64), offsets=offsets, dtype=subject.dtype)
    blocks = random_blocks(p, 3, 16, 2)
    for storage in ("flat", "paged"):
        check(subject, p, blocks, 16, *truth_and_honest(p, blocks, 16), storage)


@subjects(sparse_attention)
def test_a_cache_may_be_read_in_part(subject):
    """Keys that exist for another call only (here: NaN) are not read."""
    p = problem((3, 2), (41, 17), dtype=subject.dtype)
    blocks = random_blocks(p, 3, 16, 2)
    (truth, honest), here = truth_and_honest(p, blocks, 16), p.to(subject.device)
    cache, _ = paged(here, 8)
    cache.seq_lens += torch.tensor([7, 7], dtype=torch.int32, device=subject.device)
    out = subject.run(sparse_attention, here.q, cache, None, blocks.to(subject.device), here.seqs, block_size=16)
    assert_close("out", out, honest[0], truth[0])


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_queries_that_read_a_value_get_it(impl, value):
    p = problem((40,), (40,))
    blocks = torch.tensor([0, 2], dtype=torch.int32)[torch.arange(40) % 2].view(-1, 1, 1)
    clean = sparse_attention(p.q, p.k, p.v, blocks, block_size=16, impl=impl)
    p.v[3, 0, 5] = value
    out = sparse_attention(p.q, p.k, p.v, blocks, block_size=16, impl=impl)
    read = torch.zeros_like(out, dtype=torch.bool)
    read[16::2, :2, 5] = True  # block 0, whole
    assert out[read].sum().isnan() if math.isnan(value) else (out[read] == value).all()
    read[:16] = True  # whether the block's own queries before the key stay clean is not said
    assert_equal("out", out[~read], clean[~read])


@subjects(sparse_attention)
@pytest.mark.parametrize(
    ("q_lens", "k_lens"), [((), ()), ((0,), (0,)), ((0, 0), (5, 0)), ((3,), (0,)), ((0, 2), (0, 0)), ((2, 0, 1), (0, 40, 1))]
)
def test_nothing_to_do(subject, q_lens, k_lens):
    p = problem(q_lens, k_lens, dtype=subject.dtype)
    blocks = random_blocks(p, 3, 16, 2)
    for storage in ("flat", "paged"):
        check(subject, p, blocks, 16, *truth_and_honest(p, blocks, 16), storage)


@subjects(sparse_attention, every_dtype=True)
def test_repeats_are_bitwise_equal(subject):
    p = problem((100, 33), (150, 333), dtype=subject.dtype).to(subject.device)
    blocks = random_blocks(p, 4, 16, 2)
    options = {"block_size": 16, "return_lse": True}
    first, second = (subject.run(sparse_attention, p.q, p.k, p.v, blocks, p.seqs, **options) for _ in range(2))
    for name, a, b in zip(("out", "lse"), first, second, strict=True):
        assert_equal(name, a, b)
    assert_equal("out alone", subject.run(sparse_attention, p.q, p.k, p.v, blocks, p.seqs, block_size=16), first[0])


@subjects(sparse_attention)
def test_one_key_is_copied(subject):
    """Softmax over one key is 1: the value comes back bit for bit, and the lse is the logit."""
    p = problem((1,), (33,), dtype=subject.dtype).to(subject.device)
    blocks = torch.tensor([[[-1, 2]] * 2], dtype=torch.int32, device=subject.device)
    seqs = one_sequence(1, 33, subject.device)
    out = subject.run(sparse_attention, p.q, p.k, p.v, blocks, seqs, block_size=16)
    assert_equal("out", out, p.v[32:].repeat_interleave(2, dim=1))


def test_many_queries_never_ask_the_decode_kernels():
    """Their refusals import kernels; how many queries there are is known without."""

    def refuse(call):
        raise AssertionError("asked")

    decode = STAGE.table[0]
    rows = (Implementation("decode", decode.path, refuse, decode.reserve), *STAGE.table[2:])
    stage = Stage(sparse_attention, STAGE.check_call, rows)
    p = problem((DECODE_QUERIES + 1,), (64,), kv_heads=1, dtype=torch.float32)
    out = stage.run("auto", stage.check(p.q, p.k, p.v, random_blocks(p, 2, 16, 1), p.seqs, block_size=16))
    assert out.shape == p.q.shape
