# SPDX-License-Identifier: MIT
"""`Sequences` and the layout that stages receive are right: positions, visible blocks, chunks of queries, defaults, errors."""

from dataclasses import replace

import pytest
import torch

from openmsa import Sequences
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem
from openmsa.types import layout
from tests import oracle
from tests.contract import DEVICES

devices = pytest.mark.parametrize("device", DEVICES)
LENGTHS = [
    ((), ()),
    ((0,), (0,)),
    ((5,), (37,)),
    ((3, 0, 1, 16), (3, 9, 0, 33)),
    ((0, 0, 4), (7, 0, 2)),
    ((2, 3, 0, 0), (16, 17, 15, 0)),
]
lengths = pytest.mark.parametrize(("q_lens", "k_lens"), LENGTHS)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def layout_of(p, **changes):
    return layout(replace(p.seqs, **changes), len(p.q), len(p.k), p.device)


@devices
@lengths
@pytest.mark.parametrize("moved", [False, True])
def test_positions_and_visible_blocks(device, q_lens, k_lens, moved):
    offsets = [3 * b - 2 for b in range(len(q_lens))] if moved else None
    p = problem(q_lens, k_lens, offsets=offsets).to(device)
    rows = list(oracle.rows(p))
    sequence, last = layout_of(p).tokens(len(p.q))
    assert sequence.tolist() == [b for _, b, _ in rows]
    assert last.tolist() == [key for _, _, key in rows]
    blocks = layout_of(p).visible_blocks(len(p.q), 16)
    assert blocks.tolist() == [max(key, -1) // 16 + 1 for _, _, key in rows]
    assert blocks.dtype == torch.int32


@devices
@lengths
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_of_queries_keep_their_place(device, q_lens, k_lens, chunk):
    p = problem(q_lens, k_lens).to(device)
    whole = layout_of(p)
    sequence, last = whole.tokens(len(p.q))
    for start in range(0, len(p.q), chunk):
        stop = min(start + chunk, len(p.q))
        part = whole.query_chunk(start, stop)
        assert_equal("sequence", part.tokens(stop - start)[0], sequence[start:stop])
        assert_equal("last key", part.tokens(stop - start)[1], last[start:stop])
        assert part.cu_seqlens_q[-1] == stop - start
        assert part.max_seqlen_q >= int(part.cu_seqlens_q.diff().max())


def test_from_lengths():
    seqs = Sequences.from_lengths([3, 0, 2], [5, 1, 2])
    assert_equal("cu_seqlens_q", seqs.cu_seqlens_q, ints(0, 3, 3, 5))
    assert_equal("cu_seqlens_k", seqs.cu_seqlens_k, ints(0, 5, 6, 8))
    assert (seqs.max_seqlen_q, seqs.max_seqlen_k, seqs.q_offset) == (3, 5, None)
    with pytest.raises(ValueError, match=r"k_lens must have one entry a sequence \(2\), got 1"):
        Sequences.from_lengths([1, 2], [3])


@pytest.mark.parametrize(
    ("lens", "error", "words"),
    [
        ([1, 2.5], TypeError, r"k_lens\[1\] must be an int, got float \(2.5\)"),
        ([True, 2], TypeError, r"k_lens\[0\] must be an int, got bool"),
        ([5, -1], ValueError, r"k_lens\[1\] must be at least 0, got -1"),
        ([2**30, 2**30], ValueError, r"sum\(k_lens\) must be from 0 to 2147483647, got 2147483648"),
    ],
)
def test_lengths_are_counts(lens, error, words):
    with pytest.raises(error, match=words):
        Sequences.from_lengths([1, 1], lens)


def test_defaults():
    """Without lengths the tokens are one sequence; maximum lengths default to the longest there are, and queries come last."""
    for seqs in (None, Sequences()):
        one = layout(seqs, 3, 10, torch.device("cpu"))
        assert (one.cu_seqlens_q.tolist(), one.cu_seqlens_k.tolist()) == ([0, 3], [0, 10])
        assert (one.max_seqlen_q, one.max_seqlen_k, one.first_positions().tolist()) == (3, 10, [7])
    read = layout(Sequences(ints(0, 3, 5), ints(0, 9, 19)), 5, 19, torch.device("cpu"))
    assert (read.max_seqlen_q, read.max_seqlen_k, read.first_positions().tolist()) == (3, 10, [6, 8])
    bounds = layout(Sequences(ints(0, 3, 5), ints(0, 9, 19), 100, 200), 5, 19, torch.device("cpu"))
    assert (bounds.max_seqlen_q, bounds.max_seqlen_k, bounds.num_blocks(16)) == (100, 200, 13)


def test_views_with_gaps_become_contiguous():
    """Views with gaps become contiguous, since kernels read the starts and offsets one after the other."""
    cu_q, cu_k, offset = (torch.stack([x, x + 99], 1)[:, 0] for x in (ints(0, 1, 3), ints(0, 4, 9), ints(2, 1)))
    found = layout(Sequences(cu_q, cu_k, q_offset=offset), 3, 9, torch.device("cpu"))
    for name, expected in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k), ("q_offset", offset)):
        assert getattr(found, name).is_contiguous()
        assert_equal(name, getattr(found, name), expected)


