# SPDX-License-Identifier: MIT
"""The sequences of calls of vLLM, SGLang, TensorRT-LLM, NeMo AutoModel and transformers work, with their storage."""

import pytest
import torch

from fmha_sm100 import build_k2q_csr, fmha_sm100, fmha_sm100_plan, sparse_atten_func, sparse_topk_select
from fmha_sm100.api import _fmha_sm100, _fmha_sm100_plan
from openmsa import NVFP4
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem
from tests import oracle
from tests.contract import DEVICES
from tests.fmha_sm100.batch import assert_results, lengths, pages, truth

PAGE, TOPK, HEADS, GROUP, DIM = 128, 4, 2, 2, 64
FP8 = torch.float8_e4m3fn
devices = pytest.mark.parametrize("device", DEVICES)


def made(q_lens, k_lens, dtype=torch.bfloat16):
    """Index products are whole numbers, so that selections are exact and often tie; every number is one of float8."""
    options = {"kv_heads": HEADS, "group": GROUP, "head_dim": DIM, "integer_index": True}
    return problem(q_lens, k_lens, **options).map(lambda x: x.to(FP8).to(dtype))


def selected(p, init_blocks=0, local_blocks=1):
    """Returns int32 [total_q, HEADS, TOPK]."""
    return oracle.select_blocks(p, oracle.block_scores(p, PAGE), PAGE, TOPK, init_blocks, local_blocks)


def positions(p):
    return torch.cat([torch.arange(q) + o for q, o in zip(p.q_lens, p.offsets, strict=True)]).int()


def halves(k, v):
    """Returns K and V as vLLM holds them, packed in the last dimension of one cache."""
    return torch.cat((k, v), -1).split(k.shape[-1], -1)


def slots(x):
    """Lays pages as SGLang does, as token slots that are seen as pages."""
    pages_first = x.permute(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])  # [slots, heads, dim]
    return pages_first.view(-1, PAGE, x.shape[1], x.shape[3]).permute(0, 2, 1, 3)


def starts(lens, device):
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=device)


