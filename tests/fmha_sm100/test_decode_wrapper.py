# SPDX-License-Identifier: MIT
"""`sparse_decode_atten_func` and `SparseDecodePagedAttentionWrapper` are right, dense and with a selection, in place too."""

from dataclasses import replace

import pytest
import torch

from fmha_sm100.sparse import DecodeAttentionSchedule, SparseDecodePagedAttentionWrapper, sparse_decode_atten_func
from openmsa.testing.compare import assert_equal
from tests import oracle
from tests.contract import DEVICES
from tests.fmha_sm100.sparse_cases import FP8, case, check, floats, honest_fp8, pools, truth, with_numbers
from tests.products import Codes

devices = pytest.mark.parametrize("device", DEVICES)


def step(seqlen_q=2, k_lens=(300, 2, 129), dtype=torch.float32, **options):
    return case((seqlen_q,) * len(k_lens), k_lens, kv_heads=2, dtype=dtype, **options)


def dense(p, scale=None, causal=True):
    p = p if causal else replace(p, offsets=p.k_lens)
    reads = oracle.reads_everything(p)
    return oracle.attention(p, reads, scale), oracle.honest_attention(p, reads, scale)


def planned(p, device, page_size=128, packed=True):
    """Returns the arguments of a call beside q."""
    k, v, table, lens = pools(p, page_size, device, packed)
    seqlen_q = p.q_lens[0]
    return {"k": k, "v": v}, {
        "page_table": table,
        "seqused_k": lens,
        "seqlen_q": seqlen_q,
        "max_seqlen_k": max(p.k_lens),
    }


@devices
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [16, 100, 128])
@pytest.mark.parametrize("seqlen_q", [1, 2, 20])
def test_dense(device, seqlen_q, page_size, causal):
    p, _ = step(seqlen_q, (300, 20, 129), floats(device), group=3, head_dim=96)
    pool, plan = planned(p, device, page_size)
    options = {"softmax_scale": 0.11, "causal": causal, "return_softmax_lse": True}
    results = sparse_decode_atten_func(p.q.to(device), **pool, **plan, **options)
    check(results, dense(p, 0.11, causal))


@devices
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
@pytest.mark.parametrize("block_size", [32, 128])
def test_sparse(device, block_size, order):
    """A run reads the blocks of the selection and no others, whose ids come in any order."""
    p, blocks = step(dtype=floats(device), topk=3, block_size=block_size, group=16, head_dim=64)
    pool, plan = planned(p, device)
    q2k = blocks.to(device)
    q2k = q2k.transpose(0, 1) if order == "heads first" else q2k
    results = sparse_decode_atten_func(
        p.q.to(device), **pool, q2k_indices=q2k, **plan, blk_kv=block_size, return_softmax_lse=True
    )
    check(results, truth(p, blocks, block_size))


@devices
def test_fp8_as_the_public_function(device):
    """Queries, keys and values may be e4m3, with 16 heads a group, under scales too."""
    p, blocks = step(k_lens=(300, 140), topk=3, group=16, head_dim=128)
    codes = p.map(lambda x: x.to(FP8))
    numbers = codes.map(lambda x: x.to(torch.bfloat16))
    pool, plan = planned(numbers, device)
    pool = {name: x.to(FP8) for name, x in pool.items()}
    for scales in ({}, {"q_scale": 0.5, "k_scale": torch.tensor(0.75, device=device), "v_scale": 3.0}):
        q, k, v = (float(scales.get(f"{x}_scale", 1.0)) for x in "qkv")
        low = with_numbers(numbers, q * numbers.q, k * numbers.k, v * numbers.v)
        for selection in (None, blocks):
            q2k = None if selection is None else selection.transpose(0, 1).to(device)
            out = sparse_decode_atten_func(codes.q.to(device), **pool, q2k_indices=q2k, **plan, **scales)
            exact, honest = dense(low) if selection is None else truth(low, selection, 128)
            if device == "cuda":
                everything = torch.arange(3, dtype=torch.int32).expand(4, 2, 3)
                factors = Codes.of(codes.q, q, device), Codes.of(codes.k, k, device)
                honest = honest_fp8(low, everything if selection is None else selection, 128, None, *factors)
            check((out,), (exact, honest))


