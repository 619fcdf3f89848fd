# SPDX-License-Identifier: MIT
"""float8 and bfloat16 operands work with every scale, on every path of `fmha_sm100`."""

import pytest
import torch

from fmha_sm100.api import fmha_sm100, fmha_sm100_plan
from openmsa.testing.compare import assert_close
from tests import oracle
from tests.contract import DEVICES
from tests.fmha_sm100.batch import assert_scores, batch, lengths, pages, selection
from tests.products import FP8, Codes

SCALES = {"q_scale": 0.7, "k_scale": 1.6, "v_scale": 0.3, "o_scale": 2.5}
ANY = {"decode": "short", "prefill": "mixed", "dense": "mixed", "packed keys": "mixed", "scores": "mixed"}


def rounded(p):
    """Every number is one of float8, kept in bfloat16."""
    return p.map(lambda x: x.to(FP8).to(torch.bfloat16))


def expected(p, blocks, page_size, factors):
    """Returns the truth and honest PyTorch with the scales where they belong, in the logits and behind the sum. factors: q and
    k as `Codes` where both are float8."""
    reads = oracle.reads_everything(p) if blocks is None else oracle.reads_of_blocks(blocks, page_size)
    scale = p.q.shape[2] ** -0.5 * SCALES["q_scale"] * SCALES["k_scale"]
    factor = SCALES["v_scale"] * SCALES["o_scale"]
    results = oracle.attention(p, reads, scale), oracle.honest_attention(p, reads, scale, *factors)
    return [(out * factor, lse) for out, lse in results]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", ANY)
@pytest.mark.parametrize("formats", ["fp8", "fp8 keys", "bf16"])
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_scales(device, path, formats, on_device):
    if on_device and (formats == "bf16" or path == "scores"):
        pytest.skip("scales of bf16 and of raw scores are numbers")
    p = rounded(batch(ANY[path], torch.bfloat16, head_dim=64))
    here, page_size = p.to(device), 64
    q = here.index_q if path == "scores" else here.q
    k, v, index_k, table, _ = pages(here, page_size, interleaved=True)
    if path == "packed keys":
        k, v, table, page_size = here.k, here.v, None, -1
    if path == "scores":
        k = v = index_k
    if formats != "bf16":
        k, v = k.to(FP8), v.to(FP8)  # NaN stays NaN where no key is
    if formats == "fp8":
        q = q.to(FP8)
    blocks = selection(p, page_size) if path in ("decode", "prefill") else None
    options = {"kv_block_num": 3, "use_fp8_kvcache": True} if blocks is not None else {"output_maxscore": path == "scores"}
    plan = fmha_sm100_plan(*lengths(p), q.shape[1], page_size=page_size, device=device, **options)
    scales = dict(SCALES)
    if on_device:
        scales |= {name: torch.tensor(SCALES[name], device=device) for name in ("k_scale", "v_scale")}
    blocks_here = None if blocks is None else blocks.to(device)
    options = {"kv_indices": table, "kv_block_indexes": blocks_here, "return_lse": True, "output_o": path != "scores"}
    if path == "scores":
        scores = fmha_sm100(q, k, v, plan, kv_indices=table, output_o=False, **scales)[1]
        factors = [Codes.of(x, device=device) for x in (p.index_q, p.index_k)] if formats == "fp8" else ()
        return assert_scores("max_score", scores.transpose(1, 2), p, *factors)  # raw
    out, _, lse = fmha_sm100(q, k, v, plan, **options, **scales)
    assert out.dtype == torch.bfloat16
    factors = [Codes.of(x, device=device) for x in (p.q, p.k)] if formats == "fp8" else ()
    truth, honest = expected(p, blocks, page_size, factors)
    assert_close("out", out, honest[0].to(torch.bfloat16), truth[0])
    assert_close("lse", lse, honest[1], truth[1])
    return None


def test_scores_are_raw():
    """A scale that is only known on the device cannot be kept out of them."""
    p = batch(dtype=torch.bfloat16).map(lambda x: x.to(FP8))
    plan = fmha_sm100_plan(*lengths(p), p.q.shape[1], output_maxscore=True)
    with pytest.raises(ValueError, match="q_scale and k_scale must be numbers where max scores are asked for"):
        fmha_sm100(p.q, p.k, p.v, plan, k_scale=torch.ones(()))
