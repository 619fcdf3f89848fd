# SPDX-License-Identifier: MIT
"""Formats agree with a decoder of their bits: every code, every rounding boundary, scales and layouts, special values."""

import itertools
import math
import re
from fractions import Fraction as F

import numpy as np
import pytest
import torch

from openmsa import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8
from openmsa.kv_cache.nvfp4 import swizzled_offset, swizzled_shape
from openmsa.testing.compare import assert_equal
from tests.kv_cache import bits

NAN, INF = math.nan, math.inf
CODES = torch.arange(256).to(torch.uint8)


def around(decode, codes):
    """Returns positive float32 numbers at, between and beside all magnitudes, and the exact one-away neighbours of the
    midpoints."""
    sizes = [float(decode(code)) for code in range(codes)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(sizes)]
    x = torch.tensor([*sizes, *middles, sizes[-1] * 1.01, sizes[-1] * 1.04, sizes[-1] * 2, 3e38, 1e-45])
    return torch.cat([x, torch.nextafter(x, torch.tensor(INF)), torch.nextafter(x, torch.tensor(0.0))])


def rows(x, dim=16, heads=1):
    """Returns [total, heads, dim] of a list of numbers, padded with zeros."""
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % (dim * heads)))
    return padded.view(-1, heads, dim)


