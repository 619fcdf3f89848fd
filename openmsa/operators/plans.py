# SPDX-License-Identifier: MIT
"""Operators of plans name them by numbers. `DecodePlan.run` writes to the plan's own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from openmsa.operators.operator import Operator
from openmsa.operators.packing import pack, unpack


class SelectOperator(Operator):
    """In graphs a selection is told its plan's topk, which its shape depends on."""

    def trace(self, arguments: dict[str, Any]) -> Any:
        """Puts a selection into the graph that is traced, and returns its blocks."""
        return super().trace(arguments | {"topk": arguments["self"].topk})

    def function(self) -> Callable[..., Any]:
        """Returns the method, which knows its topk."""
        select = super().function()
        return lambda topk, **arguments: select(**arguments)


class RunOperator(Operator):
    """In graphs a run writes to three tensors: out, which is the plan's unless the caller gives one, its blocks and its lse."""

    def trace(self, arguments: dict[str, Any]) -> Tensor:
        """Puts a run into the graph that is traced, and returns `out`."""
        plan, tokens = arguments["self"], arguments["q"].shape[0]
        plan._tokens = tokens
        out: Tensor = plan._out[:tokens] if arguments.get("out") is None else arguments["out"]
        packed = pack(arguments | {"out": out}, self.writes)
        written = [*packed.written, plan._blocks[:tokens], plan._lse[:tokens]]
        self.packet.into(packed.tensors, written, packed.ints, packed.floats, packed.form)
        return out

    def run_into(
        self,
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
        form: str,
    ) -> None:
        """Runs the plan. Where a graph holds copies of the plan's blocks and lse, they are written too."""
        arguments = unpack(tensors, written, ints, floats, form)
        plan = arguments["self"]
        plan._in_graph = True  # so that a run is one even while another thread traces
        try:
            plan.run(**{name: value for name, value in arguments.items() if name != "self"})
        finally:
            plan._in_graph = False
        for buffer, own in zip(written[-2:], (plan.blocks, plan.lse), strict=True):
            if buffer.data_ptr() != own.data_ptr():
                buffer.copy_(own)
