# SPDX-License-Identifier: MIT
"""Hopper's own dense kernel is chosen where it should be, and on such a GPU its results are right."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, Sequences
from openmsa.dense_attention import gluon_sm90_dense
from openmsa.dense_attention.gluon_sm90_dense import OPTIONS, Cut, serves
from openmsa.primitives.gluon_sm90_attention import l2_holds
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem
from openmsa.types import layout
from tests.dense_attention.test_triton import check
from tests.dense_attention.test_triton import run as run_as_it_lies
from tests.hopper.marks import HOPPER, on_a_hopper_gpu, on_hopper

BF16, FP16 = torch.bfloat16, torch.float16
RESULTS = ("out", "lse", "max_score")


def lengths(*q_lens, keys=4096):
    seqs = Sequences.from_lengths(list(q_lens), [keys] * len(q_lens))
    return layout(seqs, sum(q_lens), keys * len(q_lens), torch.device("cpu"))


def served(q, k, v, seqs, page_size=0, arch=90):
    return serves(COMPILE_TARGETS[arch], q, k, v, page_size, seqs)


def rows(heads, dim, dtype=BF16):
    return torch.empty(4096, heads, dim, dtype=dtype)


def test_what_it_serves():
    k, many = rows(4, 128), lengths(4096)
    assert served(rows(64, 128), k, k, many)
    assert served(*(rows(heads, 128, FP16) for heads in (64, 4, 4)), many)
    assert not served(rows(64, 128, FP16), k, k, many)
    assert not served(rows(64, 128), k, k.half(), many)
    expected = {32: False, 40: True, 64: True, 80: True, 100: False, 128: True, 136: False, 256: False}
    for dim, serving in expected.items():
        assert served(rows(64, dim), rows(4, dim), rows(4, dim), many) is serving
    for group, serving in {1: True, 2: True, 3: True, 5: False, 6: True, 16: True, 64: True, 65: False, 100: True}.items():
        assert served(rows(4 * group, 128), k, k, many) is serving
    for page_size, serving in {64: False, 100: False, 128: True, 256: True}.items():
        assert served(rows(64, 128), k, k, many, page_size) is serving


def test_how_many_tiles_it_wants():
    q, k = rows(64, 128), rows(4, 128)
    expected = {8: False, 128: False, 256: True, 272: False, 500: True, 530: False, 600: False, 800: False, 1700: True}
    assert {length: served(q, k, k, lengths(length)) for length in expected} == expected
    assert served(q, k, k, lengths(*[100] * 50))


def test_it_fits():
    shared = (OPTIONS["STAGES"] * 2 + 1) * 128 * 128 * 2
    assert shared + 512 <= COMPILE_TARGETS[90].shared_bytes  # with barriers
    registers = OPTIONS["ATTEND_REGISTERS"] * 2 + OPTIONS["LOAD_REGISTERS"]
    assert registers <= 504  # Triton leaves what is left to the first four warps.


def test_its_tiles():
    assert [Cut.of(group, 128, 0).tokens for group in (1, 3, 4, 16, 64, 100)] == [128, 32, 32, 8, 2, 2]


def test_which_keys_and_values_the_cache_holds():
    def of(max_seqlen_k, num_kv_heads):
        return l2_holds(COMPILE_TARGETS[90], max_seqlen_k, num_kv_heads, 128)

    assert all(of(*sizes) for sizes in ((8192, 4), (16384, 4), (16384, 1), (8192, 8)))
    assert not any(of(*sizes) for sizes in ((32768, 4), (131072, 4)))
    assert of(32768, 1), "one head has a quarter of the bytes"
    assert l2_holds(COMPILE_TARGETS[90], 32768, 4, 64), "narrow heads have half of them"
    assert l2_holds(COMPILE_TARGETS[90]._replace(l2_bytes=100 << 20), 32768, 4, 128), "a larger cache holds more"


CASES = {  # q_lens, k_lens, kv_heads, group, dim, storage, causal, dtype, scale, offsets
    "packed": ((300, 0, 3, 1, 70), (700, 5, 130, 1, 256), 2, 16, 128, None, True, BF16, 0.2, None),
    "pages": ((300, 0, 3, 1, 70), (700, 5, 130, 1, 256), 2, 16, 128, 128, True, BF16, 0.2, None),
    "wide pages": ((130, 17), (900, 257), 2, 8, 128, 256, True, FP16, 0.2, None),
    "strides": ((130, 17), (900, 257), 2, 4, 64, "strided", True, FP16, 0.2, None),
    "one head a group": ((700, 33), (700, 257), 3, 1, 128, None, True, BF16, 0.2, None),
    "groups of three": ((130, 17), (500, 257), 2, 3, 80, None, True, FP16, 0.2, None),
    "wide groups": ((30, 17), (500, 257), 1, 100, 128, None, True, BF16, 0.2, None),
    "all keys": ((130, 17, 2), (500, 257, 0), 2, 16, 128, None, False, BF16, 0.2, None),
    "negative scale": ((130, 17), (500, 257), 2, 16, 128, None, True, FP16, -0.3, None),
    "no scale": ((130, 17), (500, 257), 2, 16, 128, None, True, FP16, 0.0, None),
    "offsets": ((130, 17, 9, 4), (500, 257, 128, 300), 2, 16, 128, 128, True, BF16, 0.2, (-60, 400, -20, 100)),
}


@pytest.fixture
def launches(monkeypatch):
    """Returns a list of the launches that the kernel made, and lets the kernel serve calls of any size."""
    found, launched = [], gluon_sm90_dense.launched
    monkeypatch.setattr(gluon_sm90_dense, "BUSY", 0)
    monkeypatch.setattr(gluon_sm90_dense, "launched", lambda *given: found.append(launched(*given)) or found[-1])
    return found


@pytest.fixture(params=[False, True], ids=["heads apart", "heads together"])
def order(request, monkeypatch):
    """Sets whether the tiles of a KV head come before those of the next, whatever the call would choose."""
    monkeypatch.setattr(gluon_sm90_dense, "l2_holds", lambda *_: request.param)


run = partial(run_as_it_lies, copy=True)


@on_hopper
@pytest.mark.parametrize("results", [("out",), RESULTS[:2], RESULTS] if HOPPER else [RESULTS], ids=len)
@pytest.mark.parametrize("name", CASES)
def test_against_the_truth(name, results, launches):
    q_lens, k_lens, heads, group, dim, storage, causal, dtype, scale, offsets = CASES[name]
    p = problem(q_lens, k_lens, kv_heads=heads, group=group, head_dim=dim, dtype=dtype, offsets=offsets)
    got = [run(p, storage, causal=causal, scale=scale, block_size=128, results=results) for _ in range(2)]
    check(p, got[0], causal=causal, scale=scale, block_size=128)
    for result in results:
        assert_equal(result, got[0][result], got[1][result])
    assert launches == [not ("max_score" in results and scale <= 0)] * 2


@on_hopper
@pytest.mark.parametrize("storage", [None, 128])
def test_many_tiles(storage, launches, order):
    """Programs take several tiles, of sequences of very different lengths; some have one block, or rows for one group."""
    long = (450, 700, 1500) if HOPPER else (70, 90, 300)  # The interpreter has 4 multiprocessors.
    q_lens, k_lens = (long[0], 3, long[1], 0, 57, 1), (long[2], 128, long[1], 9, 257, 1)
    p = problem(q_lens, k_lens, kv_heads=4 if HOPPER else 2, group=16, head_dim=128, dtype=BF16)
    check(p, run(p, storage, block_size=128), block_size=128)
    assert launches == [True]


@on_hopper
def test_many_small_tiles(launches, order):
    """Most tiles have one block, so that a group may be several tiles before the other, as far as the ring lets it."""
    repeats = 6 if HOPPER else 1
    p = problem((3, 9, 1, 0, 7, 130) * repeats, (3, 9, 1, 5, 100, 130) * repeats, kv_heads=2, group=16, head_dim=64, dtype=BF16)
    got = [run(p, block_size=128) for _ in range(2)]
    check(p, got[0], block_size=128)
    for result in RESULTS:
        assert_equal(result, got[0][result], got[1][result])
    assert launches == [True] * 2


@on_hopper
def test_a_nan_stays_in_its_rows(launches):
    p = problem((200,), (300,), kv_heads=1, group=16, head_dim=128, dtype=BF16)
    clean = run(p, block_size=128)
    p.q[17, 3] = float("nan")
    got = run(p, block_size=128)
    assert got["out"][17, 3].isnan().all()
    assert got["lse"][17, 3].isnan()
    assert (got["max_score"][3, 17] == -torch.inf).all()
    for name, axis in (("out", 0), ("lse", 0), ("max_score", 1)):
        keep = [n for n in range(200) if n != 17]
        index = torch.tensor(keep, device=got[name].device)
        assert_equal(name, got[name].index_select(axis, index), clean[name].index_select(axis, index))


@on_a_hopper_gpu
def test_stored_keys_go_to_the_other_kernel(launches):
    from openmsa import dense_attention

    q, k = (torch.randn(4096, heads, 128, device="cuda").bfloat16() for heads in (64, 4))
    dense_attention(q, E4M3.quantize(k), E4M3.quantize(k))
    dense_attention(q, k, k)
    assert launches == [False, True]
