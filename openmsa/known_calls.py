# SPDX-License-Identifier: MIT
"""On a GPU a call makes the launches of an earlier call of its kind again (`openmsa/runtime/kinds.py`). The host's code
computes its lengths alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from openmsa.kv_cache import PagedIndexKeys, PagedKV
from openmsa.runtime import checks
from openmsa.runtime.dispatch import Stage, has_triton
from openmsa.runtime.kinds import Kinds, tensors_in
from openmsa.runtime.memory import Memory
from openmsa.types import Layout, Sequences, layout, starts


def repeats(check: bool, *values: Any) -> bool:
    """Says whether a call of these values, of which the first are queries, may make known launches again."""
    return getattr(values[0], "is_cuda", False) and not check and not checks.needs_grad(*values) and has_triton()


def bounded(seqs: Any, device: Any) -> Any:
    """Returns `seqs` with the maxima that `layout` would read from their starts, which takes a host sync. Launches depend on
    them, so they belong to the kind of a call."""
    most = {}
    for side in "qk" if isinstance(seqs, Sequences) else "":
        given, name = getattr(seqs, f"cu_seqlens_{side}"), f"max_seqlen_{side}"
        if given is not None and getattr(seqs, name) is None:
            most[name] = max(starts(f"seqs.cu_seqlens_{side}", given, device).diff().tolist(), default=0)
    return replace(seqs, **most) if most else seqs


def lengths_again(q: Any, keys: Any, seqs: Sequences | None) -> Layout:
    """Returns the lengths of a call whose arguments were checked when it was recorded."""
    if isinstance(keys, (PagedKV, PagedIndexKeys)):
        return keys.layout(seqs, q.shape[0], q.device)
    return layout(seqs, q.shape[0], keys.shape[0], q.device)


class KnownCalls(Kinds):
    """Runs the calls of one stage."""

    def run(
        self, stage: Stage[Any], impl: str, values: tuple[Any, ...], seqs: Sequences | None, numbers: tuple[Any, ...],
        checked: Callable[[], Any], places: Callable[[], dict[str, Tensor]],
    ) -> dict[str, Tensor]:  # fmt: skip
        """Returns the results by their names in the stage's call, which are written to new memory.

        values:   queries, keys, and what else holds tensors of the call. seqs: as `bounded` returns them.
        numbers:  whatever else the call depends on.
        checked:  checks the arguments and returns the stage's call. places: makes the memory of the results.
        """
        known = self.look(*values, seqs, impl, *numbers)
        if known.replays is None:
            call, made = checked(), places()
            step = partial(stage.run, impl, call._replace(**made))
            self.first(known, [step], (*values, seqs, call.seqs, *made.values()))
        else:
            lengths, made = lengths_again(values[0], values[1], seqs), places()
            known.addresses.extend(x.data_ptr() for x in tensors_in(lengths, *made.values()))
            self.again(known, Memory())
        return made