@devices
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_vllm_prefill(device, fp8):
    """Scores of the prefill rows into a token-major view behind the decode rows, one selection for all, then attention."""
    p, decode_rows = made((60, 5, 33), (700, 5, 161)), 3
    here, total = p.to(device), sum(p.q_lens)
    k, v, index_k, table, width = pages(here, PAGE, fixed=True)
    if fp8:
        index_k, here = index_k.to(FP8), here.map(lambda x: x.to(FP8))
    qo, kv = lengths(p)
    plan = _fmha_sm100_plan(
        qo, kv, HEADS, num_kv_heads=1, qo_offset=kv - qo, page_size=PAGE, output_maxscore=True, causal=True, num_kv_splits=1,
        device=device,
    )  # fmt: skip
    plan["max_k_tiles"] = 64
    unified = torch.full((decode_rows + total, HEADS, 64), -torch.inf, device=device)
    unified[:decode_rows, :, :2] = 1
    flat = torch.cat([row[: -(-n // PAGE)] for row, n in zip(table.view(-1, width), p.k_lens, strict=True)])
    options = {"kv_indices": flat, "output_o": False, "output_maxscore": True, "sm_scale": DIM**-0.5}
    _fmha_sm100(here.index_q, index_k, index_k, plan, max_score=unified[decode_rows:], **options)
    valid = torch.cat((torch.full((decode_rows,), 2), positions(p) // PAGE + 1)).int().to(device)
    buffer = torch.empty(decode_rows + total + 9, HEADS, TOPK, dtype=torch.int32, device=device)
    blocks = sparse_topk_select(
        unified, TOPK, num_valid_pages=valid, force_begin_blocks=0, force_end_blocks=1, output=buffer[: len(unified)],
        max_score_layout="THK",
    )  # fmt: skip
    assert blocks[:decode_rows].flatten().tolist() == [0, 1, -1, -1] * decode_rows * HEADS
    assert_equal("blocks", blocks[decode_rows:], selected(p))

    q, (key, value) = p.q.to(device), halves(k, v)
    if fp8:
        q, (key, value) = q.to(FP8), halves(k.to(FP8), v.to(FP8))
    cu_q, cu_k = starts(p.q_lens, device), starts(p.k_lens, device)
    bounds = {"max_seqlen_q": max(p.q_lens), "max_seqlen_k": max(p.k_lens)}
    row_ptr, q_idx, schedule = build_k2q_csr(
        blocks[decode_rows:].transpose(0, 1), cu_q, cu_k, PAGE, total_k=0, total_rows=sum(-(-n // PAGE) for n in p.k_lens),
        qhead_per_kv=GROUP, return_schedule=True, **bounds,
    )  # fmt: skip
    out = torch.empty(decode_rows + total, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=device)
    sparse_atten_func(
        q, key, value, row_ptr, q_idx, topK=TOPK, blk_kv=PAGE, causal=True, softmax_scale=DIM**-0.5, cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k, page_table=table.view(-1, width), seqused_k=cu_k.diff(), schedule=schedule, out=out[decode_rows:],
        **bounds,
    )  # fmt: skip
    assert_results((out[decode_rows:],), truth(p, selected(p), PAGE))


@devices
@pytest.mark.parametrize("queries", [1, 3])
def test_vllm_decode(device, queries):
    """vLLM makes a plan for each batch size and rewrites lengths and offsets of each query token every step; pages lie at row *
    stride."""
    p = made((queries,) * 5, (700, 3, 128, 260, 517))
    here, tokens, stride_rows = p.to(device), 5 * queries, torch.arange(5).repeat_interleave(queries)
    k, v, _, table, width = pages(here, PAGE, fixed=True)
    key, value = halves(k.to(FP8), v.to(FP8))
    qo = torch.full((5,), queries, dtype=torch.int32)
    kv = torch.full((5,), max(queries, 8), dtype=torch.int32)  # of the dummy batch
    plan = fmha_sm100_plan(
        qo, kv, HEADS * GROUP, num_kv_heads=HEADS, qo_offset=kv - qo, page_size=PAGE, output_maxscore=False, kv_block_num=TOPK,
        causal=True, sparse_kernel_mode="decode", use_fp8_kvcache=True, split_prefill_decode=False, device=device,
        decode_backend="kv_mode3",
    )  # fmt: skip
    assert plan[3]["kv_segment_lens"].shape == plan[3]["qo_offset"].shape == (tokens,)
    plan[3]["kv_page_indptr"].copy_(torch.cat((stride_rows * width, torch.tensor([5 * width]))))
    plan[3]["kv_segment_lens"].copy_(torch.tensor(p.k_lens)[stride_rows])
    plan[3]["qo_offset"].copy_(positions(p))
    blocks, out = selected(p), torch.empty(tokens, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=device)
    found = fmha_sm100(
        here.q.to(FP8), key, value, plan, kv_indices=table, kv_block_indexes=blocks.to(device), out=out, output_maxscore=False,
        output_o=True, sm_scale=DIM**-0.5, q_scale=1.0, k_scale=1.0, v_scale=1.0, o_scale=1.0,
    )  # fmt: skip
    assert found[0] is out
    assert_results((out,), truth(p, blocks, PAGE))


@devices
def test_vllm_decode_nvfp4(device):
    """vLLM decodes over slots of codes and scales, with V's scales by fours and global scales on the device."""
    p = made((1,) * 3, (300, 5, 130))
    kv, _ = paged(p, PAGE)
    whole = torch.tensor(0.37)
    stored = [NVFP4.quantize(x.nan_to_num(0), whole) for x in (kv.k, kv.v)]
    num_pages = kv.k.shape[0]
    cache = torch.zeros(num_pages, 2 * HEADS, PAGE * DIM * 9 // 16, dtype=torch.uint8)
    for n, x in enumerate(stored):
        scales = x.scale.view(torch.uint8)  # [pages, heads, page, groups]
        if n:
            scales = scales.unflatten(2, (PAGE // 4, 4)).transpose(3, 4)
        cache[:, n::2] = torch.cat((x.data.flatten(2), scales.flatten(2)), -1)
    cache = cache.view(num_pages, 2 * HEADS, PAGE, DIM * 9 // 16).to(device)
    numbers = [oracle.from_pages(x.dequantize(torch.float64), kv.page_table, kv.seq_lens) for x in stored]
    exact = type(p)(**{**vars(p), "q": p.q.double(), "k": numbers[0], "v": numbers[1]})

    qo, lens = lengths(p)
    heads = {"num_kv_heads": HEADS, "page_size": PAGE, "kv_block_num": TOPK, "device": device}
    plan = fmha_sm100_plan(qo, lens, HEADS * GROUP, sparse_kernel_mode="decode", **heads)
    flat = torch.cat([row[: -(-n // PAGE)] for row, n in zip(kv.page_table, p.k_lens, strict=True)]).to(device)
    options = {"kv_indices": flat, "kv_block_indexes": selected(p).to(device), "output_maxscore": False, "q_scale": 0.5}
    scales = {"k_scale": whole.to(device), "v_scale": whole.to(device)}
    out, _ = fmha_sm100(p.q.to(device).to(FP8), cache[:, 0::2], cache[:, 1::2], plan, **options, **scales)
    honest = exact.map(lambda x: x.to(torch.bfloat16))
    found = (truth(x, selected(p), PAGE, DIM**-0.5 / 2)[n] for n, x in enumerate((exact, honest)))
    assert_results((out,), tuple(found))


@devices
def test_sglang_prefill(device):
    """SGLang prefills with lengths on the device, slot-major caches that are seen as pages, and a prefix in the cache."""
    p = made((40, 2, 129), (300, 2, 640))
    here = p.to(device)
    k, v, _, table, _ = pages(here, PAGE)
    qo, kv = (x.to(device) for x in lengths(p))
    plan = fmha_sm100_plan(
        qo, kv, HEADS * GROUP, num_kv_heads=HEADS, page_size=PAGE, kv_block_num=TOPK, causal=True,
        qo_offset=(kv - qo).int(), use_fp8_kvcache=False,
    )  # fmt: skip
    assert isinstance(plan, tuple)
    assert isinstance(plan[3], dict)
    blocks = selected(p)
    out, _ = fmha_sm100(
        here.q, slots(k), slots(v), plan, sm_scale=DIM**-0.5, kv_indices=table, kv_block_indexes=blocks.to(device).contiguous()
    )
    assert_results((out,), truth(p, blocks, PAGE))


@devices
def test_sglang_decode(device):
    """SGLang makes one plan for each batch size, not causal, and rewrites its tensors every step."""
    q, plan = (1,) * 4, None
    for k_lens in ((600, 1, 130, 0), (300, 900, 129, 513)):
        p = made(q, k_lens)
        here = p.to(device)
        k, v, _, table, _ = pages(here, PAGE)
        if plan is None:
            ones, full = torch.ones(4, dtype=torch.int32), torch.full((4,), TOPK * PAGE, dtype=torch.int32)
            plan = fmha_sm100_plan(
                ones, full, HEADS * GROUP, num_kv_heads=HEADS, page_size=PAGE, kv_block_num=TOPK, causal=False,
                qo_offset=full - 1, device=device, use_fp8_kvcache=True,
            )  # fmt: skip
        lens = torch.tensor(k_lens, dtype=torch.int32, device=device)
        plan[3]["kv_segment_lens"].copy_(lens)
        plan[3]["kv_segment_offsets"][1:].copy_(lens.cumsum(0))
        plan[3]["kv_page_indptr"][1:].copy_(((lens + PAGE - 1) // PAGE).cumsum(0))
        plan[3]["qo_offset"].copy_(lens.max().expand(4))
        blocks = selected(p)
        scales = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 0.25}
        out, _ = fmha_sm100(
            *(here.q.to(FP8), slots(k.to(FP8)), slots(v.to(FP8)), plan),
            sm_scale=DIM**-0.5, kv_indices=table, kv_block_indexes=blocks.to(device), **scales,
        )  # fmt: skip
        (exact, _), (honest, _) = truth(p, blocks, PAGE, DIM**-0.5 * 1.5)
        assert_results((out,), ((exact * 0.25,), (honest * 0.25,)))


class StablePlan:
    """Copies the tensors of each step's plan to buffers that a captured graph reads, as TensorRT-LLM does."""

    KEYS = ("qo_segment_lens", "kv_segment_lens", "qo_segment_offsets", "kv_segment_offsets", "kv_page_indptr", "qo_offset")

    def __init__(self, device):
        self.buffers = {key: torch.zeros(64, dtype=torch.int32, device=device) for key in self.KEYS}

    def refresh(self, plan):
        mixed, split, batch, fresh, prefill = plan
        assert not mixed
        assert all(fresh.get(key) is None for key in ("workspace_o", "workspace_lse", "kv_split_indices"))
        stable = dict(fresh)
        for key in self.KEYS:
            stable[key] = self.buffers[key][: fresh[key].shape[0]]
            stable[key].copy_(fresh[key], non_blocking=True)
        return mixed, split, batch, stable, prefill


@devices
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (4, 4, 4), (50, 1, 7)])
def test_tensorrt_llm(device, q_lens):
    """TensorRT-LLM makes three plans a step, for scores, selected pages and all keys; K and V are views of one buffer [pages,
    2, heads, page, dim]."""
    p = made(q_lens, (400, 130, 900))
    here, (qo, kv) = p.to(device), lengths(p)
    k, v, index_k, table, _ = pages(here, PAGE)
    buffers = torch.stack((k, v), 1)
    k, v = buffers[:, 0], buffers[:, 1]
    shared = {"qo_offset": kv - qo, "page_size": PAGE, "causal": True, "device": device}
    proxy = fmha_sm100_plan(qo, kv, HEADS, num_kv_heads=1, output_maxscore=True, num_kv_splits=1, **shared)
    sparse = fmha_sm100_plan(qo, kv, HEADS * GROUP, num_kv_heads=HEADS, kv_block_num=TOPK, use_fp8_kvcache=False, **shared)
    dense = fmha_sm100_plan(qo, kv, HEADS * GROUP, num_kv_heads=HEADS, num_kv_splits=1, **shared)
    proxy, sparse, dense = (StablePlan(device).refresh(plan) for plan in (proxy, sparse, dense))

    tiles, total = proxy[3]["max_k_tiles"], len(p.q)
    scores = torch.full((HEADS, tiles, total), -torch.inf, device=device)
    options = {"kv_indices": table, "output_o": False, "output_maxscore": True, "max_score": scores, "sm_scale": DIM**-0.5}
    fmha_sm100(here.index_q, index_k, index_k, proxy, **options)
    blocks = sparse_topk_select(scores, TOPK, (positions(p) // PAGE + 1).to(device), force_end_blocks=1)
    assert_equal("blocks", blocks, selected(p))

    out = torch.empty(total, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=device)
    options = {"kv_indices": table, "sm_scale": DIM**-0.5, "output_maxscore": False}
    assert fmha_sm100(here.q, k, v, sparse, kv_block_indexes=blocks, out=out, **options)[0] is out
    assert_results((out,), truth(p, selected(p), PAGE))
    fmha_sm100(here.q, k, v, dense, out=out, **options)
    assert_results((out,), truth(p))


@devices
def test_nemo(device):
    """NeMo packs documents behind each other, writes scores into [heads, tiles, total_q] and selects in the order of the
    scores."""
    lens = (500, 1, 130)
    p = made(lens, lens)
    here, cpu_lens, total = p.to(device), torch.tensor(lens, dtype=torch.int32), sum(lens)
    plan = fmha_sm100_plan(
        cpu_lens,
        cpu_lens,
        HEADS,
        num_kv_heads=1,
        causal=True,
        output_maxscore=True,
        num_kv_splits=1,
        split_prefill_decode=False,
    )
    split_batch, _, _, score_plan, _ = plan
    assert split_batch is False
    tiles = score_plan["max_k_tiles"]
    scores = torch.full((HEADS, tiles, total), -torch.inf, device=device)
    _, found = fmha_sm100(
        here.index_q, here.index_k, here.index_k, plan, max_score=scores, output_o=False, output_maxscore=True
    )
    assert found is scores
    local = (positions(p) // PAGE).to(device).long()
    chosen = scores.transpose(1, 2).scatter(2, local[None, :, None].expand(HEADS, -1, 1), torch.inf).topk(TOPK, dim=-1)
    q2k = chosen.indices.int().masked_fill(chosen.values == -torch.inf, -1)  # [heads, total_q, topk], best first
    cu = starts(lens, device)
    bounds = {"max_seqlen_q": max(lens), "max_seqlen_k": max(lens)}
    row_ptr, q_idx, schedule = build_k2q_csr(
        q2k, cu, cu, PAGE, total_k=total, total_rows=sum(-(-n // PAGE) for n in lens), qhead_per_kv=GROUP, return_schedule=True,
        **bounds,
    )  # fmt: skip
    assert schedule.scheduler_metadata.shape[1] == 6
    out, lse = sparse_atten_func(
        here.q, here.k, here.v, row_ptr, q_idx, TOPK, cu_seqlens_q=cu, cu_seqlens_k=cu, blk_kv=PAGE, causal=True,
        softmax_scale=DIM**-0.5, partial_dtype=torch.bfloat16, return_softmax_lse=True, schedule=schedule, **bounds,
    )  # fmt: skip
    assert_results((out, lse), truth(p, q2k.transpose(0, 1), PAGE))


@devices
@pytest.mark.parametrize("q_len", [300, 1], ids=["prefill", "decode"])
def test_transformers(device, q_len):
    """transformers passes rectangles of tokens, ids with the local block first and then by score, and takes two values from
    `build_k2q_csr`."""
    p = made((q_len,) * 2, (600,) * 2)
    here, blocks = p.to(device), selected(p).flip(2).roll(1, 2)
    cu_q, cu_k = starts(p.q_lens, device), starts(p.k_lens, device)
    bounds = {"max_seqlen_q": q_len, "max_seqlen_k": 600}
    q2k = blocks.to(device).transpose(0, 1).contiguous()
    row_ptr, q_idx = build_k2q_csr(q2k, cu_q, cu_k, PAGE, total_k=1200, qhead_per_kv=GROUP, **bounds)
    out = sparse_atten_func(
        here.q, here.k, here.v, row_ptr, q_idx, TOPK, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, blk_kv=PAGE, causal=True,
        softmax_scale=DIM**-0.5, **bounds,
    )  # fmt: skip
    assert_results((out,), truth(p, blocks, PAGE))
