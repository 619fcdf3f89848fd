# SPDX-License-Identifier: MIT
"""The interpreter of Gluon computes as the hardware does, and tells each kind of mistake that a kernel can make."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmsa.testing.compare import assert_equal
from tests.hopper.launch import run
from tests.hopper.memory import places_of
from tests.hopper.values import OPERATIONS, Value, bits_of, from_bits, stored

SEEDS = range(12)
TILES = gl.constexpr(4)
SIZE = gl.constexpr(64)


@gluon.jit
def bring(tma_x, ring, full, free, FAULT: gl.constexpr):
    for t in range(TILES):
        s = t % 2
        if FAULT != "no wait for a free place":
            mbarrier.wait(free.index(s), t // 2 & 1 ^ 1)
        mbarrier.expect(full.index(s), tma_x.block_type.nbytes if FAULT != "too many bytes" else 2 * tma_x.block_type.nbytes)
        tma.async_copy_global_to_shared(tma_x, [t * SIZE, 0], full.index(s), ring.index(s))


@gluon.jit
def multiply(out, own, ring, full, free, FAULT: gl.constexpr):
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    o_r, o_c = gl.arange(0, SIZE, gl.SliceLayout(1, PRODUCT)), gl.arange(0, SIZE, gl.SliceLayout(0, PRODUCT))
    zero = gl.zeros([SIZE, SIZE], gl.float32, PRODUCT)
    acc = zero
    own.store((o_r[:, None] * 0 + o_c[None, :]).to(gl.bfloat16))
    if FAULT != "no fence":
        fence_async_shared()
    gl.thread_barrier()
    for t in range(TILES):
        s = t % 2
        if FAULT != "no wait for a full place":
            mbarrier.wait(full.index(s), t // 2 & 1)
        b_x = warpgroup_mma(own, ring.index(s), zero, use_acc=False, is_async=True)
        if FAULT == "given back before the product":
            mbarrier.arrive(free.index(s), count=1)
        if FAULT != "no wait for the product":
            b_x = warpgroup_mma_wait(0, deps=(b_x,))
        acc += b_x
        if FAULT != "no thread barrier":
            gl.thread_barrier()
        if FAULT != "given back before the product":
            mbarrier.arrive(free.index(s), count=1)
        if FAULT == "given back twice":
            mbarrier.arrive(free.index(s), count=1)
    behind = SIZE * SIZE if FAULT == "behind the end" else 0
    gl.store(out + behind + o_r[:, None] * SIZE + o_c[None, :], acc)


@gluon.jit
def kernel(tma_x, out, FAULT: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, SIZE], gl.bfloat16)
    own = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], LAYOUT)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, SIZE, SIZE], tma_x.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2 if FAULT == "an arrival is missing" else 1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [(multiply, (out, own, ring, full, free, FAULT)), (bring, (tma_x, ring, full, free, FAULT))], [1], [24]
    )  # fmt: skip


def outcome(fault, seed):
    """Returns what a run of the kernel says, or whether its result is right."""
    x = torch.randint(-3, 4, (TILES.value * SIZE.value, SIZE.value), generator=torch.Generator().manual_seed(seed)).bfloat16()
    box = [SIZE.value, SIZE.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    out = torch.full(box, torch.nan)
    try:
        run(kernel, TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout), out, grid=(1,), seed=seed, FAULT=fault)
    except (AssertionError, RuntimeError, IndexError) as failure:
        return str(failure)
    row = torch.arange(SIZE.value, dtype=torch.float32) @ x.float().view(TILES.value, *box).sum(0)
    return "right" if torch.equal(out, row.expand(box)) else "wrong"


def test_a_kernel_without_a_fault_is_right():
    assert {outcome("none", seed) for seed in SEEDS} == {"right"}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("no fence", "without a fence"),
        ("no thread barrier", "a thread barrier is missing"),
        ("no wait for the product", "before it is waited for"),
        ("too many bytes", "nobody can go on"),
        ("an arrival is missing", "nobody can go on"),
        ("behind the end", "of a storage of 16384 bytes"),
    ],
)
def test_what_is_always_told(fault, says):
    assert all(says in outcome(fault, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    "fault", ["no wait for a free place", "no wait for a full place", "given back before the product", "given back twice"]
)
def test_what_some_orders_tell(fault):
    """Copies and groups go on in random order, so that a few runs show what a GPU may not show in a thousand."""
    assert {outcome(fault, seed) for seed in SEEDS} != {"right"}


@gluon.jit
def hand_over(x, out, arrived, FAULT: gl.constexpr):
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    place = gl.allocate_shared_memory(gl.float32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    o_x = gl.arange(0, SIZE, LINE)
    for _ in gl.static_range(2 if FAULT == "one place twice" else 1):
        async_copy.async_copy_global_to_shared(place, x + o_x)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    gl.store(out + o_x, place.load(LINE))
    if FAULT != "counted too early":
        gl.thread_barrier()
    gl.atomic_add(arrived, 1, sem="acq_rel")


@pytest.mark.parametrize(
    ("fault", "says"),
    [("none", ""), ("one place twice", "the same place"), ("counted too early", "a thread barrier is missing")],
)
def test_copies_and_counts(fault, says):
    x, out, arrived = torch.randn(SIZE.value), torch.full([SIZE.value], torch.nan), torch.zeros(1, dtype=torch.int32)
    if says:
        with pytest.raises(AssertionError, match=says):
            run(hand_over, x, out, arrived, grid=(1,), FAULT=fault)
    else:
        run(hand_over, x, out, arrived, grid=(2,), FAULT=fault)
        assert_equal("out", out, x)
        assert arrived.item() == 2


def test_it_goes_on_after_a_fault():
    """A failed run leaves no group of warps behind that would disturb the next one."""
    assert "nobody" in outcome("an arrival is missing", 0)
    assert outcome("none", 0) == "right"


INTEGERS = np.array([-7, -6, -1, 0, 1, 5, 7, 2**31 - 1, -(2**31)], np.int32)


@pytest.mark.parametrize("by", [3, -3, 7])
def test_integers_divide_towards_zero(by):
    x, y = Value(INTEGERS, gl.int32), Value(np.full_like(INTEGERS, by), gl.int32)
    exact = [abs(int(i)) // abs(by) * (1 if (i < 0) == (by < 0) else -1) for i in INTEGERS]
    assert (x // y).data.tolist() == exact
    assert (x % y).data.tolist() == [int(i) - q * by for i, q in zip(INTEGERS, exact, strict=True)]


def test_types_of_results():
    half, wide = Value(np.float16(1), gl.float16), Value(np.float32(1), gl.float32)
    i32, i64, bit = Value(np.int32(5), gl.int32), Value(np.int64(5), gl.int64), Value(np.bool_(True), gl.int1)
    results = half * 2.5, half * wide, i32 * 2, i32 + i64, i32 * 0.5, i32 / i32, bit & bit, i32 < i64
    assert [x.dtype.name for x in results] == ["fp16", "fp32", "int32", "int64", "fp32", "fp32", "int1", "int1"]
    assert (Value(np.int32(2**31 - 1), gl.int32) + 1).data == -(2**31)
    assert set(OPERATIONS) >= {"add", "floordiv", "rshift", "xor", "le"}


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [(gl.bfloat16, torch.bfloat16), (gl.float16, torch.float16), (gl.float8e4nv, torch.float8_e4m3fn)],
    ids=str,
)
def test_numbers_are_rounded_as_by_pytorch(dtype, torch_dtype):
    x = torch.randn(1000) * torch.logspace(-6, 2, 1000)
    x[:2] = torch.tensor([0.0, torch.nan])
    expected = x.to(torch_dtype)
    held = stored(x.numpy(), dtype)
    assert_equal("rounded", torch.from_numpy(held.astype(np.float32)), expected.float())
    assert_equal("bits", torch.from_numpy(from_bits(bits_of(held, dtype), dtype).astype(np.float32)), expected.float())


@pytest.mark.parametrize("width", [128, 64, 32])
def test_swizzled_tiles_hold_each_element_once(width):
    """Rows of a panel are `width` bytes, eight rows of a column lie in different banks, and a tile begins where it should."""
    layout = gl.NVMMASharedLayout(width, 16, 2)
    places = places_of((3, 16, 128), layout, 2)
    assert sorted(places.reshape(-1).tolist()) == list(range(3 * 16 * 128))
    assert (places[1] == places[0] + 16 * 128).all()
    banks = places[0, :8, 0] * 2 // 16 % 8
    assert len(set(banks.tolist())) == 8
    assert (places[0, 0, : width // 2] == np.arange(width // 2)).all()
