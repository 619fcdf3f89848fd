# SPDX-License-Identifier: MIT
"""Every token, page and head has one owner, and shares differ by as little as they can."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openmsa.parallel import PageStripes, TokenShards, shard_heads

LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=4).map(tuple)
quick = settings(max_examples=40, derandomize=True, deadline=None, database=None)


@quick
@given(lengths=LENGTHS, ranks=st.integers(1, 5), order=st.sampled_from(["zigzag", "contiguous"]))
def test_every_token_has_one_owner(lengths, ranks, order):
    shards = TokenShards(lengths, ranks, order)
    rows = [shards.rows(rank) for rank in range(ranks)]
    assert torch.cat(rows).sort().values.tolist() == list(range(sum(lengths)))
    assert [shards.tokens(rank) for rank in range(ranks)] == [len(x) for x in rows]
    most = shards.most()
    padded = torch.cat([torch.nn.functional.pad(x, (0, most - len(x)), value=-1) for x in rows])
    assert padded[shards.gathered_rows(torch.device("cpu"))].tolist() == list(range(sum(lengths)))


@quick
@given(lengths=LENGTHS, ranks=st.integers(1, 5), order=st.sampled_from(["zigzag", "contiguous"]), old=st.integers(0, 9))
def test_pieces_say_where_queries_stand(lengths, ranks, order, old):
    shards = TokenShards(lengths, ranks, order)
    cached = [old + b for b in range(len(lengths))]
    position = torch.cat([torch.arange(c, c + n) for c, n in zip(cached, lengths, strict=True)])
    for rank in range(ranks):
        mine, found = shards.shard(position, rank), []
        for rows, seqs in shards.pieces(rank, cached):
            assert rows.stop - rows.start == int(seqs.cu_seqlens_q[-1])
            assert seqs.cu_seqlens_k.diff().tolist() == [c + n for c, n in zip(cached, lengths, strict=True)]
            counts = seqs.cu_seqlens_q.diff().tolist()
            found += [o + i for o, n in zip(seqs.q_offset.tolist(), counts, strict=True) for i in range(n)]
        assert found == mine.tolist()


def test_zigzag_shares_work_evenly():
    """Work is the number of keys that a rank's queries see; contiguous shards leave the last rank with most of it."""
    for ranks in (2, 3, 8):
        of = {order: TokenShards((4096,), ranks, order) for order in ("zigzag", "contiguous")}
        work = {order: [int((x.rows(r) + 1).sum()) for r in range(ranks)] for order, x in of.items()}
        assert max(work["zigzag"]) < 1.01 * sum(work["zigzag"]) / ranks
        assert max(work["contiguous"]) > (1.9 - 1 / ranks) * sum(work["contiguous"]) / ranks * 0.99


@quick
@given(length=st.integers(0, 300), ranks=st.integers(1, 5), page=st.sampled_from([1, 16, 48]))
def test_every_key_has_one_owner(length, ranks, page):
    stripes = PageStripes(ranks, page)
    held = [stripes.positions(0, length, rank) for rank in range(ranks)]
    assert torch.cat(held).sort().values.tolist() == list(range(length))
    counts = [stripes.held(length, rank) for rank in range(ranks)]
    assert counts == [len(x) for x in held]
    assert counts == [int(stripes.held(torch.tensor([length]), rank)) for rank in range(ranks)]
    assert max(counts) - min(counts) <= page


@quick
@given(kv=st.sampled_from([1, 2, 4, 6]), group=st.sampled_from([1, 2, 4]), ranks=st.integers(1, 8), one=st.booleans())
def test_every_head_has_its_keys(kv, group, ranks, one):
    heads, index_heads = kv * group, 1 if one else kv
    if heads % ranks or (kv % ranks and ranks % kv):
        with pytest.raises(ValueError, match="ranks must divide"):
            shard_heads(heads, kv, 0, ranks)
        return
    shares = [shard_heads(heads, kv, r, ranks, index_heads=index_heads, index_key_heads=1) for r in range(ranks)]
    assert [h for share in shares for h in range(share.q.start, share.q.stop)] == list(range(heads))
    for share in shares:
        assert share.num_q_heads % share.num_kv_heads == 0
        of_group = share.num_q_heads // share.num_kv_heads
        for i, head in enumerate(range(share.q.start, share.q.stop)):
            assert head // group == share.kv.start + i // of_group
        assert share.index_q == (slice(0, 1) if one else share.kv)
        assert share.index_k == slice(0, 1)
        assert (share.index_heads, share.index_key_heads) == (1 if one else share.num_kv_heads, 1)


def test_index_keys_follow_their_index_heads():
    assert [shard_heads(16, 4, r, 2, index_key_heads=4).index_k for r in range(2)] == [slice(0, 2), slice(2, 4)]
    assert [shard_heads(16, 4, r, 4, index_key_heads=2).index_k for r in range(4)] == [slice(0, 1)] * 2 + [slice(1, 2)] * 2
    with pytest.raises(ValueError, match="ranks must give each rank whole index key heads"):
        shard_heads(12, 6, 1, 3, index_key_heads=2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: TokenShards((3, -1), 2), r"lengths\[1\] must be at least 0, got -1"),
        (lambda: TokenShards((3,), 0), "ranks must be at least 1, got 0"),
        (lambda: TokenShards((3,), 2, "striped"), "order must be one of 'zigzag', 'contiguous', got 'striped'"),
        (lambda: TokenShards((3,), 2).spans(2), "rank must be from 0 to 1, got 2"),
        (lambda: TokenShards((3,), 2).pieces(0, [1, 2]), r"cached must have one entry a sequence \(1\), got 2"),
        (lambda: TokenShards((3,), 2).pieces(0, [2**31 - 3]), r"sum\(cached\) must be from 0 to 2147483644, got 2147483645"),
        (lambda: PageStripes(2, 16).held(10, 2), "rank must be from 0 to 1, got 2"),
        (lambda: PageStripes(2, 16).positions(0, 10, -1), "rank must be from 0 to 1, got -1"),
        (lambda: TokenShards((3,), 2).shard(torch.zeros(4), 0), r"x.shape\[0\] must be 3"),
        (lambda: PageStripes(2, 0), "page_size must be at least 1, got 0"),
        (lambda: shard_heads(8, 3, 0, 1), r"num_kv_heads must divide num_q_heads \(8\), got 3"),
        (lambda: shard_heads(12, 4, 0, 3), r"ranks must divide num_kv_heads \(4\) or be a multiple of it, got 3"),
        (lambda: shard_heads(8, 4, 0, 16), r"ranks must divide num_q_heads \(8\), got 16"),
        (lambda: shard_heads(8, 4, 0, 2, index_heads=2), r"index_heads must be num_kv_heads \(4\) or 1, got 2"),
        (lambda: shard_heads(8, 4, 2, 2), "rank must be from 0 to 1, got 2"),
    ],
)
def test_errors_name_the_argument(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_lengths_are_known_on_the_host():
    with pytest.raises(TypeError, match="lengths must be a list of ints, one a sequence, got Tensor"):
        TokenShards(torch.tensor([3]), 2)
