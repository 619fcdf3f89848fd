# SPDX-License-Identifier: MIT
"""The Gluon scoring kernel of NVFP4 keys for Hopper is chosen where it should be; on such a GPU its scores agree with the
reference and, bit for bit, with the Triton kernel."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, NVFP4, PagedIndexKeys
from openmsa.block_scores import gluon_sm90_lanes, reference
from openmsa.block_scores.gluon_sm90_lanes import CONFIG, RING, SHARE, cut
from openmsa.block_scores.triton_lanes import reads_lanes
from openmsa.primitives.rows import KeyTiles, Tile, query_rows
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem
from tests.block_scores.launched import assert_triton_agrees, launched_scores
from tests.hopper.marks import DEVICE, in_turn, on_hopper
from tests.low_precision import quantized, spread

# name: query lengths, key lengths, index heads, key heads, page size, format, queries, positions of first queries
CASES = {
    "ragged": ((1, 1, 0, 1, 1), (1, 290, 40, 0, 9001), 4, 1, 128, "nvfp4", "bf16", None),
    "swizzled": ((1, 1, 1), (128, 4097, 257), 4, 1, 128, "nvfp4 128x4", "bf16", None),
    "two key heads": ((1, 1), (700, 1300), 4, 2, 128, "nvfp4", "bf16", None),
    "two key heads, swizzled": ((1, 1), (700, 1300), 4, 2, 128, "nvfp4 128x4", "fp16", None),
    "two tokens": ((2, 1, 2), (130, 129, 1), 2, 1, 128, "nvfp4", "fp16", None),
    "four tokens": ((4, 3), (130, 513), 1, 1, 128, "nvfp4", "bf16", None),
    "three heads": ((1, 1), (130, 513), 3, 1, 128, "nvfp4", "bf16", None),
    "wide pages": ((1, 1, 1), (300, 5000, 1025), 4, 1, 512, "nvfp4", "bf16", None),
    "wide pages, swizzled": ((1, 1, 1), (300, 5000, 1025), 4, 1, 512, "nvfp4 128x4", "bf16", None),
    "stored queries": ((1, 1), (300, 5000), 4, 1, 128, "nvfp4", "e4m3", None),
    "offsets": ((1, 2, 1), (1000, 3000, 513), 2, 1, 128, "nvfp4", "bf16", (-20, 1000, 5000)),
}


def serves(keys, queries, rows, device=COMPILE_TARGETS[90], block=128, pages=2):
    """Returns what `gluon_sm90_lanes.serves` says of index keys and queries."""
    cache = PagedIndexKeys(keys, torch.zeros(1, pages, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    tile = Tile.of(block)
    tiles = KeyTiles.of(cache, tile, device)
    return gluon_sm90_lanes.serves(device, tiles, query_rows(queries, device.arch >= 90), tile, rows, reads_lanes(tiles, tile))


def test_what_it_serves():
    pool, queries = torch.randn(3, 1, 256, 128).bfloat16(), torch.randn(1, 4, 128).bfloat16()
    keys = NVFP4.quantize(pool)
    assert all(serves(keys, queries, rows) for rows in (1, 4))
    assert not serves(keys, queries, 5)
    assert serves(NVFP4.quantize(pool, layout="128x4"), queries, 4)
    assert serves(keys, E4M3.quantize(queries, per="head"), 4)
    assert not serves(keys, spread(queries).transpose(1, 2).contiguous().transpose(1, 2), 4)
    assert not serves(spread(keys), queries, 4)
    assert not serves(keys, queries, 4, block=256)
    assert not serves(keys, queries, 4, block=64)
    assert not serves(NVFP4.quantize(pool[..., :64]), queries[..., :64], 4)
    assert not serves(NVFP4.quantize(pool[:, :, :64]), queries, 4)
    assert not serves(E4M3.quantize(pool, per="tensor"), queries, 4)
    assert not any(serves(keys, queries, 4, device=COMPILE_TARGETS[arch]) for arch in (80, 100, 120))


def test_configuration_fits():
    assert CONFIG.resident * (RING + 1024) <= COMPILE_TARGETS[90].shared_bytes
    assert CONFIG.resident // 4 * 32 * CONFIG.max_registers <= 65536 // 4
    assert CONFIG.share <= SHARE.value
    assert 128 % CONFIG.slot == 0
    assert CONFIG.slot % 32 == 0


@pytest.mark.parametrize("programs", [1, 8, 32, 64, 1000])
@pytest.mark.parametrize("tiles", [1, 33, 256, 1024, 8192])
def test_cut(programs, tiles):
    """Nearly all programs are resident at a time, unless that leaves a program more than eight tiles."""
    share, resident = cut(programs, tiles, 132), CONFIG.resident * 132
    assert 1 <= share <= min(CONFIG.share, tiles)
    total = programs * -(-tiles // share)
    assert total <= resident or share == CONFIG.share or -(-total // resident) * resident <= 1.25 * total


@on_hopper
@pytest.mark.parametrize(("name", "visible"), in_turn(CASES, [False, True]))
def test_on_the_device(name, visible, monkeypatch):
    q_lens, k_lens, heads, key_heads, page_size, form, query, offsets = CASES[name]
    device, dtype = DEVICE, torch.float16 if query == "fp16" else torch.bfloat16
    p = problem(
        q_lens, k_lens, kv_heads=heads, index_heads=heads, index_key_heads=key_heads, index_dim=128, offsets=offsets,
        dtype=dtype,
    ).to(device)  # fmt: skip
    p.index_k[sum(k_lens) // 2, 0, 3], p.index_q[0, 0], p.index_q[-1, -1, 5] = torch.nan, 0, torch.nan
    index_q = E4M3.quantize(p.index_q, per="head") if query == "e4m3" else p.index_q
    cache = paged(p, page_size)[1]
    index_k = PagedIndexKeys(quantized(cache.keys, form), cache.page_table, cache.seq_lens)
    lengths = index_k.layout(p.seqs, sum(q_lens), device)

    def run():
        return launched_scores(index_q, index_k, lengths, visible)

    launched = []
    launch = gluon_sm90_lanes.launch
    monkeypatch.setattr(gluon_sm90_lanes, "launch", lambda *args, **more: (launched.append(1), launch(*args, **more)))
    tuned = run()
    assert launched
    assert_equal("repeated", run(), tuned.cpu())
    assert_triton_agrees(run, gluon_sm90_lanes, index_k, monkeypatch)
    exact = index_q.dequantize(torch.float64) if query == "e4m3" else index_q.double()
    truth, honest = (reference.block_scores(q, index_k, lengths, 128) for q in (exact, index_q))
    assert_close("scores", tuned, honest, truth)
