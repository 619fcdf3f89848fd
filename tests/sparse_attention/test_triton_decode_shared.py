# SPDX-License-Identifier: MIT
"""Decode attention whose tokens share the reading of blocks is right, in the interpreter without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import PagedKV
from openmsa.primitives.softmax import Partials
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.sparse_attention.triton_decode_shared import Config, configure, launch, room
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close
from openmsa.testing.inputs import paged, problem, random_blocks, strided
from tests import oracle

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
FLOAT = torch.float16 if DEVICE.type == "cuda" else torch.float32  # on a GPU the kernels serve half precision only
SCALE = 0.2

CASES = [  # new tokens, head_dim, group, kv_heads, block_size, page_size, topk, dtype, config
    (8, 128, 16, 2, 128, 128, 16, torch.float16, Config(8, 128, 64, 1, 8, 3)),
    (4, 64, 16, 1, 64, 128, 5, torch.bfloat16, Config(4, 64, 32, 3, 4, 2)),
    (3, 96, 5, 2, 32, 32, 3, FLOAT, Config(4, 32, 32, 2, 4, 2)),
    (5, 32, 3, 2, 64, 64, 6, torch.float16, Config(2, 16, 64, 4, 4, 3)),
    (16, 48, 1, 1, 32, 96, 4, FLOAT, Config(8, 16, 32, 1, 4, 2)),
    (2, 16, 64, 1, 256, 256, 2, torch.bfloat16, Config(2, 128, 64, 1, 8, 1)),
]


@pytest.mark.parametrize(("new", "head_dim", "group", "kv_heads", "block", "page", "topk", "dtype", "config"), CASES)
def test_against_the_truth(new, head_dim, group, kv_heads, block, page, topk, dtype, config):
    """Lengths of no key, of fewer keys than new tokens, and odd ones; shuffled and shared pages, wild ids where nothing is."""
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
    q = strided(p.q, 2).to(DEVICE)
    with PoisonedOutputs():
        out, lse = torch.empty(q.shape, dtype=dtype, device=DEVICE), torch.empty(q.shape[:2], device=DEVICE)
    for _ in range(2):  # the second launch finds the counters as the first did
        out.fill_(torch.nan)
        launch(config, partials, q, kv, wild.to(DEVICE), new, block, SCALE, out, lse)
        reads = oracle.reads_of_blocks(blocks, block)
        truth, truth_lse = oracle.attention(p, reads, SCALE)
        honest, honest_lse = oracle.honest_attention(p, reads, SCALE)
        assert_close("out", out.cpu(), honest, truth)
        assert_close("lse", lse.cpu(), honest_lse, truth_lse)


def test_what_is_served():
    device = COMPILE_TARGETS[90]
    sizes = (4, 16, 128, 16, 128, 128, device)  # KV heads, group, dim, topk, block, page
    assert configure(128, 8, *sizes) == Config(8, 128, 64, 1, 8, 3)
    assert configure(8, 4, *sizes) == Config(4, 64, 64, 4, 4, 3)
    assert configure(8, 16, *sizes).tokens == 8
    assert configure(8, 1, *sizes) is None  # one token has nobody to share with
    assert configure(8, 2, 1, 128, 128, 16, 128, 128, device) is None  # a token fills the rows
    assert configure(8, 2, 4, 16, 256, 16, 128, 128, device) is None
    assert configure(8, 2, 4, 16, 128, 16, 128, 64, device) is None  # a block has several pages
    assert configure(8, 2, 4, 16, 128, 16, 48, 96, device) is None
    assert configure(1, 2, 4, 16, 128, 64, 128, 128, COMPILE_TARGETS[120]).num_stages == 2


def test_room_serves_every_batch():
    sizes = (3, 2, 16, 128, 16, 128, 128, COMPILE_TARGETS[90])
    configs = [configure(batch, *sizes) for batch in range(1, 20)]
    partials = room(configs, 3, 2, 128, torch.float16, torch.device("cpu"))
    for batch, config in enumerate(configs, 1):
        assert partials.arrived.numel() >= batch * 2
        assert partials.rows.numel() >= (config.splits > 1) * batch * 2 * config.splits * config.rows * 128
    assert room([None], 3, 2, 128, torch.float16, torch.device("cpu")).rows.numel() == 0