def mixed(*shape, seed=0):
    """Draws numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))


def e4m3_truth(x, scale):
    """Returns the codes of ``x / scale`` rounded to float32, by the definition."""
    return torch.tensor([signed(float(v), bits.e4m3, 127, 128) for v in (x / scale).flatten().tolist()]).view(x.shape)


def signed(x, decode, codes, sign_bit):
    if math.isnan(x):
        return 0x7F
    size = F(10) ** 60 if math.isinf(x) else abs(F(x))
    return bits.nearest(size, decode, codes) | (sign_bit if math.copysign(1, x) < 0 else 0)


# ---- every code ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.1, 3.0])
def test_every_e4m3_code(dtype, scale):
    stored = E4M3(CODES.view(16, 1, 16), scale)
    exact = bits.numbers(CODES, bits.e4m3).view(16, 1, 16)
    if scale is not None:
        number = torch.tensor(scale, dtype=torch.float32)
        exact = exact * number.double() if dtype == torch.float64 else (exact.float() * number)
    assert_equal("numbers", stored.dequantize(dtype), exact.to(dtype))


def test_every_e2m1_code_under_every_e4m3_scale():
    data = CODES.view(1, 256).expand(256, 256).reshape(256, 8, 32).flatten(1)  # every byte in each row
    scale = CODES[:, None].expand(256, 512 // 16).contiguous()
    stored = NVFP4(data[:, None], scale[:, None], 0.37)
    exact = bits.numbers(bits.unpacked(CODES), bits.e2m1) * bits.numbers(CODES, bits.e4m3)[:, None]  # [scale, element]
    whole = torch.tensor(0.37)
    assert_equal("float64", stored.dequantize(torch.float64)[:, 0], exact * whole.double())
    assert_equal("float32", stored.dequantize()[:, 0], exact.float() * whole)


def test_every_e2m1_code_under_every_e8m0_scale():
    scale = CODES[:, None].expand(256, 512 // 32).contiguous()
    stored = MXFP4(CODES.expand(256, 256).contiguous(), scale)
    exact = bits.numbers(bits.unpacked(CODES), bits.e2m1) * bits.numbers(CODES, bits.e8m0)[:, None]
    assert_equal("float64", stored.dequantize(torch.float64), exact)
    assert_equal("float32", stored.dequantize(), exact.float())
    assert_equal("as e8m0", MXFP4(stored.data, scale.view(torch.float8_e8m0fnu)).dequantize(), exact.float())


def test_every_int8_code():
    codes = torch.arange(-128, 128).to(torch.int8).view(16, 16)
    scale = (torch.rand(16) + 0.01).bfloat16()
    stored = Int8(codes, scale, torch.zeros(16).bfloat16())
    assert_equal("float64", stored.dequantize(torch.float64), codes.double() * scale.double()[:, None])
    assert_equal("float32", stored.dequantize(), codes.float() * scale[:, None])


# ---- rounding ----


@pytest.mark.parametrize("scale", [None, 0.1, 7.0])
def test_e4m3_rounds_to_even_and_saturates(scale):
    x = around(bits.e4m3, 127)
    x = rows(torch.cat([x, -x, torch.tensor([0.0, -0.0, INF, -INF, NAN, 464.0, 465.0, -480.0])]) * (scale or 1.0))
    stored = E4M3.quantize(x, scale)
    number = torch.tensor(1.0 if scale is None else scale)
    assert_equal("codes", stored.data.view(torch.uint8).long(), e4m3_truth(x, number))


@pytest.mark.parametrize("format", [NVFP4, MXFP4])
def test_e2m1_rounds_to_even_and_saturates(format):
    """Each group holds 6, or as much as keeps its scale at 1."""
    x = around(bits.e2m1, 8)
    x = torch.cat([x[x <= 6], -x[x <= 6], torch.tensor([0.0, -0.0])])
    group = 32 if format is MXFP4 else 16
    x = torch.nn.functional.pad(x, (0, -x.numel() % (group - 1))).view(-1, group - 1)
    x = torch.cat([x, torch.full((len(x), 1), 6.0)], 1)
    stored = format.quantize(x[:, None], 1.0) if format is NVFP4 else format.quantize(x[:, None])
    truth = torch.tensor([signed(v, bits.e2m1, 8, 8) for v in x.flatten().tolist()]).view(x.shape)
    assert_equal("codes", bits.unpacked(stored.data[:, 0]), truth)


def groups(x, size):
    return x.flatten().view(-1, size).tolist()


def float32(x):
    return float(torch.tensor(float(x), dtype=torch.float32))


@pytest.mark.parametrize("whole", [1.0, 0.037])
def test_nvfp4_by_the_definition(whole):
    x = mixed(64, 2, 48)
    stored = NVFP4.quantize(x, whole)
    whole = float32(whole)
    codes, scales = bits.unpacked(stored.data).flatten().view(-1, 16), stored.scale.view(torch.uint8).flatten()
    for group, code, scale in zip(groups(x, 16), codes.tolist(), scales.tolist(), strict=True):
        wanted = float32(max(map(abs, group)) / float32(6 * whole))  # a quotient of doubles, rounded once more: not a tie
        assert scale == bits.nearest(F(wanted), bits.e4m3, 127)
        unit = float32(bits.e4m3(scale) * F(whole))
        assert code == [signed(float32(v / unit) if unit else 0.0, bits.e2m1, 8, 8) for v in group]


def test_nvfp4_global_scale_reaches_the_largest_number():
    x = mixed(32, 2, 32)
    stored = NVFP4.quantize(x)
    assert_equal("global_scale", stored.global_scale, x.abs().max() / torch.tensor(2688.0))
    assert stored.scale.view(torch.uint8).max() == 0x7E
    assert float((stored.dequantize() - x).abs().max()) <= float(x.abs().max()) / 6  # half the widest step, 4 to 6


@pytest.mark.parametrize("largest", [1e-45, 1e-42])
def test_computed_scales_are_positive(largest):
    """Scales are positive also where the division of the largest magnitude underflows; what is next to it stays 0."""
    x = torch.zeros(2, 2, 4, 32)
    x[0, 0, 0, :3] = largest
    for per in ("tensor", "head", "page"):
        stored = E4M3.quantize(x, per=per)
        assert bool((stored.scale > 0).all())
        assert bool((stored.dequantize()[x == 0] == 0).all())
    packed = NVFP4.quantize(x)
    assert float(packed.global_scale) > 0
    assert bool((packed.dequantize()[x == 0] == 0).all())


def test_mxfp4_by_the_definition():
    x = torch.cat([mixed(40, 2, 64), mixed(8, 2, 64) * 1e-37, mixed(8, 2, 64) * 1e-43, mixed(8, 2, 64).clamp(-1, 1) * 3e38])
    stored = MXFP4.quantize(x)
    codes, scales = bits.unpacked(stored.data).flatten().view(-1, 32), stored.scale.flatten()
    for group, code, scale in zip(groups(x, 32), codes.tolist(), scales.tolist(), strict=True):
        largest = max(map(abs, group))
        exponent = math.frexp(largest)[1] - 1 if largest else -500  # floor(log2)
        assert scale == max(exponent - 2, -127) + 127
        assert code == [signed(math.copysign(abs(F(v)) / bits.e8m0(scale), v), bits.e2m1, 8, 8) for v in group]


# ---- scales ----


@pytest.mark.parametrize("per", ["tensor", "head", "page"])
def test_e4m3_scales(per):
    x = mixed(5, 3, 8, 32)
    x[2, 1] = 0
    x[3, 2, 0, 0] = INF
    stored = E4M3.quantize(x, per=per)
    dims = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "page": (2, 3)}[per]
    amax = x.masked_fill(x.isinf(), 0).abs().amax(dims, keepdim=True)
    scale = torch.where(amax > 0, amax / torch.full_like(amax, 448), 1.0)
    assert_equal("scale", stored.scale, scale.view({"tensor": (), "head": (3,), "page": (5, 3)}[per]))
    truth = bits.numbers(stored.data.view(torch.uint8), bits.e4m3) * scale.double()
    assert_equal("numbers", stored.dequantize(torch.float64), truth)
    finite = x.isfinite()
    bound = truth.abs() / 16 + scale.double() * 2**-10  # half a step of normal numbers, of subnormal ones
    assert bool(((truth - x).abs() <= bound * 1.0001)[finite].all())
    assert_equal("rows", stored.rows(torch.tensor([3, 0, 3]), 2, slice(1, 4)), stored.dequantize()[[3, 0, 3], 2, 1:4])
    assert stored.scale_strides == {"tensor": (0, 0), "head": (0, 1), "page": (3, 1)}[per]


def test_e4m3_takes_scales_as_engines_hold_them():
    """A float, one element, one a head, a column of a table, one a page for all heads; None is 1."""
    codes = CODES.view(4, 2, 2, 16)
    plain = E4M3(codes).dequantize(torch.float64)
    table = torch.rand(4, 7) + 0.1
    for scale, factor in (
        (0.5, 0.5),
        (torch.tensor([0.5]), 0.5),
        (table[0, 1::3], table[0, 1::3].double().view(1, 2, 1, 1)),
        (table[:, 2:3], table[:, 2].double().view(4, 1, 1, 1)),
        (table[:, ::4], table[:, ::4].double().view(4, 2, 1, 1)),
    ):
        assert_equal("numbers", E4M3(codes, scale).dequantize(torch.float64), plain * factor)


@pytest.mark.parametrize(("shape", "dim"), [((3, 2), 48), ((5, 3, 100), 80), ((129, 1), 256), ((2, 1, 64), 16)])
def test_128x4_layout(shape, dim):
    x = mixed(*shape, dim)
    linear, swizzled = NVFP4.quantize(x, 0.01), NVFP4.quantize(x, 0.01, "128x4")
    assert_equal("data", swizzled.data, linear.data)
    assert_equal("numbers", swizzled.dequantize(), linear.dequantize())
    assert tuple(swizzled.scale.shape) == swizzled_shape(math.prod(shape), dim // 16)
    flat, cols = linear.scale.view(torch.uint8).view(-1, dim // 16), dim // 16
    for row in {0, 31 % len(flat), len(flat) // 2, len(flat) - 1}:
        for col in range(cols):
            assert bits.at_128x4(swizzled.scale.view(torch.uint8), row, col, cols) == int(flat[row, col])
    for moved, other in ((linear.in_layout("128x4"), swizzled), (swizzled.in_layout("linear"), linear)):
        assert moved.layout == other.layout
        assert_equal("scale", moved.scale.view(torch.uint8), other.scale.view(torch.uint8))
    index = (torch.tensor([shape[0] - 1, 0]), 0) if len(shape) == 2 else (torch.tensor([1, 0]), slice(None), slice(1, 40, 3))
    assert_equal("rows", swizzled.rows(*index), linear.dequantize()[index])


def test_128x4_offsets_are_a_permutation():
    row, col = torch.arange(384)[:, None], torch.arange(7)
    offsets = swizzled_offset(row, col, 7)
    assert offsets.unique().numel() == offsets.numel()
    assert int(offsets.max()) < 384 * 8


# ---- special values ----


def test_special_values():
    x = torch.zeros(6, 1, 32)
    x[1, 0, 3], x[2, 0, 4], x[3, 0, 5], x[4, 0, 6] = NAN, INF, -INF, 1e-45
    x[:, 0, 31] = torch.tensor([0.0, 6.0, 6.0, 6.0, 0.0, -0.0])

    e4 = E4M3.quantize(x, 0.5).dequantize()[:, 0]
    assert e4[1].isnan().nonzero().tolist() == [[3]]
    assert e4[2, 4] == 224
    assert e4[3, 5] == -224
    assert e4[1, 31] == 6

    fp4 = NVFP4.quantize(x, 1.0)
    numbers = fp4.dequantize()[:, 0]
    assert numbers[1, :16].isnan().all()
    assert numbers[1, 31] == 6
    assert numbers[2, 4] == 2688
    assert numbers[3, 5] == -2688
    assert not numbers[4].any()
    assert int(fp4.scale.view(torch.uint8)[1, 0, 0]) == 0x7F

    mx = MXFP4.quantize(x)
    numbers = mx.dequantize()[:, 0]
    assert numbers[1].isnan().all()
    assert int(mx.scale[1, 0, 0]) == 255
    assert numbers[2, 4] == 6 * 2.0**125
    assert numbers[3, 5] == -6 * 2.0**125
    assert not numbers[0].any()

    int8 = Int8.quantize(x)
    assert int8.dequantize()[1].isnan().all()
    assert int8.scale.view(torch.int16)[1, 0].tolist() == 0x7FC0  # as the kernels write it
    assert int8.error[:2, 0].tolist() == [0, 0]
    assert abs(int8.dequantize()[2, 0, 4] / 2.0**127 - 1) <= 0.5 / 127
    assert int8.error[2:4, 0].tolist() == [INF, INF]
    assert not int8.scale[[0, 5]].any()
    assert not int8.error[[0, 5]].any()
    assert not int8.data[[0, 5]].any()


# ---- the error bound of Int8 ----


NASTY = {
    "normal": mixed(200, 128),
    "one element": torch.zeros(1, 128).index_fill_(1, torch.tensor([7]), 3.3),
    "ties": (torch.arange(128.0) - 63.5).expand(2, 128) * torch.tensor([[1.0], [127 / 64]]),
    "whole": torch.randint(-127, 128, (50, 128), generator=torch.Generator().manual_seed(0)).float(),
    "outlier": mixed(20, 128).index_fill_(1, torch.tensor([0]), 1e6),
    "tiny": mixed(50, 128) * 1e-38,
    "subnormal": mixed(200, 256) * torch.logspace(-45, -39, 200)[:, None],
    "huge": mixed(50, 128).clamp(-3, 3) * 5e37,
    "largest": torch.full((1, 128), 2.0**127),
    "dim 16": mixed(100, 16),
    "dim 256": mixed(100, 256),
}


@pytest.mark.parametrize("name", NASTY)
def test_int8_error_bounds(name):
    """The bound of an error is at least the distance, computed in float64 without rounding to speak of, and hardly more."""
    x = NASTY[name]
    stored = Int8.quantize(x[:, None])
    assert stored.data.abs().max() <= 127
    distance = (x.double() - stored.data[:, 0].double() * stored.scale.double()).norm(dim=-1)
    assert bool((stored.error[:, 0].double() >= distance * (1 - 1e-12)).all())
    loosest = stored.scale[:, 0].double() * math.sqrt(x.shape[1]) * 2e-5 + 2.0**-125
    steps = 1 + 2.0**-7  # of bfloat16
    assert bool((stored.error[:, 0].double() <= (distance * 1.0002 + loosest) * steps).all())


def test_int8_codes_by_the_definition():
    x = torch.cat([NASTY["normal"], NASTY["ties"]])
    stored = Int8.quantize(x)
    amax = x.abs().amax(-1)
    fraction, exponent = torch.frexp(amax / torch.full_like(amax, 127.49))
    assert_equal("scale", stored.scale.float(), torch.ldexp((fraction * 256).ceil() / 256, exponent))
    assert_equal("codes", stored.data.float(), (x / stored.scale[:, None].float()).round())
    assert stored.data.abs().amax(-1).tolist() == [127] * len(x)


def test_int8_of_its_own_numbers():
    """Keys that have a code of 127 do not change when they are quantised again, with any scale between two powers of two."""
    scale = (torch.arange(128, 256) / 128).bfloat16()
    codes = torch.randint(-126, 127, (128, 16), dtype=torch.int8)
    codes[:, 3] = 127
    stored = Int8(codes, scale, torch.zeros_like(scale))
    again = Int8.quantize(stored.dequantize())
    assert_equal("scale", again.scale, scale)
    assert_equal("codes", again.data, codes)


def test_int8_words():
    """Scale and error that lie side by side are read as one number, also of a slice and of a copy; where they lie otherwise
    there is None."""
    stored = Int8.quantize(mixed(24, 16).view(2, 3, 4, 16))
    for keys in (stored, Int8(stored.data[:, 1:], stored.scale[:, 1:], stored.error[:, 1:]), stored.to("cpu")):
        words = keys.words()
        assert words.shape == keys.scale.shape
        assert_equal("scale", words & 0xFFFF, keys.scale.view(torch.int16).int())
        assert_equal("error", words >> 16, keys.error.view(torch.int16).int())
        assert words.untyped_storage().data_ptr() == keys.scale.untyped_storage().data_ptr()
    pairs = torch.zeros(2, 3, 4, 3, dtype=torch.bfloat16)
    for scale, error in ((pairs[..., 1], pairs[..., 0]), (pairs[..., 0], pairs[..., 1]), (stored.scale, stored.error.clone())):
        assert Int8(stored.data, scale, error).words() is None
    whole = np.zeros(48, np.int16)
    neighbours = (torch.from_numpy(whole[i::2]).view(torch.bfloat16).view(2, 3, 4) for i in range(2))
    assert Int8(stored.data, *neighbours).words() is None  # two storages, the first of which ends before its last error
    behind = torch.zeros(49, dtype=torch.bfloat16)[1:].view(2, 3, 4, 2)
    assert Int8(stored.data, *behind.unbind(-1)).words() is None


# ---- wrong arguments, and what all share ----


BAD = {
    "codes": (TypeError, ("E4M3.data", "float8_e4m3fn", "float32"), lambda: E4M3(torch.zeros(1, 1, 16))),
    "scale dtype": (
        TypeError,
        ("E4M3.scale", "float32", "float64"),
        lambda: E4M3(CODES.view(4, 2, 32), torch.ones(2).double()),
    ),
    "scale shape": (ValueError, ("E4M3.scale", "(2,)", "(3,)"), lambda: E4M3(CODES.view(4, 2, 32), torch.ones(3))),
    "page scales of packed": (ValueError, ("E4M3.scale", "(4, 2)"), lambda: E4M3(CODES.view(4, 2, 32), torch.ones(4, 2))),
    "both scales": (ValueError, ("per", "scale", "head"), lambda: E4M3.quantize(torch.ones(1, 1, 16), 1.0, per="head")),
    "per": (ValueError, ("per", "'row'"), lambda: E4M3.quantize(torch.ones(1, 1, 16), per="row")),
    "per page of packed": (ValueError, ("per", "4 dimensions"), lambda: E4M3.quantize(torch.ones(1, 1, 16), per="page")),
    "per head of a row": (ValueError, ("per", "3 dimensions", "(16,)"), lambda: E4M3.quantize(torch.ones(16), per="head")),
    "int8 scale": (
        ValueError,
        ("Int8.scale", "(1, 2)", "(2,)"),
        lambda: Int8(torch.zeros(1, 2, 16).char(), *torch.zeros(2, 2).bfloat16()),
    ),
    "layout": (ValueError, ("NVFP4.layout", "'rows'"), lambda: NVFP4.quantize(torch.ones(1, 1, 16), layout="rows")),
    "nvfp4 dim": (ValueError, ("NVFP4.data", "multiple of 8", "12"), lambda: NVFP4(CODES[:12][None], CODES[None, :1])),
    "nvfp4 scale": (ValueError, ("NVFP4.scale", "(1, 2)", "(1, 1)"), lambda: NVFP4(CODES[:16][None], CODES[None, :1])),
    "swizzled scale": (
        ValueError,
        ("NVFP4.scale", "(128, 4)", "(1, 2)"),
        lambda: NVFP4(CODES[:16][None], CODES[None, :2], layout="128x4"),
    ),
    "global scale": (
        ValueError,
        ("NVFP4.global_scale", "one element", "(2,)"),
        lambda: NVFP4(CODES[:16][None], CODES[None, :2], torch.ones(2)),
    ),
    "mxfp4 dim": (ValueError, ("MXFP4.data", "multiple of 16", "8"), lambda: MXFP4(CODES[:8][None], CODES[None, :1])),
    "mxfp4 scale": (TypeError, ("MXFP4.scale", "uint8", "float32"), lambda: MXFP4(CODES[:16][None], torch.ones(1, 1))),
    "exact": (
        TypeError,
        ("CertifiedKeys.exact", "float32", "float64"),
        lambda: CertifiedKeys.quantize(torch.ones(1, 16).double()),
    ),
    "quantized list": (TypeError, ("values", "torch.Tensor", "list"), lambda: E4M3.quantize([1.0])),
    "quantized integers": (TypeError, ("values", "float32", "int32"), lambda: Int8.quantize(torch.ones(1, 16).int())),
    "quantized number": (ValueError, ("values", "[..., dim]", "()"), lambda: Int8.quantize(torch.ones(()))),
    "quantized nothing": (TypeError, ("values", "torch.Tensor", "NoneType"), lambda: CertifiedKeys.quantize(None)),
    "nvfp4 of 17": (ValueError, ("values", "multiple of 16", "(1, 17)"), lambda: NVFP4.quantize(torch.ones(1, 17))),
    "room for nvfp4 of 17": (ValueError, ("shape[-1]", "multiple of 16", "17"), lambda: NVFP4.allocate((4, 1, 17))),
    "room for nvfp4 of 24": (ValueError, ("shape[-1]", "multiple of 16", "24"), lambda: NVFP4.allocate((4, 1, 24))),
    "room for mxfp4 of 16": (ValueError, ("shape[-1]", "multiple of 32", "16"), lambda: MXFP4.allocate((4, 1, 16))),
    "mxfp4 of 48": (ValueError, ("values", "multiple of 32", "(1, 48)"), lambda: MXFP4.quantize(torch.ones(1, 48))),
    "device": (
        ValueError,
        ("Int8.error", "device", "meta"),
        lambda: Int8(torch.zeros(1, 16).char(), torch.zeros(1).bfloat16(), torch.zeros(1, device="meta").bfloat16()),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    error, words, call = BAD[case]
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


MAKERS = {
    "e4m3": lambda x: E4M3.quantize(x, per="head"),
    "int8": Int8.quantize,
    "nvfp4": NVFP4.quantize,
    "nvfp4 128x4": lambda x: NVFP4.quantize(x, layout="128x4"),
    "mxfp4": MXFP4.quantize,
    "certified": CertifiedKeys.quantize,
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_common_face(name):
    x = mixed(6, 2, 5, 64)
    stored = MAKERS[name](x)
    assert stored.shape == x.shape
    assert stored.dim() == 4
    assert stored.numel() == x.numel()
    assert stored.device == x.device
    assert stored.format == name.split()[0]
    assert not stored.requires_grad
    assert stored.detach() is stored
    whole = stored.dequantize()
    for index in ((2,), (slice(1, 4), 0), (torch.tensor([[5], [1]]), torch.tensor([0, 1]), torch.tensor([4, 0]))):
        assert_equal(f"rows {index}", stored.rows(*index), whole[index])
    stored.write((torch.tensor([3, 0]), slice(None), torch.tensor([4, 2])), torch.zeros(2, 2, 64))
    whole[[3, 0], :, [4, 2]] = 0
    assert_equal("written", stored.dequantize(), whole)
    again = MAKERS[name](whole)
    if name != "e4m3" and not name.startswith("nvfp4"):  # whose scales of the whole changed
        assert_equal("stable", again.dequantize(), whole)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("index", "error", "rule"),
    [
        ((6,), ValueError, "index must stay within the leading dimensions.*index 6 is out of bounds"),
        ((-7,), ValueError, "index must stay within.*index -7"),
        ((5, 3), ValueError, "index must stay within.*index 3 is out of bounds for dimension 1"),
        ((torch.tensor([0, 6]),), ValueError, "index must stay within.*index 6"),
        ((0, 0, 0, 0), ValueError, "index must stay within.*too many indices"),
        ((slice(None, None, -1),), ValueError, "index must stay within.*step must be greater than zero"),
        ((..., 0), TypeError, r"index\[0\] must be an int, a slice or a tensor"),
        ((0, "a"), TypeError, r"index\[1\] must be .*got str"),
    ],
)
def test_an_index_that_leaves_the_rows_is_refused(name, index, error, rule):
    stored = MAKERS[name](mixed(6, 2, 5, 64))
    before = stored.dequantize()
    with pytest.raises(error, match=rule):
        stored.rows(*index)
    with pytest.raises(error, match=rule):
        stored.write(index, torch.zeros(2, 5, 64))
    assert_equal("unchanged", stored.dequantize(), before)


@pytest.mark.parametrize("name", MAKERS)
def test_values_that_do_not_fit_are_refused_before_anything_is_written(name):
    stored = MAKERS[name](mixed(6, 2, 5, 64))
    before = stored.dequantize()
    for shape in ((64,), (5, 64), (1, 5, 64), (2, 5, 32), (2, 5, 63), (3, 5, 64), ()):
        with pytest.raises(ValueError, match=r"values must have shape \(2, 5, 64\), got \("):
            stored.write((0,), torch.zeros(shape))
        with pytest.raises(ValueError, match=r"values must have shape \(6, 2, 5, 64\), got \("):
            stored.fill(torch.zeros(shape))
    for values, error, rule in (
        (torch.zeros(2, 5, 64, dtype=torch.int32), TypeError, "values must have dtype .*int32"),
        (torch.zeros(2, 5, 64, device="meta"), ValueError, "values must be on the device of the codes"),
        ([0.0], TypeError, "values must be a torch.Tensor, got list"),
    ):
        with pytest.raises(error, match=rule):
            stored.write((0,), values)
    with pytest.raises(TypeError, match="index must be a tuple of indices, got int"):
        stored.write(0, torch.zeros(2, 5, 64))
    with pytest.raises(TypeError, match=r"dtype must be .*int8"):
        stored.rows(0, dtype=torch.int8)
    assert_equal("unchanged", stored.dequantize(), before)


def test_rows_that_share_memory_are_not_written():
    keys = Int8.quantize(torch.randn(6, 2, 64))
    shared = Int8(keys.data, keys.scale[:1].expand(6, 2), keys.error)
    with pytest.raises(ValueError, match=r"Int8\.scale must not be expanded"):
        shared.write((0,), torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"CertifiedKeys\.coarse\.scale must not be expanded"):
        CertifiedKeys(shared, torch.randn(6, 2, 64)).fill(torch.zeros(6, 2, 64))


@pytest.mark.parametrize("format", [E4M3, Int8, NVFP4, MXFP4, CertifiedKeys], ids=lambda x: x.__name__)
def test_only_dense_rows_are_quantised(format):
    x = torch.randn(4, 64)
    for wrong, rule in ((x.to_sparse(), "torch.sparse_coo"), (torch.nested.nested_tensor([x, x[1:]]), "nested")):
        with pytest.raises(TypeError, match=f"values must be a dense tensor .*got {rule}"):
            format.quantize(wrong)


def test_codes_have_a_dimension():
    byte, scale = torch.zeros((), dtype=torch.uint8), torch.zeros((), dtype=torch.bfloat16)
    for name, make in (
        ("E4M3", lambda: E4M3(byte)),
        ("NVFP4", lambda: NVFP4(byte, byte)),
        ("MXFP4", lambda: MXFP4(byte, byte)),
        ("Int8", lambda: Int8(byte.view(torch.int8), scale, scale)),
    ):
        with pytest.raises(ValueError, match=rf"{name}\.data must have shape \[..., dim\], got \(\)"):
            make()


def test_queries_in_e4m3_are_cut_by_slices():
    with pytest.raises(TypeError, match=r"rows of E4M3\[rows\] must be a slice, got int"):
        E4M3.quantize(torch.randn(6, 2, 64))[0]


@pytest.mark.parametrize("format", [E4M3, Int8], ids=lambda x: x.__name__)
def test_sizes_may_be_symbolic(format):
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda x: format.quantize(x).data.view(torch.uint8), tracing_mode="symbolic")(torch.randn(6, 2, 32))
    x = torch.randn(9, 2, 32)
    assert_equal("codes", traced(x), format.quantize(x).data.view(torch.uint8))


def test_what_a_format_stores_requires_no_gradient():
    """None would reach it, as numbers of formats are read without autograd; values that are quantised are detached."""
    values, one = torch.randn(4, 2, 32, requires_grad=True), torch.ones((), requires_grad=True)
    stored = E4M3.quantize(values)
    makers = {
        "E4M3.scale": lambda: E4M3(stored.data, one),
        "NVFP4.global_scale": lambda: NVFP4.quantize(values, one),
        "Int8.scale": lambda: Int8(torch.zeros(4, 2, 32, dtype=torch.int8), *torch.ones(2, 4, 2).bfloat16().requires_grad_()),
        "CertifiedKeys.exact": lambda: CertifiedKeys(Int8.quantize(values), values),
    }
    for name, make in makers.items():
        with pytest.raises(ValueError, match=rf"{re.escape(name)} must not require a gradient, as none flows to what a format"):
            make()
        with torch.no_grad():
            assert not make().requires_grad
    with pytest.raises(ValueError, match=r"E4M3\.scale must not require a gradient"):
        E4M3.quantize(values, torch.ones(2, requires_grad=True))
