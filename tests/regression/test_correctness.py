# SPDX-License-Identifier: MIT
"""`fmha_sm100` is right over many shapes (heads, lengths, pages, types, causal and not, scores) and on random batches."""

import random

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan
from tests.exact import DEVICES, FP8, assert_attention, assert_scores, random_batch

HEADS = [(48, 8), (64, 4), (64, 1), (8, 8), (1, 1)]
CHAOS_HEADS = [(4, 4), (12, 6), (12, 2), (16, 2), (32, 2)]
CHAOS_SEEDS = range(8)
LENGTHS = {
    "one": ((1,), (1,)),
    "square": ((200,), (200,)),
    "chunk": ((130,), (513,)),
    "ragged": ((7, 129, 0, 1, 64), (7, 300, 40, 513, 64)),
    "more queries than keys": ((50, 20), (30, 20)),
}
LONG = {"square": ((4096,), (4096,)), "chunk": ((1000,), (16384,)), "ragged": ((7, 1025, 0, 1, 640), (7, 3000, 40, 8192, 640))}
device = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)


def attend(batch, page_size=-1, **options):
    """Returns out and max scores of the planned batch, with poisoned output."""
    k, v, more = batch.k, batch.v, {}
    if page_size > 0:
        k, v, more["kv_indices"] = batch.pages(page_size)
    wanted = options.pop("scores", False)
    plan = fmha_sm100_plan(
        *batch.lengths(),
        batch.q.shape[1],
        num_kv_heads=batch.k.shape[1],
        page_size=page_size,
        output_maxscore=wanted,
        causal=batch.causal,
        qo_offset=None if batch.offsets is None else torch.tensor(batch.offsets, dtype=torch.int32),
        device=batch.q.device,
    )
    dtype = torch.bfloat16 if batch.q.dtype == FP8 else batch.q.dtype
    out = torch.full(batch.q.shape, torch.nan, dtype=dtype, device=batch.q.device)
    return fmha_sm100(batch.q, k, v, plan, out=out, output_maxscore=wanted, **more, **options)


@device
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [-1, 128])
def test_heads(heads, page_size, device):
    batch = random_batch((5, 100), (140, 100), heads, dim=64, device=device)
    assert_attention(str(heads), attend(batch, page_size)[0], batch)


@device
@dtypes
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_lengths(lengths, causal, dtype, device):
    batch = random_batch(*LENGTHS[lengths], (4, 2), dtype=dtype, device=device, causal=causal)
    assert_attention(lengths, attend(batch)[0], batch)


@device
@dtypes
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
def test_page_sizes(page_size, dtype, device):
    batch = random_batch(*LENGTHS["ragged"], (4, 2), dtype=dtype, device=device)
    out, scores = attend(batch, page_size, scores=True)
    assert_attention(str(page_size), out, batch)
    assert_scores(str(page_size), scores, batch)


@device
@pytest.mark.parametrize("dim", [16, 64, 96, 192, 256])
def test_head_dims(dim, device):
    batch = random_batch((70, 3), (200, 130), (4, 2), dim=dim, device=device)
    assert_attention(str(dim), attend(batch, 128)[0], batch)


@device
@dtypes
@pytest.mark.parametrize("lengths", LENGTHS)
def test_max_scores(lengths, dtype, device):
    batch = random_batch(*LENGTHS[lengths], (4, 1), dtype=dtype, device=device)
    assert_scores(lengths, attend(batch, 128, scores=True, output_o=False)[1], batch)


@device
@pytest.mark.parametrize("scales", [{"sm_scale": 0.3}, {"q_scale": 0.5, "k_scale": 0.25}], ids=str)
def test_scales_of_the_logits(scales, device):
    batch = random_batch((70, 3), (200, 130), (4, 2), dim=64, device=device)
    scale = scales.get("sm_scale", 64**-0.5) * scales.get("q_scale", 1) * scales.get("k_scale", 1)
    assert_attention("out", attend(batch, **scales)[0], batch, scale=scale)


@device
def test_scales_of_the_output(device):
    batch = random_batch((70, 3), (200, 130), (4, 2), dim=64, device=device)
    plain, scaled = attend(batch)[0], attend(batch, v_scale=4.0, o_scale=0.5)[0]
    torch.testing.assert_close(scaled, 2 * plain, atol=0, rtol=0.01)


@device
def test_the_lse_is_that_of_the_denominator(device):
    batch = random_batch(*LENGTHS["ragged"], (4, 2), dim=64, device=device)
    out, _, lse = attend(batch, 128, return_lse=True)
    assert_attention("out", out, batch, lse=lse)


@device
@pytest.mark.parametrize("page_size", [-1, 128])
@dtypes
@pytest.mark.parametrize("seed", CHAOS_SEEDS)
def test_chaos(seed, page_size, dtype, device):
    """Random requests, offsets and heads, which the seed decides, give correct results."""
    draw = random.Random(seed)
    heads, count = draw.choice(CHAOS_HEADS), draw.randint(1, 5)
    k_lens = [draw.choice((0, 1, draw.randint(2, 64), draw.randint(65, 400))) for _ in range(count)]
    q_lens = [draw.choice((0, 1, draw.randint(1, 40))) if n == 0 else draw.randint(1, min(n, 150)) for n in k_lens]
    if sum(q_lens) == 0 or sum(k_lens) == 0:
        q_lens[0], k_lens[0] = 3, 70
    offsets = None if draw.random() < 0.5 else tuple(draw.randint(-3, n + 3) for n in k_lens)
    more = {"offsets": offsets, "causal": offsets is not None or draw.random() < 0.7}
    batch = random_batch(q_lens, k_lens, heads, dim=64, dtype=dtype, device=device, seed=seed, **more)
    out, scores = attend(batch, page_size, scores=batch.causal)
    assert_attention(f"{heads} {q_lens} {k_lens} {more}", out, batch)
    if scores is not None and max(k_lens):
        assert_scores("scores", scores, batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="long requests need a GPU")
@dtypes
@pytest.mark.parametrize("lengths", LONG)
@pytest.mark.parametrize("page_size", [-1, 128])
def test_long_requests(lengths, page_size, dtype):
    batch = random_batch(*LONG[lengths], (8, 1), dtype=dtype, device="cuda")
    out, scores = attend(batch, page_size, scores=True)
    assert_attention(lengths, out, batch)
    assert_scores(lengths, scores, batch)
