# SPDX-License-Identifier: MIT
"""`Operator` registers a public function with `torch.library`, so that traced graphs hold it as one node.

Every operator has the same two forms, whose arguments are those of `packing`:

    package::function(Tensor[] tensors, SymInt[] ints, float[] floats, str form) -> Tensor[]
    package::function.into(Tensor[] tensors, Tensor(a!)[] written, SymInt[] ints, float[] floats, str form) -> ()

The second serves calls that write to an argument (a cache, `out`); results without a buffer of the caller's get one in front.
Gradients are those of the eager function, which is run again in the backward pass: whatever has a gradient in eager code has
it in a graph, and what has none raises the same error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from openmsa.operators.packing import pack, unpack
from openmsa.runtime.tracing import FUNCTIONS, TRACED

ARGUMENTS = "SymInt[] ints, float[] floats, str form"
OPERATORS: dict[str, Operator] = {}
"""Every operator by its name."""


def flat(result: Any) -> list[Tensor]:
    """Returns the tensors of a result: one tensor, None, or a tuple of such."""
    items = result if isinstance(result, tuple) else (result,)
    return [item for item in items if item is not None]


def as_returned(found: list[Tensor], arguments: dict[str, Any]) -> Any:
    """Returns one tensor alone and several as a tuple."""
    return found[0] if len(found) == 1 else tuple(found)


class Operator:
    """An operator is a public function in traced graphs.

    name:     ``"package::function"``, which the function is decorated with.
    results:  takes the function's arguments, without values of tensors, and returns what the function does, with empty tensors;
              what it returns of written arguments is these themselves. Here tracing learns that arguments are wrong.
    writes:   what the function writes to, as in `pack`.
    restore:  makes the function's result of the tensors in it and the arguments.
    ignores:  arguments that change no result and cannot be packed.
    gradients:  whether the results have gradients.
    copies:   whether results are copied, because they lie in memory that the next call overwrites.
    home:     the module that defines the function, imported before it runs; None where the package's own import does so.
    """

    def __init__(
        self,
        name: str,
        results: Callable[..., Any],
        *,
        writes: tuple[str, ...] = (),
        restore: Callable[[list[Tensor], dict[str, Any]], Any] = as_returned,
        ignores: tuple[str, ...] = (),
        gradients: bool = True,
        copies: bool = False,
        home: str | None = None,
    ) -> None:
        self.name, self.results, self.writes, self.restore, self.ignores = name, results, writes, restore, ignores
        self.home, self.copies = home, copies
        OPERATORS[name] = self
        TRACED[name] = self.trace
        package, _, function = name.partition("::")
        library = LIBRARIES.setdefault(package, torch.library.Library(package, "FRAGMENT"))
        tags = (torch.Tag.pt2_compliant_tag,)
        library.define(f"{function}(Tensor[] tensors, {ARGUMENTS}) -> Tensor[]", tags=tags)
        library.impl(function, self.run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, self.fake, lib=library)
        if gradients:
            torch.library.register_autograd(name, self.backward, setup_context=self.setup, lib=library)
        if writes:
            into = f"{function}.into"
            library.define(f"{into}(Tensor[] tensors, Tensor(a!)[] written, {ARGUMENTS}) -> ()", tags=tags)
            library.impl(into, self.run_into, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{package}::{into}", lambda *arguments: None, lib=library)
        self.packet = getattr(getattr(torch.ops, package), function)

    def trace(self, arguments: dict[str, Any]) -> Any:
        """Puts a node into the graph that is traced, and returns what the function would return."""
        arguments = {name: value for name, value in arguments.items() if name not in self.ignores}
        packed = pack(arguments, self.writes)
        if not packed.written:
            found = self.packet.default(packed.tensors, packed.ints, packed.floats, packed.form)
            return self.restore(found, arguments)
        result = self.results(**arguments)
        fresh = [x for x in flat(result) if not any(x is own for own in packed.written)]
        self.packet.into(packed.tensors, packed.written + fresh, packed.ints, packed.floats, packed.form)
        return result

    def function(self) -> Callable[..., Any]:
        """Returns the function itself, which calls pass through in eager code."""
        if self.home is not None:
            importlib.import_module(self.home)
        return FUNCTIONS[self.name]

    def run(self, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float], form: str) -> list[Tensor]:
        """Calls the function."""
        with torch.no_grad():
            found = flat(self.function()(**unpack(tensors, (), ints, floats, form)))
        return [x.clone() if self.copies or any(x is given for given in tensors) else x for x in found]

    def run_into(
        self,
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
        form: str,
    ) -> None:
        """Calls the function and copies those of its results for which the caller gave no buffer into the last written ones."""
        with torch.no_grad():
            found = flat(self.function()(**unpack(tensors, written, ints, floats, form)))
            fresh = [x for x in found if not any(x is own for own in written)]
            for buffer, value in zip(written[len(written) - len(fresh) :], fresh, strict=True):
                buffer.copy_(value)

    def fake(self, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float], form: str) -> list[Tensor]:
        """Returns empty tensors of the results' shapes."""
        return flat(self.results(**unpack(tensors, (), ints, floats, form)))

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the arguments for the backward pass. A formula that wants the results keeps them here too."""
        tensors, ctx.ints, ctx.floats, ctx.form = inputs
        ctx.save_for_backward(*tensors)

    def backward(self, ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        """Returns the gradients of the tensors, None where none is asked for."""
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad[0]) if needed]
        tensors = list(ctx.saved_tensors)
        found = torch.ops.openmsa.gradients(self.name, tensors, ctx.ints, ctx.floats, ctx.form, wanted, list(grads))
        result: list[Tensor | None] = [None] * len(tensors)
        for place, grad in zip(wanted, found, strict=True):
            result[place] = grad
        nothing: list[Any] = [None if numbers else [] for numbers in (ctx.ints, ctx.floats)]  # what PyTorch wants of lists
        return result, *nothing, None


def gradients(
    name: str,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    form: str,
    wanted: Sequence[int],
    grads: Sequence[Tensor],
) -> list[Tensor]:
    """Returns the gradients of the `wanted` tensors for those of the results, by the eager function and its own gradients."""
    inputs = [x.detach() for x in tensors]
    sources = [inputs[place].requires_grad_() for place in wanted]
    with ExitStack() as autograd:  # operators run below autograd, which is let in again
        autograd.enter_context(torch.enable_grad())
        for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
            autograd.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        found = flat(OPERATORS[name].function()(**unpack(inputs, (), ints, floats, form)))
        reached = [(x, grad) for x, grad in zip(found, grads, strict=True) if x.requires_grad]
        outputs, given = [x for x, _ in reached], [grad for _, grad in reached]
        result = torch.autograd.grad(outputs, sources, given, allow_unused=True, materialize_grads=True)
    return [grad.contiguous() for grad in result]


def _shapes_of_gradients(
    name: str,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    form: str,
    wanted: Sequence[int],
    grads: Sequence[Tensor],
) -> list[Tensor]:
    return [torch.empty_like(tensors[place], memory_format=torch.contiguous_format) for place in wanted]


LIBRARIES = {"openmsa": torch.library.Library("openmsa", "FRAGMENT")}
LIBRARIES["openmsa"].define(
    f"gradients(str name, Tensor[] tensors, {ARGUMENTS}, int[] wanted, Tensor[] grads) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARIES["openmsa"].impl("gradients", gradients, "CompositeExplicitAutograd")
torch.library.register_fake("openmsa::gradients", _shapes_of_gradients, lib=LIBRARIES["openmsa"])
