# SPDX-License-Identifier: MIT
"""The kernels around a launch do what PyTorch does on the CPU, bit for bit."""

import pytest
import torch

pytest.importorskip("triton")

from fmha_sm100 import call, plan_rows
from fmha_sm100.api import fmha_sm100, fmha_sm100_plan
from openmsa.testing.compare import assert_equal
from tests.contract import CUDA
from tests.fmha_sm100.batch import assert_results, batch, lengths, pages, selection, truth

DEVICE = "cuda" if CUDA else "cpu"  # without a GPU in Triton's interpreter
pytestmark = [pytest.mark.gpu] if CUDA else []


@pytest.fixture
def both(monkeypatch):
    """Calls a function in PyTorch and with the kernels."""

    def run(function, *args):
        found = []
        for kernels in (False, True):
            monkeypatch.setattr(plan_rows, "uses_kernels", lambda tensor, kernels=kernels: kernels)
            found.append(function(*args))
        return found

    return run


@pytest.mark.parametrize("fixed", [False, True])
def test_page_tables(both, fixed):
    p = batch("short").to(DEVICE)
    _, _, _, table, _ = pages(p, 16, fixed=fixed)
    plan = fmha_sm100_plan(*lengths(p), 4, page_size=16, device=DEVICE)[3]
    plan["kv_page_indptr"][-2] = table.numel() - 1
    plan["kv_page_indptr"][1] = -3
    for wide in (table, table.new_full((table.numel(), 2), 9).select(1, 1).copy_(table)):
        assert_equal("page_table", *both(plan_rows.page_table, plan, wide, 16, None))
        assert_equal("page_table", *both(plan_rows.page_table, plan, wide, 16, 5))


def test_one_long_sequence(both):
    p = batch("short")
    blocks = selection(p, 16).to(DEVICE)
    plan = fmha_sm100_plan(*lengths(p), 4, page_size=16, kv_block_num=3, device=DEVICE)[3]
    plan["kv_page_indptr"][2], plan["kv_page_indptr"][3], plan["qo_offset"][0] = -1, 1000, -2
    for ids in (blocks, blocks.transpose(1, 2).contiguous().transpose(1, 2), blocks[:, :1].expand(-1, 3, -1)):
        found = both(plan_rows.one_long_sequence, plan, plan["qo_offset"], ids, 37, 16)
        for name, torch_one, triton_one in zip(("blocks", "keys", "position"), *found, strict=True):
            assert_equal(name, triton_one, torch_one)


def test_a_decode_step(monkeypatch):
    """A whole decode step is right in Triton's interpreter or on a GPU."""
    p = batch("short", torch.float32 if DEVICE == "cpu" else torch.bfloat16)
    here, blocks = p.to(DEVICE), selection(p, 16)
    k, v, _, table, _ = pages(here, 16)
    monkeypatch.setattr(plan_rows, "uses_kernels", lambda tensor: True)
    monkeypatch.setattr(call, "reads_one_long_sequence", lambda call: True)
    plan = fmha_sm100_plan(*lengths(p), 4, page_size=16, kv_block_num=3, device=DEVICE)
    out, _, lse = fmha_sm100(*(here.q, k, v, plan), kv_indices=table, kv_block_indexes=blocks.to(DEVICE), return_lse=True)
    assert_results((out, lse), truth(p, blocks, 16))
