# SPDX-License-Identifier: MIT
"""Without a GPU, Triton kernels run in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from types import FunctionType, ModuleType

import pytest
import torch

from tests import instructions

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported


def _widen_bfloat16() -> None:
    """Makes the interpreter compute bfloat16 in float32 and round the result back, as the hardware does: it keeps bfloat16 as
    raw 16-bit integers, on whose bits its arithmetic works. Its conversions of bfloat16 and float8 are replaced by
    PyTorch's."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def is_bf16(handle: object) -> bool:
        return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16

    def widen(handle: object) -> object:
        if isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.float8e4nv:
            return create_fp_to_fp(None, handle, tl.float32, None)
        if not is_bf16(handle):
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def narrow(handle: TensorHandle) -> TensorHandle:
        bits = handle.data.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        rounded = np.where(np.isnan(handle.data), 0x7FC0, rounded)
        return TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    def patched(name: str, keep: bool) -> None:
        method = getattr(InterpreterBuilder, name)

        @functools.wraps(method)
        def call(self: object, *arguments: object, **options: object) -> TensorHandle:
            wide = [widen(a) for a in arguments]
            result = method(self, *wide, **options)
            return narrow(result) if keep and is_bf16(arguments[0]) else result

        setattr(InterpreterBuilder, name, call)

    # The GPU's maximum of NaN and a number is the number; the interpreter's is NaN.
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    for name in ("fadd", "fsub", "fmul", "fdiv", "fneg", "maximumf", "minimumf", "maxnumf", "minnumf"):
        if hasattr(InterpreterBuilder, f"create_{name}"):
            patched(f"create_{name}", keep=True)
    for name in ("OLT", "OLE", "OGT", "OGE", "OEQ", "ONE", "ULT", "ULE", "UGT", "UGE", "UEQ", "UNE"):
        patched(f"create_fcmp{name}", keep=False)

    def create_dot(self: object, a: object, b: object, d: TensorHandle, *options: object) -> TensorHandle:
        """Multiplies in float64, whose order of sums rounding to float32 hardly shows: a GPU's product has the same bits of a
        row wherever it stands, but BLAS sums rows in orders of its own."""
        with np.errstate(all="ignore"):
            product = np.matmul(*(widen(x).data.astype(np.float64) for x in (a, b)))
            return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
    cast, convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def cast_impl(self: object, source: TensorHandle, to: tl.dtype) -> TensorHandle:
        """Its own cuts bits off and loses subnormal numbers."""
        if is_bf16(source):
            wide = widen(source)
            return wide if to.scalar == tl.float32 else cast(self, wide, to)
        if to.scalar == tl.bfloat16:
            return narrow(cast(self, source, tl.float32))
        return cast(self, source, to)

    def create_fp_to_fp(self: object, source: TensorHandle, to: tl.dtype, rounding: object) -> TensorHandle:
        """Its own rounds ties up and knows no NaN; these round as PyTorch and saturate as the hardware does."""
        if source.dtype.scalar == tl.float8e4nv:
            numbers = torch.from_numpy(source.data.view(np.uint8).copy()).view(torch.float8_e4m3fn).float().numpy()
            wide = TensorHandle(numbers, tl.float32)
            return wide if to.scalar == tl.float32 else cast_impl(self, wide, to)
        if to.scalar == tl.float8e4nv:
            numbers = torch.from_numpy(cast_impl(self, source, tl.float32).data.copy()).clamp(-448, 448)
            return TensorHandle(numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), tl.float8e4nv)
        return convert(self, source, to, rounding)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp = cast_impl, create_fp_to_fp


def _quicken() -> None:
    """Makes Triton's interpreter take less than half its time without changing a result: it would prepare the language again at
    each call of a device function, and compute whether integers overflow, which it tells only in debug mode."""
    import triton.language as tl
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang

    @functools.cache
    def languages(function: FunctionType) -> list[ModuleType]:
        """These modules are prepared for it."""
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def prepare_once(function: FunctionType) -> object:
        unprepared = any(tl.core.is_builtin(language.load) for language in languages(function))
        return prepare(function) if unprepared else interpreter._LangPatchScope()

    interpreter._patch_lang = prepare_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_types() -> None:
    """Makes the interpreter's types once each. It would make the type of every tensor anew, spell the name of every tuple's
    type, and write down the numpy dtypes of all types whenever it looks one up."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    dtype_of, make, made = functools.cache(interpreter._get_np_dtype), tl.block_type.__init__, {}

    def numpy_dtype(kind: tl.dtype) -> np.dtype:
        return np.dtype(np.uint64) if isinstance(kind.scalar, tl.pointer_type) else dtype_of(kind.scalar)

    def remembered(self: tl.block_type, element_ty: tl.dtype, shape: list[int]) -> None:
        if isinstance(element_ty, tl.pointer_type):  # It cannot be hashed.
            make(self, element_ty, shape)
            return
        key = (element_ty, *(getattr(size, "value", size) for size in shape))
        if key not in made:
            make(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    def unnamed(self: tl.tuple_type, types: list[tl.dtype], fields: list[str] | None = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    interpreter._get_np_dtype = numpy_dtype
    tl.block_type.__init__, tl.tuple_type.__init__ = remembered, unnamed
    tl.tuple_type.name = property(lambda self: "[" + ",".join(map("{}:{}".format, self.fields, self.types)) + "]")


def _reduce_by_slice() -> None:
    """Makes the interpreter reduce by functions that it does not know, the exchanges of `tl.sort` among them, a slice at a time
    along the axis. It would do so element by element, in the same order."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import ReduceOps

    by_element = ReduceOps.generic_reduce

    def by_slice(self: ReduceOps, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
        if self.axis is None:
            return by_element(self, inputs)

        def tensors(values: tuple[np.ndarray, ...]) -> list[tl.tensor]:
            return [self.to_tensor(value, x.dtype) for value, x in zip(values, inputs, strict=True)]

        def combine(one: list[tl.tensor], other: list[tl.tensor]) -> tuple[tl.tensor, ...]:
            found = self.combine_fn.fn(*one, *other)
            return found if isinstance(found, tuple) else (found,)

        arrays = [x.handle.data for x in inputs]
        shape = list(arrays[0].shape)
        shape[self.axis : self.axis + 1] = [1] * bool(self.keep_dims)
        found = functools.reduce(combine, map(tensors, zip(*(np.moveaxis(x, self.axis, 0) for x in arrays), strict=True)))
        return tensors(tuple(x.handle.data.reshape(shape) for x in found))

    ReduceOps.generic_reduce = by_slice


if os.environ.get("TRITON_INTERPRET") == "1":
    _widen_bfloat16()
    _quicken()
    _remember_types()
    _reduce_by_slice()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels written in Gluon run without a GPU, as they do on a Hopper GPU (`tests/hopper`)."""
    if torch.cuda.is_available():
        return
    from triton.experimental.gluon._runtime import GluonJITFunction

    from openmsa.block_scores import triton_route
    from openmsa.dense_attention import triton_forward
    from openmsa.runtime import launch
    from openmsa.sparse_attention import triton_backward, triton_prefill
    from tests.hopper.launch import run

    monkeypatch.setattr(GluonJITFunction, "run", run)
    monkeypatch.setattr(launch, "_observed", lambda kernel: True)  # Launches go through the kernel itself.
    for module in (triton_route, triton_forward, triton_backward, triton_prefill):
        monkeypatch.setattr(module, "runs_hopper_kernels", lambda device: True)


@pytest.fixture(params=instructions.ALL)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has C kernels compiled for this processor's instructions, and for those of older ones."""
    instructions.use(monkeypatch, request.param)