def test_int64_is_converted():
    seqs = Sequences(ints(0, 3, dtype=torch.int64), ints(0, 9, dtype=torch.int64), q_offset=ints(2, dtype=torch.int64))
    converted = layout(seqs, 3, 9, torch.device("cpu"))
    for field in (converted.cu_seqlens_q, converted.cu_seqlens_k, converted.q_offset):
        assert field.dtype == torch.int32


@devices
def test_a_cache_brings_its_lengths(device):
    p = problem((2, 1), (20, 33)).to(device)
    cache, _ = paged(p, 16)
    whole = cache.layout(Sequences(p.seqs.cu_seqlens_q), 3, cache.device)
    assert whole.k_lens().tolist() == [20, 33]
    assert whole.first_positions().tolist() == [18, 32]
    assert whole.max_seqlen_k == (33 if device == "cpu" else cache.capacity)
    fewer = cache.layout(Sequences(p.seqs.cu_seqlens_q, ints(0, 16, 49).to(device)), 3, cache.device)
    assert fewer.k_lens().tolist() == [16, 33]
    assert fewer.first_positions().tolist() == [14, 32]


BAD = {
    "seqs type": (TypeError, ("seqs ", "openmsa.Sequences", "tuple"), (ints(0, 3), ints(0, 9))),
    "list": (TypeError, ("seqs.cu_seqlens_q ", "torch.Tensor", "list"), Sequences([0, 3])),
    "rank": (ValueError, ("seqs.cu_seqlens_q ", "[batch + 1]", "(1, 2)"), Sequences(ints(0, 3)[None])),
    "floats": (TypeError, ("seqs.cu_seqlens_k ", "int32", "float32"), Sequences(None, torch.tensor([0.0, 9.0]))),
    "empty": (ValueError, ("seqs.cu_seqlens_q ", "at least one", "(0,)"), Sequences(ints())),
    "device": (ValueError, ("seqs.cu_seqlens_q ", "device", "meta"), Sequences(ints(0, 3).to("meta"))),
    "start": (ValueError, ("seqs.cu_seqlens_q ", "start at 0", "got 1"), Sequences(ints(1, 3))),
    "decreasing q": (
        ValueError,
        ("seqs.cu_seqlens_q ", "not decrease", "4 then 3 at index 2"),
        Sequences(ints(0, 4, 3), ints(0, 4, 9)),
    ),
    "decreasing k": (
        ValueError,
        ("seqs.cu_seqlens_k ", "not decrease", "5 then 4 at index 2"),
        Sequences(ints(0, 1, 2, 3), ints(0, 5, 4, 9)),
    ),
    "end q": (ValueError, ("seqs.cu_seqlens_q ", "number of queries (3)", "got 4"), Sequences(ints(0, 4))),
    "end k": (ValueError, ("seqs.cu_seqlens_k ", "number of keys (9)", "got 8"), Sequences(None, ints(0, 8))),
    "negative": (ValueError, ("seqs.cu_seqlens_q ", "not decrease", "-1"), Sequences(ints(0, -1, 3), ints(0, 0, 9))),
    "batches": (ValueError, ("seqs.cu_seqlens_k ", "as many sequences", "(2", "got 1"), Sequences(ints(0, 1, 3), ints(0, 9))),
    "max q": (ValueError, ("seqs.max_seqlen_q ", "longest sequence (3)", "got 2"), Sequences(max_seqlen_q=2)),
    "max k": (ValueError, ("seqs.max_seqlen_k ", "longest sequence (9)", "got 8"), Sequences(max_seqlen_k=8)),
    "negative max": (ValueError, ("seqs.max_seqlen_q ", "at least 0", "got -1"), Sequences(max_seqlen_q=-1)),
    "bool max": (TypeError, ("seqs.max_seqlen_k ", "int", "bool"), Sequences(max_seqlen_k=True)),
    "float max": (TypeError, ("seqs.max_seqlen_q ", "int", "3.0"), Sequences(max_seqlen_q=3.0)),
    "offset size": (ValueError, ("seqs.q_offset", "1", "got 2"), Sequences(q_offset=ints(1, 2))),
    "offset rank": (ValueError, ("seqs.q_offset ", "[batch]", "()"), Sequences(q_offset=torch.tensor(1))),
    "offset dtype": (TypeError, ("seqs.q_offset ", "int32", "float32"), Sequences(q_offset=torch.tensor([1.0]))),
    "offset past int32": (
        ValueError,
        ("seqs.q_offset ", "2147483643", "got 4294967296"),
        Sequences(q_offset=ints(2**32, dtype=torch.int64)),
    ),
    "last position past int32": (ValueError, ("seqs.q_offset ", "got 2147483646"), Sequences(q_offset=ints(2**31 - 2))),
    "offset device": (ValueError, ("seqs.q_offset ", "device", "meta"), Sequences(q_offset=ints(1).to("meta"))),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lengths(case):
    """Bad lengths for three queries and nine keys are refused."""
    error, words, seqs = BAD[case]
    with pytest.raises(error) as caught:
        layout(seqs, 3, 9, torch.device("cpu"))
    for word in words:
        assert word in str(caught.value)
