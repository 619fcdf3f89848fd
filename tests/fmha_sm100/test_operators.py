# SPDX-License-Identifier: MIT
"""The public functions are operators in traced graphs, with the results of eager calls."""

import pytest
import torch

import fmha_sm100 as public
from fmha_sm100.sparse import quantize_kv_bf16_to_nvfp4_128x4
from openmsa.operators import OPERATORS
from openmsa.operators.packing import pack
from openmsa.runtime.tracing import FUNCTIONS
from tests.fmha_sm100.batch import batch, lengths, pages, selection
from tests.fmha_sm100.sparse_cases import case
from tests.fmha_sm100.sparse_cases import lengths as bounds
from tests.fmha_sm100.test_fp4_indexer import setup


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def agree(function, *arguments):
    """What a graph returns and writes is what an eager call returns and writes."""
    graph = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    mine, theirs = ([x.clone() if isinstance(x, torch.Tensor) else x for x in arguments] for _ in range(2))
    found, expected = graph(*mine), function(*theirs)
    found, expected = ((x if isinstance(x, tuple) else (x,), given) for x, given in ((found, mine), (expected, theirs)))
    for x, y in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        if not isinstance(x, torch.Tensor):
            assert x is y or not isinstance(y, torch.Tensor)
            continue
        assert x.dtype == y.dtype
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_each_public_function_is_an_operator():
    assert callable(public.fmha_sm100)  # which loads its module
    assert callable(public.sparse_atten_func)
    names = {name for name in FUNCTIONS if name.startswith("fmha_sm100::")}
    assert names == {name for name in OPERATORS if name.startswith("fmha_sm100::")}
    kernels = {"fmha_sm100", "run_plan", "sparse_topk_select", "sparse_atten_func", "sparse_atten_nvfp4_kv_func"}
    kernels |= {"sparse_decode_atten_func", "build_k2q_csr", "fp4_indexer_block_scores"}
    assert names == {f"fmha_sm100::{name}" for name in kernels}


@pytest.mark.parametrize("buffers", [False, True])
def test_dense_attention_and_its_selection(buffers):
    p = batch()
    plan = public.fmha_sm100_plan(*lengths(p), 4, 2, output_maxscore=True)
    out = torch.zeros(p.q.shape) if buffers else None
    score = torch.full((4, plan[3]["max_k_tiles"], p.q.shape[0]), -torch.inf) if buffers else None

    def run(q, k, v, out, score):
        out, score, lse = public.fmha_sm100(q, k, v, plan, out=out, max_score=score, return_lse=True)
        return out, lse, public.sparse_topk_select(score, 2), score

    agree(run, p.q, p.k, p.v, out, score)


@pytest.mark.parametrize("lens", ["decode", "mixed"])
def test_selected_pages(lens):
    """A mixed batch has two plans."""
    p = batch(lens)
    k, v, _, table, _ = pages(p, 16)
    plan = public.fmha_sm100_plan(*lengths(p), 4, 2, page_size=16, kv_block_num=3)
    assert plan[0] == (lens == "mixed")
    agree(lambda *x: public.fmha_sm100(*x[:3], plan, *x[3:])[0], p.q, k, v, table, selection(p, 16))


@pytest.mark.parametrize("buffer", [False, True])
def test_a_selection_in_compressed_rows(buffer):
    p, blocks = case(block_size=16)
    own = bounds(p, "cpu")

    def run(q, k, v, q2k, cu_q, cu_k, out):
        options = own | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        rows = public.build_k2q_csr(q2k, cu_q, cu_k, 16, total_k=k.shape[0])
        options |= {"blk_kv": 16, "return_softmax_lse": True, "return_temperature_lse": True, "lse_temperature_scale": 2.0}
        return public.sparse_atten_func(q, k, v, *rows, blocks.shape[2], causal=True, out=out, **options)

    out = torch.zeros(p.q.shape) if buffer else None
    agree(run, p.q, p.k, p.v, blocks.transpose(0, 1), own["cu_seqlens_q"], own["cu_seqlens_k"], out)


def test_nvfp4():
    p, blocks = case(block_size=16)
    own = bounds(p, "cpu")
    (k, v), options = quantize_kv_bf16_to_nvfp4_128x4(p.k, p.v), own | {"blk_kv": 16, "causal": True}
    rows = public.build_k2q_csr(blocks.transpose(0, 1), own["cu_seqlens_q"], own["cu_seqlens_k"], 16, total_k=p.k.shape[0])
    scales = (k.scale_128x4, v.scale_128x4, k.global_scale, v.global_scale)

    def run(q, k, v, *rest):
        return public.sparse_atten_nvfp4_kv_func(q, k, v, *rest, blocks.shape[2], **options)

    agree(run, p.q, k.data, v.data, *scales, *rows)


def test_planned_decode():
    table, lens = torch.randperm(18).int().view(3, 6), torch.tensor([5, 96, 0], dtype=torch.int32)
    k, v = torch.randn(2, 18, 2, 16, 32).unbind(0)

    def run(q, k, v, table, lens):
        wrapper = public.SparseDecodePagedAttentionWrapper(blk_kv=16)
        wrapper.plan(page_table=table, seqused_k=lens, seqlen_q=2, max_seqlen_k=96)
        return wrapper.run(q, k, v, k_scale=2.0, return_softmax_lse=True)

    agree(run, torch.randn(6, 4, 32), k, v, table, lens)


@pytest.mark.parametrize("name", ["fp4_indexer_block_scores", "sparse_topk_select"])
def test_opcheck(name):
    operator = OPERATORS[f"fmha_sm100::{name}"]
    if name == "sparse_topk_select":
        arguments = {"max_score": torch.randn(2, 9, 5), "topk": 3}
    else:
        arguments = setup((3, 2), (130, 200), 2, 1, "mxfp4")[1] | {"scale_layout": "public"}
    tensors, _, *numbers = pack(arguments, operator.writes)
    torch.library.opcheck(operator.packet.default, (tensors, *numbers))


def test_planning_is_done_outside():
    lens = torch.tensor([3], dtype=torch.int32)

    def plan(lens):
        return public.fmha_sm100_plan(lens, lens, 4, 2)[3]["qo_segment_lens"]

    with pytest.raises(Exception, match="fmha_sm100_plan reads lengths on the host: call it outside the traced function"):
        torch.compile(plan, fullgraph=True, backend="eager")(lens)
    assert torch.equal(torch.compile(plan, backend="eager")(lens), lens)  # with a break in the graph
