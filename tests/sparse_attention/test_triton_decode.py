# SPDX-License-Identifier: MIT
"""Split decode attention over selected blocks is right, in the interpreter without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, PagedKV, Sequences, explain, sparse_attention
from openmsa.primitives.softmax import Partials
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.sparse_attention import STAGE, triton_decode, triton_decode_call, triton_decode_walk
from openmsa.sparse_attention.triton_decode import Config
from openmsa.sparse_attention.triton_decode_call import configure
from openmsa.sparse_attention.triton_decode_walk import refuse
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks, strided
from openmsa.types import layout
from tests import oracle
from tests.low_precision import stored_problem

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
FLOAT = torch.float16 if DEVICE.type == "cuda" else torch.float32  # on a GPU the kernels serve half precision only
SCALE = 0.2


def run(p, blocks, block_size, kv=None, v=None, config=None):
    """Runs the kernel's own host function on checked arguments, with poisoned outputs."""
    q, k, v = (p.q, p.k, p.v) if kv is None else (strided(p.q, 2), kv, v)
    if isinstance(k, PagedKV):
        k = PagedKV(*(x.to(DEVICE) for x in (k.k, k.v, k.page_table, k.seq_lens)))
        lengths = layout(p.to(DEVICE).seqs, q.shape[0], None, DEVICE, k.seq_lens, k.capacity)
    else:
        k, v = k.to(DEVICE), v.to(DEVICE)
        lengths = layout(p.to(DEVICE).seqs, q.shape[0], k.shape[0], DEVICE)
    with PoisonedOutputs():
        return triton_decode_call.sparse_attention(
            q.to(DEVICE), k, v, blocks.to(DEVICE), lengths, block_size, SCALE, True, config=config
        )


def check(p, blocks, block_size, result):
    reads = oracle.reads_of_blocks(blocks, block_size)
    truth, lse = oracle.attention(p, reads, SCALE)
    honest, honest_lse = oracle.honest_attention(p, reads, SCALE)
    assert_close("out", result[0].cpu(), honest, truth)
    assert_close("lse", result[1].cpu(), honest_lse, lse)


CASES = [  # head_dim, group, kv_heads, block_size, page_size, topk, dtype, tiles
    (128, 16, 2, 128, 128, 4, torch.float16, 1),
    (64, 3, 2, 64, 64, 5, torch.float16, 2),
    (96, 1, 1, 64, 128, 3, FLOAT, 4),
    (64, 16, 1, 48, 7, 3, FLOAT, 2),
    (32, 2, 2, 16, 16, 6, torch.bfloat16, 1),
    (16, 20, 1, 256, 0, 2, torch.float16, 1),
    (48, 3, 1, 32, 0, 4, FLOAT, 2),
]


