# SPDX-License-Identifier: MIT
"""`q_offset_override` replaces the plan's offsets when the launch runs: as int, as tensor, dense, paged, sparse, for scores."""

from dataclasses import replace

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan
from tests.exact import DEVICES, assert_attention, assert_scores, random_batch

LENS = (40, 3, 130), (300, 140, 260)
SETTINGS = [0, 17, 130, (5, 137, 0), (260, 0, 99), (-10, -3, 20)]
device = pytest.mark.parametrize("device", DEVICES)
setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)


def given(setting, device):
    return setting if isinstance(setting, int) else torch.tensor(setting, dtype=torch.int32, device=device)


def expected(batch, setting):
    return replace(batch, offsets=(setting,) * 3 if isinstance(setting, int) else setting)


def plan_of(batch, **options):
    return fmha_sm100_plan(*batch.lengths(), 4, num_kv_heads=2, device=batch.q.device, **options)


@device
@setting
@pytest.mark.parametrize("paged", [False, True])
def test_dense(setting, paged, device):
    batch = random_batch(*LENS, (4, 2), dim=64, device=device)
    k, v, more = batch.k, batch.v, {}
    if paged:
        k, v, more["kv_indices"] = batch.pages()
    plan = plan_of(batch, page_size=128 if paged else -1)
    out, _ = fmha_sm100(batch.q, k, v, plan, q_offset_override=given(setting, device), **more)
    assert_attention("out", out, expected(batch, setting))


@device
@setting
def test_max_scores(setting, device):
    batch = random_batch(*LENS, (4, 2), dim=64, device=device)
    plan = plan_of(batch, output_maxscore=True)
    _, scores = fmha_sm100(batch.q, batch.k, batch.v, plan, q_offset_override=given(setting, device), output_o=False)
    assert_scores("scores", scores, expected(batch, setting))


@device
@setting
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_sparse(setting, mode, device):
    batch = random_batch(*LENS, (4, 2), dim=64, device=device)
    k, v, table = batch.pages()
    ids = torch.tensor([2, 0, -1, 1], dtype=torch.int32, device=device).expand(173, 2, 4).contiguous()
    plan = plan_of(batch, page_size=128, kv_block_num=4, sparse_kernel_mode=mode)
    offset = given(setting, device)
    out, _ = fmha_sm100(batch.q, k, v, plan, kv_indices=table, kv_block_indexes=ids, q_offset_override=offset)
    assert_attention("out", out, expected(batch, setting), blocks=ids)


@device
@setting
def test_the_same_as_planned(setting, device):
    batch = random_batch(*LENS, (4, 2), dim=64, device=device)
    offset = given(setting, "cpu")
    planned = fmha_sm100(batch.q, batch.k, batch.v, plan_of(batch, qo_offset=offset))[0]
    overridden = fmha_sm100(batch.q, batch.k, batch.v, plan_of(batch), q_offset_override=given(setting, device))[0]
    assert torch.equal(planned, overridden)


@device
def test_it_leaves_the_plan_alone(device):
    batch = random_batch(*LENS, (4, 2), dim=64, device=device)
    plan = plan_of(batch)
    before = fmha_sm100(batch.q, batch.k, batch.v, plan)[0]
    fmha_sm100(batch.q, batch.k, batch.v, plan, q_offset_override=3)
    assert torch.equal(before, fmha_sm100(batch.q, batch.k, batch.v, plan)[0])


@device
def test_queries_before_the_first_key_give_zero(device):
    batch = random_batch(*LENS, (4, 2), dim=64, device=device)
    out, _ = fmha_sm100(batch.q, batch.k, batch.v, plan_of(batch), q_offset_override=-1000)
    assert not bool(out.any())


@pytest.mark.parametrize("wrong", [torch.tensor([1, 2]), torch.tensor([1.0, 2.0, 3.0]), "5"], ids=str)
def test_wrong_overrides_are_refused(wrong):
    batch = random_batch(*LENS, (4, 2), dim=64)
    with pytest.raises((ValueError, TypeError), match="q_offset_override"):
        fmha_sm100(batch.q, batch.k, batch.v, plan_of(batch), q_offset_override=wrong)
