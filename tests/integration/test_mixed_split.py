# SPDX-License-Identifier: MIT
"""Decode and prefill requests in one batch, in any order, give what each gives alone."""

import itertools

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan
from openmsa.testing.inputs import packed_order
from tests.exact import DEVICES, Batch, assert_attention, random_batch

Q_LENS, K_LENS = (1, 200, 4, 33), (300, 260, 129, 33)
ORDERS = [(0, 2, 3, 1), (1, 0, 2, 3), (3, 1, 0, 2)]


def moved(batch, order):
    q, k = (packed_order(lens, order) for lens in (batch.q_lens, batch.k_lens))
    q_lens, k_lens = (tuple(lens[b] for b in order) for lens in (batch.q_lens, batch.k_lens))
    return Batch(batch.q[q], batch.k[k], batch.v[k], q_lens, k_lens)


def blocks_of(batch, topk=2):
    """Returns each query's first and own block."""
    own = (batch.positions() // 128).int()
    ids = torch.stack([own, torch.where(own > 0, 0, -1)], 1)[:, None].expand(-1, 2, -1).contiguous()
    return ids.int().to(batch.q.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("paged", "sparse"), [(False, False), (True, False), (True, True)])
def test_any_order(order, paged, sparse, device):
    batch = moved(random_batch(Q_LENS, K_LENS, (4, 2), dim=64, device=device), order)
    k, v, more, options = batch.k, batch.v, {}, {}
    blocks = None
    if paged:
        k, v, more["kv_indices"] = batch.pages()
        options["page_size"] = 128
    if sparse:
        options["kv_block_num"], blocks = 2, blocks_of(batch)
        more["kv_block_indexes"] = blocks
    plan = fmha_sm100_plan(*batch.lengths(), 4, num_kv_heads=2, device=device, **options)
    buffer = torch.full_like(batch.q, torch.nan)
    out, _ = fmha_sm100(batch.q, k, v, plan, out=buffer, output_maxscore=False, **more)
    assert out is buffer
    assert_attention(str(order), out, batch, blocks=blocks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", [True, False])
def test_split_flag_changes_nothing(split, device):
    batch = random_batch(Q_LENS, K_LENS, (4, 2), dim=64, device=device)
    plans = [
        fmha_sm100_plan(*batch.lengths(), 4, num_kv_heads=2, split_prefill_decode=flag, device=device) for flag in (split, True)
    ]
    outs = [fmha_sm100(batch.q, batch.k, batch.v, plan)[0] for plan in plans]
    assert torch.equal(*outs)


def test_each_alone_is_each_together():
    batch = random_batch(Q_LENS, K_LENS, (4, 2), dim=64, dtype=torch.float64)
    plan = fmha_sm100_plan(*batch.lengths(), 4, num_kv_heads=2)
    together = fmha_sm100(batch.q, batch.k, batch.v, plan)[0]
    q_at, k_at = ([0, *itertools.accumulate(lens)] for lens in (Q_LENS, K_LENS))
    for b, (q_len, k_len) in enumerate(zip(Q_LENS, K_LENS, strict=True)):
        keys = slice(k_at[b], k_at[b + 1])
        own = fmha_sm100_plan(torch.tensor([q_len]), torch.tensor([k_len]), 4, num_kv_heads=2)
        alone = fmha_sm100(batch.q[q_at[b] : q_at[b + 1]], batch.k[keys], batch.v[keys], own)[0]
        torch.testing.assert_close(together[q_at[b] : q_at[b + 1]], alone, atol=1e-12, rtol=0)
