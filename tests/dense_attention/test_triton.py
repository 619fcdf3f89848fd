# SPDX-License-Identifier: MIT
"""The dense kernel is right in every regime and result, flat and paged, in the interpreter without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import PagedKV
from openmsa.dense_attention import triton_forward
from openmsa.dense_attention.triton_config import Config, configure, spans
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, strided
from openmsa.types import layout
from tests import oracle

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
FLOAT = torch.float16 if DEVICE.type == "cuda" else torch.float32  # on a GPU the kernels serve half precision only
RESULTS = ("out", "lse", "max_score")


def run(p, storage=None, *, causal=True, scale=0.2, block_size=64, results=RESULTS, config=None, copy=False):
    """Runs the kernel's own host function on checked arguments, with poisoned outputs. storage: None, "strided" or a page
    size. copy: whether tensors are copied without a GPU too, which puts them at addresses that the copy engine takes."""
    q, k, v = (p.q, p.k, p.v) if storage is None else (strided(p.q, 2), strided(p.k), strided(p.v))
    total_k, cached = k.shape[0], {}
    if isinstance(storage, int):
        kv, v = paged(p, storage, interleaved=storage != 64)[0], None
        k = PagedKV(*(x.to(DEVICE, copy=copy) for x in (kv.k, kv.v, kv.page_table, kv.seq_lens)))
        total_k, cached = None, {"cached_lens": k.seq_lens, "cache_capacity": k.capacity}
    lengths = layout(p.to(DEVICE).seqs, q.shape[0], total_k, DEVICE, **cached)
    q, k, v = (x.to(DEVICE, copy=copy) if isinstance(x, torch.Tensor) else x for x in (q, k, v))
    with PoisonedOutputs():
        got = triton_forward.dense_attention(
            q, k, v, lengths, causal, scale, block_size, *(name in results for name in RESULTS), config=config
        )
    return dict(zip([name for name in RESULTS if name in results], got if isinstance(got, tuple) else (got,), strict=True))


def check(p, got, *, causal=True, scale=0.2, block_size=64):
    reads = oracle.reads_everything(p, causal)
    truth, honest = oracle.attention(p, reads, scale), oracle.honest_attention(p, reads, scale)
    scores = oracle.block_scores(p, block_size, q=p.q, k=p.k, causal=causal)
    exact = dict(zip(RESULTS, (*truth, scores), strict=True))
    plain = dict(zip(RESULTS, (*honest, scores.to(torch.float32)), strict=True))
    for name, result in got.items():
        assert_close(name, result.cpu(), plain[name], exact[name])


def ragged(block, **options):
    """Draws one batch of nothing, one token, a query before position 0, a decode step and a long query."""
    lens = (2, 1, 0, 3, 70), (2 * block + 5, 0, block, 3 * block - 1, 2 * block)
    return problem(*lens, shared_prefix=block, offsets=(2 * block + 3, 0, 3, -1, 2 * block - 70), **options)


CASES = [  # head_dim, group, kv_heads, block_size, storage, causal, dtype, config
    (64, 3, 1, 64, None, True, torch.float16, None),
    (32, 16, 1, 64, 64, True, torch.float16, Config(128, 64, 2, 4, 2)),
    (96, 2, 1, 48, 7, True, FLOAT, Config(64, 64, 3, 4, 2)),
    (64, 1, 2, 100, "strided", False, FLOAT, Config(64, 64, 2, 4, 2)),
    (32, 5, 1, 128, 128, True, torch.bfloat16, Config(64, 64, 2, 4, 2)),
    (16, 4, 1, 16, 32, False, FLOAT, Config(64, 32, 1, 4, 2)),
]


@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "block", "storage", "causal", "dtype", "config"), CASES)
def test_against_the_truth(head_dim, group, kv_heads, block, storage, causal, dtype, config):
    p = ragged(block, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    check(p, run(p, storage, causal=causal, block_size=block, config=config), causal=causal, block_size=block)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("storage", [None, 32, 48])
def test_decode(storage, splits):
    """One token a sequence, split over the keys: short and empty sequences leave splits without work."""
    p = problem((1, 1, 1), (700, 3, 0), kv_heads=2, group=16, head_dim=64, dtype=torch.float16, offsets=(699, 2, 0))
    check(p, run(p, storage, config=Config(16, 32, splits, 4, 3)))


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_any_scale(scale):
    p = problem((40,), (200,), kv_heads=1, group=2, head_dim=32, dtype=FLOAT)
    check(p, run(p, scale=scale), scale=scale)


@pytest.mark.parametrize("results", [("out",), ("lse",), ("max_score",), ("out", "max_score")])
def test_each_result_alone(results):
    p = problem((20, 3), (90, 130), kv_heads=1, group=4, head_dim=32, dtype=FLOAT)
    got = run(p, results=results, block_size=32)
    assert tuple(got) == results
    check(p, got, block_size=32)


def test_nan_products_and_strangers_keys():
    """A NaN product counts as -inf in the scores; NaN in one sequence reaches no other, not even through a tile they share."""
    p = problem((4, 4), (70, 75), kv_heads=1, group=2, head_dim=32, dtype=FLOAT)
    p.k[70 + 3], p.v[70 + 3] = torch.nan, torch.nan
    got = run(p, results=("out", "max_score"), block_size=32)
    alone = problem((4, 4), (70, 75), kv_heads=1, group=2, head_dim=32, dtype=FLOAT)
    clean = run(alone, results=("out", "max_score"), block_size=32)
    assert_equal("first sequence", got["out"][:4], clean["out"][:4])
    assert got["out"][4:].isnan().all()
    assert not got["max_score"].isnan().any()


def test_split_and_whole_agree():
    """Split + merge = whole, counters reset: a second run of the same call gives the same bits."""
    p = problem((2,), (900,), kv_heads=1, group=8, head_dim=32, dtype=FLOAT)
    whole, split, again = (run(p, results=("out", "lse"), config=Config(16, 32, n, 4, 2)) for n in (1, 5, 5))
    assert_equal("again", again["out"], split["out"])
    tolerance = 4 * torch.finfo(FLOAT).eps
    torch.testing.assert_close(split, whole, atol=tolerance, rtol=tolerance)


def test_configuration_is_a_pure_function_of_sizes():
    hopper, ada = COMPILE_TARGETS[90], COMPILE_TARGETS[120]
    assert configure(1, 16384, 131072, 4, 16, 128, hopper) == Config(128, 64, 1, 4, 2)
    assert configure(32, 1, 32768, 4, 16, 128, hopper) == Config(16, 64, 1, 4, 4)
    assert configure(1, 1, 32768, 4, 16, 128, hopper).splits == 33
    assert configure(8, 1, 131072, 4, 16, 128, hopper).splits == 4
    assert configure(1, 1, 100, 4, 16, 128, hopper).splits == 1
    assert configure(1, 64, 131072, 4, 16, 128, hopper) == Config(128, 64, 8, 4, 2)
    assert configure(1, 256, 131072, 4, 16, 128, hopper) == Config(128, 64, 2, 4, 2)
    assert configure(64, 1, 1 << 20, 4, 16, 128, hopper).splits == 16
    assert configure(1, 16384, 131072, 4, 16, 128, ada) == Config(64, 64, 1, 4, 2)
    assert configure(1, 64, 64, 1, 1, 256, hopper).num_warps == 8


def test_tiles_keep_to_blocks():
    assert spans(64, None) == (64, 1)
    assert spans(64, 16) == (64, 4)
    assert spans(64, 64) == (64, 1)
    assert spans(64, 256) == (256, 1)
    assert spans(64, 48) == (48, 1)