@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "block", "page", "topk", "dtype", "tiles"), CASES)
def test_against_the_truth(head_dim, group, kv_heads, block, page, topk, dtype, tiles):
    """Results agree with the truth for ragged lengths, several new tokens, lengths of zero, queries before position 0, shuffled
    and shared pages, and wild ids everywhere."""
    q_lens, k_lens = (2, 1, 0, 3, 1), (2 * block + 5, 0, block, 7 * block - 1, 1)
    p = problem(
        q_lens, k_lens, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype, shared_prefix=block,
        offsets=(2 * block + 3, 0, block, -1, 0),
    )  # fmt: skip
    blocks = random_blocks(p, topk, block, kv_heads if group != 3 else 1)
    wild = blocks.clone()
    wild[blocks < 0] = torch.tensor([-1, 2**31 - 1, 2**25, -(2**31)], dtype=torch.int32)[torch.arange((blocks < 0).sum()) % 4]
    keys = 64 if block % 64 == 0 and page % 64 == 0 else 32
    lookup = bool(block % keys or (page and page % keys))
    splits = -(-topk * block // (keys * tiles))
    config = Config(triton_decode_walk.row_tiles(group, head_dim)[0], keys, tiles, splits, lookup, 4, 3)
    if page:
        kv, _ = paged(p, page, interleaved=page != 64)
        check(p, blocks, block, run(p, wild, block, kv, config=config))
    else:
        check(p, blocks, block, run(p, wild, block, strided(p.k), strided(p.v), config))


STORED = [  # format, queries, storage, page_size, head_dim, group, block_size, dtype, tiles, warps apart, tiles of a step
    ("e4m3", "plain", "paged", 64, 128, 16, 64, torch.float16, 2, True, 2),
    ("e4m3", "plain", "paged", 64, 128, 20, 64, torch.float16, 2, False, 2),
    ("e4m3 page", "plain", "paged", 32, 64, 3, 32, torch.bfloat16, 1, True, 1),
    ("e4m3 page", "plain", "paged", 64, 32, 2, 64, torch.float16, 4, False, 4),
    ("e4m3", "e4m3", "flat", 0, 96, 2, 64, torch.bfloat16, 4, True, 2),
    ("nvfp4", "plain", "paged", 64, 128, 16, 32, torch.bfloat16, 2, True, 1),
    ("nvfp4 128x4", "e4m3", "paged", 32, 96, 3, 64, torch.bfloat16, 2, True, 2),
    ("nvfp4 128x4", "plain", "flat", 0, 48, 4, 64, torch.float16, 1, False, 1),
    ("nvfp4 128x4", "plain", "paged", 32, 64, 4, 64, torch.float16, 2, True, 2),
]


@pytest.mark.parametrize(
    ("name", "queries", "storage", "page", "head_dim", "group", "block", "dtype", "tiles", "apart", "together"), STORED
)
def test_formats_against_the_truth(name, queries, storage, page, head_dim, group, block, dtype, tiles, apart, together):
    """Results are those of the numbers that the bytes stand for, with scales of tensors, heads, pages and groups."""
    p = problem(
        (2, 1, 0, 1), (3 * block + 5, 0, block, 1), kv_heads=2, group=group, head_dim=head_dim, dtype=dtype,
        offsets=(2 * block + 3, 0, block, 0),
    )  # fmt: skip
    stored = stored_problem(p, name, "plain", storage, page, queries)
    blocks = random_blocks(p, 3, block, 2 if group != 3 else 1)
    moved = stored.to(DEVICE.type)
    options = {"block_size": block, "softmax_scale": SCALE, "return_lse": True}
    checked = STAGE.check(moved.q, *moved.kv, blocks.to(DEVICE), moved.seqs, **options)
    splits, warps = -(-3 * block // 32 // tiles), 2 if apart else 4
    config = Config(triton_decode_walk.row_tiles(group, head_dim)[0], 32, tiles, splits, False, warps, 3, apart, together)
    with PoisonedOutputs():
        out, lse = triton_decode_call.sparse_attention(*checked, config=config)
    reads = oracle.reads_of_blocks(blocks, block)
    truth, truth_lse = oracle.attention(stored.numbers, reads, SCALE)
    honest, honest_lse = oracle.honest_attention(stored.honest(out.dtype), reads, SCALE)
    assert_close("out", out.cpu(), honest, truth)
    assert_close("lse", lse.cpu(), honest_lse, truth_lse)


def test_formats_that_are_not_read_are_refused():
    p = problem((1,), (64,), head_dim=64, dtype=torch.bfloat16)
    e4m3 = E4M3.quantize(p.k)
    assert refuse(p.q, e4m3, e4m3, 64) is None
    assert "32 in a row" in refuse(p.q, e4m3, e4m3, 48)
    assert "beside keys" in refuse(E4M3.quantize(p.q), p.k, p.v, 64)
    odd = E4M3(torch.zeros(64, 2, 65, dtype=torch.uint8)[..., :64])
    assert "even addresses" in refuse(p.q, odd, odd, 64)


def test_keys_far_apart_are_refused():
    """Offsets inside a tile have 32 bits: pages whose first tokens lie together, then all second ones."""
    q, table, lens = (
        torch.empty(1, 1, 64, device="meta"),
        torch.empty(1, 1, device="meta").int(),
        torch.empty(1, device="meta").int(),
    )
    near, far = (
        torch.empty_strided((4, 1, 128, 64), (64, 64, step, 1), dtype=torch.float16, device="meta")
        for step in (2**24 - 64, 2**24)
    )
    assert refuse(q, PagedKV(near, near, table, lens), None, 64) is None
    assert "32 bits" in refuse(q, PagedKV(near, far, table, lens), None, 64)
    stored = E4M3(far.to(torch.float8_e4m3fn).as_strided(far.shape, far.stride()))
    assert "32 bits" in refuse(q, PagedKV(stored, stored, table, lens), None, 64)
    assert "32 bits" in refuse(q, near[:, 0, :, :].transpose(0, 1), far[:, 0].transpose(0, 1), 64)


def test_the_order_of_blocks_and_the_split_do_not_matter():
    """Split + merge = whole; every block selected = dense; the default configuration serves as well."""
    p = problem((3, 1), (300, 70), group=4, head_dim=64, dtype=FLOAT)
    blocks = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i)) for i in range(8)])
    blocks = blocks.view(4, 2, 5).to(torch.int32)
    reads = oracle.reads_everything(p)
    truth, lse = oracle.attention(p, reads, SCALE)
    honest, honest_lse = oracle.honest_attention(p, reads, SCALE)
    for config in (
        None,
        Config(16, 64, 8, 1, False, 4, 3),
        Config(16, 64, 2, 3, False, 4, 3),
        Config(16, 32, 1, 10, False, 4, 3),
    ):
        out, lses = run(p, blocks, 64, config=config)
        assert_close(f"out {config}", out.cpu(), honest, truth)
        assert_close(f"lse {config}", lses.cpu(), honest_lse, lse)