@devices
def test_short_and_empty_sequences(device):
    """Where a sequence has fewer keys than new tokens, tokens before its start read nothing."""
    p, _ = case((4, 4, 4), (2, 0, 130), kv_heads=2, dtype=floats(device))
    pool, plan = planned(p, device)
    results = sparse_decode_atten_func(p.q.to(device), **pool, **plan, return_softmax_lse=True)
    check(results, dense(p))
    assert not results[0][:2].any()
    assert (results[1][4:8] == -torch.inf).all()


@devices
@pytest.mark.parametrize("sparse", [False, True])
def test_wrapper(device, sparse):
    """Buffers are used; lengths, pages and selection are read at each run."""
    p, blocks = step(dtype=floats(device), topk=3)
    pool, plan = planned(p, device)
    q2k = blocks.transpose(0, 1).contiguous().to(device) if sparse else None
    wrapper = SparseDecodePagedAttentionWrapper()
    assert wrapper.plan(**plan, q2k_indices=q2k, num_qo_heads=4, num_kv_heads=2, head_dim=64) is wrapper
    q = p.q.to(device)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
    results = wrapper.run(q, **pool, return_softmax_lse=True, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    check(results, truth(p, blocks, 128) if sparse else dense(p))
    assert_equal("out alone", wrapper.run(q, **pool), out)

    shorter = replace(p, k_lens=(250, 2, 127), offsets=(248, 0, 125))
    keep = torch.cat([torch.arange(n) + sum(p.k_lens[:b]) for b, n in enumerate(shorter.k_lens)])
    shorter = replace(shorter, k=p.k[keep], v=p.v[keep])
    plan["seqused_k"].copy_(torch.tensor(shorter.k_lens))
    if sparse:
        blocks = blocks.flip(0).contiguous()
        q2k.copy_(blocks.transpose(0, 1))
    check((wrapper.run(q, **pool),), truth(shorter, blocks, 128) if sparse else dense(shorter))


SCHEDULE = {"page_table": torch.zeros(4, 40, dtype=torch.int32), "seqlen_q": 2, "max_seqlen_k": 5000}
HEADS = {"num_qo_heads": 16, "num_kv_heads": 1}


def split(pages, grid, seqlen_q=1, heads=16, kv_heads=1, **options):
    """Returns the schedule of sequences of so many whole pages."""
    lens = torch.tensor(pages, dtype=torch.int32) * 128
    plan = {"page_table": torch.zeros(len(pages), max(pages), dtype=torch.int32), "max_seqlen_k": int(lens.max())}
    heads = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "seqlen_q": seqlen_q, "max_grid_size": grid}
    return SparseDecodePagedAttentionWrapper().plan(**plan, seqused_k=lens, **heads, **options).decode_schedule


