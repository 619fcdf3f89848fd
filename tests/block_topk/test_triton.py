# SPDX-License-Identifier: MIT
"""The Triton selection kernels agree with the reference, in the interpreter or on a GPU where there is one."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, MXFP4, NVFP4, Int8, PagedIndexKeys
from openmsa.block_topk import reference, triton_select, triton_topk
from openmsa.decode import kernels, memory
from openmsa.decode.sizes import Sizes
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem
from openmsa.types import Sequences, layout

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter, on NaN
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
BF16, FP16 = torch.bfloat16, torch.float16


def poisoned(*shape):
    return torch.full(shape, -77, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("topk", "init", "local"), [(1, 0, 1), (6, 1, 2), (5, 5, 0), (20, 0, 0), (40, 0, 1)])
@pytest.mark.parametrize("num_blocks", [3, 50, 1500])
def test_given_scores(num_blocks, topk, init, local):
    generator = torch.Generator().manual_seed(num_blocks + topk)
    scores = torch.randn(2, 3, num_blocks, generator=generator)
    scores[0, 0] = scores[0, 0].round()  # ties
    scores[1, 0, ::3] = torch.nan
    scores[0, 1, num_blocks // 2 :] = -torch.inf
    scores[1, 1] *= 1e-40  # below the normal numbers
    scores[0, 2, :4] = torch.inf
    scores[1, 2] = 0
    scores[1, 2, ::2] = -0.0
    visible = torch.tensor([num_blocks, num_blocks - 1, max(num_blocks - 5, 0)], dtype=torch.int32)
    expected = reference.select_from_scores(scores, topk, visible, init, local)
    for given in (scores, scores.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        out = poisoned(3, 2, topk)
        triton_topk.launch_topk(given.to(DEVICE), visible.to(DEVICE), init, local, out)
        assert_equal("blocks", out, expected)


def test_row_without_scores():
    scores, visible = torch.full((1, 2, 40), torch.nan), torch.tensor([40, 0], dtype=torch.int32)
    result = triton_topk.select_from_scores(scores.to(DEVICE), 4, visible.to(DEVICE), 1, 1)
    assert result.tolist() == [[[0, 39, -1, -1]], [[-1, -1, -1, -1]]]


# query lengths, key lengths, heads, key heads, dim, block size, k, forced first, forced last, dtype
CASES = {
    "tuned": ((18,), (900,), 4, 1, 128, 128, 4, 0, 1, BF16),
    "ragged": ((3, 20, 0, 5), (3, 300, 7, 0), 4, 2, 64, 64, 4, 1, 1, FP16),
    "odd": ((10,), (330,), 2, 1, 80, 48, 3, 0, 0, BF16),
    "large blocks": ((8, 9), (400, 700), 4, 1, 32, 200, 2, 0, 1, FP16),
    "small blocks": ((9,), (300,), 3, 3, 16, 16, 12, 0, 2, FP16),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("storage", ["flat", "pages"])
@pytest.mark.parametrize("way", ["fused", "two"])
def test_select(name, storage, way):
    q_lens, k_lens, heads, key_heads, dim, block, topk, init, local, dtype = CASES[name]
    p = problem(
        q_lens, k_lens, index_heads=heads, index_key_heads=key_heads, index_dim=dim, dtype=dtype, integer_index=True
    ).to(DEVICE)
    p.index_k[::50] = torch.nan
    total_q = p.index_q.shape[0]
    keys, lengths = p.index_k, layout(p.seqs, total_q, p.index_k.shape[0], DEVICE)
    if storage == "pages":
        _, keys = paged(p, block if name != "odd" else 32)
        lengths = keys.layout(p.seqs, total_q, DEVICE)
    expected = reference.select_blocks(p.index_q, keys, lengths, block, topk, init, local)
    out = poisoned(total_q, heads, topk)
    select = {"fused": triton_select.launch_fused, "two": triton_select.score_then_select}[way]
    select(p.index_q, keys, lengths, block, init, local, out)
    assert_equal("blocks", out, expected)


def exact(keys, name):
    """Stores whole numbers from -2 to 2 exactly, in a format with scales that are not 1."""
    if name == "int8":
        scale = torch.full(keys.shape[:-1], 2.0, dtype=torch.bfloat16, device=DEVICE)
        scale[keys.isnan().any(-1)] = torch.nan
        return Int8(keys.nan_to_num().to(torch.int8), scale, torch.zeros_like(scale))
    quarter = torch.tensor(0.25, device=DEVICE)
    return {
        "e4m3": lambda: E4M3.quantize(keys, quarter),
        "e4m3 page": lambda: E4M3.quantize(keys, quarter.expand(keys.shape[:2]).contiguous()),
        "nvfp4": lambda: NVFP4.quantize(keys, quarter),
        "nvfp4 128x4": lambda: NVFP4.quantize(keys, quarter, layout="128x4"),
        "mxfp4": lambda: MXFP4.quantize(keys),
    }[name]()


FORMATS = [
    ("tuned", "fp8", "e4m3"),
    ("tuned", "plain", "int8"),
    ("ragged", "fp8", "e4m3 page"),
    ("ragged", "plain", "mxfp4"),
    ("odd", "plain", "nvfp4 128x4"),
    ("large blocks", "plain", "e4m3"),
    ("small blocks", "fp8", "nvfp4"),
]


@pytest.mark.parametrize(("name", "query", "keys"), FORMATS)
@pytest.mark.parametrize("way", ["fused", "two"])
def test_select_formats(name, query, keys, way):
    q_lens, k_lens, heads, key_heads, dim, block, topk, init, local, dtype = CASES[name]
    p = problem(
        q_lens, k_lens, index_heads=heads, index_key_heads=key_heads, index_dim=dim, dtype=dtype, integer_index=True
    ).to(DEVICE)
    p.index_k[::50] = torch.nan
    index_q = E4M3.quantize(p.index_q, 2.0 ** -torch.arange(heads, device=DEVICE)) if query == "fp8" else p.index_q
    cache = paged(p, block if name != "odd" else 32)[1]
    cache = PagedIndexKeys(exact(cache.keys, keys), cache.page_table, cache.seq_lens)
    lengths = cache.layout(p.seqs, sum(q_lens), DEVICE)
    expected = reference.select_blocks(index_q, cache, lengths, block, topk, init, local)
    out = poisoned(sum(q_lens), heads, topk)
    select = {"fused": triton_select.launch_fused, "two": triton_select.score_then_select}[way]
    select(index_q, cache, lengths, block, init, local, out)
    assert_equal("blocks", out, expected)


def test_chunks_make_no_difference(monkeypatch):
    p = problem((10, 13), (300, 200), index_heads=1, index_dim=32, dtype=FP16, integer_index=True).to(DEVICE)
    lengths = layout(p.seqs, 23, 500, DEVICE)
    whole = triton_select.select_blocks(p.index_q, p.index_k, lengths, 32, 3, 0, 1)
    monkeypatch.setattr(triton_select, "WORKSPACE", 1)
    assert_equal("blocks", triton_select.select_blocks(p.index_q, p.index_k, lengths, 32, 3, 0, 1), whole)


@pytest.mark.parametrize(
    ("q_lens", "query", "keys"),
    [
        ((1, 1, 1), "plain", "plain"),
        ((2, 3, 1), "plain", "plain"),
        ((1, 1, 1), "fp8", "e4m3 page"),
        ((2, 3, 1), "plain", "int8"),
        ((1, 1, 1), "plain", "nvfp4"),
        ((1, 1, 1), "plain", "mxfp4"),
    ],
)
def test_decode(q_lens, query, keys):
    p = problem(q_lens, (300, 140, 3), index_heads=4, index_dim=64, dtype=BF16, integer_index=True).to(DEVICE)
    cache = paged(p, 64)[1]
    if keys != "plain":
        cache = PagedIndexKeys(exact(cache.keys, keys), cache.page_table, cache.seq_lens)
    index_q = E4M3.quantize(p.index_q) if query == "fp8" else p.index_q
    total_q = sum(q_lens)
    cu_seqlens_q = torch.tensor([0, *q_lens], device=DEVICE).cumsum(0, dtype=torch.int32)
    lengths = cache.layout(Sequences(cu_seqlens_q), total_q, DEVICE)
    expected = reference.select_blocks(index_q, cache, lengths, 64, 3, 0, 1)
    attention = {"num_q_heads": 4, "num_kv_heads": 4, "head_dim": 64}
    index = {"index_heads": 4, "index_key_heads": 1, "index_dim": 64, "page_size": 64, "num_blocks": cache.capacity // 64}
    selection = {"topk": 3, "init_blocks": 0, "local_blocks": 1, "block_size": 64}
    sizes = Sizes(new_tokens=max(q_lens), **attention, **index, **selection)
    held = torch.full((memory.scores_held(total_q, cache.capacity, sizes),), torch.nan, device=DEVICE)
    out = poisoned(total_q, 4, 3)
    kernels.select(index_q, cache, cu_seqlens_q, sizes, held, None, out)
    assert_equal("blocks", out, expected)


def test_choice():
    hopper = COMPILE_TARGETS[90]
    assert triton_select.fuses(65536, 1024, 15, hopper)
    assert not triton_select.fuses(1024, 1024, 15, hopper)  # too few rows to fill the card
    assert not triton_select.fuses(65536, 1024, 31, hopper)  # too long a list
    assert triton_select.fuses(1024, 20000, 15, hopper)
    assert not triton_select.fuses(65536, 1024, 15, hopper, narrow=True)  # lists would take longer than the products
    assert triton_select.fuses(65536, 20000, 15, hopper, narrow=True)
    lengths = layout(Sequences(max_seqlen_k=17000 * 16, max_seqlen_q=1), 1, 17000 * 16, torch.device("cpu"))
    assert triton_select.refuse(lengths, 16, 16, 0, 1) is None
    assert "more than 16384 blocks" in triton_select.refuse(lengths, 16, 32, 0, 1)
    assert "at most 16384" in triton_topk.refuse(torch.empty(1, 1, 16385))
