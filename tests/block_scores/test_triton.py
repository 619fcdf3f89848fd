# SPDX-License-Identifier: MIT
"""The Triton scoring kernel agrees with the reference, in the interpreter or on a GPU where there is one."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from openmsa import E4M3, MXFP4, NVFP4, Int8, PagedIndexKeys
from openmsa.block_scores import reference, triton_route
from openmsa.block_scores.triton_config import config
from openmsa.block_scores.triton_lanes import reads_lanes
from openmsa.block_scores.triton_route import launch_scores
from openmsa.primitives.rows import KeyTiles, Tile
from openmsa.primitives.walks import Kind, splits
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, strided
from openmsa.types import layout
from tests import oracle
from tests.low_precision import codes_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter, on NaN
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
BF16, FP16 = torch.bfloat16, torch.float16
# name: query lengths, key lengths, index dim, block size, key heads, dtype
CASES = {
    "tuned": ((40,), (450,), 128, 128, 1, BF16),
    "ragged": ((3, 70, 0, 5), (3, 200, 9, 0), 64, 64, 2, FP16),
    "odd": ((30,), (300,), 80, 48, 1, BF16),
    "large blocks": ((20, 30), (700, 260), 32, 200, 1, FP16),
    "small blocks": ((40,), (280,), 16, 16, 4, BF16),
    "decode": ((1, 1, 4), (1, 290, 130), 64, 32, 1, FP16),
}


def make(name, integers=False):
    q_lens, k_lens, dim, block, key_heads, dtype = CASES[name]
    p = problem(q_lens, k_lens, kv_heads=4, index_key_heads=key_heads, index_dim=dim, dtype=dtype, integer_index=integers).to(
        DEVICE
    )
    return p, layout(p.seqs, p.index_q.shape[0], p.index_k.shape[0], DEVICE), block


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name):
    p, lengths, block = make(name)
    truth = reference.block_scores(p.index_q.double(), p.index_k.double(), lengths, block)
    honest = reference.block_scores(p.index_q, p.index_k, lengths, block)
    assert_close("scores", triton_route.block_scores(p.index_q, p.index_k, lengths, block), honest, truth)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pages", ["block", "small", "odd"])
def test_pages(name, pages):
    p, _, block = make(name, integers=True)
    size = {"block": block, "small": 16, "odd": 2 * block + 1}[pages]
    _, cache = paged(p, size, interleaved=pages == "small")
    lengths = cache.layout(p.seqs, p.index_q.shape[0], DEVICE)
    expected = reference.block_scores(p.index_q, cache, lengths, block)
    assert_equal("scores", triton_route.block_scores(p.index_q, cache, lengths, block), expected)


def test_strides_and_offsets():
    p = problem((5, 9), (150, 33), kv_heads=2, index_dim=32, dtype=FP16, offsets=(-2, 100), integer_index=True).to(DEVICE)
    lengths = layout(p.seqs, 14, 183, DEVICE)
    expected = reference.block_scores(p.index_q, p.index_k, lengths, 64)
    result = triton_route.block_scores(strided(p.index_q), strided(p.index_k, 2), lengths, 64)
    assert_equal("scores", result, expected)


def test_nan_and_infinity():
    p, lengths, block = make("tuned", integers=True)
    p.index_k[5], p.index_k[128:256], p.index_q[3, 1, 7] = torch.nan, torch.nan, torch.inf
    p.index_k[300, 0, 7] = torch.inf
    expected = reference.block_scores(p.index_q, p.index_k, lengths, block)
    assert_equal("scores", triton_route.block_scores(p.index_q, p.index_k, lengths, block), expected)


def test_pages_that_do_not_exist_are_not_read():
    p, _, _ = make("tuned", integers=True)
    cache = PagedIndexKeys(
        p.index_k[:384].view(3, 1, 128, 128), torch.tensor([[2, -1, 7, 0]]).int().to(DEVICE), p.index_q.new_zeros(1).int()
    )
    lengths = layout(p.seqs, 40, 450, DEVICE)
    scores = triton_route.block_scores(p.index_q, cache, lengths, 128)
    assert scores.shape == (4, 40, 4)
    assert bool((scores[:, :, 1:3] == 0).all())  # what they hold is undefined, but it is no memory of others


def stored(keys, name):
    """Returns keys, packed or a pool, in a format with scales of every shape."""
    heads = torch.linspace(0.5, 2, keys.shape[1], device=DEVICE)
    return {
        "plain": lambda: keys,
        "e4m3": lambda: E4M3.quantize(keys),
        "e4m3 head": lambda: E4M3.quantize(keys, heads),
        "e4m3 page": lambda: E4M3.quantize(keys, per="page" if keys.dim() == 4 else "tensor"),
        "int8": lambda: Int8.quantize(keys),
        "nvfp4": lambda: NVFP4.quantize(keys),
        "nvfp4 128x4": lambda: NVFP4.quantize(keys, layout="128x4"),
        "mxfp4": lambda: MXFP4.quantize(keys),
    }[name]()


QUERIES = {"bf16": BF16, "fp16": FP16, "e4m3": BF16}
FORMAT_CASES = [
    ("bf16", "e4m3 head", "tuned"),
    ("bf16", "int8", "tuned"),
    ("bf16", "nvfp4", "tuned"),
    ("bf16", "mxfp4", "tuned"),
    ("fp16", "e4m3 page", "decode"),
    ("fp16", "int8", "decode"),
    ("fp16", "nvfp4 128x4", "decode"),
    ("fp16", "mxfp4", "decode"),
    ("bf16", "nvfp4 128x4", "odd"),
    ("bf16", "int8", "ragged"),
    ("e4m3", "e4m3 head", "tuned"),
    ("e4m3", "e4m3 page", "ragged"),
    ("e4m3", "e4m3 page", "large blocks"),
    ("e4m3", "e4m3", "decode"),
    ("e4m3", "plain", "decode"),
    ("e4m3", "nvfp4", "decode"),
    ("e4m3", "int8", "small blocks"),
]


@pytest.mark.parametrize("storage", ["flat", "block", "small"])
@pytest.mark.parametrize(("query", "keys", "name"), FORMAT_CASES)
def test_formats(query, keys, name, storage):
    q_lens, k_lens, dim, block, key_heads, _ = CASES[name]
    p = problem(q_lens, k_lens, kv_heads=4, index_key_heads=key_heads, index_dim=dim, dtype=QUERIES[query]).to(DEVICE)
    p.index_k[sum(k_lens) // 2, 0, 3] = torch.nan
    index_q = E4M3.quantize(p.index_q, per="head") if query == "e4m3" else p.index_q
    if storage == "flat":
        index_k, lengths = stored(p.index_k, keys), layout(p.seqs, sum(q_lens), sum(k_lens), DEVICE)
    else:
        cache = paged(p, block if storage == "block" else 16)[1]
        index_k = PagedIndexKeys(stored(cache.keys, keys), cache.page_table, cache.seq_lens)
        lengths = index_k.layout(p.seqs, sum(q_lens), DEVICE)
    exact = index_q.dequantize(torch.float64) if query == "e4m3" else index_q.double()
    truth = reference.block_scores(exact, index_k, lengths, block)
    honest = reference.block_scores(index_q, index_k, lengths, block)
    if query == "e4m3" and keys.startswith("e4m3"):
        pages = () if storage == "flat" else (index_k.page_table, index_k.seq_lens)
        factors = codes_of(index_q), codes_of(index_k if storage == "flat" else index_k.keys, *pages)
        honest = oracle.honest_scores(p, block, *factors, num_blocks=truth.shape[2])
    assert_close("scores", triton_route.block_scores(index_q, index_k, lengths, block), honest, truth)


def test_configurations_fit():
    for arch, device in COMPILE_TARGETS.items():
        for dim in (16, 64, 128, 192, 256):
            for rows in (4, 64, 65, 65536):
                for indirect, format, narrow in product((False, True), (0, 1, 2, 3, 4), (False, True)):
                    dtype = tl.float8e4nv if narrow and format == 1 else tl.float16 if narrow else tl.bfloat16
                    kind = Kind.of(dim, 128, format, dtype, indirect, device.has_tma)
                    c = config(device, rows, kind)
                    assert c.swap == (rows <= 64 or kind.must_group)
                    assert c.rows >= min(rows, 16 if c.grouped else 64)
                    assert c.grouped <= (format >= 3)
                    assert c.num_stages >= 1, arch
                    assert c.resident <= 4


def test_lanes_serve_up_to_four_rows():
    for device in COMPILE_TARGETS.values():
        kind = Kind.of(128, 128, 3, tl.bfloat16, True, device.has_tma)._replace(lanes=True)
        assert all((config(device, rows, kind).lanes > 0) == (rows <= 4) for rows in (1, 4, 5, 64, 65536))
        chosen = config(device, 1, kind)
        assert chosen.rows == 4
        assert 128 % chosen.lanes == 0
        assert 7 <= chosen.resident <= 65536 // (32 * chosen.max_registers)
        assert chosen.resident * 2 * chosen.lanes * 72 <= device.shared_bytes


@pytest.mark.parametrize("block_size", [16, 48, 64, 100, 128, 129, 200, 256])
def test_tiles_cover_blocks(block_size):
    tile = Tile.of(block_size)
    assert tile.keys <= tile.tile <= 128
    assert tile.tile & (tile.tile - 1) == 0
    assert tile.parts * tile.keys >= tile.span > (tile.parts - 1) * tile.keys
    assert tile.count(7) * tile.sub >= 7 * tile.parts


def test_splits_fill_the_card():
    assert splits(0, 100, 264, 8) == 1
    assert splits(8000, 100, 264, 8) == 1
    for programs, tiles in ((8, 1024), (54, 1024), (1, 256), (32, 1024)):
        n = splits(programs, tiles, 264, 1)
        rounds = -(-programs * n // 264)
        assert programs * n >= 0.85 * rounds * 264 or n == tiles


@pytest.mark.parametrize("exponent", [-30, 0, 40])
@pytest.mark.parametrize("dim", [32, 64])
def test_mxfp4_scales_past_float16(dim, exponent):
    """Scores are right where float16 queries times the scales of the keys are out of range, with one and two groups a key."""
    generator = torch.Generator().manual_seed(dim)
    q = torch.randn(2, 2, dim, generator=generator, dtype=FP16)
    keys = MXFP4.quantize((torch.randn(64, 1, dim, generator=generator) * 2.0**exponent).to(BF16))
    one = layout(None, 2, 64, torch.device("cpu"))
    want = reference.block_scores(q.double(), keys, one, 32)
    keys = MXFP4(*(x.to(DEVICE) for x in (keys.data, keys.scale)))
    got = triton_route.block_scores(q.to(DEVICE), keys, layout(None, 2, 64, DEVICE), 32)
    assert_close("scores", got.cpu(), want.float(), want)


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("query", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("keys", ["nvfp4", "nvfp4 128x4", "mxfp4"])
def test_few_rows_of_fp4(query, keys, dim):
    """Scores of decode are right for ragged lengths and an absent sequence, sizes far apart, zeros, infinity and NaN."""
    q_lens, k_lens = (1, 1, 0, 1, 2), (1, 290, 40, 128, 140)
    p = problem(q_lens, k_lens, kv_heads=4, index_key_heads=1, index_dim=dim, dtype=QUERIES[query]).to(DEVICE)
    p.index_k[200, 0, 3], p.index_q[0, 1], p.index_q[1, 2, 5] = torch.nan, 0, torch.nan
    if query == "bf16":
        p.index_q[1, 3] *= 2.0**100
        p.index_q[2] *= 2.0**-100
        p.index_q[3, :, ::3] *= 2.0**-20
        p.index_q[4, 0, 7] = torch.inf
    index_q = E4M3.quantize(p.index_q, per="head") if query == "e4m3" else p.index_q
    cache = paged(p, 128)[1]
    index_k = PagedIndexKeys(stored(cache.keys, keys), cache.page_table, cache.seq_lens)
    lengths = index_k.layout(p.seqs, sum(q_lens), DEVICE)
    exact = index_q.dequantize(torch.float64) if query == "e4m3" else index_q.double()
    truth = reference.block_scores(exact, index_k, lengths, 128)
    honest = reference.block_scores(index_q, index_k, lengths, 128)
    scores = triton_route.block_scores(index_q, index_k, lengths, 128)
    for token in range(sum(q_lens)):
        for head in range(4):
            assert_close(f"scores of {token}, {head}", scores[head, token], honest[head, token], truth[head, token])


@pytest.mark.parametrize("page", [None, 256, 512])
@pytest.mark.parametrize("keys", ["nvfp4", "nvfp4 128x4"])
def test_lanes_elsewhere(keys, page):
    """The lanes also serve packed keys, blocks of two parts, several tiles a page and two key heads; they overwrite poison, and
    follow no page that does not exist."""
    q_lens, k_lens = (1, 1, 0, 2), (5, 700, 40, 530)
    p = problem(q_lens, k_lens, kv_heads=4, index_key_heads=2, index_dim=128, dtype=BF16).to(DEVICE)
    if page is None:
        index_k, lengths = stored(p.index_k, keys), layout(p.seqs, 4, sum(k_lens), DEVICE)
    else:
        cache = paged(p, page)[1]
        index_k = PagedIndexKeys(stored(cache.keys, keys), cache.page_table, cache.seq_lens)
        lengths = index_k.layout(p.seqs, 4, DEVICE)
    for block in (128, 256):
        truth = reference.block_scores(p.index_q.double(), index_k, lengths, block)
        honest = reference.block_scores(p.index_q, index_k, lengths, block)
        scores = torch.full_like(honest, torch.nan)
        launch_scores(p.index_q, index_k, lengths, block, scores, None)
        assert_close("scores", scores, honest, truth)
    if page is not None:
        index_k.page_table[1, 0] = -1
        missing = torch.full_like(honest, torch.nan)
        launch_scores(p.index_q, index_k, lengths, 256, missing, None)
        there = slice(page // 256, 3)  # blocks of the second sequence behind the missing page
        assert bool((missing[:, 1, : page // 256] == 0).all())
        assert_equal("other blocks", missing[:, 1, there], scores[:, 1, there])


@pytest.mark.parametrize("rows", [4, 8])
def test_few_rows_of_large_queries(rows):
    """Scores that are in range are right for queries near the end of the range, and for zero keys, in both kernels for few
    rows."""
    p = problem((1,), (256,), kv_heads=rows, index_heads=rows, index_dim=128, dtype=BF16).to(DEVICE)
    p.index_q.mul_(2.0**122)
    p.index_k.mul_(2.0**-20)
    p.index_k[128:] = 0
    index_k, lengths = NVFP4.quantize(p.index_k), layout(p.seqs, 1, 256, DEVICE)
    truth = reference.block_scores(p.index_q.double(), index_k, lengths, 128)
    honest = reference.block_scores(p.index_q, index_k, lengths, 128)
    assert_close("scores", triton_route.block_scores(p.index_q, index_k, lengths, 128), honest, truth)


@pytest.mark.parametrize("step", [32, 2**25 // 64, 2**24 - 32, 2**24])
def test_lanes_have_offsets_of_32_bits(step):
    """Keys whose distance in memory needs more than 32 bits are not given to the lanes; the meta device holds so large a
    pool."""
    data = torch.empty_strided((1, 1, 128, 64), (256 * step, 2, 2 * step, 1), dtype=torch.uint8, device="meta")
    keys = NVFP4(data, torch.empty(1, 1, 128, 8, dtype=torch.uint8, device="meta"))
    table = torch.zeros(1, 1, dtype=torch.int32, device="meta")
    tiles = KeyTiles.of_pool(keys, table, Tile.of(128), COMPILE_TARGETS[80])
    assert reads_lanes(tiles, Tile.of(128)) == (128 * step < 2**31)
