# SPDX-License-Identifier: MIT
"""The dense kernel is right on stored queries, keys and values of every format and form of scale, in the interpreter without
a GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from openmsa import PagedKV
from openmsa.dense_attention import triton_forward
from openmsa.dense_attention.triton_config import Config, configure
from openmsa.kv_cache import E4M3, NVFP4
from openmsa.kv_cache.rows import dequantized
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, strided
from openmsa.types import layout
from tests import oracle

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
RESULTS = ("out", "lse", "max_score")
BOTH = {"bf16": torch.bfloat16, "fp16": torch.float16}
pytestmark = [pytest.mark.gpu] if GPU else []


def by_page(x):
    """Quantises with scales that differ a lot from page to page."""
    scale = 0.003 * 3.0 ** (torch.arange(x.shape[0] * x.shape[1]) % 5).view(x.shape[:2])
    return E4M3.quantize(x, scale)


STORES = {
    "e4m3": lambda x: E4M3.quantize(x * 100),
    "e4m3 tensor": lambda x: E4M3.quantize(x, per="tensor"),
    "e4m3 head": lambda x: E4M3.quantize(x, per="head"),
    "e4m3 page": by_page,
    "e4m3 page, one head": lambda x: E4M3.quantize(x, torch.linspace(0.002, 0.03, x.shape[0])[:, None]),
    "nvfp4": NVFP4.quantize,
    "nvfp4 without": lambda x: NVFP4.quantize(x, 1.0),
    "nvfp4 128x4": lambda x: NVFP4.quantize(x, 0.01, layout="128x4"),
}


def moved(x):
    """Returns a format or a tensor on the device."""
    if isinstance(x, torch.Tensor):
        return x.to(DEVICE)
    fields = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in vars(x).items()}
    return type(x)(**fields)


def stored(p, store, page_size):
    """Returns k and v as the call takes them, and the problem in the numbers that they stand for."""
    if not page_size:
        k, v = store(p.k), store(p.v)
        return (k, v), replace(p, k=dequantized(k, torch.float64), v=dequantized(v, torch.float64)), None
    kv, _ = paged(p, page_size)
    k, v = store(kv.k), store(kv.v)
    numbers = (oracle.from_pages(dequantized(x, torch.float64), kv.page_table, kv.seq_lens) for x in (k, v))
    cache = PagedKV(*(moved(x) for x in (k, v, kv.page_table, kv.seq_lens)))
    return (cache, None), replace(p, **dict(zip("kv", numbers, strict=True))), cache


def check(p, store, *, q_store=None, page_size=0, block_size=64, scale=0.2, causal=True, results=RESULTS, config=None):
    (k, v), exact, cache = stored(p, store, page_size)
    q = p.q if q_store is None else q_store(p.q)
    exact = replace(exact, q=dequantized(q, torch.float64))
    known = {"cached_lens": cache.seq_lens, "cache_capacity": cache.capacity} if cache else {}
    total_k = None if cache else p.k.shape[0]
    lengths = layout(p.to(DEVICE).seqs, p.q.shape[0], total_k, DEVICE, **known)
    k, v = (k, v) if cache else (moved(k), moved(v))
    wanted = [name in results for name in RESULTS]
    with PoisonedOutputs():
        got = triton_forward.dense_attention(moved(q), k, v, lengths, causal, scale, block_size, *wanted, config=config)
    got = got if isinstance(got, tuple) else (got,)
    reads = oracle.reads_everything(exact, causal)
    rounded = torch.bfloat16 if q_store is not None else p.q.dtype
    plain = replace(exact, q=exact.q.to(rounded), k=exact.k.to(rounded), v=exact.v.to(rounded))
    scores = oracle.block_scores(exact, block_size, q=exact.q, k=exact.k, causal=causal)
    truth = (*oracle.attention(exact, reads, scale), scores)
    honest = (*oracle.honest_attention(plain, reads, scale), scores.float())
    chosen = [x for x in zip(RESULTS, honest, truth, strict=True) if x[0] in results]
    for result, (name, near, right) in zip(got, chosen, strict=True):
        assert_close(name, result.cpu(), near, right)
    return got


def ragged(block, dtype, **options):
    lens = (2, 1, 0, 3, 40), (2 * block + 5, 0, block, 3 * block - 1, 2 * block)
    return problem(*lens, shared_prefix=block, offsets=(2 * block + 3, 0, 3, -1, 2 * block - 40), dtype=dtype, **options)


CASES = [  # store, query store, dtype, head_dim, group, kv_heads, block, page_size, causal, config
    ("e4m3", None, "bf16", 64, 3, 2, 64, 0, True, None),
    ("e4m3 tensor", None, "fp16", 32, 4, 1, 48, 7, True, Config(64, 64, 2, 4, 2)),
    ("e4m3 head", None, "bf16", 96, 2, 2, 64, 64, False, Config(64, 64, 2, 4, 2)),
    ("e4m3 page", None, "bf16", 64, 5, 2, 64, 64, True, Config(64, 64, 1, 4, 2)),
    ("e4m3 page", None, "fp16", 32, 2, 2, 32, 16, True, Config(64, 64, 2, 4, 2)),
    ("e4m3 page, one head", None, "bf16", 16, 4, 2, 128, 128, True, None),
    ("nvfp4", None, "bf16", 64, 3, 2, 64, 0, True, None),
    ("nvfp4 without", None, "fp16", 16, 2, 2, 32, 32, False, Config(64, 32, 2, 4, 2)),
    ("nvfp4 128x4", None, "bf16", 96, 2, 2, 48, 0, True, Config(64, 64, 2, 4, 2)),
    ("nvfp4 128x4", None, "bf16", 48, 3, 2, 64, 16, True, None),
    ("nvfp4", None, "bf16", 16, 2, 2, 32, 0, True, None),  # fewer elements than a product of unpacked ones sums, packed
    ("nvfp4 128x4", None, "fp16", 16, 16, 1, 64, 64, True, Config(16, 64, 2, 4, 3)),  # and paged
    ("e4m3 head", "e4m3 head", "bf16", 64, 2, 2, 64, 0, True, Config(64, 64, 1, 4, 2, qk8=True)),
    ("e4m3 page", "e4m3 tensor", "bf16", 64, 2, 2, 64, 64, True, None),
    ("nvfp4", "e4m3 head", "bf16", 64, 2, 2, 64, 32, True, None),
    ("plain", "e4m3 head", "bf16", 64, 2, 2, 64, 0, True, None),
    ("plain", "e4m3", "fp16", 32, 2, 2, 64, 16, True, None),
]


@pytest.mark.parametrize(
    ("store", "q_store", "dtype", "head_dim", "group", "kv_heads", "block", "page_size", "causal", "config"), CASES
)
def test_against_the_truth(store, q_store, dtype, head_dim, group, kv_heads, block, page_size, causal, config):
    p = ragged(block, BOTH[dtype], kv_heads=kv_heads, group=group, head_dim=head_dim)
    options = {"page_size": page_size, "block_size": block, "causal": causal, "config": config}
    if config is not None and config.qk8:  # whose products are no result: the matrix unit of Hopper rounds them
        options["results"] = ("out", "lse")
    scale = 0.002 if "e4m3" in (store, q_store) else 0.2  # without scales the numbers are a hundred times larger
    check(p, STORES.get(store, lambda x: x), q_store=STORES.get(q_store), scale=scale, **options)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("store", "page_size"), [("e4m3 head", 0), ("e4m3 page", 32), ("nvfp4", 48), ("nvfp4 128x4", 128)])
def test_decode(store, page_size, splits):
    """One token a sequence, split over the keys: short and empty sequences leave splits without work."""
    p = problem((1, 1, 1), (700, 3, 0), kv_heads=2, group=16, head_dim=64, dtype=torch.bfloat16, offsets=(699, 2, 0))
    check(p, STORES[store], page_size=page_size, config=Config(16, 128, splits, 4, 3))


@pytest.mark.parametrize(
    ("store", "page_size", "dtype"), [("nvfp4", 0, "bf16"), ("nvfp4", 64, "fp16"), ("nvfp4 128x4", 16, "bf16")]
)
def test_decode_of_one_group_of_elements(store, page_size, dtype):
    """Decode is right with a head_dim of 16, which a tile pads to what a product of unpacked elements sums at least, as the
    host configures it."""
    p = problem((1, 1, 2), (300, 3, 65), kv_heads=2, group=4, head_dim=16, dtype=BOTH[dtype])
    check(p, STORES[store], page_size=page_size)


@pytest.mark.parametrize("results", [("out",), ("lse",), ("max_score",)])
@pytest.mark.parametrize(("store", "scale"), [("e4m3 page", 0.2), ("nvfp4", -0.3)])
def test_each_result_alone(store, scale, results):
    p = problem((20, 3), (90, 130), kv_heads=1, group=4, head_dim=32, dtype=torch.bfloat16)
    check(p, STORES[store], page_size=64 if "page" in store else 0, scale=scale, results=results, block_size=32)


def test_small_weights_are_not_lost():
    """Weights of 2**-9 and less are not lost: one key lies far above hundreds of equal ones, which together weigh as much."""
    p = problem((2,), (513,), kv_heads=1, group=2, head_dim=32, dtype=torch.bfloat16)
    p.k.zero_()
    p.k[0], p.q[:] = 1.0, 9 / 32
    check(p, STORES["e4m3 tensor"], scale=0.7, causal=False)


@pytest.mark.parametrize("exponent", [-120, -30, 0, 60, 100])
def test_queries_of_any_size(exponent):
    """bfloat16 rows meet float16 keys: a power of two moves them into its range."""
    p = problem((9,), (70,), kv_heads=1, group=2, head_dim=32, dtype=torch.bfloat16)
    p.q.mul_(2.0**exponent)
    p.q[3, :, 5] = 0
    check(p, STORES["e4m3 tensor"], scale=2.0 ** max(-exponent, -100) * 0.2 if exponent < 100 else 2.0**-100)


def test_nan_stays_where_it_is():
    """A NaN key makes its products NaN, which count as -inf in the scores; other sequences do not see it."""
    options = {"results": ("out", "max_score"), "block_size": 32}
    clean = problem((4, 4), (70, 75), kv_heads=1, group=2, head_dim=32, dtype=torch.bfloat16)
    spoiled = problem((4, 4), (70, 75), kv_heads=1, group=2, head_dim=32, dtype=torch.bfloat16)
    spoiled.k[73], spoiled.v[73] = torch.nan, torch.nan
    for store in (lambda x: E4M3.quantize(x, 0.01), lambda x: NVFP4.quantize(x, 0.01)):
        expected = check(clean, store, **options)
        lengths = layout(spoiled.to(DEVICE).seqs, 8, 145, DEVICE)
        k, v = moved(store(spoiled.k)), moved(store(spoiled.v))
        got = triton_forward.dense_attention(spoiled.q.to(DEVICE), k, v, lengths, True, 0.2, 32, True, False, True)
        assert_equal("first sequence", got[0][:4], expected[0][:4])
        assert got[0][4:].isnan().all()
        assert not got[1].isnan().any()


@pytest.mark.parametrize("store", ["e4m3 head", "nvfp4"])
def test_rows_need_not_be_contiguous(store):
    """Keys and values are the left halves of wider rows."""
    p = problem((5,), (150,), kv_heads=2, group=2, head_dim=64, dtype=torch.bfloat16)

    def left_half(x):
        wide = STORES[store](torch.cat((x, x), 2))
        data = wide.data[..., : wide.data.shape[2] // 2]
        return E4M3(data, wide.scale) if store == "e4m3 head" else NVFP4(data, wide.scale[..., :4], wide.global_scale)

    check(replace(p, q=strided(p.q)), left_half)


def test_configuration_of_formats():
    hopper = COMPILE_TARGETS[90]
    assert configure(1, 16384, 131072, 4, 16, 128, hopper, "e4m3", "e4m3").qk8
    assert not configure(1, 16384, 131072, 4, 16, 128, hopper, "e4m3").qk8
    assert not configure(1, 16384, 131072, 4, 16, 128, COMPILE_TARGETS[80], "e4m3", "e4m3").qk8
    assert configure(32, 1, 32768, 4, 16, 128, hopper, "nvfp4").keys == 128
