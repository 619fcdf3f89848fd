# SPDX-License-Identifier: MIT
"""A known call has the lengths that its checks would give."""

import itertools

import pytest
import torch

from openmsa import PagedKV, Sequences
from openmsa.known_calls import bounded, lengths_again
from openmsa.types import Layout


def made(lens, given):
    """Returns starts of sequences, None, or such that implementations do not receive."""
    starts = torch.tensor([0, *lens]).cumsum(0)
    if given == "strided":
        return starts.int().repeat_interleave(2)[::2]
    return {"none": None, "int32": starts.int(), "int64": starts}[given]


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("batch", "maxima"), [(1, True), (3, True), (3, False)])
def test_lengths(batch, maxima, paged):
    new, keys = [[3, 0, 20][:batch], [3, 7, 200][:batch]]
    q = torch.zeros(sum(new), 2, 16)
    table = torch.arange(batch * 13, dtype=torch.int32).view(batch, 13)
    cache = PagedKV(*torch.zeros(2, batch * 13, 1, 16, 16), table, torch.tensor(keys, dtype=torch.int32))
    read = cache if paged else torch.zeros(sum(keys), 1, 16)
    kinds = ("none", "int32", "int64", "strided")
    for q_given, k_given, offset in itertools.product(kinds, kinds, (None, torch.int32, torch.int64)):
        if batch > 1 and (q_given == "none" or (k_given == "none" and not paged)):
            continue
        seqs = Sequences(made(new, q_given), made(keys, k_given))
        if maxima:
            seqs = Sequences(seqs.cu_seqlens_q, seqs.cu_seqlens_k, max(new), max(keys))
        if offset is not None:
            seqs = Sequences(*(vars(seqs) | {"q_offset": torch.arange(batch, dtype=offset)}).values())
        seqs = bounded(seqs, q.device)
        if paged and k_given == "none" and seqs.max_seqlen_k is None:  # A GPU does not read it: it is the cache's capacity.
            seqs = Sequences(*(vars(seqs) | {"max_seqlen_k": cache.capacity}).values())
        found = lengths_again(q, read, seqs)
        wanted = cache.layout(seqs, q.shape[0], q.device) if paged else lengths_again(q, read, made_again(seqs))
        assert same(found, wanted), (q_given, k_given, offset)
    if paged and batch == 1:
        assert same(lengths_again(q, read, None), cache.layout(None, q.shape[0], q.device))


def made_again(seqs):
    """Returns the same lengths in int64, which are converted."""
    values = {name: x.long() if isinstance(x, torch.Tensor) else x for name, x in vars(seqs).items()}
    return Sequences(*values.values())


def same(x, y):
    assert isinstance(x, Layout)
    pairs = zip(vars(x).values(), vars(y).values(), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
