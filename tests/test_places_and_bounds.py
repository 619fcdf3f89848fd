# SPDX-License-Identifier: MIT
"""Results that would overlap, lengths that no cache has, and derivatives that nobody computes are refused."""

import copy
import pickle

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan
from openmsa import AttentionPlan, DecodePlan, PagedIndexKeys, PagedKV, Sequences, dense_attention, index_loss, sparse_attention


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_packed_keys_reach_the_end_of_a_plans_sequences():
    q, k, index_q, index_k = (torch.randn(n, h, 32) for n, h in ((5, 4), (100, 2), (5, 2), (100, 1)))
    sizes = {"total_q": 5, "max_seqlen_q": 3, "max_seqlen_k": 60, "topk": 2, "block_size": 16}
    plan = AttentionPlan(cu_seqlens_q=ints(0, 3, 5), cu_seqlens_k=ints(0, 40, 100), **sizes)
    plan.run(q, k, k, index_q, index_k)
    for keys, index in ((k[:90], index_k), (k, index_k[:90])):
        with pytest.raises(ValueError, match=r"shape\[0\] must be at least the end of cu_seqlens_k \(100\), got 90"):
            plan.run(q, keys, keys, index_q, index)


def decode_step():
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    kv, index_keys = PagedKV.allocate(table, 8, 2, 16, 32), PagedIndexKeys.allocate(table, 8, 1, 16, 32)
    kv.append(torch.randn(80, 2, 32), torch.randn(80, 2, 32))
    index_keys.append(torch.randn(80, 1, 32))
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "page_size": 16, "max_pages": 4, "index_dim": 32}
    plan = DecodePlan(max_batch=2, topk=2, block_size=16, dtype=torch.float32, device="cpu", **sizes)
    return plan, kv, torch.randn(2, 2, 32), index_keys


def test_a_decode_plan_writes_over_no_input_but_the_queries():
    plan, kv, index_q, index_keys = decode_step()
    both = torch.randn(3, 4, 32)
    expected = plan.run(both[:2].clone(), kv, index_q, index_keys).clone()
    for out in (both[1:], kv.k.view(-1)[:256].view(2, 4, 32)):
        with pytest.raises(ValueError, match="out must share no memory with the inputs"):
            plan.run(both[:2], kv, index_q, index_keys, out=out)
    torch.testing.assert_close(plan.run(both[:2], kv, index_q, index_keys, out=both[:2]), expected)


def test_results_of_the_drop_in_do_not_overlap():
    q, k = torch.randn(8, 4, 32), torch.randn(100, 2, 32)
    plan, out = fmha_sm100_plan(ints(3, 5), ints(40, 60), 4, 2), torch.empty(8, 4, 32)
    with pytest.raises(ValueError, match="lse must share no memory with out"):
        fmha_sm100(q, k, k, plan, out=out, lse=out.view(-1)[:32].view(8, 4))
    with pytest.raises(ValueError, match="qo_offset must lie from"):
        fmha_sm100_plan(ints(3), ints(40), 4, 2, qo_offset=torch.tensor([2**40]))


@pytest.mark.parametrize("length", [-1, -100, 2**31 - 1])
def test_a_cache_of_impossible_lengths_takes_nothing(length):
    pool = torch.zeros(4, 2, 16, 32)
    cache = PagedKV(pool, pool.clone(), ints(0, 1, 2, 3).view(1, 4), ints(length))
    with pytest.raises(ValueError, match="seq_lens must lie from 0 to 64"):
        cache.append(torch.ones(2, 2, 32), torch.ones(2, 2, 32))
    assert not cache.k.any()
    with pytest.raises(ValueError, match=r"lens\[0\] must be at most 64"):
        cache.check_pages(ints(65))


def test_starts_beyond_int32_are_refused():
    q, k = torch.randn(1, 4, 32), torch.randn(2, 2, 32)
    seqs = Sequences(ints(0, 1), torch.tensor([0, 2**32 + 2]), max_seqlen_q=1, max_seqlen_k=2)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        dense_attention(q, k, k, seqs)


@pytest.mark.parametrize("stage", ["dense", "sparse", "loss"])
def test_second_derivatives_are_refused(stage):
    q, k = (torch.randn(n, 2, 32, dtype=torch.float64, requires_grad=True) for n in (5, 20))
    blocks = torch.zeros(5, 2, 1, dtype=torch.int32)
    found = {
        "dense": lambda: dense_attention(q, k, k).square().sum(),
        "sparse": lambda: sparse_attention(q, k, k, blocks, block_size=16).square().sum(),
        "loss": lambda: index_loss(q.detach(), k.detach(), q, k, blocks, block_size=16),
    }[stage]()
    with pytest.raises(NotImplementedError, match="second derivatives are not computed"):
        torch.autograd.grad(found, q, create_graph=True)
    torch.autograd.grad(found, q)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))], ids=["copied", "read"])
def test_a_copy_of_a_plan_is_a_plan_of_its_own(copied):
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    sizes = {"total_q": 2, "max_seqlen_q": 1, "max_seqlen_k": 64, "page_size": 16, "topk": 2, "block_size": 16}
    plan = AttentionPlan(cu_seqlens_q=ints(0, 1, 2), page_table=table, seq_lens=ints(40, 40), **sizes)
    other = copied(plan)
    other.seq_lens.fill_(10)
    other.refresh()
    q, index_q = torch.randn(2, 4, 32), torch.randn(2, 2, 32)
    pools = [torch.randn(8, heads, 16, 32) for heads in (2, 2, 1)]
    run = lambda plan: plan.run(q, *pools[:2], index_q, pools[2])  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(lambda: run(other), backend="eager")()
    torch.testing.assert_close(compiled, run(other))
    assert not torch.equal(compiled, run(plan))
    plan, kv, index_q, index_keys = decode_step()
    q = torch.randn(2, 4, 32)
    torch.testing.assert_close(copied(plan).run(q, kv, index_q, index_keys), plan.run(q, kv, index_q, index_keys))