def test_counters_return_to_zero_and_runs_repeat_bitwise():
    p = problem((2, 1), (200, 90), group=4, head_dim=32, dtype=torch.float16).to(DEVICE)
    blocks = random_blocks(p, 4, 32, 2)
    lengths = layout(p.seqs, 3, 290, DEVICE)
    config = Config(16, 32, 1, 4, False, 4, 2)
    partials = Partials.allocate(8, 32, 16, 32, torch.float16, DEVICE)
    outs = [torch.full_like(p.q, torch.nan) for _ in range(2)]
    for out in outs:
        triton_decode.launch(config, partials, p.q, p.k, p.v, blocks, lengths, 2, 32, SCALE, out, None)
        assert not partials.arrived.any()
    assert_equal("second run", outs[1], outs[0])


def test_an_unwritable_page_is_skipped():
    """Page ids outside the pool and lengths past the page table are never followed."""
    p = problem((1,), (96,), group=2, head_dim=32, dtype=FLOAT)
    kv, _ = paged(p, 32)
    kv = PagedKV(*(x.to(DEVICE) for x in (kv.k, kv.v, kv.page_table, kv.seq_lens)))
    kv.page_table[0, 1] = 1_000_000
    kv.page_table[0, 3:] = -5
    blocks = torch.tensor([[[0, 1, 2, 3, 70]]], dtype=torch.int32, device=DEVICE).expand(1, 2, 5)
    lengths = layout(Sequences(max_seqlen_q=1, max_seqlen_k=96), 1, None, DEVICE, torch.tensor([96], device=DEVICE), 96)
    result = triton_decode_call.sparse_attention(p.q.to(DEVICE), kv, None, blocks, lengths, 32, SCALE, True)
    check(p, torch.tensor([[[0, 2]]], dtype=torch.int32).expand(1, 2, 2), 32, result)


