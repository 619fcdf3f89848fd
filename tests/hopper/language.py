# SPDX-License-Identifier: MIT
"""What kernels call, by the names of the kernel language."""

from __future__ import annotations

import builtins
from types import SimpleNamespace

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper.mbarrier import MBarrierLayout

from openmsa.block_scores.gluon_sm90_few import STORE
from openmsa.sparse_attention.gluon_sm90_union import TO_FP16
from tests.hopper import memory, units
from tests.hopper.machine import current
from tests.hopper.values import Value, promoted, stored, value_of

LAYOUTS = [
    "AutoLayout",
    "BlockedLayout",
    "CoalescedLayout",
    "DistributedLinearLayout",
    "DotOperandLayout",
    "NVMMADistributedLayout",
    "SliceLayout",
]


def ranged(*bounds):
    """Counts as `range` does, in numbers of the language."""
    return (value_of(i) for i in builtins.range(*map(int, bounds)))


def inline_asm(code, constraints, arguments, dtype, is_pure, pack):
    """Does what the few pieces of assembly do that kernels hold."""
    found = ASSEMBLY[" ".join(code.split())](*arguments)
    results, types = (found, dtype) if isinstance(dtype, tuple) else ((found,), (dtype,))
    assert [x.dtype for x in results] == list(types)
    return found


def _halves(low, high, dtype):
    bits = [memory.bits_of(stored(x.data, dtype), dtype).astype(np.uint32) for x in (low, high)]
    return Value((bits[0] | bits[1] << 16).view(np.int32), gl.int32)


def _numbers_of_codes(words):
    """Converts words of four e4m3 codes to two words of two float16 numbers."""
    codes = np.ascontiguousarray(words.data).view(np.uint8).reshape(*words.shape, 2, 2)
    bits = memory.bits_of(stored(memory.from_bits(codes, gl.float8e4nv), gl.float16), gl.float16)
    pairs = np.ascontiguousarray(bits).view(np.int32)[..., 0]
    return Value(pairs[..., 0], gl.int32), Value(pairs[..., 1], gl.int32)


def _store(pointer, value, mask):
    current().memory.store(pointer.data, value.data, value.dtype, mask.data != 0)
    return mask * 0


def _float_function(function):
    def compute(x):
        with np.errstate(all="ignore"):
            return Value(stored(function(x.data), x.dtype), x.dtype)

    return compute


ASSEMBLY = {
    "mov.b32 $0, $1;": lambda x: x,
    "mov.b32 $0, $2; mov.b32 $1, $3;": lambda x: x,
    "{ .reg .pred p; setp.ge.s32 p, $1, 0; @p bra done; nanosleep.u32 1; done: mov.b32 $0, $1; }": lambda x: x,
    " ".join(STORE.value.split()): _store,
    "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda low, high: _halves(low, high, gl.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": lambda low, high: _halves(low, high, gl.float16),
    " ".join(TO_FP16.value.split()): _numbers_of_codes,
    "rcp.approx.ftz.f32 $0, $1;": _float_function(lambda x: 1 / x),
    "lg2.approx.ftz.f32 $0, $1;": _float_function(np.log2),
    "ex2.approx.ftz.f32 $0, $1;": _float_function(np.exp2),
}


def where(condition, x, y):
    x, y, dtype = promoted(x, y)
    return Value(np.where(value_of(condition).data, x, y), dtype)


def _extremum(function):
    def compute(x, y):
        x, y, dtype = promoted(x, y)
        return Value(function(x, y), dtype)

    return compute


def _reduced(function):
    def compute(x, axis):
        return Value(function(x.data, axis).astype(x.data.dtype), x.dtype)

    return compute


def full(shape, value, dtype, layout=None):
    return Value(np.full(tuple(shape), stored(value_of(value).data, dtype)), dtype)


def join(x, y):
    assert x.dtype == y.dtype
    return Value(np.stack([x.data, y.data], -1), x.dtype)


def gather(x, which, axis):
    return Value(np.take_along_axis(x.data, which.data, axis), x.dtype)


