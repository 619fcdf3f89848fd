# SPDX-License-Identifier: MIT
"""Instructions that compute registers from registers, each thread for itself."""

from __future__ import annotations

import numpy as np

U16, U32, U64, I32, I64, F32 = np.uint16, np.uint32, np.uint64, np.int32, np.int64, np.float32
TYPES = {
    "b16": U16, "u16": U16, "b32": U32, "u32": U32, "s32": I32, "b64": U64, "u64": U64, "s64": I64, "f32": F32,
    "pred": np.bool_,
}  # fmt: skip
BITS = {1: np.bool_, 2: U16, 4: U32, 8: U64}
"""The type of registers of so many bytes; a predicate is one."""
ROUNDING = ("rn", "ftz", "approx")


def bits_of(values):
    """Returns numbers as registers hold them."""
    return values.view(BITS[values.itemsize])


def from_bfloat16(bits):
    """Returns numbers of 16 bits as 32 bits."""
    return (bits.astype(U32) << U32(16)).view(F32)


def to_bfloat16(values):
    """Returns the bits of numbers, rounded to the nearest of 16 bits."""
    bits = values.view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(values), U16(0x7FFF), rounded.astype(U16))


def _fused(x, y, z):
    return (x.astype(np.float64) * y + z).astype(F32)


def _divided(x, y):
    """Returns quotients that are rounded towards zero."""
    return np.trunc(x.astype(np.float64) / np.where(y == 0, 1, y)).astype(x.dtype)


def _product(x, y):
    """Returns whole products of 32-bit integers."""
    wide = I64 if x.dtype == I32 else U64
    return x.astype(wide) * y.astype(wide)


SAME_TYPE = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mul.lo": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.logical_not, "max": np.fmax, "min": np.fmin, "div": _divided, "fma": _fused,
    "min.relu": lambda x, y: np.maximum(np.minimum(x, y), 0), "mad.lo": lambda x, y, z: x * y + z,
    "rcp": lambda x: F32(1) / x, "ex2": np.exp2, "mul.hi": lambda x, y: (_product(x, y) >> 32).astype(x.dtype),
    "mul.wide": _product,
    "setp.eq": np.equal, "setp.lt": np.less, "setp.le": np.less_equal, "setp.gt": np.greater, "setp.ge": np.greater_equal,
    "setp.ne": lambda x, y: (x < y) | (x > y),
}  # fmt: skip
"""Instructions whose operands are of the type that the opcode ends with."""
CONVERSIONS = {
    "f32.bf16": (U16, from_bfloat16), "f32.s32": (I32, lambda x: x.astype(F32)), "s64.s32": (I32, lambda x: x.astype(I64)),
    "u64.u32": (U32, lambda x: x.astype(U64)), "u32.u16": (U16, lambda x: x.astype(U32)),
    "u32.u64": (U64, lambda x: x.astype(U32)),
}  # fmt: skip


def _field(x, start, count):
    """Returns a field of bits of integers, signed as they are."""
    found = (x.astype(I64) >> start) & ((1 << count) - 1)
    return np.where(found >> (count - 1), found - (1 << count), found) if x.dtype == I32 else found


def compute(instruction, read):
    """Returns the bits that an instruction gives each thread. read(i, kind): its operand i, as numbers of this kind."""
    *middle, last = (x for x in instruction.parts if x not in ROUNDING)
    name, kind, given = ".".join([instruction.name, *middle]), TYPES.get(last), instruction.operands
    if instruction.name == "cvt" and middle[0] == "bf16x2":
        high, low = (to_bfloat16(read(i, F32)).astype(U32) for i in (1, 2))
        result = high << U32(16) | low
    elif instruction.name == "cvt":
        source, convert = CONVERSIONS[".".join([*middle, last])]
        result = convert(read(1, source))
    elif name == "mad.wide":
        result = _product(read(1, kind), read(2, kind))
        result += read(3, result.dtype)
    elif name == "selp":
        result = np.where(read(3, np.bool_), read(1, kind), read(2, kind))
    elif name in ("shl", "shr"):
        shift = (np.left_shift, np.right_shift)[name == "shr"]
        result = shift(read(1, kind), read(2, U32).astype(kind))
    elif name == "bfe":
        result = _field(read(1, kind), *given[2:]).astype(kind)
    else:
        result = SAME_TYPE[name](*(read(i, kind) for i in range(1, len(given))))
    return bits_of(result)
