# SPDX-License-Identifier: MIT
"""A stage runs the calls of its public function here. On a GPU a call makes the launches of an earlier call of its kind again
(`openmsa/runtime/kinds.py`), and the host's code computes its lengths alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from openmsa.kv_cache import PagedIndexKeys, PagedKV
from openmsa.runtime import checks
from openmsa.runtime.dispatch import Stage, has_triton
from openmsa.runtime.kinds import Kinds, rounded, tensors_in
from openmsa.runtime.lengths import starts_of
from openmsa.runtime.memory import Memory
from openmsa.types import Layout, Sequences, layout, starts

CALLS = Kinds()


def bounded(seqs: Any, device: Any) -> Any:
    """Returns `seqs` with the maxima that `layout` would read from their starts, which takes a host sync. Launches depend on
    them, so they belong to the kind of a call."""
    most = {}
    for side in "qk" if isinstance(seqs, Sequences) else "":
        given, name = getattr(seqs, f"cu_seqlens_{side}"), f"max_seqlen_{side}"
        if given is not None and getattr(seqs, name) is None:
            most[name] = max(starts(f"seqs.cu_seqlens_{side}", given, device).diff().tolist(), default=0)
    return replace(seqs, **most) if most else seqs


def like(seqs: Any, keys: Any, device: Any) -> Any:
    """Returns `seqs` with maxima that like calls share: those of `bounded`, rounded up, of keys where these are in pages."""
    seqs = bounded(seqs, device)
    if not isinstance(seqs, Sequences):
        return seqs
    most_q, most_k = seqs.max_seqlen_q, seqs.max_seqlen_k
    more_q = rounded(most_q) if type(most_q) is int else most_q
    more_k = rounded(most_k) if type(most_k) is int and isinstance(keys, PagedKV) else most_k
    if (more_q, more_k) == (most_q, most_k):
        return seqs
    return Sequences(seqs.cu_seqlens_q, seqs.cu_seqlens_k, more_q, more_k, seqs.q_offset)


def counted(keys: Any, seqs: Any) -> tuple[Tensor, int] | None:
    """Returns what `starts_of` takes where a call's keys start is all that is computed for its lengths, so that a launch of the
    call itself can do it; else None."""
    paged = isinstance(keys, (PagedKV, PagedIndexKeys))
    if not paged or not isinstance(seqs, Sequences) or seqs.cu_seqlens_k is not None:
        return None
    if seqs.cu_seqlens_q is None or not (_as_received(seqs.cu_seqlens_q) and _as_received(seqs.q_offset)):
        return None
    return keys.seq_lens, keys.capacity if seqs.max_seqlen_k is None else min(seqs.max_seqlen_k, keys.capacity)


def lengths_again(q: Any, keys: Any, seqs: Sequences | None) -> Layout:
    """Returns the lengths of a call whose arguments were checked when it was recorded, and whose maxima are `bounded`. Its
    sequences are taken as they are where implementations receive them so."""
    if seqs is not None and seqs.cu_seqlens_q is not None:
        cu_k, most_q, most_k = seqs.cu_seqlens_k, cast(int, seqs.max_seqlen_q), seqs.max_seqlen_k
        if (cached := counted(keys, seqs)) is not None:
            cu_k, most_k = starts_of(*cached), keys.capacity if most_k is None else most_k
        if cu_k is not None and all(map(_as_received, (seqs.cu_seqlens_q, cu_k, seqs.q_offset))):
            return Layout(seqs.cu_seqlens_q, cu_k, most_q, cast(int, most_k), seqs.q_offset, most_q)
    if isinstance(keys, (PagedKV, PagedIndexKeys)):
        return keys.layout(seqs, q.shape[0], q.device)
    return layout(seqs, q.shape[0], keys.shape[0], q.device)


def _as_received(value: Tensor | None) -> bool:
    return value is None or (value.dtype == torch.int32 and value.is_contiguous())


def run(
    stage: Stage[Any],
    impl: str,
    operands: tuple[Any, ...],
    seqs: Sequences | None,
    numbers: tuple[Any, ...],
    check: bool,
    places: Callable[[], dict[str, Tensor]],
) -> Any:
    """Checks and runs a call of a stage.

    operands:  the arguments that the stage's checks take in front of `seqs`: queries, keys and others.
    numbers:   the arguments that they take between `seqs` and `check`.
    places:    makes new memory for the results, by their names in the stage's call, in the order of the results.
    """
    on_gpu = getattr(operands[0], "is_cuda", False) and has_triton()
    if not on_gpu or check is not False or checks.needs_grad(*operands):
        return stage.run(impl, stage.check_call(*operands, seqs, *numbers, check))
    seqs = bounded(seqs, operands[0].device)
    known = CALLS.look(stage.name, impl, *operands, seqs, *numbers)
    if known.replay is None:
        call, made = stage.check_call(*operands, seqs, *numbers, check), places()
        CALLS.first(known, [partial(stage.run, impl, call._replace(**made))], (*operands, seqs, call.seqs, *made.values()))
    else:
        lengths, made = lengths_again(operands[0], operands[1], seqs), places()
        known.addresses.extend(x.data_ptr() for x in tensors_in(lengths, *made.values()))
        CALLS.again(known, Memory())
    results = tuple(made.values())
    return results[0] if len(results) == 1 else results
