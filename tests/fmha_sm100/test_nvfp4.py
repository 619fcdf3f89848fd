# SPDX-License-Identifier: MIT
"""NVFP4 quantisers agree with a decoder of bits, layouts with the formula, and attention with the numbers."""

import pytest
import torch

from fmha_sm100.nvfp4_kv import nvfp4_head_slot_views
from fmha_sm100.sparse import (
    Nvfp4QuantizedTensor,
    dequantize_nvfp4_128x4_to_bf16,
    nvfp4_global_scale_from_amax,
    nvfp4_scale_128x4_offset,
    quantize_bf16_to_nvfp4_128x4,
    quantize_kv_bf16_to_nvfp4_128x4,
    sparse_atten_nvfp4_kv_func,
    swizzle_nvfp4_scale_to_128x4,
)
from openmsa.testing.compare import assert_close, assert_equal
from tests.contract import DEVICES
from tests.fmha_sm100.sparse_cases import FP8, case, check, csr, honest_fp8, lengths, pools, truth, with_numbers

devices = pytest.mark.parametrize("device", DEVICES)


def e2m1(code):
    """Returns the number of a code: sign, two exponent bits of bias 1, one mantissa bit."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e4m3(code):
    """Returns the number of a code: sign, four exponent bits of bias 7, three mantissa bits."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def decoded(data, scale_of, whole):
    """Numbers, float64, of bytes [rows, dim / 2]; scale_of(row, group) is a code."""
    rows, half = data.shape
    numbers = torch.empty(rows, 2 * half, dtype=torch.float64)
    for row in range(rows):
        for i in range(2 * half):
            byte = int(data[row, i // 2])
            numbers[row, i] = e2m1(byte >> 4 if i % 2 else byte & 15) * e4m3(scale_of(row, i // 16)) * whole
    return numbers


def offset(row, col, cols):
    """Returns the byte of a scale in 128x4 tiles, from the layout's definition."""
    return ((row // 128) * -(-cols // 4) + col // 4) * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4


@devices
@pytest.mark.parametrize("shape", [(3, 2, 64), (130, 2, 48), (2, 2, 16, 128), (5, 16)])
def test_round_trip_against_bits(device, shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) * 3
    quantized = quantize_bf16_to_nvfp4_128x4(x.to(device))
    rows, groups = x.shape[:-1].numel(), shape[-1] // 16
    assert isinstance(quantized, Nvfp4QuantizedTensor)
    assert quantized.data.shape == (*shape[:-1], shape[-1] // 2)
    assert quantized.scale_128x4.shape == (-(-rows // 128) * 128, -(-groups // 4) * 4)
    assert quantized.data.dtype == quantized.scale_128x4.dtype == torch.uint8
    assert (quantized.logical_scale_shape, quantized.original_shape) == ((rows, groups), shape)
    whole = float(quantized.global_scale)
    assert whole == pytest.approx(float(x.abs().max()) / (448 * 6), rel=1e-6)
    scales = quantized.scale_128x4.flatten().tolist()
    numbers = decoded(quantized.data.cpu().view(rows, -1), lambda r, c: scales[offset(r, c, groups)], whole)
    assert_equal("dequantised", dequantize_nvfp4_128x4_to_bf16(quantized), numbers.float().to(torch.bfloat16).view(shape))
    bare = dequantize_nvfp4_128x4_to_bf16(quantized, include_global_scale=False)
    assert_equal("without the global scale", bare, (numbers / whole).to(torch.bfloat16).view(shape))
    # Nearest: half the widest step of E2M1 (2) and half a unit of E4M3 on the largest, in units of the group's scale.
    group = x.double().view(rows, groups, 16).abs().amax(-1).repeat_interleave(16, 1)
    error = (numbers - x.double().view(rows, -1)).abs()
    assert (error <= group * (1 / 6 + 1 / 16) + 1e-6).all()


@devices
def test_k_and_v_have_scales_of_their_own(device):
    k = torch.randn(4, 2, 32, device=device)
    both = quantize_kv_bf16_to_nvfp4_128x4(k, 5 * k)
    assert float(both[1].global_scale) == pytest.approx(5 * float(both[0].global_scale))
    assert_equal("codes", both[0].data, both[1].data)
    assert_equal("zeros", dequantize_nvfp4_128x4_to_bf16(quantize_bf16_to_nvfp4_128x4(0 * k)), (0 * k).to(torch.bfloat16))


@devices
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 4), (129, 8), (300, 5)])
def test_swizzle_follows_the_formula(device, rows, cols):
    scale = torch.randint(0, 127, (rows, cols), dtype=torch.uint8, device=device)
    tiled = swizzle_nvfp4_scale_to_128x4(scale, rows=rows, cols=cols).flatten().tolist()
    assert len(tiled) == -(-rows // 128) * 128 * (-(-cols // 4) * 4)
    expected = [0] * len(tiled)
    for r in range(rows):
        for c in range(cols):
            assert nvfp4_scale_128x4_offset(r, c, cols) == offset(r, c, cols)
            expected[offset(r, c, cols)] = int(scale[r, c])
    assert tiled == expected
    row = torch.arange(rows, device=device)[:, None]
    at = nvfp4_scale_128x4_offset(row, torch.arange(cols, device=device), cols)
    assert_equal("by tensors", torch.tensor(expected, dtype=torch.uint8)[at.cpu()], scale.cpu())
    again = swizzle_nvfp4_scale_to_128x4(scale.view(FP8).flatten(), rows=rows, cols=cols)
    assert again.dtype == FP8
    again = again.view(torch.uint8)
    assert again.flatten().tolist() == expected


def test_global_scale():
    amax = torch.tensor([2688.0, 1.0, 0.0, 1e-42])
    assert_equal("scale", nvfp4_global_scale_from_amax(amax), torch.tensor([1.0, 1 / 2688, 1.0, 1.0]))


def quads(scale):
    """Lays V's scales as vLLM's cache holds them, with four tokens of a page next to each other."""
    pages, heads, size, groups = scale.shape
    return scale.view(pages, heads, size // 4, 4, groups).transpose(-1, -2).reshape(scale.shape)


@devices
@pytest.mark.parametrize("query", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["legacy", "linear", "vllm"])
@pytest.mark.parametrize("paged", [False, True])
def test_attention_of_the_numbers(device, layout, paged, query):
    p, blocks = case((5, 33, 4), (300, 140, 8), topk=3, kv_heads=2, group=4, head_dim=128, dtype=torch.bfloat16)
    q = p.q.to(FP8) if query == "fp8" else p.q
    options = lengths(p, device) | {"causal": True, "return_softmax_lse": True, "softmax_scale": 0.1}
    k, v = p.k, p.v
    if paged:
        k, v, table, lens = pools(p, 128, "cpu", packed=False)
        k, v = k.nan_to_num(0), v.nan_to_num(0)
        options |= {"page_table": table.to(device), "seqused_k": lens.to(device)}
    both = quantize_kv_bf16_to_nvfp4_128x4(k, v)
    flat = quantize_kv_bf16_to_nvfp4_128x4(p.k, p.v)  # the same groups under the same global scale
    numbers = with_numbers(p, q.double(), *(numbers_of(x) for x in flat))
    low = numbers.map(lambda x: x.to(torch.bfloat16))
    scales = [scales_of(x, layout, name == "v", paged).to(device) for x, name in zip(both, "kv", strict=True)]
    wholes = both[0].global_scale.to(device), float(both[1].global_scale)
    if layout != "legacy":  # the default
        options["kv_layout"] = layout
    index = csr(p, blocks, 128, device)
    out, lse = sparse_atten_nvfp4_kv_func(
        *(q.to(device), both[0].data.to(device), both[1].data.to(device), *scales, *wholes, *index, 3), **options
    )
    exact, honest = truth(numbers, blocks, 128, 0.1)[0], truth(low, blocks, 128, 0.1)[1]
    if query == "fp8" and device == "cuda":
        honest = honest_fp8(low, blocks, 128, 0.1)
    check((out, lse), (exact, honest))


def numbers_of(quantized):
    """Returns float64, by the decoder of bits through a table of its values."""
    codes = torch.tensor([e2m1(c) for c in range(16)], dtype=torch.float64)
    scales = torch.tensor([e4m3(c) for c in range(256)], dtype=torch.float64)
    data = quantized.data.long()
    numbers = torch.stack((codes[data & 15], codes[data >> 4]), -1).flatten(-2)
    rows, groups = quantized.logical_scale_shape
    at = [[offset(r, c, groups) for c in range(groups)] for r in range(rows)]
    scale = scales[quantized.scale_128x4.flatten().long()[torch.tensor(at)]].repeat_interleave(16, 1)
    return numbers * scale.view(numbers.shape) * float(quantized.global_scale)


def scales_of(quantized, layout, is_v, paged):
    """Reads scales from the tiles and lays them as `kv_layout` asks."""
    if layout == "legacy":
        spare = torch.full((128, quantized.scale_128x4.shape[1]), 0x7F, dtype=torch.uint8)
        return torch.cat((quantized.scale_128x4, spare))  # more rows than needed
    rows, groups = quantized.logical_scale_shape
    at = torch.tensor([[offset(r, c, groups) for c in range(groups)] for r in range(rows)])
    linear = quantized.scale_128x4.flatten()[at].view(*quantized.original_shape[:-1], groups)
    if layout == "linear" or not is_v:
        return linear
    if paged:
        return quads(linear)
    total, heads, groups = linear.shape
    return linear.view(total // 4, 4, heads, groups).permute(0, 2, 3, 1).reshape(linear.shape)


@devices
def test_slots_of_the_vllm_cache(device):
    """Codes and scales of one head of one page lie together; views, not copies."""
    cache = torch.randint(0, 255, (3, 4, 128, 72), dtype=torch.uint8, device=device)
    k_data, k_scale, v_data, v_scale = nvfp4_head_slot_views(cache[:, 0::2], cache[:, 1::2])
    for n, (data, scale) in enumerate(((k_data, k_scale), (v_data, v_scale))):
        assert data.shape == (3, 2, 128, 64)
        assert scale.shape == (3, 2, 128, 8)
        for page, head in ((0, 0), (2, 1)):
            slot = cache[page, 2 * head + n].flatten()
            assert_equal("codes", data[page, head].flatten(), slot[:8192])
            assert_equal("scales", scale[page, head].flatten(), slot[8192:])
    v_scale[1, 1, 5, 3] = 9
    assert int(cache[1, 3].flatten()[8192 + 5 * 8 + 3]) == 9


@devices
def test_as_vllm_attends_from_slots(device):
    """vLLM attends from one packed cache with slots of K and V, V's scales by fours, into an output buffer."""
    p, blocks = case((5, 33), (300, 140), topk=16, kv_heads=2, group=16, head_dim=128, dtype=torch.bfloat16)
    k, v, table, lens = pools(p, 128, "cpu", packed=False)
    both = quantize_kv_bf16_to_nvfp4_128x4(k.nan_to_num(0), v.nan_to_num(0))
    cache = torch.full((k.shape[0] + 40, 4, 128 * 72), 0x7F, dtype=torch.uint8)  # more pages than the table names
    for n, x in enumerate(both):
        cache[: k.shape[0], n::2, :8192] = x.data.flatten(2)
        cache[: k.shape[0], n::2, 8192:] = scales_of(x, "vllm", n == 1, True).flatten(2)
    cache = cache.view(-1, 4, 128, 72).to(device)
    k_data, k_sf, v_data, v_sf = nvfp4_head_slot_views(cache[:, 0::2], cache[:, 1::2])
    out = torch.full_like(p.q, torch.nan, device=device)
    row_ptr, q_idx, schedule = csr(p, blocks, 128, device, total_k=0, total_rows=5, qhead_per_kv=16, return_schedule=True)
    result = sparse_atten_nvfp4_kv_func(
        *(p.q.to(device), k_data, v_data, k_sf, v_sf, both[0].global_scale.to(device), both[1].global_scale.to(device)),
        *(row_ptr, q_idx, 16),
        **lengths(p, device),
        **{"blk_kv": 128, "causal": True, "softmax_scale": 0.09, "page_table": table.to(device), "seqused_k": lens.to(device)},
        **{"schedule": schedule, "out": out, "kv_layout": "vllm"},
    )
    assert result is out
    flat = quantize_kv_bf16_to_nvfp4_128x4(p.k, p.v)
    numbers = with_numbers(p, p.q.double(), *(numbers_of(x) for x in flat))
    low = numbers.map(lambda x: x.to(torch.bfloat16))
    assert_close("out", out, truth(low, blocks, 128, 0.09)[1][0], truth(numbers, blocks, 128, 0.09)[0][0])


ARGUMENTS = {"k": torch.zeros(8, 2, 64, dtype=torch.uint8), "k_scale_128x4": torch.zeros(128, 8, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"k": torch.zeros(8, 2, 64)}, TypeError, "k must have dtype torch.uint8"),
        ({"k": torch.zeros(8, 2, 32, dtype=torch.uint8)}, ValueError, r"k.shape\[-1\] must be 64 \(head_dim // 2"),
        (
            {"k_scale_128x4": torch.zeros(64, 8, dtype=torch.uint8)},
            ValueError,
            r"k_scale_128x4 must have shape \(128, 8\) or more",
        ),
        ({"k_scale_128x4": torch.zeros(128, 8)}, TypeError, "k_scale_128x4 must have dtype torch.uint8"),
        ({"kv_layout": "vllm"}, ValueError, r"k_scale_128x4 must have shape \[total_k, num_kv_heads, groups\]"),
        ({"kv_layout": "tiled"}, ValueError, "kv_layout must be one of legacy, linear, vllm, got 'tiled'"),
        ({"k_global_scale": torch.ones(2)}, ValueError, "k_global_scale must be one float32 number"),
        ({"k_global_scale": float("inf")}, ValueError, "k_global_scale must be finite, got inf"),
    ],
)
def test_misuse(change, error, match):
    p, blocks = case((8,), (8,), topk=1, kv_heads=2, head_dim=128)
    index = csr(p, blocks, 128)
    arguments = {"q": p.q, "k2q_row_ptr": index[0], "k2q_q_indices": index[1], "topK": 1, **lengths(p, "cpu"), **ARGUMENTS}
    arguments |= {"v": ARGUMENTS["k"], "v_scale_128x4": ARGUMENTS["k_scale_128x4"]}
    arguments |= {"k_global_scale": None, "v_global_scale": None}
    with pytest.raises(error, match=match):
        sparse_atten_nvfp4_kv_func(**(arguments | change))


@pytest.mark.parametrize(
    ("function", "arguments", "error", "match"),
    [
        (quantize_bf16_to_nvfp4_128x4, (torch.zeros(3, 10),), ValueError, "dim a multiple of 16"),
        (quantize_bf16_to_nvfp4_128x4, (torch.zeros(3, 16, dtype=torch.int32),), TypeError, "x must be a float tensor"),
        (quantize_kv_bf16_to_nvfp4_128x4, (torch.zeros(3, 16), torch.zeros(2, 16)), ValueError, "v must have the shape of k"),
        (dequantize_nvfp4_128x4_to_bf16, (torch.zeros(3, 8),), TypeError, "qx must be an Nvfp4QuantizedTensor, got Tensor"),
        (nvfp4_scale_128x4_offset, (0, "1", 4), TypeError, "col must be an int, got str"),
        (nvfp4_head_slot_views, (torch.zeros(1, 2, 8, 72),) * 2, TypeError, "k must be uint8 slots"),
        (nvfp4_head_slot_views, (torch.zeros(1, 2, 8, 70, dtype=torch.uint8),) * 2, ValueError, "k must have shape"),
    ],
)
def test_misuse_of_the_helpers(function, arguments, error, match):
    with pytest.raises(error, match=match):
        function(*arguments)