def associative_scan(x, axis, combine):
    """Combines each number with all before it; here by addition, whose functions are called with numbers elsewhere."""
    assert combine(1, 2) == 3, "other scans are not interpreted"
    return Value(np.cumsum(x.data, axis, dtype=x.data.dtype), x.dtype)


def multiple_of(x, factor):
    assert not (x.data % factor).any(), f"the kernel promises multiples of {factor}"
    return x


def static_assert(condition, message=""):
    assert condition, message


class Language:
    """The names of the kernel language; those that are not here, such as types, are its own."""

    load, store, atomic_add = staticmethod(memory.load), staticmethod(memory.store), staticmethod(memory.atomic_add)
    inline_asm_elementwise, where, join = staticmethod(inline_asm), staticmethod(where), staticmethod(join)
    full, gather, multiple_of = staticmethod(full), staticmethod(gather), staticmethod(multiple_of)
    associative_scan = staticmethod(associative_scan)
    static_assert, static_range = staticmethod(static_assert), builtins.range
    allocate_shared_memory = staticmethod(memory.Shared.allocate)
    warp_specialize, thread_barrier = staticmethod(units.warp_specialize), staticmethod(units.thread_barrier)
    minimum, maximum = staticmethod(_extremum(np.fmin)), staticmethod(_extremum(np.fmax))  # A number passes over NaN.
    max, min = staticmethod(_reduced(np.fmax.reduce)), staticmethod(_reduced(np.fmin.reduce))
    sum = staticmethod(_reduced(lambda x, axis: np.sum(x, axis, dtype=x.dtype)))
    exp2, exp = staticmethod(_float_function(np.exp2)), staticmethod(_float_function(np.exp))
    log2, log = staticmethod(_float_function(np.log2)), staticmethod(_float_function(np.log))
    abs = staticmethod(_float_function(np.abs))

    def __getattr__(self, name):
        if name in LAYOUTS:
            return lambda *arguments, **more: None  # No layout of registers changes a result.
        found = getattr(gl, name)
        is_function = getattr(found, "__triton_builtin__", False) or hasattr(found, "fn")
        assert not is_function, f"gl.{name} is not interpreted"
        return found

    @staticmethod
    def arange(start, end, layout=None):
        return Value(np.arange(start, end, dtype=np.int32), gl.int32)

    @staticmethod
    def zeros(shape, dtype, layout=None):
        return full(shape, 0, dtype)

    @staticmethod
    def zeros_like(x):
        return full(x.shape, 0, x.dtype)

    @staticmethod
    def to_tensor(x):
        return value_of(x)

    @staticmethod
    def cdiv(x, y):
        return (x + (y - 1)) // y

    @staticmethod
    def convert_layout(x, layout, assert_trivial=False):
        return x

    @staticmethod
    def program_id(axis):
        return value_of(current().program.ids[axis])

    @staticmethod
    def num_programs(axis):
        return value_of(current().program.grid[axis])

    @staticmethod
    def num_warps():
        return current().program.num_warps


NAMES = {
    "fence_async_shared": units.fence_async_shared,
    "warpgroup_mma": units.warpgroup_mma,
    "warpgroup_mma_wait": units.warpgroup_mma_wait,
    "mma_v2": units.mma_v2,
    "gdc_launch_dependents": lambda: None,
    "gdc_wait": lambda: None,
}
"""Functions that kernels import by name."""
MODULES = {
    "triton.experimental.gluon.language": Language(),
    "triton.language": Language(),
    "triton.experimental.gluon.language.nvidia.hopper.mbarrier": SimpleNamespace(
        init=units.init, expect=units.expect, arrive=units.arrive, wait=units.wait, MBarrierLayout=MBarrierLayout
    ),
    "triton.experimental.gluon.language.nvidia.hopper.tma": SimpleNamespace(
        async_copy_global_to_shared=units.copy_box
    ),
    "triton.experimental.gluon.language.nvidia.ampere.async_copy": SimpleNamespace(
        async_copy_global_to_shared=units.copy_elements, commit_group=units.commit_group, wait_group=units.wait_group
    ),
}  # fmt: skip
