# SPDX-License-Identifier: MIT
"""Values of registers: arrays with the types, the promotion and the rounding of the kernel language."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from triton.experimental.gluon import language as gl

STORED = {
    "int1": np.bool_, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "fp16": np.float16, "bf16": np.float32, "fp32": np.float32, "fp64": np.float64, "fp8e4nv": np.float32,
}  # fmt: skip
"""Numbers of each type are held in arrays of these; bfloat16 and e4m3 as float32 numbers that they can represent."""
FLOATS = ("fp8e4nv", "fp16", "bf16", "fp32", "fp64")
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def is_pointer(dtype):
    return isinstance(dtype, gl.pointer_type)


def is_float(dtype):
    return not is_pointer(dtype) and dtype.name in FLOATS


def item_bytes(dtype):
    return 8 if is_pointer(dtype) else max(dtype.primitive_bitwidth // 8, 1)


def stored(array, dtype):
    """Returns the array as `dtype` is held, rounded to its numbers."""
    array = np.asarray(array)
    if dtype.name == "bf16" and array.dtype != np.float32:
        array = array.astype(np.float32)
    if dtype.name == "bf16":
        bits = array.view(np.uint32) if array.ndim else array.reshape(1).view(np.uint32).reshape(())
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) & np.uint32(0xFFFF0000)  # ties to even
        return np.where(np.isnan(array), np.float32(np.nan), np.asarray(nearest, np.uint32).view(np.float32))
    if dtype.name == "fp8e4nv":
        codes = torch.from_numpy(np.array(array, np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.float().numpy()
    return array.astype(STORED[dtype.name], copy=False)


def bits_of(data, dtype):
    """Returns the bits of held numbers."""
    data = np.asarray(data, order="C")
    if dtype.name == "bf16":
        return (data.view(np.uint32) >> 16).astype(np.uint16)
    if dtype.name == "fp8e4nv":
        return torch.from_numpy(data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return data.view(BITS[item_bytes(dtype)])


def from_bits(bits, dtype):
    """Returns numbers as they are held, from their bits."""
    bits = np.asarray(bits, order="C")
    if dtype.name == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype.name == "fp8e4nv":
        return torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn).float().numpy()
    return bits.view(STORED[dtype.name])


class Value:
    """A number or a block of numbers in registers. The data of a pointer are addresses in bytes."""

    def __init__(self, data, dtype):
        self._data = np.asarray(data)
        self.dtype = dtype

    @property
    def data(self):
        return self._data

    @property
    def shape(self):
        return self._data.shape

    @property
    def type(self):
        return SimpleNamespace(layout=None, shape=self.shape, scalar=self.dtype, is_block=lambda: self.shape != ())

    def to(self, dtype, bitcast=False):
        if is_pointer(dtype):
            assert is_pointer(self.dtype)
            return Value(self.data, dtype)
        if not bitcast:
            return Value(stored(self.data != 0 if dtype.name == "int1" else self.data, dtype), dtype)
        assert item_bytes(dtype) == item_bytes(self.dtype)
        return Value(from_bits(bits_of(self.data, self.dtype), dtype).reshape(self.shape), dtype)

    def reshape(self, *shape):
        return Value(self.data.reshape(shape[0] if isinstance(shape[0], list | tuple) else shape), self.dtype)

    def permute(self, *order):
        return Value(self.data.transpose(order[0] if isinstance(order[0], list | tuple) else order), self.dtype)

    def split(self):
        assert self.shape[-1] == 2
        return Value(self.data[..., 0], self.dtype), Value(self.data[..., 1], self.dtype)

    def __getitem__(self, key):
        assert all(k is None or k == slice(None) for k in (key if isinstance(key, tuple) else (key,)))
        return Value(self.data[key], self.dtype)

    def __bool__(self):
        assert self.shape == (), "only one number decides a branch"
        return bool(self.data)

    def __index__(self):
        assert self.shape == ()
        return int(self.data)

    def __neg__(self):
        return Value(stored(-self.data, self.dtype), self.dtype)

    def __invert__(self):
        return Value(~self.data, self.dtype)


def value_of(x):
    """Returns a value as it is, and a Python number as the language takes it."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool | np.bool_):
        return Value(np.bool_(x), gl.int1)
    if isinstance(x, int):
        return Value(np.int64(x), gl.int64) if abs(x) >= 1 << 31 else Value(np.int32(x), gl.int32)
    return Value(np.float32(x), gl.float32)