def test_schedule_of_the_public_kernels():
    lens = torch.tensor([5000, 40, 0, 129], dtype=torch.int32)
    wrapper = SparseDecodePagedAttentionWrapper()
    plan = SCHEDULE | HEADS | {"seqused_k": lens, "max_grid_size": 20}
    wrapper.plan(**plan)
    schedule = wrapper.decode_schedule
    assert isinstance(schedule, DecodeAttentionSchedule)
    assert wrapper.decode_schedule is schedule
    assert wrapper.kv_pages.tolist() == [40, 1, 1, 2]
    assert (wrapper.seqlen_q, wrapper.batch, wrapper.is_sparse) == (2, 4, False)
    assert (wrapper.cta_tile_q, wrapper.num_q_tiles) == (64, 1)
    assert (wrapper.kv_chunk_size_pages, wrapper.kv_chunk_size_tokens) == (16, 2048)
    assert wrapper.split_counts.tolist() == [3, 1, 1, 1]
    assert wrapper.split_kv is True
    assert wrapper.work_count == wrapper.padded_work_count == 6
    assert wrapper.request_indices.tolist() == [0, 0, 0, 1, 2, 3]
    assert wrapper.kv_tile_indices.tolist() == [0, 1, 2, 0, 0, 0]
    assert wrapper.qo_tile_indices.tolist() == [0] * 6
    assert wrapper.o_indptr.tolist() == [0, 24, 32, 40, 48]  # 128 rows, 8 tokens of 16 heads, a tile and chunk
    assert wrapper.merge_indptr.tolist() == [0, 3, 6, 7, 8, 9, 10, 11, 12]
    assert wrapper.block_valid_mask.tolist() == [1] * 6
    assert (schedule.partial_rows, schedule.max_split_count, schedule.max_grid_size, schedule.base_cta) == (48, 3, 20, 4)
    assert schedule.active_blocks_per_sm == -(-20 // schedule.num_sms)
    assert wrapper.O_partial.shape == (48, 16, 128)
    assert wrapper.LSE_partial.shape == (48, 16)
    assert wrapper.O_partial.dtype == wrapper.LSE_partial.dtype == torch.float32
    assert wrapper.O_partial is wrapper.O_partial
    wrapper.plan(**plan, disable_split_kv=True)
    assert not wrapper.split_kv
    assert (wrapper.work_count, wrapper.kv_chunk_size_pages) == (4, 40)
    assert wrapper.O_partial is wrapper.LSE_partial is None
    wrapper.plan(**plan | {"max_grid_size": 9}, fixed_split_size=20, enable_cuda_graph=True)
    assert wrapper.split_counts.tolist() == [2, 1, 1, 1]
    assert (wrapper.work_count, wrapper.padded_work_count) == (9, 9)
    assert wrapper.block_valid_mask.tolist() == [1] * 5 + [0] * 4
    own = wrapper.plan(**SCHEDULE, **HEADS, seqused_k=lens).decode_schedule
    assert (own.max_grid_size, own.active_blocks_per_sm) == (own.num_sms, 1)


@pytest.mark.parametrize(("seqlen_q", "head_dim", "tile", "tiles"), [(1, 128, 16, 1), (4, 128, 64, 1), (5, 128, 128, 1),
                                                                      (20, 128, 128, 3), (5, 256, 64, 2)])  # fmt: skip
def test_schedule_tiles(seqlen_q, head_dim, tile, tiles):
    """Query tiles have 16, 64 or 128 rows; partial rows are those of whole tiles."""
    found = split([40, 40], 8, seqlen_q, head_dim=head_dim)
    assert (found.cta_tile_q, found.num_q_tiles, found.base_cta) == (tile, tiles, 2 * tiles)
    chunks = 8 // (2 * tiles) or 1
    if found.split_kv:
        assert found.split_counts.tolist() == [-(-40 // found.kv_chunk_size_pages)] * 2
        assert found.split_counts[0] <= chunks
    assert found.o_indptr.tolist() == [b * int(found.split_counts[0]) * tiles * 8 for b in range(3)]
    assert found.partial_rows == found.o_indptr[-1]
    triples = list(
        zip(*(x.tolist() for x in (found.request_indices, found.qo_tile_indices, found.kv_tile_indices)), strict=True)
    )
    assert triples == [(b, t, c) for b in range(2) for t in range(tiles) for c in range(int(found.split_counts[0]))]


@pytest.mark.parametrize(
    ("pages", "grid", "options", "chunk", "counts"),
    [
        ([40, 1, 1, 2], 4, {}, None, [1, 1, 1, 1]),  # programs without chunks fill the grid
        ([8, 3], 1000, {"enable_cuda_graph": True}, None, [1, 1]),  # short sequences
        ([400], 32, {"heads": 64, "kv_heads": 4}, 50, [8]),  # chunks of four heads fit the grid
        ([400, 40, 40, 40], 8, {}, 32, [13, 2, 2, 2]),  # a quarter of the mean, for a long sequence among short ones
        ([8192], 10_000, {}, 32, [256]),  # no more than 256 chunks
        ([10], 6, {}, None, [1]),  # one chunk holds all
        ([10], 6, {"enable_cuda_graph": True}, 10, [1]),
        ([10, 3], 6, {"fixed_split_size": 10}, None, [1, 1]),
        ([10, 3], 1, {"fixed_split_size": 4}, 4, [3, 1]),
    ],
)
def test_schedule_rules(pages, grid, options, chunk, counts):
    found = split(pages, grid, **options)
    assert found.split_kv is (chunk is not None)
    assert found.kv_chunk_size_pages == (chunk or max(pages))
    assert found.split_counts.tolist() == counts
    assert found.max_split_count == max(counts)
    padded = max(sum(counts), grid // options.get("kv_heads", 1))
    cuts_a_graph = "enable_cuda_graph" in options and chunk is not None
    assert found.work_count == len(found.block_valid_mask) == (padded if cuts_a_graph else sum(counts))
    assert int(found.block_valid_mask.sum()) == sum(counts)


def test_the_wrapper_before_its_plan():
    wrapper = SparseDecodePagedAttentionWrapper()
    nothing = "decode_schedule O_partial LSE_partial batch num_qo_heads num_kv_heads head_dim page_table seqused_k q2k_indices "
    nothing += "seqlen_q max_seqlen_k request_indices qo_tile_indices kv_tile_indices merge_indptr o_indptr block_valid_mask "
    nothing += "kv_pages split_counts"
    assert all(getattr(wrapper, name) is None for name in nothing.split())
    assert wrapper.is_sparse is wrapper.split_kv is False
    sizes = "cta_tile_q num_q_tiles kv_chunk_size_pages kv_chunk_size_tokens work_count padded_work_count"
    assert all(getattr(wrapper, name) == 0 for name in sizes.split())
    wrapper.plan(**SCHEDULE, seqused_k=torch.tensor([5000, 40, 0, 129]), max_grid_size=20)
    with pytest.raises(ValueError, match=r"plan\(\) must be given num_qo_heads and head_dim for O_partial"):
        _ = wrapper.O_partial


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"seqlen_q": 0}, ValueError, "seqlen_q must be at least 1, got 0"),
        ({"seqlen_q": 3}, ValueError, r"q.shape\[0\] must be 9 \(batch 3 of page_table times seqlen_q 3\)"),
        ({"max_seqlen_k": 299}, ValueError, "max_seqlen_k must be at least the longest sequence"),
        ({"blk_kv": 8}, ValueError, "blk_kv must be from 16 to 256, got 8"),
        ({"page_table": torch.zeros(3, 2)}, TypeError, "page_table must have dtype torch.int32"),
        ({"page_table": torch.full((3, 4), 99, dtype=torch.int32)}, ValueError, r"page_table\[0, 0\] must be a page from 0 to"),
        ({"seqused_k": torch.zeros(2, dtype=torch.int32)}, ValueError, r"seqused_k.shape\[0\] must be 3"),
        ({"q2k_indices": torch.zeros(5, 6, 2, dtype=torch.int32)}, ValueError, r"q2k_indices must have shape \[num_kv_heads"),
        ({"q2k_indices": torch.zeros(2, 6, 2)}, TypeError, "q2k_indices must have dtype torch.int32"),
        ({"out": torch.zeros(6, 4, 32)}, ValueError, r"out must have shape \(6, 4, 64\)"),
        ({"lse": torch.zeros(4, 6)}, ValueError, r"lse must have shape \(6, 4\), got \(4, 6\)"),
        ({"causal": "no"}, TypeError, "causal must be a bool, got str"),
        ({"seqused_k": torch.tensor([1, -1, 1])}, ValueError, r"seqused_k must lie from 0 to \d+, got -1 at \(1,\)"),
        ({"q2k_indices": torch.zeros(2, 6, 65, dtype=torch.int32)}, ValueError, r"q2k_indices.shape\[2\] \(topk\) .* got 65"),
    ],
)
def test_misuse(change, error, match):
    p, _ = step()
    pool, plan = planned(p, "cpu")
    with pytest.raises(error, match=match):
        sparse_decode_atten_func(**({"q": p.q} | pool | plan | change))


