# SPDX-License-Identifier: MIT
"""A public function is an operator while a graph is traced; otherwise a row of its stage's table serves its checked call. Every
stage has one table of implementations; refusals are sentences, and nothing falls back silently."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

import torch

from openmsa.runtime import compiler_key, explanation, tracing
from openmsa.runtime.checks import format_of, needs_grad
from openmsa.runtime.explanation import Explanation

F = TypeVar("F", bound=Callable[..., Any])
CallT = TypeVar("CallT", bound="tuple[Any, ...]")
"""The checked call of a stage is a named tuple, whose fields are the parameters of every implementation, in order."""


def operator(name: str) -> Callable[[F], F]:
    """Decorates a public function, which is the operator `name`, ``"package::function"``, while `torch.compile` or
    `torch.export` traces a graph: one node there, whatever it reads or launches. Eager calls pass straight through."""

    def decorate(function: F) -> F:
        tracing.FUNCTIONS[name] = function
        parameters = inspect.signature(function).parameters.values()
        names = tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(function)
        def public(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() and len(args) <= len(names):
                return tracing.TRACED[name](dict(zip(names, args, strict=False)) | kwargs)
            if torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
                tracing.refuse_transforms(function.__qualname__, kwargs.get("impl"))
            return function(*args, **kwargs)

        return cast(F, public)

    return decorate


def never(call: Any) -> None:
    """Refuses no call."""


@dataclass(frozen=True)
class Implementation(Generic[CallT]):
    """An implementation is one way to run a stage: a row of the stage's table.

    name:     what ``impl=`` calls it.
    path:     ``"package.module:function"``, imported when first used; the function takes the fields of a call in order.
    refuse:   takes a checked call and returns None when this implementation can serve it, else the reason, a sentence.
    reserve:  takes a checked call and returns why ``impl="auto"`` passes this implementation over although it could run, or
              None.
    backward: ``"package.module:function"``, which computes gradients. The function takes the fields of a call in order, the
              results in their places, and the gradients of the results, where the stage's recorder asks for nothing else. None:
              PyTorch differentiates the implementation, or none are computed.
    """

    name: str
    path: str
    refuse: Callable[[CallT], str | None]
    reserve: Callable[[CallT], str | None] = never
    backward: str | None = None

    def load(self) -> Callable[..., Any]:
        """Imports and returns the function."""
        module, function = _imported(self.path)
        return getattr(module, function)

    def load_backward(self) -> Callable[..., Any]:
        """Imports and returns the function that computes gradients."""
        if self.backward is None:
            raise TypeError(f"{self.name} has no function that computes gradients")
        module, function = _imported(self.backward)
        return getattr(module, function)


@functools.cache
def _imported(path: str) -> tuple[ModuleType, str]:
    """Imports the module of a row and returns it with the name of the row's function."""
    module, _, function = path.partition(":")
    if ".triton_" in module:
        compiler_key.remember()
    return importlib.import_module(module), function


