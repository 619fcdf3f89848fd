# SPDX-License-Identifier: MIT
"""One process without a group is a group of one; wrong arguments are named before anything else."""

import pytest
import torch

from openmsa import msa_attention
from openmsa.parallel import ContextDecodePlan, TokenShards, context_attention, gather_tokens
from openmsa.parallel.symmetric import count_hosts
from openmsa.testing.inputs import problem
from tests.parallel import cases

OPTIONS = {"topk": 3, "block_size": 16}


def test_prefill():
    p = problem((37, 5), (37, 5), **cases.SMALL)
    shards = TokenShards((37, 5), 1)
    mine = [shards.shard(x, 0) for x in (p.q, p.k, p.v, p.index_q, p.index_k)]
    expected = shards.shard(msa_attention(p.q, p.k, p.v, p.index_q, p.index_k, seqs=p.seqs, **OPTIONS), 0)
    torch.testing.assert_close(context_attention(*mine, shards, **OPTIONS), expected)


def test_decode():
    assert cases.decode(None, 0, 1, (100, 3), 2, torch.float32, "cpu", cases.SMALL, OPTIONS, 32) == "collective"


def a_plan(**changes):
    table = torch.zeros(2, 3, dtype=torch.int32)
    return ContextDecodePlan(
        **({"seq_lens": torch.ones(2, dtype=torch.int32), "page_table": table, "page_size": 128} | changes)
    )


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"page_size": 100}, ValueError, r"block_size must divide page_size \(100\), got 128"),
        ({"new_tokens": 17}, ValueError, "new_tokens must be from 1 to 16, got 17"),
        ({"new_tokens": 2, "local_blocks": 0}, NotImplementedError, "local_blocks must be at least 1 with several new_tokens"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, ValueError, r"page_table.shape\[0\] must be 3"),
        ({"page_table": torch.zeros(2, 3)}, TypeError, "page_table must have dtype torch.int32"),
        ({"page_table": torch.zeros(2, 0, dtype=torch.int32)}, ValueError, r"page_table.shape\[1\] must be at least 1, got 0"),
        ({"exchange": "fast"}, ValueError, "exchange must be one of 'auto', 'symmetric', 'collective', got 'fast'"),
        ({"exchange": "symmetric"}, NotImplementedError, "exchange='symmetric' cannot serve: it needs CUDA devices, got cpu"),
        ({"timeout": 0}, ValueError, "timeout must be positive, got 0"),
        ({"init_blocks": 16}, ValueError, "init_blocks . local_blocks must be at most topk"),
    ],
)
def test_a_plan_names_what_is_wrong(changes, error, text):
    with pytest.raises(error, match=text):
        a_plan(**changes)


