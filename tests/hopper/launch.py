# SPDX-License-Identifier: MIT
"""Launches of kernels written in Gluon run here where there is no Hopper GPU."""

from __future__ import annotations

import builtins
import functools
import itertools
import random
from types import FunctionType, ModuleType

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.hopper import language
from tests.hopper.machine import Machine, Program
from tests.hopper.memory import Memory
from tests.hopper.units import Boxes
from tests.hopper.values import Value, value_of

TYPES = {
    torch.float32: gl.float32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float64: gl.float64,
    torch.float8_e4m3fn: gl.float8e4nv, torch.int8: gl.int8, torch.uint8: gl.uint8, torch.int16: gl.int16,
    torch.int32: gl.int32, torch.int64: gl.int64, torch.bool: gl.int1,
}  # fmt: skip
TOGETHER = 4
"""So many programs run at a time."""


def _replaced(value):
    """Returns what a name of a kernel's module stands for in the interpreter."""
    if isinstance(value, ModuleType):
        return language.MODULES.get(value.__name__, value)
    if isinstance(value, JITFunction | InterpretedFunction):
        return lambda *arguments, **named: interpreted(value.fn)(*arguments, **named)
    if isinstance(value, gl.constexpr):
        return value.value
    name = getattr(value, "__name__", None)
    if name in language.NAMES and getattr(value, "__module__", "").startswith("triton."):
        return language.NAMES[name]
    return value


@functools.cache
def interpreted(function):
    """Returns a function of the kernel language as a Python function over values of the interpreter."""
    names = {name: _replaced(function.__globals__[name]) for name in _names(function.__code__) & set(function.__globals__)}
    names.update(__builtins__=builtins, range=language.ranged)
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def _names(code):
    inner = (x for x in code.co_consts if hasattr(x, "co_names"))
    return set(code.co_names).union(*map(_names, inner))


def _argument(x, memory):
    """Returns an argument of a launch as kernels see it."""
    if isinstance(x, torch.Tensor):
        memory.add(x)
        return Value(x.data_ptr(), gl.pointer_type(TYPES[x.dtype]))
    if isinstance(x, TensorDescriptor):
        memory.add(x.base)
        return Boxes(x, memory, TYPES[x.base.dtype])
    if isinstance(x, tuple):
        fields = [_argument(field, memory) for field in x]
        return type(x)(*fields) if hasattr(x, "_fields") else tuple(fields)
    return value_of(x) if isinstance(x, bool | int | float) else x


def run(kernel, *arguments, grid, warmup=False, seed=None, **constants):
    """Runs the programs of a launch, a few at a time, in random order."""
    function = interpreted(kernel.fn)
    parameters = [parameter.name for parameter in kernel.params]
    memory = Memory()
    given = [_argument(x, memory) for x in arguments]
    named = {name: x for name, x in constants.items() if name in parameters}
    assert len(given) + len(named) == len(parameters), f"{kernel.__name__} takes {parameters}"
    grid = (*grid, 1, 1)[:3]
    seed = random.randrange(1 << 32) if seed is None else seed
    chance = random.Random(seed)
    ids = list(itertools.product(*map(range, grid)))
    chance.shuffle(ids)
    try:
        for i in range(0, len(ids), TOGETHER):
            machine = Machine(chance)
            for one in ids[i : i + TOGETHER]:
                program = Program(memory, one, grid, constants.get("num_warps", 4))
                machine.add(program, lambda: function(*given, **named))
            machine.run()
    except Exception as failure:
        failure.add_note(f"{kernel.__name__} ran with seed {seed}")
        raise