def test_misuse_of_the_wrapper():
    p, _ = step()
    pool, plan = planned(p, "cpu")
    wrapper = SparseDecodePagedAttentionWrapper()
    with pytest.raises(RuntimeError, match=r"plan\(\) must be called before run\(\)"):
        wrapper.run(p.q, **pool)
    with pytest.raises(ValueError, match=r"num_kv_heads must divide num_qo_heads \(4\), got 3"):
        wrapper.plan(**plan, num_qo_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="num_qo_heads must be 8, as planned, got 4"):
        wrapper.plan(**plan, num_qo_heads=8).run(p.q, **pool)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        wrapper.nonsense  # noqa: B018
    with pytest.raises(ValueError, match="fixed_split_size must be at least 1, got 0"):
        wrapper.plan(**plan, fixed_split_size=0)


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", [False, True])
def test_wrapper_is_captured(sparse):
    p, blocks = step(dtype=torch.bfloat16, topk=3)
    pool, plan = planned(p, "cuda")
    q2k = blocks.transpose(0, 1).contiguous().cuda() if sparse else None
    wrapper = SparseDecodePagedAttentionWrapper().plan(**plan, q2k_indices=q2k)
    q, out = p.q.cuda(), torch.empty_like(p.q, device="cuda")
    wrapper.run(q, **pool, out=out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        wrapper.run(q, **pool, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, **pool, out=out)
    if sparse:
        blocks = blocks.flip(0).contiguous()
        q2k.copy_(blocks.transpose(0, 1))
    out.fill_(torch.nan)
    graph.replay()
    check((out,), truth(p, blocks, 128) if sparse else dense(p))
