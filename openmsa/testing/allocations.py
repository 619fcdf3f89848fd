# SPDX-License-Identifier: MIT
"""These modes poison what an operation allocates without filling, and measure how much memory it holds at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_UNFILLED = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)


class PoisonedOutputs(TorchDispatchMode):
    """Within this mode, memory from ``torch.empty`` and its relatives holds NaN, or the lowest integer, instead of chance."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNFILLED and result.numel():
            result.fill_(poison(result.dtype))
        return result


class PeakMemory(TorchDispatchMode):
    """This mode counts the bytes of tensors that operations create: ``peak``, the most alive at once, and ``largest``, the
    biggest single one. Memory that an operator needs only while it runs is not seen; the inputs do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _storage(tensor) not in given | self._known.keys():
                size = tensor.untyped_storage().nbytes()
                self._known[_storage(tensor)] = StorageWeakRef(tensor.untyped_storage()), size
                self.largest = max(self.largest, size)
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def poison(dtype: torch.dtype) -> float | int | bool:
    """Returns a value that no correct result contains by chance."""
    if dtype.is_floating_point:
        return torch.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def peak_memory(function: Callable[..., Any], *args: Any, **kwargs: Any) -> PeakMemory:
    """Runs ``function(*args, **kwargs)`` and returns what it held."""
    with PeakMemory() as memory:
        function(*args, **kwargs)
    return memory
