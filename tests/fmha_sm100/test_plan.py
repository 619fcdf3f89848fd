# SPDX-License-Identifier: MIT
"""`fmha_sm100_plan` returns and refuses what it should, and plans share nothing."""

import inspect
import subprocess
import sys

import pytest
import torch

import fmha_sm100
from fmha_sm100 import api
from fmha_sm100.api import _fmha_sm100_plan, fmha_sm100_plan
from openmsa.testing.compare import assert_equal
from tests.contract import DEVICES

QO, KV = torch.tensor([2, 1, 0]), torch.tensor([300, 64, 5], dtype=torch.int32)


def test_exports_are_lazy():
    code = "import sys, torch, fmha_sm100; print(sorted(m for m in sys.modules if m.startswith(('fmha_sm100.', 'openmsa'))))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    for name in fmha_sm100.__all__:
        assert callable(getattr(fmha_sm100, name))
        assert name in dir(fmha_sm100)
    with pytest.raises(AttributeError, match="no attribute 'fmha'"):
        _ = fmha_sm100.fmha


def test_signatures():
    """Names, order and defaults of the public package, wherever it offers them."""
    assert api.sparse_fmha is fmha_sm100.sparse_fmha
    assert api.sparse_fmha_plan is fmha_sm100.sparse_fmha_plan
    names = "num_qo_heads num_kv_heads qo_offset num_kv_splits page_size output_maxscore kv_block_num usable_SM_count causal"
    planner = list(inspect.signature(_fmha_sm100_plan).parameters)
    expected = [
        "qo_segment_lens",
        "kv_segment_lens",
        *names.split(),
        "sparse_kernel_mode",
        "use_fp8_kvcache",
        "device",
        "stream",
    ]
    assert planner[: len(expected)] == expected
    runner = list(inspect.signature(fmha_sm100.fmha_sm100).parameters)
    optional = ["kv_indices", "kv_block_indexes", "q_offset_override", "out", "max_score"]
    assert runner == ["q", "k", "v", "plan_info", *optional, "kwargs"]
    topk = inspect.signature(fmha_sm100.sparse_topk_select).parameters
    assert [(n, p.default) for n, p in topk.items()][2:] == [
        *(("num_valid_pages", None), ("output", None), ("force_begin_blocks", 0), ("force_end_blocks", 0)),
        ("max_score_layout", "HKT"),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_for_each_request(device):
    plan = fmha_sm100_plan(QO, KV, 4, num_kv_heads=2, page_size=128, output_maxscore=True, device=device)
    assert isinstance(plan, tuple)
    assert plan[:3] == (False, 0, 3)
    assert isinstance(plan[3], dict)
    assert plan[4] is None
    tensors = {name: x.tolist() for name, x in plan[3].items() if isinstance(x, torch.Tensor)}
    assert tensors == {
        "qo_segment_lens": [2, 1, 0],
        "kv_segment_lens": [300, 64, 5],
        "qo_offset": [298, 63, 5],
        "qo_segment_offsets": [0, 2, 3, 3],
        "kv_segment_offsets": [0, 300, 364, 369],
        "kv_page_indptr": [0, 3, 4, 5],
    }
    for x in plan[3].values():
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.device.type, x.data_ptr() % 128) == (
                torch.int32,
                device,
                plan[3]["qo_segment_lens"].data_ptr() % 128,
            )
    assert plan[3]["max_k_tiles"] == 128
    assert plan[3]["num_kv_splits"] == 1
    assert plan[3]["MM-SA-Nv"] is False
    assert fmha_sm100_plan(QO, KV * 128 * 128, 4, output_maxscore=True)[3]["max_k_tiles"] == 38400
    assert fmha_sm100_plan(QO, KV, 4)[3]["max_k_tiles"] == -1


