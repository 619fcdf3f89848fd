# SPDX-License-Identifier: MIT
"""Decode attention whose tokens share the reading of blocks is right, in the interpreter without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import PagedKV
from openmsa.primitives.softmax import Partials
from openmsa.runtime.devices import COMPILE_TARGETS, facts
from openmsa.sparse_attention import triton_decode, triton_decode_call
from openmsa.sparse_attention.triton_decode_shared import Config, Shared, configure, launch
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close
from openmsa.testing.inputs import paged, problem, random_blocks, strided
from tests import oracle

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
FLOAT = torch.float16 if DEVICE.type == "cuda" else torch.float32  # on a GPU the kernels serve half precision only
SCALE = 0.2

CASES = [  # new tokens, head_dim, group, kv_heads, block_size, page_size, topk, dtype, config
    (8, 128, 16, 2, 128, 128, 16, torch.float16, Config(8, 128, 64, 1, 72, 8, 3)),
    (4, 64, 16, 1, 64, 128, 5, torch.bfloat16, Config(4, 64, 32, 3, 99, 4, 2)),
    (3, 96, 5, 2, 32, 32, 3, FLOAT, Config(4, 32, 32, 2, 99, 4, 2)),
    (5, 32, 3, 2, 64, 64, 6, torch.float16, Config(2, 16, 64, 4, 8, 4, 3)),
    (16, 48, 1, 1, 32, 96, 4, FLOAT, Config(8, 16, 32, 1, 7, 4, 2)),
    (2, 16, 64, 1, 256, 256, 2, torch.bfloat16, Config(2, 128, 64, 1, 99, 8, 1)),
]


@pytest.mark.parametrize(("new", "head_dim", "group", "kv_heads", "block", "page", "topk", "dtype", "config"), CASES)
def test_against_the_truth(new, head_dim, group, kv_heads, block, page, topk, dtype, config):
    """Lengths are 0, less than the new tokens, and odd; pages are shuffled and shared; ids are wild where nothing is read."""
    k_lens = (2 * block + 5, 0, 9 * block - 1, new - 1, new, block)
    p = problem(
        (new,) * len(k_lens), k_lens, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype, shared_prefix=block,
        offsets=tuple(n - new for n in k_lens),
    )  # fmt: skip
    blocks = random_blocks(p, topk, block, kv_heads if group != 3 else 1)
    near = torch.arange(blocks.shape[0]) % 2 == 1  # every second token selects what the one in front does
    before = blocks.roll(1, 0)
    seen = torch.cat([torch.arange(n - new, n) for n in k_lens]).div(block, rounding_mode="floor")
    blocks = torch.where(near[:, None, None] & (before <= seen[:, None, None]), before, blocks)
    wild = blocks.clone()
    wild[blocks < 0] = torch.tensor([-1, 2**31 - 1, 2**25, -(2**31)], dtype=torch.int32)[torch.arange((blocks < 0).sum()) % 4]
    kv, _ = paged(p, page, interleaved=page != 64)
    kv = PagedKV(*(x.to(DEVICE) for x in (kv.k, kv.v, kv.page_table, kv.seq_lens)))
    tiles = len(k_lens) * -(-new // config.tokens) * kv_heads
    partials = Partials.allocate(tiles, tiles * config.splits, config.rows, head_dim, dtype, DEVICE)
    shared = Shared([], partials, torch.empty(tiles, dtype=torch.int32, device=DEVICE))
    cut = triton_decode_call.configure(1000, kv_heads, group, head_dim, topk, block, page, COMPILE_TARGETS[90])
    apart = Partials.allocate(1000, 1000 * cut.splits, cut.rows, head_dim, dtype, DEVICE)
    q = strided(p.q, 2).to(DEVICE)
    with PoisonedOutputs():
        out, lse = torch.empty(q.shape, dtype=dtype, device=DEVICE), torch.empty(q.shape[:2], device=DEVICE)
    for _ in range(2):  # the second launch finds the counters as the first did
        out.fill_(torch.nan)
        shared.served.fill_(-1)
        numbers = (new, block, SCALE, out, lse)
        served = launch(config, shared, q, kv, wild.to(DEVICE), *numbers)
        triton_decode.launch(cut, apart, q, kv, None, wild.to(DEVICE), kv.seq_lens, *numbers, served=served)
        lists = [part.unique() for b in blocks.split(new) for part in b.split(config.tokens)]
        assert served.flags.min() >= 0
        assert len(lists) * kv_heads == tiles
        if blocks.shape[1] == 1:
            long = torch.tensor([[(ids >= 0).sum() > config.most] * kv_heads for ids in lists])
            assert torch.equal(served.flags.cpu() == 0, long.flatten())
        reads = oracle.reads_of_blocks(blocks, block)
        truth, truth_lse = oracle.attention(p, reads, SCALE)
        honest, honest_lse = oracle.honest_attention(p, reads, SCALE)
        assert_close("out", out.cpu(), honest, truth)
        assert_close("lse", lse.cpu(), honest_lse, truth_lse)


def test_nothing_is_read_of_pages_outside_the_pool():
    """Page 0, whose place they take, holds NaN, as it is of no sequence."""
    new, kv_heads, size, dim, dtype = 4, 2, 32, 32, torch.float16
    k, v = (torch.randn(5, kv_heads, size, dim, dtype=dtype) for _ in range(2))
    k[0], v[0] = torch.nan, torch.nan
    table = torch.tensor([[1, 5, 2], [-1, 3, 4]], dtype=torch.int32)
    q, blocks = torch.randn(2 * new, 4, dim, dtype=dtype), torch.arange(3, dtype=torch.int32).expand(2 * new, kv_heads, 3)
    q, k, v, table, blocks = (x.contiguous().to(DEVICE) for x in (q, k, v, table, blocks))
    kv = PagedKV(k, v, table, torch.full((2,), 3 * size, dtype=torch.int32, device=DEVICE))
    config = Config(4, 16, 32, 1, 99, 4, 2)
    shared = Shared([], Partials.allocate(0, 0, 16, dim, dtype, DEVICE), torch.empty(4, dtype=torch.int32, device=DEVICE))
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=DEVICE)
    launch(config, shared, q, kv, blocks, new, size, SCALE, out, lse)
    known = PagedKV(k, v, table.clamp(1, 4), kv.seq_lens)
    found = blocks.clone()
    found[:new, :, 1], found[new:, :, 0] = -1, -1
    expected, expected_lse = torch.empty_like(out), torch.empty_like(lse)
    launch(config, shared, q, known, found, new, size, SCALE, expected, expected_lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert bool(out.isfinite().all())


def test_what_is_served():
    device = COMPILE_TARGETS[90]
    sizes = (4, 16, 128, 16, 128, 128, device)  # KV heads, group, dim, topk, block, page
    assert configure(128, 8, *sizes) == Config(8, 128, 64, 1, 48, 8, 3)
    assert configure(12, 4, *sizes) == Config(4, 64, 64, 2, 24, 4, 3)
    assert configure(8, 16, *sizes).tokens == 8
    assert configure(8, 4, *sizes) is None  # a program for each token and head has a multiprocessor of its own
    assert configure(200, 1, *sizes) is None  # one token has nobody to share with
    assert configure(200, 2, 1, 128, 128, 16, 128, 128, device) is None  # a token fills the rows
    assert configure(200, 2, 4, 16, 256, 16, 128, 128, device) is None
    assert configure(200, 2, 4, 16, 128, 16, 128, 64, device) is None  # a block has several pages
    assert configure(200, 2, 4, 16, 128, 16, 48, 96, device) is None
    assert configure(50, 2, 4, 16, 128, 64, 128, 128, COMPILE_TARGETS[120]).num_stages == 2


def test_room_serves_every_batch():
    shape = (3, 2, 16, 128, 16, 128, 128)
    shared = Shared.allocate(60, shape, torch.float16, DEVICE)
    assert [config is None for config in shared.cuts] == [configure(b, *shape, facts(DEVICE)) is None for b in range(1, 61)]
    for batch, config in enumerate(shared.cuts, 1):
        if config:
            tiles = batch * 2 * -(-3 // config.tokens)
            assert shared.served.numel() >= tiles
            if config.splits > 1:
                assert shared.partials.arrived.numel() >= tiles
                assert shared.partials.rows.numel() >= tiles * config.splits * config.rows * 128
    assert Shared.allocate(60, shape, torch.float16, DEVICE, shares=False).served.numel() == 0