def test_a_layer_names_what_is_wrong():
    plan = a_plan()
    q, pool = torch.zeros(2, 4, 32), torch.zeros(4, 2, 128, 32)
    with pytest.raises(ValueError, match="select must run before attend"):
        plan.attend(q, pool, pool)
    with pytest.raises(ValueError, match="index_q must not require a gradient"):
        plan.select(torch.zeros(2, 2, 32, requires_grad=True), pool[:, :1])
    with pytest.raises(ValueError, match=r"index_q.shape\[0\] must be 2"):
        plan.select(torch.zeros(3, 2, 32), pool[:, :1])
    index_q = torch.zeros(2, 2, 32)
    plan.select(index_q, pool[:, :1])
    with pytest.raises(TypeError, match=r"out must have dtype torch.float32, got torch.float64"):
        plan.attend(q, pool, pool, out=torch.zeros(2, 4, 32, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"lse must be a torch.Tensor of shape .*, got list"):
        plan.attend(q, pool, pool, lse=[0.0])
    with pytest.raises(ValueError, match=r"out must not require a gradient, as it is written to"):
        plan.attend(q, pool, pool, out=torch.zeros(2, 4, 32, requires_grad=True))
    with pytest.raises(ValueError, match=r"out must be contiguous, got strides"):
        plan.attend(q, pool, pool, out=torch.zeros(4, 2, 32).transpose(0, 1))
    values, memory, keys = torch.zeros_like(pool), torch.zeros(264), pool[:, :1].clone()
    for inside in (pool, values, keys):
        with pytest.raises(ValueError, match=r"out must share no memory with the inputs"):
            plan.run(q, pool, values, index_q, keys, out=inside.flatten()[:256].view(2, 4, 32))
    with pytest.raises(ValueError, match=r"lse must share no memory with the inputs"):
        plan.attend(q, pool, values, out=memory[:256].view(2, 4, 32), lse=memory[255:263].view(2, 4))
    with pytest.raises(ValueError, match=r"out must share no memory with the inputs"):
        plan.attend(memory[:256].view(2, 4, 32), pool, values, out=memory[8:].view(2, 4, 32))
    assert plan.attend(q, pool, values, out=q) is q
    with pytest.raises(ValueError, match=r"index_k.shape\[2\] must be 128 \(page_size of the plan\), got 64"):
        plan.select(index_q, pool[:, :1, :64])
    with pytest.raises(ValueError, match=r"k.shape\[2\] must be 128 \(page_size of the plan\), got 64"):
        plan.attend(q, pool[:, :, :64], pool[:, :, :64])
    with pytest.raises(TypeError, match=r"q must be a torch.Tensor of shape .*, got list"):
        plan.attend([q], pool, pool)


def test_a_group_must_be_there():
    with pytest.raises(ValueError, match="group must have 2 ranks, got None"):
        gather_tokens(torch.zeros(2), TokenShards((4,), 2))
    with pytest.raises(TypeError, match=r"shards must be an openmsa.parallel.TokenShards, got tuple"):
        gather_tokens(torch.zeros(4), (4,))
    with pytest.raises(TypeError, match=r"x must be a torch.Tensor of shape \[tokens, ...\], got a tensor without dimensions"):
        gather_tokens(torch.tensor(4.0), TokenShards((4,), 1))


def of_no_sequence():
    """Returns tokens of no sequence, and caches for none."""
    p = problem((1,), (1,), **cases.SMALL)
    return [x[:0] for x in (p.q, p.k, p.v, p.index_q, p.index_k)], cases.empty_caches((), 0, 1, 16, p)


def test_no_sequences():
    tokens, (kv, index) = of_no_sequence()
    shards = TokenShards((), 1)
    for caches in ({}, {"kv": kv, "index_keys": index, "cached": ()}):
        assert context_attention(*tokens, shards, **caches, **OPTIONS).shape == (0, 4, 32)
    plan = a_plan(seq_lens=torch.zeros(0, dtype=torch.int32), page_table=torch.zeros(0, 3, dtype=torch.int32))
    pool = torch.zeros(4, 2, 128, 32)
    assert plan.run(torch.zeros(0, 4, 32), pool, pool, torch.zeros(0, 2, 32), pool[:, :1]).shape == (0, 4, 32)


def test_pages_that_are_missing_are_named_before_anything_changes():
    p = problem((20,), (20,), **cases.SMALL)
    kv, index = cases.empty_caches((20,), 0, 1, 16, p)
    kv.page_table[0, 1] = -1
    shards, caches = TokenShards((20,), 1), {"kv": kv, "index_keys": index, "cached": (0,)}
    with pytest.raises(ValueError, match=r"page_table\[0, 1\] must be a page from 0 to .* got -1"):
        context_attention(p.q, p.k, p.v, p.index_q, p.index_k, shards, **caches, **OPTIONS)
    assert kv.seq_lens.tolist() == index.seq_lens.tolist() == [0]


def test_hosts_are_counted_as_torchrun_starts_ranks(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert count_hosts([0, 8]) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (count_hosts([8, 9, 15]), count_hosts([0, 8]), count_hosts([7, 8, 24])) == (1, 2, 3)
