# SPDX-License-Identifier: MIT
"""The Triton kernels of the formats agree with PyTorch in every bit, in the interpreter or on a GPU where there is one."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from openmsa import E4M3, MXFP4, NVFP4, PagedKV
from openmsa.kv_cache import triton_numbers, triton_store
from openmsa.kv_cache.e4m3 import encode
from openmsa.kv_cache.nvfp4 import encode_pairs
from openmsa.testing.compare import assert_equal
from tests.kv_cache import bits
from tests.kv_cache.test_formats import MAKERS, NASTY, around, mixed
from tests.kv_cache.test_stored_pages import POOLS, cache, codes, keys, starts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter, on NaN
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@triton.jit
def decode_kernel(codes, e2m1, e4m3, e8m0):
    i = tl.arange(0, 256)
    code = tl.load(codes + i)
    tl.store(e2m1 + i, triton_numbers.e2m1(code))
    tl.store(e4m3 + i, triton_numbers.e4m3(code))
    tl.store(e8m0 + i, triton_numbers.e8m0(code))


@triton.jit
def encode_kernel(numbers, e2m1, e4m3, whole, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(numbers + i, mask=i < size, other=0)
    tl.store(e2m1 + i, triton_numbers.e2m1_code(x), mask=i < size)
    tl.store(e4m3 + i, triton_numbers.e4m3_code(x), mask=i < size)
    tl.store(whole + i, triton_numbers.round_even(x), mask=i < size)


def test_every_code():
    given = torch.arange(256).to(torch.uint8)
    outs = [torch.empty(256, dtype=dtype, device=DEVICE) for dtype in (torch.float16, torch.float16, torch.float32)]
    decode_kernel[(1,)](given.to(DEVICE), *outs)
    assert_equal("e2m1", outs[0], bits.numbers(given & 15, bits.e2m1).half())
    assert_equal("e4m3", outs[1], bits.numbers(given, bits.e4m3).half())
    assert_equal("e8m0", outs[2], bits.numbers(given, bits.e8m0).float())


def test_every_rounding():
    random = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(0)).int().view(torch.float32)
    edges = torch.cat([around(bits.e4m3, 127), around(bits.e2m1, 8), torch.tensor([torch.nan, torch.inf, 0.0])])
    x = torch.cat([random, edges, -edges, torch.arange(-600, 600) / 4])
    e2m1, e4m3 = (torch.empty(len(x), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    whole = torch.empty(len(x), device=DEVICE)
    encode_kernel[(triton.cdiv(len(x), 4096),)](x.to(DEVICE), e2m1, e4m3, whole, len(x), BLOCK=4096)
    assert_equal("e4m3", e4m3, encode(x).view(torch.uint8))
    number = ~x.isnan()
    assert_equal("e2m1", e2m1.cpu()[number], (encode_pairs(torch.stack([x, x], 1))[:, 0] & 15)[number])
    small = x.abs() < 2**22
    assert_equal("round_even", whole.cpu()[small], x[small].round())


def same_codes(name, tested, expected):
    for a, b in zip(codes(tested), codes(expected), strict=True):
        assert_equal(name, a, b)


@pytest.mark.parametrize("dim", [16, 48, 96, 256])
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "certified"])
def test_quantize_and_dequantize(name, dim):
    if name == "mxfp4" and dim % 32:
        dim *= 2
    x = mixed(6, 3, 2, dim)
    x[1, 0, 0, 3], x[2, 1, 1, 1], x[3, 2, 0, 0], x[4, 0] = torch.nan, torch.inf, -torch.inf, 0
    x[5] *= 1e-40
    for values in (x, x.flatten(0, 1).bfloat16(), x.permute(2, 1, 0, 3)):
        expected = MAKERS[name](values)
        tested = expected.to(DEVICE)
        for part in codes(tested)[:1] + [vars(tested)[n] for n in ("scale", "error") if n in vars(tested) and name != "e4m3"]:
            (part.view(torch.uint8) if part.itemsize == 1 else part).fill_(0x55)
        triton_store.quantize_into(tested, values.to(DEVICE))
        if "128x4" in name:  # the padding
            assert_equal("numbers", tested.rows(), expected.rows())
        else:
            same_codes(name, tested, expected)
        for dtype in (torch.float32, torch.bfloat16):
            assert_equal(f"as {dtype}", triton_store.dequantize(tested, dtype), expected.rows(dtype=dtype))


@pytest.mark.parametrize("name", NASTY)
def test_int8_errors(name):
    expected = MAKERS["int8"](NASTY[name][:, None])
    tested = expected.to(DEVICE)
    for part in codes(tested):
        part.zero_()
    triton_store.quantize_into(tested, NASTY[name][:, None].to(DEVICE))
    same_codes(name, tested, expected)


@pytest.mark.parametrize("name", POOLS)
def test_append(name):
    """Ragged pieces; then tokens past the end of cu_seqlens, on pages outside the pool and past the capacity are left out."""
    x = keys(DEVICE)
    tested, expected = cache(name, DEVICE), cache(name, "cpu")
    for lengths, rows in (((13, 0, 4), slice(0, 17)), ((1, 0, 0), slice(17, 18)), ((1, 0, 5), slice(18, 24))):
        cu = starts("cpu", *lengths)
        triton_store.append(tested.pools(), {"keys": x[rows]}, tested.page_table, tested.seq_lens, cu.to(DEVICE))
        expected.append(x[rows].cpu(), cu)
        same_codes(name, tested.keys, expected.keys)
        assert tested.seq_lens.tolist() == expected.seq_lens.tolist()

    triton_store.append(tested.pools(), {"keys": x[:9]}, tested.page_table, tested.seq_lens, starts(DEVICE, 1, 0, 0))
    expected.append(x[:1].cpu(), starts("cpu", 1, 0, 0))
    same_codes("past cu_seqlens", tested.keys, expected.keys)
    before = tested.seq_lens.tolist()
    tested.seq_lens.copy_(torch.tensor([31, 8, 17]))
    triton_store.append(tested.pools(), {"keys": x[:6]}, tested.page_table, tested.seq_lens, None)  # two each
    expected.seq_lens[0] = 31
    expected.append(x[:1].cpu(), starts("cpu", 1, 0, 0))
    same_codes("no place", tested.keys, expected.keys)
    assert tested.seq_lens.tolist() == [32, 10, 19]
    assert before == [16, 0, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_append_plain(dtype):
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    tested, expected = (PagedKV.allocate(table.to(d), 4, 3, 16, 80, dtype) for d in (DEVICE, "cpu"))
    k, v = mixed(20, 3, 80), mixed(20, 3, 80).transpose(0, 1).contiguous().transpose(0, 1)
    new = {"k": k.to(DEVICE), "v": v.to(DEVICE)}
    triton_store.append(tested.pools(), new, tested.page_table, tested.seq_lens, None)
    expected.append(k, v)
    assert_equal("k", tested.k, expected.k)
    assert_equal("v", tested.v, expected.v)
    assert tested.seq_lens.tolist() == [10, 10]


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64, 65])
def test_tokens_find_their_sequences(batch):
    """Tokens find their sequences among any number of them, where counts are ragged and many are zero."""
    generator = torch.Generator().manual_seed(batch)
    counts = torch.randint(0, 4, (batch,), generator=generator) * torch.randint(0, 2, (batch,), generator=generator)
    table = torch.randperm(batch, generator=generator).int()[:, None]
    tested, expected = (PagedKV.allocate(table.to(d), batch, 1, 4, 16) for d in (DEVICE, "cpu"))
    new = torch.arange(float(counts.sum()))[:, None, None].expand(-1, 1, 16)
    cu = starts("cpu", *counts.tolist())
    pools = tested.pools()
    triton_store.append(pools, dict.fromkeys("kv", new.to(DEVICE)), tested.page_table, tested.seq_lens, cu.to(DEVICE))
    expected.append(new, new, cu)
    assert_equal("k", tested.k, expected.k)
    assert tested.seq_lens.tolist() == expected.seq_lens.tolist()


def test_empty():
    for stored in (
        E4M3.allocate((0, 2, 16), DEVICE),
        NVFP4.allocate((3, 0, 16), DEVICE),
        MXFP4.allocate((2, 1, 0, 32), DEVICE),
    ):
        triton_store.quantize_into(stored, torch.empty(stored.shape, device=DEVICE))
        assert triton_store.dequantize(stored, torch.float32).shape == stored.shape