def test_configuration_is_a_pure_function_of_sizes():
    hopper, ada = COMPILE_TARGETS[90], COMPILE_TARGETS[120]
    sizes = {"num_kv_heads": 4, "group": 16, "head_dim": 128, "topk": 16, "block_size": 128, "page_size": 128}
    splits = {tokens: configure(tokens, **sizes, device=hopper).splits for tokens in (1, 2, 4, 8, 16, 32, 128)}
    assert splits == {1: 16, 2: 8, 4: 8, 8: 4, 16: 2, 32: 1, 128: 1}
    assert configure(1, **sizes, device=hopper).keys == 128
    assert configure(1, **sizes, device=ada).keys == 64
    assert [configure(b, **sizes, device=hopper).num_stages for b in (1, 32, 64, 96, 128)] == [3, 3, 2, 3, 2]
    assert configure(96, **sizes, device=hopper).keys == 64
    assert configure(1, **sizes | {"page_size": 16}, device=hopper).lookup
    assert configure(1, **sizes | {"page_size": 64}, device=hopper) == Config(16, 64, 2, 16, False, 4, 3)
    for block_size in range(16, 257, 8):
        for topk in (1, 5, 64):
            c = configure(3, **sizes | {"block_size": block_size, "topk": topk, "page_size": 0}, device=hopper)
            assert c.splits * c.tiles * c.keys >= topk * block_size > (c.splits - 1) * c.tiles * c.keys


def test_configuration_of_stored_rows():
    """Warps walk apart where one holds all rows; splits are as many as of plain rows, whose workspace is shared."""
    hopper = COMPILE_TARGETS[90]
    sizes = {"num_kv_heads": 4, "group": 16, "head_dim": 128, "topk": 16, "block_size": 128, "page_size": 128}

    def summary(tokens, form, **other):
        c = configure(tokens, **sizes | other, device=hopper, form=form)
        plain = configure(tokens, **sizes | other, device=hopper)
        assert (c.splits, c.tiles * c.keys, c.rows) == (plain.splits, plain.tiles * plain.keys, plain.rows)
        assert c.walks == (c.num_warps if c.apart else 1)
        assert c.walks == 1 or c.keys // c.walks >= 16
        assert c.tiles % c.together == 0
        return c.walks, c.keys, c.num_stages

    assert [summary(b, 1) for b in (1, 8, 32, 64)] == [(4, 128, 3), (8, 128, 3), (8, 128, 3), (4, 64, 4)]
    assert [summary(b, 3) for b in (1, 8, 32, 64)] == [(4, 128, 3), (8, 128, 3), (8, 128, 3), (4, 128, 2)]
    for form in (1, 3):
        assert [summary(b, form)[:2] for b in (96, 128)] == [(4, 64), (4, 64 if form == 1 else 128)]
        for tokens in (1, 32, 64):
            assert summary(tokens, form, block_size=32)[:2] == (2, 32)
            for wide in ({"group": 17}, {"group": 64}, {"head_dim": 256}):  # of a wide tile a warp holds a part
                assert summary(tokens, form, **wide)[0] == 1
    assert [summary(32, form, group=32)[1] for form in (1, 3)] == [128, 64]
    pairs = {form: [configure(b, **sizes, device=hopper, form=form).together for b in (1, 8, 32, 64)] for form in (0, 1, 3)}
    assert pairs == {0: [1] * 4, 1: [1] * 4, 3: [1, 2, 2, 1]}
    small = COMPILE_TARGETS[120]  # its shared memory holds two buffers of a pair of narrow tiles
    assert [configure(32, **sizes, device=small, form=form).together for form in (1, 3)] == [1, 2]
    ampere = COMPILE_TARGETS[80]
    assert [configure(32, **sizes | {"group": 64}, device=ampere, form=form).keys for form in (0, 1, 3)] == [128, 32, 32]


def test_long_queries_are_left_to_other_kernels():
    p = problem((17,), (40,), group=2, head_dim=32)
    reasons = explain(sparse_attention, p.q, p.k, p.v, random_blocks(p, 2, 32, 2), p.seqs, block_size=32).reasons
    assert "CUDA" in reasons["triton_decode"]