class Stage(Generic[CallT]):
    """A stage is a public operation: the public function, the function that checks its arguments, and the table of its
    implementations in order of preference.

    ``check_call`` takes each argument of the public function but ``impl``, none left out, and returns the checked call.
    ``recorder`` is the ``"package.module:function"`` that runs a row which has a backward, so that autograd can call it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        check_call: Callable[..., CallT],
        table: tuple[Implementation[CallT], ...],
        name: str | None = None,
        recorder: str | None = None,
    ) -> None:
        self.name, self.check_call, self.table = name or function.__name__, check_call, table
        self.recorder = recorder
        self.signature = inspect.signature(function)

    def check(self, *args: Any, **kwargs: Any) -> CallT:
        """Returns the checked call of the public function with these arguments and, for those left out, its defaults."""
        return self.check_call(**explanation.arguments(self.signature, self.name, args, kwargs))

    @property
    def names(self) -> list[str]:
        """Returns the names of the implementations, in the order of the table."""
        return [row.name for row in self.table]

    def explain(self, impl: str, call: CallT) -> Explanation:
        """Says what `run` would choose for this checked call, and why."""
        check_name(impl, self)
        return explanation.of_table(self.name, self.table, impl, call)

    def run(self, impl: str, call: CallT) -> Any:
        """Calls the first implementation that can serve; NotImplementedError lists every refusal when none can. Autocast
        ends here: an implementation computes in the precision of its inputs, as its contract says."""
        device = call[0].device.type
        if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.run(impl, call)
        row = self.choice(impl, call)
        if self.recorder is None or row.backward is None or not needs_grad(*call):
            return row.load()(*call)
        module, function = _imported(self.recorder)
        return getattr(module, function)(row, call)

    def choice(self, impl: str, call: CallT) -> Implementation[CallT]:
        """Returns the first implementation that can serve; NotImplementedError lists every refusal when none can."""
        for row in self.table:
            if impl == "auto" and row.reserve(call) is not None:
                continue  # `reserve` goes first: it looks at shapes, where `refuse` may import kernels
            if impl in ("auto", row.name) and row.refuse(call) is None:
                return row
        raise NotImplementedError(f"impl={impl!r} cannot serve this call of {self.name}:\n{self.explain(impl, call)}")


def check_name(impl: str, *stages: Stage[Any]) -> None:
    """`impl` must be "auto" or stand in the table of each of these stages."""
    if not isinstance(impl, str) or (impl != "auto" and not all(impl in stage.names for stage in stages)):
        raise ValueError(explanation.of_names(impl, {stage.name: stage.names for stage in stages}))


def unless_cpu(*tensors: Any) -> str | None:
    """Refuses tensors that an implementation which reads CPU memory cannot serve."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            return f"it needs CPU tensors, got {tensor.device}"
    return None


def unless_inference(*tensors: Any) -> str | None:
    """Refuses tensors whose gradients are wanted, for an implementation that computes none."""
    if needs_grad(*tensors):
        return "it computes no gradients and an input requires one; call it under torch.no_grad()"
    return None


def unless_recordable(call: Any) -> str | None:
    """Refuses to compute gradients of an attention's q, k and v but for packed plain tensors, and through places of results."""
    if needs_grad(*call[:3]):
        for operand in call[:3]:
            if operand is not None and not isinstance(operand, torch.Tensor):
                kind = type(operand).__name__
                return f"it computes gradients for packed tensors alone, got a {kind}; call it under torch.no_grad()"
        if call.out is not None or call.lse is not None:
            return "it computes no gradients of results that are written to given tensors; call it under torch.no_grad()"
    return None


def unless_cpu_inference(*tensors: Any) -> str | None:
    """Refuses tensors that an implementation which reads CPU memory and computes no gradients cannot serve."""
    return unless_cpu(*tensors) or unless_inference(*tensors)


@functools.cache
def has_triton() -> bool:
    """Says whether the triton package is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def unless_cuda(*tensors: Any, dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)) -> str | None:
    """Refuses tensors that a Triton kernel cannot read. dtypes: of plain tensors; `unless_reads` checks formats."""
    if not has_triton():
        return "the triton package is not installed"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cuda":
            return f"it needs CUDA tensors, got {tensor.device}"
        if _capability(tensor.device) < (8, 0):
            return f"it needs compute capability 8.0 or newer, which {tensor.device} has not"
        if format_of(tensor) == "plain" and tensor.dtype not in dtypes:
            return f"it needs {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, got {tensor.dtype}"
    return None


def unless_cuda_inference(*tensors: Any, dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)) -> str | None:
    """Refuses tensors that a Triton kernel without a backward cannot serve."""
    return unless_cuda(*tensors, dtypes=dtypes) or unless_inference(*tensors)


def unless_reads(reads: Mapping[str, tuple[str, ...]], **operands: Any) -> str | None:
    """Refuses operands in storage formats that an implementation does not read. reads: for each operand the formats that its
    kernels take, the name of a tensor without one being "plain". An operand may be a tensor, a cache or None."""
    for name, operand in operands.items():
        stored = format_of(operand)
        if stored not in reads[name]:
            return f"it reads {name} stored as {' or '.join(reads[name])}, got {stored}"
    return None
