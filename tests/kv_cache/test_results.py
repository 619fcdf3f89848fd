# SPDX-License-Identifier: MIT
"""Every implementation writes its results to the places that it is given, and wrong places are refused before that."""

import pytest
import torch

from openmsa.block_scores import STAGE as SCORING
from openmsa.dense_attention import STAGE as DENSE
from openmsa.runtime.dispatch import has_triton
from openmsa.sparse_attention import STAGE as SPARSE
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks
from tests.contract import CUDA

DEVICE = "cuda" if CUDA else "cpu"  # without a GPU kernels run in Triton's interpreter
BLOCK = 32


def rows_of(stage):
    """Returns the implementations that run here."""
    names = [row.name for row in stage.table if ("cpu" not in row.name or DEVICE == "cpu")]
    return [name for name in names if has_triton() or "triton" not in name]


def made():
    """Draws short and long requests, one without queries and one without keys, in half precision as the kernels want it."""
    dtype = torch.float16 if CUDA else torch.float32
    return problem((3, 40, 0, 2), (100, 40, 33, 0), kv_heads=2, group=2, head_dim=32, dtype=dtype).to(DEVICE)


def loaded(stage, name):
    return next(row for row in stage.table if row.name == name).load()


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("storage", ["packed", "paged"])
@pytest.mark.parametrize("name", rows_of(SPARSE))
def test_sparse_attention(name, storage):
    p = made()
    blocks = random_blocks(p, 2, BLOCK, 2).to(DEVICE)
    k, v = (p.k, p.v) if storage == "packed" else (paged(p, BLOCK)[0], None)
    call = SPARSE.check(p.q, k, v, blocks, p.seqs, block_size=BLOCK, return_lse=True)
    expected = loaded(SPARSE, name)(*call)
    out, lse = poisoned(*p.q.shape, dtype=p.q.dtype), poisoned(*p.q.shape[:2])
    found = loaded(SPARSE, name)(*call.writing(out, lse))
    assert found[0] is out
    assert found[1] is lse
    for label, x, truth in zip(("out", "lse"), found, expected, strict=True):
        assert_equal(label, x, truth)
    out = poisoned(*p.q.shape, dtype=p.q.dtype)
    alone = SPARSE.check(p.q, k, v, blocks, p.seqs, block_size=BLOCK).writing(out, None)
    assert loaded(SPARSE, name)(*alone) is out
    assert_equal("out alone", out, expected[0])


@pytest.mark.parametrize("scores_first", ["blocks", "queries"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", rows_of(DENSE))
def test_dense_attention(name, causal, scores_first):
    """Maximum scores of fewer blocks than there are, with either dimension innermost."""
    p = made()
    options = {"causal": causal, "block_size": BLOCK, "return_lse": True, "return_max_score": True}
    call = DENSE.check(p.q, p.k, p.v, p.seqs, **options)
    expected = loaded(DENSE, name)(*call)
    assert expected[2].shape[2] == 4
    out, lse = poisoned(*p.q.shape, dtype=p.q.dtype), poisoned(*p.q.shape[:2])
    scores = poisoned(4, len(p.q), 3) if scores_first == "blocks" else poisoned(3, 4, len(p.q)).permute(1, 2, 0)
    found = loaded(DENSE, name)(*call.writing(out, lse, scores))
    for place, given in zip(found, (out, lse, scores), strict=True):
        assert place is given
    assert_equal("out", out, expected[0])
    assert_equal("lse", lse, expected[1])
    assert_equal("max_score", scores.nan_to_num(-torch.inf, torch.inf, -torch.inf), expected[2][..., :3])


@pytest.mark.parametrize("scores_first", ["blocks", "queries"])
@pytest.mark.parametrize("name", rows_of(SCORING))
def test_block_scores(name, scores_first):
    p = made()
    call = SCORING.check(p.index_q, p.index_k, p.seqs, block_size=BLOCK)
    expected = loaded(SCORING, name)(*call)
    heads, total, blocks = expected.shape
    for count in (blocks, blocks - 1):
        scores = poisoned(heads, total, count) if scores_first == "blocks" else poisoned(count, total, heads).permute(2, 1, 0)
        assert loaded(SCORING, name)(*call.writing(scores)) is scores
        assert_equal("scores", scores.nan_to_num(-torch.inf, torch.inf, -torch.inf), expected[..., :count])


def test_refusals():
    p = made()
    dense = DENSE.check(p.q, p.k, p.v, p.seqs, return_max_score=True)
    total = len(p.q)
    both = torch.zeros(total * 5, 4, 32, dtype=p.q.dtype, device=DEVICE)
    aliased = DENSE.check(both[:total], p.k, p.v, p.seqs)
    wide = torch.float16 if p.q.dtype == torch.float32 else torch.float32
    cases = (
        (dense, (p.q.new_empty(total, 4, 16), None), ValueError, "out must have shape"),
        (dense, (p.q.to(wide), None), TypeError, "out must have dtype"),
        (dense, ("out", None), TypeError, "out must be a torch.Tensor"),
        (dense, (p.q.new_empty(4, total, 32).transpose(0, 1), None), ValueError, "out must be contiguous, got strides"),
        (dense, (p.q.new_empty(total, 4, 32, device="meta"), None), ValueError, "out must be on the device of the inputs"),
        (dense, (None, poisoned(total, 4)), ValueError, "lse must be None with return_lse=False, got Tensor"),
        (dense, (None, None, poisoned(4, total, 9)), ValueError, "max_score must have shape"),
        (dense, (None, None, poisoned(4, total, 1).double()), TypeError, "max_score must have dtype"),
        (dense, (None, None, poisoned(1, 1, 1).expand(4, total, 1)), ValueError, "max_score must not be expanded"),
        (aliased, (both[total - 1 : 2 * total - 1], None), ValueError, "out must share no memory with the inputs"),
    )
    for call, places, error, words in cases:
        with pytest.raises(error, match=words):
            call.writing(*places)
    apart = aliased.writing(both[total : 2 * total], None)
    assert apart.out.data_ptr() == both[total:].data_ptr()
    sparse = SPARSE.check(p.q, p.k, p.v, torch.zeros(total, 1, 1, dtype=torch.int32, device=DEVICE), p.seqs, return_lse=True)
    memory = p.q.new_empty(total * 4 * 32)
    with pytest.raises(ValueError, match="lse must share no memory with the inputs"):
        sparse.writing(memory.view(total, 4, 32), memory.view(torch.float32)[: total * 4].view(total, 4))
    with pytest.raises(ValueError, match="scores must have shape"):
        SCORING.check(p.index_q, p.index_k, p.seqs).writing(poisoned(1, total, 1))
