# SPDX-License-Identifier: MIT
"""Callers can take the plan apart: it is a tuple with a dict at index 3, whose tensors are read when a launch runs."""

from dataclasses import replace

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan
from fmha_sm100.api import _fmha_sm100, _fmha_sm100_plan
from tests.exact import DEVICES, assert_attention, random_batch

REWRITTEN = ("kv_segment_lens", "kv_segment_offsets", "kv_page_indptr", "qo_offset")
device = pytest.mark.parametrize("device", DEVICES)


@device
@pytest.mark.parametrize("sparse", [False, True])
def test_its_form(sparse, device):
    q, k = torch.ones(3, dtype=torch.int32), torch.tensor([300, 128, 1], dtype=torch.int32)
    options = {"page_size": 128, "device": device} | ({"kv_block_num": 16} if sparse else {"output_maxscore": True})
    plan = fmha_sm100_plan(q, k, 8, num_kv_heads=2, **options)
    assert isinstance(plan, tuple)
    assert len(plan) == 5
    assert isinstance(plan[3], dict)
    for name in REWRITTEN:
        assert plan[3][name].dtype == torch.int32
        assert plan[3][name].device.type == device
    assert plan[3]["kv_segment_lens"].tolist() == [300, 128, 1]
    assert plan[3]["qo_offset"].tolist() == [299, 127, 0]
    assert plan[3]["kv_page_indptr"].tolist() == [0, 3, 4, 5]
    assert plan[3]["max_k_tiles"] == (-1 if sparse else 128)


@device
def test_lengths_written_in_place_count(device):
    """A decode plan made for one batch serves the next steps: lengths, offsets and page starts are overwritten."""
    planned = fmha_sm100_plan(
        torch.ones(3, dtype=torch.int32),
        torch.full((3,), 16 * 128, dtype=torch.int32),
        4,
        num_kv_heads=2,
        page_size=128,
        kv_block_num=16,
        causal=False,
        device=device,
    )
    for k_lens in ((300, 17, 129), (301, 18, 130), (5, 700, 1)):
        batch = replace(random_batch((1, 1, 1), k_lens, (4, 2), dim=64, device=device, seed=sum(k_lens)), causal=False)
        k, v, table = batch.pages()
        fresh = fmha_sm100_plan(
            *batch.lengths(), 4, num_kv_heads=2, page_size=128, kv_block_num=16, causal=False, device=device
        )
        for name in REWRITTEN:
            planned[3][name].copy_(fresh[3][name])
        ids = torch.arange(16, dtype=torch.int32, device=device)
        ids = torch.stack([ids.where(ids < -(-n // 128), -1) for n in k_lens])[:, None].expand(-1, 2, -1).contiguous()
        out, _ = fmha_sm100(batch.q, k, v, planned, kv_indices=table, kv_block_indexes=ids, output_maxscore=False)
        assert_attention(str(k_lens), out, batch)


@device
def test_page_starts_may_be_a_multiple_of_a_stride(device):
    batch = random_batch((1, 1), (260, 100), (4, 2), dim=64, device=device)
    k, v, table = batch.pages()
    padded = torch.full((2, 7), -1, dtype=torch.int32, device=device)
    padded[0, :3], padded[1, :1] = table[:3], table[3:]
    plan = fmha_sm100_plan(*batch.lengths(), 4, num_kv_heads=2, page_size=128, device=device)
    plan[3]["kv_page_indptr"].copy_(torch.tensor([0, 7, 14], dtype=torch.int32))
    out, _ = fmha_sm100(batch.q, k, v, plan, kv_indices=padded.view(-1), output_maxscore=False)
    assert_attention("out", out, batch)


def test_two_plans_share_nothing():
    lens = torch.tensor([4, 5]), torch.tensor([300, 200])
    one, other = (fmha_sm100_plan(*lens, 4, num_kv_heads=2, page_size=128) for _ in range(2))
    pointers = [{x.data_ptr() for x in plan[3].values() if torch.is_tensor(x) and x.numel()} for plan in (one, other)]
    assert not pointers[0] & pointers[1]


def test_the_inner_functions_take_the_dict():
    batch = random_batch((7,), (50,), (4, 2), dim=64)
    plan = _fmha_sm100_plan(*batch.lengths(), 4, num_kv_heads=2)
    assert isinstance(plan, dict)
    out, _ = _fmha_sm100(batch.q, batch.k, batch.v, plan, output_maxscore=False)
    assert_attention("out", out, batch)


@pytest.mark.parametrize("plan", [None, (1, 2), (False, 0, 1, {}, None)], ids=str)
def test_what_is_no_plan_is_refused(plan):
    batch = random_batch((7,), (50,), (4, 2), dim=64)
    with pytest.raises((TypeError, ValueError), match="plan_info must be what"):
        fmha_sm100(batch.q, batch.k, batch.v, plan)