def _beside(number, dtype):
    """Returns the type that a Python number has beside values of a type."""
    if isinstance(number, bool):
        return dtype
    if isinstance(number, int):
        wide = not is_float(dtype) and abs(number) >= 1 << min(8 * item_bytes(dtype), 32) - 1
        return gl.int64 if wide else gl.int32 if dtype.name == "int1" else dtype
    return dtype if is_float(dtype) else gl.float32


def common_type(x, y):
    """Returns the type in which two values, or a value and a Python number, are computed."""
    if not isinstance(x, Value) or not isinstance(y, Value):
        if isinstance(x, Value):
            return _beside(y, x.dtype)
        return _beside(x, y.dtype) if isinstance(y, Value) else common_type(value_of(x), y)
    a, b = x.dtype, y.dtype
    if is_float(a) != is_float(b):
        return a if is_float(a) else b
    if is_float(a):
        return gl.float32 if {a.name, b.name} == {"fp16", "bf16"} else max(a, b, key=lambda t: FLOATS.index(t.name))
    return max(a, b, key=lambda t: (t.primitive_bitwidth, t.name.startswith("u")))


def promoted(x, y):
    """Returns two operands as arrays of their common type, and the type."""
    dtype = common_type(x, y)
    x, y = value_of(x), value_of(y)
    assert not (x.shape and y.shape and len(x.shape) != len(y.shape)), f"shapes {x.shape} and {y.shape} need the same rank"
    return stored(x.data, dtype), stored(y.data, dtype), dtype


def _truncated(x, y):
    """Divides integers as the hardware does, towards 0."""
    quotient = np.floor_divide(x, y)
    return quotient + ((quotient * y != x) & ((x < 0) != (y < 0))).astype(quotient.dtype)


def _arithmetic(operation):
    def compute(x, y):
        for pointer, offset in ((x, y), (y, x)):
            if isinstance(pointer, Value) and is_pointer(pointer.dtype):
                size = item_bytes(pointer.dtype.element_ty)
                return Value(operation(pointer.data, value_of(offset).data.astype(np.int64) * size), pointer.dtype)
        a, b, dtype = promoted(x, y)
        with np.errstate(all="ignore"):
            return Value(stored(operation(a, b), dtype), dtype)

    return compute


def _compared(operation):
    def compute(x, y):
        a, b, _ = promoted(x, y)
        return Value(operation(a, b), gl.int1)

    return compute


def _divided(x, y):
    a, b, dtype = promoted(x, y)
    dtype = dtype if dtype.name in ("fp32", "fp64") else gl.float32
    with np.errstate(all="ignore"):
        return Value(stored(a, dtype) / stored(b, dtype), dtype)


def _shifted(operation):
    def compute(x, y):
        dtype = x.dtype if isinstance(x, Value) else gl.int32
        return Value(operation(value_of(x).data, value_of(y).data.astype(STORED[dtype.name])), dtype)

    return compute


OPERATIONS = {
    "add": _arithmetic(np.add), "sub": _arithmetic(np.subtract), "mul": _arithmetic(np.multiply),
    "floordiv": _arithmetic(_truncated), "mod": _arithmetic(lambda x, y: x - _truncated(x, y) * y),
    "truediv": _divided, "and": _arithmetic(np.bitwise_and), "or": _arithmetic(np.bitwise_or),
    "xor": _arithmetic(np.bitwise_xor), "lshift": _shifted(np.left_shift), "rshift": _shifted(np.right_shift),
    "lt": _compared(np.less), "le": _compared(np.less_equal), "gt": _compared(np.greater), "ge": _compared(np.greater_equal),
    "eq": _compared(np.equal), "ne": _compared(np.not_equal),
}  # fmt: skip
for _name, _operation in OPERATIONS.items():
    setattr(Value, f"__{_name}__", _operation)
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{_name}__", lambda x, y, operation=_operation: operation(y, x))