def test_a_row_for_each_query_token():
    plan = fmha_sm100_plan(QO, KV, 4, page_size=128, kv_block_num=16, qo_offset=7)[3]
    found = {name: plan[name].tolist() for name in ("kv_segment_lens", "qo_offset", "kv_page_indptr", "qo_segment_offsets")}
    assert found == {
        "kv_segment_lens": [300, 300, 64],
        "qo_offset": [7, 8, 7],
        "kv_page_indptr": [0, 0, 3, 5],
        "qo_segment_offsets": [0, 1, 2, 3],
    }
    for options in ({"sparse_kernel_mode": "prefill"}, {"qo": QO * 20}):
        qo = options.pop("qo", QO)
        by_request = fmha_sm100_plan(qo, KV, 4, page_size=128, kv_block_num=16, **options)[3]
        assert by_request["kv_segment_lens"].tolist() == [300, 64, 5]
        assert by_request["MM-SA-Nv"] is True


def test_what_callers_read_of_a_sparse_plan():
    """Plans by requests say what the public ones say."""
    options = {"page_size": 64, "kv_block_num": 4, "device": "cpu"}
    plan = api.sparse_fmha_plan(QO, KV, 8, 2, torch.tensor([297, 63, 5]), usable_SM_count=7, **options)
    found = {name: plan[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")}
    assert found == {"cu_seqlens_q": [0, 2, 3, 3], "cu_seqlens_k": [0, 300, 364, 369], "seqused_k": [299, 64, 5]}
    assert plan["cu_seqlens_q"] is plan["qo_segment_offsets"]
    numbers = "max_seqlen_q max_seqlen_k total_k total_rows batch blk_kv page_size num_qo_heads qhead_per_kv usable_SM_count"
    assert [plan[name] for name in numbers.split()] == [2, 300, 369, 7, 3, 64, 64, 8, 4, 7]
    assert api.sparse_fmha_plan(QO, KV, 8, causal=False, **options)["seqused_k"].tolist() == KV.tolist()
    by_token = fmha_sm100_plan(QO, KV, 8, **options)[3]
    assert "seqused_k" not in by_token


def test_mixed_batches_have_two_plans():
    """Short requests in front of the first long one; the limit is 32 queries with a selection, else 128."""
    qo, kv = torch.tensor([1, 32, 33, 2, 129]), torch.tensor([9, 70, 40, 300, 200], dtype=torch.int32)
    dense = fmha_sm100_plan(qo, kv, 4, page_size=64, qo_offset=torch.tensor([1, 2, 3, 4, 5]), device="cpu")
    sparse = fmha_sm100_plan(qo, kv, 4, page_size=64, kv_block_num=4, device="cpu")
    assert dense[:3] == (True, 4, 5)
    assert sparse[:3] == (True, 2, 5)
    assert [plan["qo_offset"].tolist() for plan in dense[3:]] == [[1, 2, 3, 4], [5]]
    assert [plan["kv_page_indptr"].tolist() for plan in dense[3:]] == [[0, 1, 3, 4, 9], [0, 4]]
    assert [plan["MM-SA-Nv"] for plan in sparse[3:]] == [False, True]
    assert sparse[3]["kv_segment_lens"].numel() == 33
    assert sparse[4]["cu_seqlens_q"].tolist() == [0, 33, 35, 164]
    assert fmha_sm100_plan(qo.flip(0), kv.flip(0), 4, kv_block_num=4, page_size=64)[:2] == (False, 0)
    assert fmha_sm100_plan(qo, kv, 4, split_prefill_decode=False)[4] is None
    assert fmha_sm100_plan(qo, kv, 4, kv_block_num=4, page_size=64, split_prefill_decode=False)[:3] == (False, 0, 5)
    with pytest.raises(ValueError, match=r"qo_offset.shape\[0\] must be 5"):
        fmha_sm100_plan(qo, kv, 4, qo_offset=torch.tensor([1, 2]))


def test_plans_share_nothing():
    """A plan and its inputs, and two plans, are changed apart."""
    first, second = (fmha_sm100_plan(QO, KV, 4, page_size=16)[3] for _ in range(2))
    for name, x in first.items():
        if isinstance(x, torch.Tensor):
            x.fill_(-5)
            assert not bool((second[name] == -5).any())
    assert KV.tolist() == [300, 64, 5]


def test_plans_made_in_inference_mode_can_be_changed_outside():
    with torch.inference_mode():
        plan = fmha_sm100_plan(QO, KV, 4, page_size=16, kv_block_num=4)[3]
    plan["kv_segment_lens"].add_(1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"qo_segment_lens": [1, 2]}, TypeError, "qo_segment_lens must be a torch.Tensor"),
        ({"qo_segment_lens": QO.float()}, TypeError, "qo_segment_lens must have dtype"),
        ({"kv_segment_lens": KV[:2]}, ValueError, r"kv_segment_lens.shape\[0\] must be 3"),
        ({"kv_segment_lens": -KV}, ValueError, "kv_segment_lens must lie from 0 .* got -300"),
        ({"num_qo_heads": 0}, ValueError, "num_qo_heads must be at least 1, got 0"),
        ({"num_qo_heads": 4.0}, TypeError, "num_qo_heads must be an int"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads must divide num_qo_heads"),
        ({"page_size": 8}, ValueError, "page_size must be from 16 to 256, got 8"),
        ({"page_size": 512}, ValueError, "page_size must be from 16 to 256, got 512"),
        ({"kv_block_num": 65}, ValueError, "kv_block_num must be from 1 to 64, got 65"),
        ({"kv_block_num": 0}, ValueError, "kv_block_num must be from 1 to 64, got 0"),
        ({"qo_offset": 1.5}, TypeError, "qo_offset must be an int"),
        ({"qo_offset": QO[:1]}, ValueError, r"qo_offset.shape\[0\] must be 3"),
        ({"sparse_kernel_mode": "fast"}, ValueError, "sparse_kernel_mode must be one of .* got 'fast'"),
        ({"block_size": 8}, ValueError, "block_size must be from 16 to 256, got 8"),
        ({"max_kv_len": 299}, ValueError, r"kv_segment_lens must be at most max_kv_len \(299\), got 300"),
        ({"unknown": 1}, TypeError, "unknown"),
        ({"device": "nonsense"}, ValueError, "device must be a CUDA device or a CPU, got nonsense"),
        ({"causal": None}, TypeError, "causal must be a bool, got NoneType"),
        ({"output_maxscore": "no"}, TypeError, r"output_maxscore must be a bool, got str \('no'\)"),
        ({"split_prefill_decode": 2}, TypeError, "split_prefill_decode must be a bool, got int"),
        ({"use_fp8_kvcache": torch.float8_e4m3fn}, TypeError, "use_fp8_kvcache must be a bool, got dtype"),
        ({"num_kv_splits": -2}, ValueError, "num_kv_splits must be at least -1, got -2"),
        ({"usable_SM_count": 1.5}, TypeError, "usable_SM_count must be an int"),
        ({"num_kv_heads": torch.ones(2)}, TypeError, "num_kv_heads must be an int, got Tensor"),
        ({"page_size": torch.ones(2)}, TypeError, "page_size must be an int, got Tensor"),
        ({"kv_block_num": torch.ones(2)}, TypeError, "kv_block_num must be an int, got Tensor"),
    ],
)
def test_misuse(changes, error, words):
    arguments = {"qo_segment_lens": QO, "kv_segment_lens": KV, "num_qo_heads": 4} | changes
    with pytest.raises(error, match=words):
        fmha_sm100_plan(**arguments)


def test_lengths_with_gaps():
    """Slices of larger tensors give the plan of their numbers; a replaced entry must be contiguous."""
    qo, kv = torch.tensor([[3, 300], [1, 17], [4, 129]], dtype=torch.int32).T
    sparse = fmha_sm100_plan(qo, kv, 4, num_kv_heads=2, page_size=64, qo_offset=kv - qo)[3]
    own = fmha_sm100_plan(qo.contiguous(), kv.contiguous(), 4, num_kv_heads=2, page_size=64, qo_offset=kv - qo)[3]
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            assert_equal(name, sparse[name], value)
            assert sparse[name].is_contiguous()
    plan = fmha_sm100_plan(qo, kv, 4, num_kv_heads=2, page_size=64)
    plan[3]["kv_segment_lens"] = kv
    q, pool = torch.zeros(8, 4, 64), torch.zeros(9, 2, 64, 64)
    with pytest.raises(ValueError, match=r"plan_info\['kv_segment_lens'\] must be contiguous, got strides \(2,\)"):
        fmha_sm100.fmha_sm100(q, pool, pool, plan, kv_indices=torch.arange(9, dtype=torch.int32))
