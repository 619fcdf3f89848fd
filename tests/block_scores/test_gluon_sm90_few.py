# SPDX-License-Identifier: MIT
"""The Gluon scoring kernel of few rows for Hopper is chosen where it should be; on such a GPU its scores agree with the
reference and, bit for bit, with the Triton kernel."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, PagedIndexKeys
from openmsa.block_scores import gluon_sm90_few, reference
from openmsa.block_scores.gluon_sm90_few import ABSENT, CONFIG, LEAST_BATCH, MOST_BATCH
from openmsa.primitives.operands import Bounds
from openmsa.primitives.rows import KeyTiles, Tile, query_rows
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem
from tests.block_scores.launched import assert_triton_agrees, launched_scores
from tests.hopper.marks import DEVICE, on_hopper
from tests.low_precision import spread

# name: query lengths, key lengths, index heads, key heads, dim, page size, queries, positions of first queries, multiprocessors
CASES = {
    "one row": ((1,) * 17, (*range(0, 2080, 130), 9001), 1, 1, 128, 128, "bf16", None, 9),
    "ragged": ((1, 1, 0, 1, 1), (1, 290, 40, 0, 9001), 4, 1, 128, 128, "bf16", None, 2),
    "one long": ((1,) * 33, (*(128,) * 32, 60_001), 1, 1, 128, 128, "bf16", None, 1),
    "many": ((1,) * 256, (*range(1, 257),), 1, 1, 128, 128, "fp16", None, 9),
    "two key heads": ((1, 1), (700, 1300), 4, 2, 128, 128, "bf16", None, 1),
    "sixteen key heads": ((1, 1), (5000, 1300), 16, 16, 64, 128, "fp16", None, 3),
    "two tokens": ((2, 1, 2), (130, 129, 1), 2, 1, 128, 128, "fp16", None, 1),
    "four tokens of four heads": ((4, 3), (130, 5130), 4, 1, 128, 128, "bf16", None, 1),
    "three heads": ((1, 1), (130, 513), 3, 1, 64, 128, "bf16", None, 1),
    "nine rows": ((3, 2), (130, 513), 3, 1, 64, 128, "bf16", None, 1),
    "wide pages": ((1, 1, 1), (300, 5000, 1025), 4, 1, 128, 512, "bf16", None, 2),
    "offsets": ((1, 2, 1), (1000, 3000, 513), 2, 1, 128, 128, "bf16", (-20, 1000, 5000), 1),
    "nothing but one key": ((1, 1, 1), (0, 1, 0), 1, 1, 128, 128, "bf16", None, 1),
}


def serves(keys, queries, count, device=COMPILE_TARGETS[90], block=128, batch=LEAST_BATCH, visible=True, **changes):
    """Returns what `gluon_sm90_few.serves` says of index keys and queries. changes: s_row or capacity of the keys as they are
    taken."""
    cache = PagedIndexKeys(keys, torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    tile = Tile.of(block)
    tiles, queries = KeyTiles.of(cache, tile, device), query_rows(queries, device.arch >= 90)
    rows = tiles.view.rows._replace(**{name: x for name, x in changes.items() if name == "s_row"})
    view = tiles.view._replace(rows=rows, **{name: x for name, x in changes.items() if name != "s_row"})
    tiles = tiles._replace(view=view)
    return gluon_sm90_few.serves(device, tiles, queries, tile, count, batch, torch.empty(1) if visible else None)


def test_what_it_serves():
    keys, queries = torch.randn(3, 1, 256, 128).bfloat16(), torch.randn(1, 4, 128).bfloat16()
    assert all(serves(keys, queries, rows) for rows in (1, 16))
    assert not serves(keys, queries, 17)
    assert not serves(keys, queries, 4, visible=False)
    assert not any(serves(keys, queries, 4, batch=batch) for batch in (LEAST_BATCH - 1, MOST_BATCH + 1))
    assert serves(keys[..., :64], queries[..., :64], 4)
    assert serves(keys.half(), queries.half(), 4)
    assert not serves(keys.float(), queries.float(), 4)
    assert not serves(keys[..., :48], queries[..., :48], 4)
    assert not serves(keys, E4M3.quantize(queries, per="head"), 4)
    assert not serves(E4M3.quantize(keys, per="tensor"), queries, 4)
    assert not serves(keys, spread(queries).transpose(1, 2).contiguous().transpose(1, 2), 4)
    assert not serves(spread(keys), queries, 4)
    assert not serves(torch.randn(3, 1, 256, 129).bfloat16()[..., 1:], queries, 4)
    assert not serves(keys, queries, 4, s_row=1 << 24)
    assert not serves(keys, queries, 4, capacity=1 << 27)
    assert not any(serves(keys, queries, 4, block=block) for block in (64, 256))
    assert not serves(keys[:, :, :64], queries, 4)
    assert not any(serves(keys, queries, 4, device=COMPILE_TARGETS[arch]) for arch in (80, 100, 120))


def test_configuration_fits():
    assert CONFIG.resident * (128 * 128 * 2 + 1024) <= COMPILE_TARGETS[90].shared_bytes + 1024
    assert 128 % CONFIG.slot == 0
    assert CONFIG.slot % 16 == 0


@pytest.mark.parametrize("total", [0, 1, 5, 791, 792, 2375, 2376, 8192, 131_072, 1_000_003, (1 << 24) - 1])
def test_parts_cover_the_list(total):
    """This is `gluon_sm90_few.part` in NumPy; quotients of the GPU are at most two units in the last place off."""
    programs, rounds, one = 2376, 3, np.float32(1)
    few = max(min(programs // rounds, total), 1)
    for off in (-2, 0, 2):
        ends = []
        for i in range(programs + 1):
            left = np.float32(programs - i) / np.float32(programs)
            left = np.float32(left * (one + np.float32(off) * np.finfo(np.float32).eps / 2))
            shrinking = total - int(np.float32(np.float32(left * left) * np.float32(total))) if i else 0
            equal = min(i, few) * (total // few) + min(i, total % few)
            ends.append(equal if total < programs else shrinking)
        assert ends[0] == 0
        assert ends[-1] == total
        assert all(0 <= a <= b for a, b in itertools.pairwise(ends))


@on_hopper
@pytest.mark.parametrize("name", CASES)
def test_on_the_device(name, monkeypatch):
    q_lens, k_lens, heads, key_heads, dim, page_size, query, offsets, num_sms = CASES[name]
    device, dtype = DEVICE, torch.float16 if query == "fp16" else torch.bfloat16
    p = problem(
        q_lens, k_lens, kv_heads=heads, index_heads=heads, index_key_heads=key_heads, index_dim=dim, offsets=offsets,
        dtype=dtype,
    ).to(device)  # fmt: skip
    if sum(k_lens) > 1:
        p.index_k[sum(k_lens) // 2, 0, 3], p.index_q[0, 0], p.index_q[-1, -1, 5] = torch.nan, 0, torch.nan
    index_k = paged(p, page_size)[1]
    lengths = index_k.layout(p.seqs, sum(q_lens), device)
    launched, launch = [], gluon_sm90_few.launch

    def launch_for(*arguments):
        *before, on = arguments
        served = launch(*before, on._replace(num_sms=num_sms))
        launched.append(served)
        return served

    monkeypatch.setattr(gluon_sm90_few, "LEAST_BATCH", 1)
    monkeypatch.setattr(gluon_sm90_few, "launch", launch_for)

    def run():
        return launched_scores(p.index_q, index_k, lengths, True)

    tuned = run()
    assert all(launched)
    assert launched
    assert_equal("repeated", run(), tuned.cpu())
    assert_triton_agrees(run, gluon_sm90_few, index_k, monkeypatch)
    truth, honest = (reference.block_scores(q, index_k, lengths, 128) for q in (p.index_q.double(), p.index_q))
    assert_close("scores", tuned, honest, truth)


@on_hopper
@pytest.mark.parametrize("local", [0, 1, 2])
def test_scores_that_are_handed_on(local):
    """They are the others' bit for bit, nothing is written for the last `local` blocks that a row sees, nor behind them, and
    blocks are not counted."""
    tokens, lens, heads = 2, (1, 0, 130, 129, 257, 1500), 2
    p = problem(
        (tokens,) * len(lens), lens, kv_heads=heads, index_heads=heads, index_key_heads=1, index_dim=64, dtype=torch.float16,
        offsets=[n - tokens for n in lens],
    ).to(DEVICE)  # fmt: skip
    cache, tile, device = paged(p, 128)[1], Tile.of(128), COMPILE_TARGETS[90]._replace(num_sms=1)
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=DEVICE) * tokens
    keys, longest = KeyTiles.of_pool(cache.keys, cache.page_table, tile, device), (tokens, cache.capacity)
    results = []
    for handed in (False, True):
        bits = torch.full((len(lens) * tokens, heads, cache.capacity // 128), ABSENT.value, dtype=torch.int32, device=DEVICE)
        visible = torch.full((len(lens) * tokens,), -7, dtype=torch.int32, device=DEVICE)
        bounds, scores = Bounds(starts, None, cache.seq_lens, None), bits.view(torch.float32).transpose(0, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gluon_sm90_few, "LEAST_BATCH", 1)
            served = gluon_sm90_few.launch(
                p.index_q, keys, tile, bounds, longest, scores, visible, device, 0, handed, handed * local
            )
        assert served
        results.append((bits.cpu(), visible.cpu()))
    seen = (torch.tensor(lens)[:, None] - tokens + 1 + torch.arange(tokens)).clamp(0).flatten()
    seen = (seen + 127) // 128
    (plain, counts), (bits, visible) = results
    assert_equal("visible", counts, seen.int())
    assert_equal("visible", visible, torch.full_like(counts, -7))
    blocks = torch.arange(bits.shape[2])
    assert (plain != ABSENT.value).equal((blocks < seen[:, None, None]).expand(plain.shape))
    assert_equal("handed", bits, torch.where(blocks < seen[:, None, None] - local, plain, ABSENT.value))
