# SPDX-License-Identifier: MIT
"""Sparse prefill in Triton is right, in union tiles and KV-outer, in the interpreter without a GPU."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from openmsa.kv_cache import E4M3, NVFP4, PagedKV
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.runtime.launch import next_power_of_two
from openmsa.sparse_attention import STAGE, triton_expand, triton_lists, triton_prefill
from openmsa.sparse_attention.triton_config import (
    all_together,
    few_queries,
    few_union_limit,
    hopper_outer_serves,
    plain_hopper_config,
    prefill_config,
    union_limit,
)
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks, strided
from tests import oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16
EXACT = torch.float32 if DEVICE == "cpu" else torch.float16  # a GPU multiplies float32 tiles in tf32
PATHS = ("union", "outer", "few", "auto")


def arguments(p, blocks, block_size, storage="flat", page_size=0, scale=0.2):
    """Returns the checked arguments of the stage; `storage`: flat, strided or paged."""
    p, blocks = p.to(DEVICE), blocks.to(DEVICE)
    q, k, v = (p.q, p.k, p.v) if storage == "flat" else (strided(x, 2 if x is p.q else 1) for x in (p.q, p.k, p.v))
    if storage == "paged":
        k, v = paged(p, page_size, interleaved=page_size != block_size)[0], None
    return STAGE.check(q, k, v, blocks, p.seqs, block_size=block_size, softmax_scale=scale, return_lse=True)


def take_any_size(monkeypatch, limit=None):
    """Lets kernels for many queries serve calls of any size, and KV-outer have its share of them. limit: blocks of the largest
    union of a tile that stays together."""
    monkeypatch.setattr(triton_prefill, "FEWEST_TILES", 0)
    monkeypatch.setattr(triton_lists, "all_together", lambda *sizes: False)
    for module in (triton_prefill, triton_lists):
        monkeypatch.setattr(module, "few_queries", lambda *sizes: False)
    for name in ("union_limit", "few_union_limit") if limit is not None else ():
        monkeypatch.setattr(triton_lists, name, lambda *sizes: limit)


def run(checked, **options):
    with PoisonedOutputs():
        return triton_prefill.sparse_attention(*checked, **options)


def truth(p, blocks, block_size, scale=0.2):
    reads = oracle.reads_of_blocks(blocks, block_size)
    return oracle.attention(p, reads, scale), oracle.honest_attention(p, reads, scale)


def check(result, expected):
    (out, lse), (honest_out, honest_lse) = expected
    assert_close("out", result[0].cpu(), honest_out, out)
    assert_close("lse", result[1].cpu(), honest_lse, lse)


CASES = [  # head_dim, group, kv_heads, block_size, page_size, topk, dtype
    (128, 16, 1, 128, 128, 4, DTYPE),
    (64, 3, 2, 64, 16, 5, DTYPE),
    (96, 1, 1, 64, 128, 3, EXACT),
    (64, 16, 1, 48, 0, 3, torch.bfloat16),
    (32, 2, 2, 16, 7, 6, EXACT),
    (16, 80, 1, 256, 0, 2, DTYPE),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "block", "page", "topk", "dtype"), CASES)
def test_against_the_truth(head_dim, group, kv_heads, block, page, topk, dtype, path):
    """Results agree with the truth for ragged and empty sequences, queries before position 0 and past the keys, shuffled and
    shared pages, wild ids, and empty rows."""
    p = problem(
        (11, 0, 3, 1),
        (2 * block + 5, 0, block, 1),
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        shared_prefix=block,
        offsets=(2 * block - 4, 0, -1, 0),
    )
    blocks = random_blocks(p, topk, block, kv_heads if group != 3 else 1)
    expected = truth(p, blocks, block)
    gaps = blocks < 0
    blocks[gaps] = torch.tensor([-1, 2**31 - 1, 2**26, -(2**31)], dtype=torch.int32)[torch.arange(int(gaps.sum())) % 4]
    # A small tile budget for KV-outer: several chunks of queries, several items a block.
    config = dataclasses.replace(prefill_config(head_dim, group, block, 9), outer_item=4, union_gain=0.6)
    storage = "paged" if page else "strided" if block == 48 else "flat"
    check(run(arguments(p, blocks, block, storage, page), path=path, workspace_bytes=1, config=config), expected)


STORED = {
    "e4m3": E4M3.quantize,
    "e4m3 tensor": lambda x: E4M3.quantize(x, per="tensor"),
    "e4m3 head": lambda x: E4M3.quantize(x, per="head"),
    "e4m3 page": lambda x: E4M3.quantize(x, per="page"),
    "nvfp4": NVFP4.quantize,
    "nvfp4 128x4": lambda x: NVFP4.quantize(x, 0.02, layout="128x4"),
}
STORED_CASES = [  # keys, queries, page_size, dtype
    ("e4m3", torch.float16, 0, DTYPE),
    ("e4m3 head", torch.bfloat16, 0, torch.bfloat16),
    ("e4m3 tensor", "e4m3", 64, torch.bfloat16),
    ("e4m3 page", torch.bfloat16, 64, torch.bfloat16),
    ("e4m3 page", "e4m3", 7, torch.bfloat16),
    ("nvfp4", torch.bfloat16, 0, torch.bfloat16),
    ("nvfp4 128x4", "e4m3", 16, torch.bfloat16),
    ("nvfp4 128x4", torch.float16, 0, DTYPE),
    ("plain", "e4m3", 0, torch.bfloat16),
]


def stored_case(p, blocks, block, keys, queries, page_size, dtype, scale=0.2):
    """Returns a call on stored operands, and the truth: float64 on the numbers that the codes stand for, every factor and scale
    counted."""
    p = p.map(lambda x: x * torch.tensor([1.0, 3.0]).repeat_interleave(x.shape[1] // 2 or 1)[: x.shape[1], None].to(dtype))
    p = p.to(DEVICE)
    put = STORED.get(keys, lambda x: x)
    q = E4M3.quantize(p.q, per="head") if queries == "e4m3" else p.q
    if page_size:
        cache, _ = paged(p, page_size)
        if keys == "e4m3 page":  # factors far apart
            cache.k, cache.v = (
                x * torch.logspace(-2, 2, len(x), dtype=x.dtype, device=DEVICE)[:, None, None, None] for x in (cache.k, cache.v)
            )
        k, v = PagedKV(put(cache.k), put(cache.v), cache.page_table, cache.seq_lens), None
        key_numbers, value_numbers, _ = k.gather()
    else:
        k, v = put(p.k), put(p.v)
        key_numbers, value_numbers = (x.dequantize() if keys != "plain" else x for x in (k, v))
    numbers = q.dequantize() if queries == "e4m3" else q
    meant = dataclasses.replace(p, q=numbers.float(), k=key_numbers.float(), v=value_numbers.float()).to("cpu")
    reads = oracle.reads_of_blocks(blocks, block)
    rounded = meant.map(lambda x: x.to(dtype))
    expected = oracle.attention(meant, reads, scale), oracle.honest_attention(rounded, reads, scale)
    options = {"block_size": block, "softmax_scale": scale, "return_lse": True}
    return STAGE.check(q, k, v, blocks.to(DEVICE), p.seqs, **options), expected


@pytest.mark.parametrize("path", ["union", "outer"])
@pytest.mark.parametrize(
    ("keys", "queries", "page_size", "dtype", "major"),
    [(*case, 9) for case in STORED_CASES] + [(*case, 8) for case in STORED_CASES[1:4]],
)
def test_formats(keys, queries, page_size, dtype, major, path, monkeypatch):
    p = problem((9, 0, 3), (150, 0, 64), kv_heads=2, group=3, head_dim=48, dtype=dtype, offsets=(141, 0, 50))
    checked, expected = stored_case(p, random_blocks(p, 3, 64, 2), 64, keys, queries, page_size, dtype)
    if major == 8:  # codes are bytes there, and there is no copy engine
        monkeypatch.setattr(triton_prefill, "facts", lambda _: COMPILE_TARGETS[80])
    check(run(checked, path=path, config=prefill_config(48, 3, 64, major)), expected)


@pytest.mark.parametrize("path", ["union", "outer"])
@pytest.mark.parametrize("keys", ["nvfp4", "nvfp4 128x4"])
def test_fewer_elements_than_a_product_sums(keys, path):
    """head_dim 16, blocks of 16 and one head a group: products of unpacked elements take tiles padded to 32."""
    p = problem((9, 3), (150, 64), kv_heads=2, group=1, head_dim=16, dtype=torch.bfloat16, offsets=(141, 50))
    checked, expected = stored_case(p, random_blocks(p, 3, 16, 2), 16, keys, torch.bfloat16, 0, torch.bfloat16)
    config = prefill_config(16, 1, 16, 9, stored=True, four_bits=True)
    assert min(config.union_keys, config.outer_keys) == 32
    check(run(checked, path=path), expected)


EXPANDED = {  # keys, queries, page_size, dtype: whether all keys become numbers first
    ("e4m3 tensor", torch.bfloat16, 16, torch.bfloat16): True,
    ("e4m3 head", torch.float16, 0, DTYPE): True,
    ("nvfp4", torch.bfloat16, 7, torch.bfloat16): True,
    ("nvfp4 128x4", torch.float16, 0, DTYPE): True,
    ("e4m3 page", torch.bfloat16, 16, torch.bfloat16): False,
    ("e4m3 tensor", "e4m3", 16, torch.bfloat16): False,
    ("plain", torch.bfloat16, 16, torch.bfloat16): False,
}


@pytest.mark.parametrize("case", EXPANDED, ids=str)
def test_many_readers(case, monkeypatch):
    """Results are right where 64 queries read a block, clustered ones that union tiles serve, and others."""
    keys, queries, page_size, dtype = case
    p = problem((67, 0, 40), (70, 0, 75), kv_heads=2, group=3, head_dim=48, dtype=dtype, offsets=(3, 0, 30))
    blocks = random_blocks(p, 12, 16, 2)
    blocks[80:] = blocks[80:81]
    checked, expected = stored_case(p, blocks, 16, keys, queries, page_size, dtype)
    calls = []
    monkeypatch.setattr(triton_prefill, "expand", lambda *x: calls.append(x) or triton_expand.expand(*x))
    check(run(checked), expected)
    assert bool(calls) == EXPANDED[case]
    check(run(checked, workspace_bytes=1 << 12), expected)
    assert len(calls) == EXPANDED[case]  # the copies would not fit


@pytest.fixture(scope="module")
def many():
    """More queries than a tile holds, overlapping and not."""
    p = problem((20, 9), (500, 330), kv_heads=2, group=16, head_dim=64, dtype=EXACT, seed=3)
    return p, random_blocks(p, 4, 64, 2, seed=1)


@pytest.mark.parametrize("path", PATHS)
def test_laws(many, path):
    p, blocks = many
    out, lse = run(arguments(p, blocks, 64), path=path)
    check((out, lse), truth(p, blocks, 64))
    # The workspace, the order of the ids and a repetition change nothing; on a GPU not a bit, but for the order of partials.
    tolerance = {"rtol": 2e-3, "atol": 1e-3} if EXACT == DTYPE else {"rtol": 1e-5, "atol": 1e-5}
    for ids, budget in ((blocks, 2 << 30), (blocks, 1 << 19), (blocks.flip(-1), 2 << 30)):
        again = run(arguments(p, ids, 64), path=path, workspace_bytes=budget)
        if path == "union" or (ids is blocks and (DEVICE == "cuda" or budget == 2 << 30)):
            assert_equal("out", again[0], out)
            assert_equal("lse", again[1], lse)
        else:
            torch.testing.assert_close(again[0], out, **tolerance)


@pytest.mark.parametrize("budget", [2 << 30, 1 << 19])
def test_offsets_of_lists_step_by_step(many, budget, monkeypatch):
    """The last program of a segment makes the offsets, so many at a time; how many changes nothing."""
    p, blocks = many
    outs = []
    for step in (4, 512):
        monkeypatch.setattr(triton_lists, "OFFSETS_STEP", step)
        outs.append(run(arguments(p, blocks, 64), path="outer", workspace_bytes=budget))
    for name, mine, theirs in zip(("out", "lse"), *outs, strict=True):
        assert_equal(name, mine, theirs)


@pytest.mark.parametrize("path", PATHS)
def test_all_blocks_are_dense_attention(path):
    p = problem((18,), (150,), kv_heads=1, group=4, head_dim=32, dtype=EXACT)
    blocks = torch.arange(5, dtype=torch.int32).expand(18, 1, 5)
    everything = oracle.reads_everything(p)
    dense = oracle.attention(p, everything, 0.2), oracle.honest_attention(p, everything, 0.2)
    check(run(arguments(p, blocks, 32), path=path), dense)


@pytest.mark.parametrize("path", PATHS)
def test_rows_that_nobody_reads_may_hold_nan(path):
    p = problem((8, 8), (256, 200), kv_heads=1, group=2, head_dim=64, dtype=EXACT, offsets=(130, 150))
    blocks = torch.tensor([[[1, 2, -1]]], dtype=torch.int32).repeat(16, 1, 1)
    blocks[8:] = torch.tensor([2, 0, 9], dtype=torch.int32)
    expected = truth(p, blocks, 64)
    p.k[:64], p.v[:64] = torch.nan, torch.nan  # no query of the first sequence selects block 0
    p.k[138:256], p.v[138:256] = torch.nan, torch.nan  # past its last query
    second = slice(256 + 158, 256 + 200)
    p.k[second], p.v[second] = torch.nan, torch.nan
    p.k[256 + 64 : 256 + 128], p.v[256 + 64 : 256 + 128] = torch.nan, torch.nan
    check(run(arguments(p, blocks, 64), path=path), expected)
    check(run(arguments(p, blocks, 64, "paged", 64), path=path), expected)


def test_few_queries_beside_union_tiles(monkeypatch):
    """Tiles that stay together and tiles that do not are served by one call."""
    p = problem((40, 0, 9), (1500, 0, 90), kv_heads=2, group=16, head_dim=64, dtype=EXACT)
    blocks = random_blocks(p, 8, 16, 2)
    blocks[9:17] = blocks[9]
    lists, few = [], triton_prefill.launch_few
    monkeypatch.setattr(triton_prefill, "launch_few", lambda call, x: lists.append(call.lists) or few(call, x))
    for storage in ("flat", "paged"):
        check(run(arguments(p, blocks, 16, storage, 32)), truth(p, blocks, 16))
        sizes = lists.pop().union.sizes.view(-1, 2)[:, 0]  # [tiles x heads]
        assert (sizes > 0).any()
        assert (sizes < 0).any()
    check(run(arguments(p, blocks, 16), workspace_bytes=1), truth(p, blocks, 16))
    assert not lists  # all partials at once would not fit


@pytest.mark.parametrize("path", PATHS)
def test_a_query_of_nan_has_an_lse_of_nan(path):
    p = problem((3,), (64,), kv_heads=1, group=2, head_dim=16, dtype=EXACT)
    p.q[1, 0] = torch.nan
    blocks = torch.tensor([[[0, 1]], [[1, 0]], [[-1, -1]]], dtype=torch.int32)
    out, lse = run(arguments(p, blocks, 16), path=path)
    assert lse.isnan().tolist() == [[False, False], [True, False], [False, False]]
    assert_equal("NaN", out.isnan().all(-1), lse.isnan())
    assert lse[2].eq(-torch.inf).all()


def test_a_bound_that_lies_leads_nowhere_else(monkeypatch):
    """Nobody reads lengths on a GPU: with a `max_seqlen_k` below them fewer blocks are listed, and nothing behind the lists."""
    p = problem((9,), (320,), kv_heads=1, group=16, head_dim=16, dtype=EXACT)
    blocks = torch.arange(8, dtype=torch.int32).repeat(9, 1, 1)
    checked = arguments(p, blocks, 16)
    checked = checked._replace(seqs=dataclasses.replace(checked.seqs, max_seqlen_k=32))
    calls, union = [], triton_prefill.launch_union
    monkeypatch.setattr(triton_prefill, "launch_union", lambda call: calls.append(call) or union(call))
    run(checked, path="union")
    plan, found, capacity = calls[0].plan, calls[0].lists.union, calls[0].plan.limits.capacity
    assert capacity == 2
    assert found.sizes.view(-1, 2)[: plan.num_tiles].max() <= capacity
    ids = found.ids[: plan.num_tiles * capacity].view(-1, capacity).cpu()
    assert_equal("ids", ids, torch.arange(2, dtype=torch.int32).expand(ids.shape))


def test_negative_and_zero_scale():
    p = problem((9,), (70,), kv_heads=1, group=2, head_dim=32, dtype=EXACT)
    blocks = random_blocks(p, 2, 32, 1)
    for scale in (-0.5, 0.0):
        for path in ("union", "outer", "few"):
            check(run(arguments(p, blocks, 32, scale=scale), path=path), truth(p, blocks, 32, scale))


def test_fp32_partials_are_nearer():
    p = problem((8,), (600,), kv_heads=1, group=16, head_dim=64, dtype=DTYPE)
    blocks = torch.arange(9, dtype=torch.int32).expand(8, 1, 9).contiguous()
    (out, _), _ = truth(p, blocks, 64)
    errors = [
        (run(arguments(p, blocks, 64), path="outer", partial_dtype=dtype)[0].cpu() - out).square().mean()
        for dtype in (torch.float32, DTYPE)
    ]
    assert errors[0] <= errors[1]


def test_no_keys_and_no_queries():
    for q_lens, k_lens in (((3,), (0,)), ((0,), (8,)), ((), ())):
        p = problem(q_lens, k_lens, dtype=EXACT)
        blocks = torch.zeros(sum(q_lens), 1, 2, dtype=torch.int32)
        out, lse = run(arguments(p, blocks, 16))
        assert out.eq(0).all()
        assert lse.eq(-torch.inf).all()
        out, lse = run(arguments(p, blocks, 16, "paged", 16))
        assert out.eq(0).all()
        assert lse.eq(-torch.inf).all()


def test_path_is_checked():
    p = problem((1,), (8,), dtype=EXACT)
    with pytest.raises(ValueError, match="path must be one of"):
        run(arguments(p, torch.zeros(1, 1, 1, dtype=torch.int32), 16), path="both")
    stored = arguments(p, torch.zeros(1, 1, 1, dtype=torch.int32), 16)._replace(q=E4M3.quantize(p.q))
    with pytest.raises(ValueError, match="for stored queries or keys, got 'few'"):
        run(stored, path="few")


@pytest.mark.parametrize("major", [8, 9, 10, 12])
@pytest.mark.parametrize("group", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
def test_configuration(head_dim, group, major):
    for block_size in (16, 48, 128, 256):
        config = prefill_config(head_dim, group, block_size, major)
        assert config.union_tokens * config.heads >= 16
        assert config.union_tokens <= 32, "membership is a bit of an int32"
        for value in (config.heads, config.union_tokens, config.union_keys, config.outer_tokens, config.outer_keys):
            assert value == next_power_of_two(value)
        assert config.union_tokens % config.combine_tokens == 0
        assert union_limit(config, 16, 128) <= union_limit(config, 16, 4)


def test_when_all_tiles_stay_together():
    """Sizes are those timed on an H200, random selections: 64 query heads for 4 key heads, and 32 for 8."""

    def of(queries, keys, group, head_dim=128):
        blocks, readers = keys // 128, 16 * 128 * queries / keys
        config = plain_hopper_config(prefill_config(head_dim, group, 128, 9), 4 * blocks, readers, 132)
        return all_together(config, 16, readers, blocks - queries / 256, hopper_outer_serves(group, head_dim))

    assert of(4096, 4096, 16)
    assert of(6144, 6144, 16), "0.91 ms against 0.93"
    assert not of(7168, 7168, 16), "1.20 ms against 1.13"
    assert not of(8192, 8192, 16), "1.53 ms against 1.34"
    assert of(8192, 8192, 4), "0.87 ms against 0.88: groups of 4 take Triton's KV-outer"
    assert of(8192, 8192, 16, 64), "so do heads of 64"
    assert not of(10240, 10240, 4), "1.30 ms against 1.16"
    for group in (4, 16):
        assert not of(16384, 49152, group)
        assert not of(16384, 131072, group)


def test_items_of_hoppers_own_kernel():
    """Items of 128 queries were the faster ones on an H200 where a multiprocessor has 9 or 15 items of 256, not with 31."""

    def item(queries, keys, heads):
        return plain_hopper_config(prefill_config(128, 16, 128, 9), keys // 128 * heads, 2048 * queries / keys, 132).outer_item

    assert item(16384, 49152, 1) == item(8192, 8192, 4) == 128
    assert item(16384, 131072, 4) == 256


def test_few_queries():
    assert few_queries(768, 128, 16, 4, 1024)
    assert not few_queries(769, 128, 16, 4, 1024), "more than 12 queries a block"
    assert few_queries(1820, 128, 16, 1, 1214), "at most 24, as rows are few"
    assert not few_queries(1820, 128, 16, 1, 1213)
    assert few_queries(1024, 128, 16, 1, 256), "at most 64, as rows are very few"
    assert not few_queries(1024, 128, 16, 1, 255)
    assert not few_queries(64, 256, 16, 4, 1024), "wide heads were not measured"
    assert not few_queries(512, 128, 16, 8, 8192), "lists of 64 MiB at most"
    config = prefill_config(128, 16, 128, 9)
    assert few_union_limit(config, 16, 1.0) == -1, "one query a block: no tile stays together"
    assert few_union_limit(config, 16, 1.1) == 48 < config.union_tokens * 16
    assert few_union_limit(config, 16, 20, tiles=1.3) == -1, "no tile stays together that all others would wait for"


@pytest.mark.parametrize("path", PATHS)
def test_a_block_whose_logits_are_all_minus_infinity_counts_for_nothing(path):
    """Beside another block; alone it gives 0 and lse -inf."""
    p = problem((20,), (64,), group=2, head_dim=32, dtype=DTYPE)
    p.q[..., 0], p.k[:16, :, 0] = 1, -torch.inf
    for ids in ([0, 2], [0, -1]):
        blocks = torch.tensor(ids, dtype=torch.int32).expand(20, 2, 2).contiguous()
        call = arguments(p, blocks, 16)
        out, lse = run(call, path=path)
        right = STAGE.run("reference", call)
        torch.testing.assert_close(out.float(), right[0].float(), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse, right[1], atol=2e-3, rtol=2e-3)
