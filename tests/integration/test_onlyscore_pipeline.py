# SPDX-License-Identifier: MIT
"""The three output modes agree: scores alone, output alone, both."""

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan, sparse_topk_select
from tests.exact import DEVICES, FP8, assert_attention, assert_scores, random_batch

LENS = (70, 1, 130), (400, 257, 130)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_modes_agree(paged, dtype, device):
    batch = random_batch(*LENS, (4, 2), dim=64, dtype=dtype, device=device)
    k, v, more = batch.k, batch.v, {}
    if paged:
        k, v, more["kv_indices"] = batch.pages()
    page_size = 128 if paged else -1
    plan = fmha_sm100_plan(*batch.lengths(), 4, num_kv_heads=2, page_size=page_size, output_maxscore=True, device=device)
    both, both_score = fmha_sm100(batch.q, k, v, plan, **more)
    none, only_score = fmha_sm100(batch.q, k, v, plan, output_o=False, **more)
    only, no_score = fmha_sm100(batch.q, k, v, plan, output_maxscore=False, **more)
    assert none is None
    assert no_score is None
    assert_scores("both", both_score, batch)
    assert_scores("scores alone", only_score, batch)
    assert_attention("both", both, batch)
    assert_attention("output alone", only, batch)


@pytest.mark.parametrize("device", DEVICES)
def test_scores_are_raw_whatever_the_scales(device):
    batch = random_batch(*LENS, (4, 2), dim=64, dtype=torch.float32 if device == "cpu" else torch.bfloat16, device=device)
    plan = fmha_sm100_plan(*batch.lengths(), 4, num_kv_heads=2, output_maxscore=True, device=device)
    _, plain = fmha_sm100(batch.q, batch.k, batch.v, plan, output_o=False)
    _, scaled = fmha_sm100(batch.q, batch.k, batch.v, plan, output_o=False, sm_scale=0.5, q_scale=2.0, k_scale=4.0)
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["HKT", "THK"])
def test_given_buffers_hold_their_own_where_nothing_is_seen(layout, device):
    """Only tiles that a query sees are written, so that one buffer filled once serves batch after batch."""
    batch = random_batch(*LENS, (4, 2), dim=64, device=device)
    plan = fmha_sm100_plan(*batch.lengths(), 4, num_kv_heads=2, output_maxscore=True, device=device)
    shape = (4, 128, 201) if layout == "HKT" else (201, 4, 128)
    buffer = torch.full(shape, -torch.inf, device=device)
    _, found = fmha_sm100(batch.q, batch.k, batch.v, plan, output_o=False, max_score=buffer)
    assert found is buffer
    assert_scores(layout, buffer if layout == "HKT" else buffer.permute(1, 2, 0), batch)
    valid = (batch.positions() // 128 + 1).int().to(device)
    ids = sparse_topk_select(buffer, 4, num_valid_pages=valid, max_score_layout=layout)
    assert int(ids.max()) <= 3
