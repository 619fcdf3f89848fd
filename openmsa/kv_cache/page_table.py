# SPDX-License-Identifier: MIT
"""Caches of pools with one page table say where tokens lie, and check what a call asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache import owners
from openmsa.kv_cache.rows import PLAIN_DTYPES
from openmsa.kv_cache.stored import Stored
from openmsa.runtime import checks, named_devices, value_checks
from openmsa.types import Layout, Sequences, layout

if TYPE_CHECKING:
    from typing_extensions import Self

POOL = "[num_pages, heads, page_size, dim]"


class Paged:
    """This is a cache: one or more pools of one shape and format with one page table."""

    page_table: Tensor  # int32 [batch, max_pages]
    seq_lens: Tensor  # int32 [batch]

    names: ClassVar[tuple[str, ...]]
    """These are the fields that hold its pools."""
    formats: ClassVar[tuple[str, ...]]
    """Its pools may be stored in these formats beside plain tensors."""

    def pools(self) -> Mapping[str, Tensor | Stored]:
        """Gives each pool by its argument name."""
        return {name: getattr(self, name) for name in self.names}

    def __post_init__(self) -> None:
        pools = self.pools()
        first_name, first = next(iter(pools.items()))
        for name, pool in pools.items():
            checks.rows(name, pool, POOL, self.formats, PLAIN_DTYPES)
            checks.alike(name, pool, first_name, first)
            if checks.stored_as(pool) != checks.stored_as(first):
                raise TypeError(
                    f"{name} must be stored as {first_name} ({checks.stored_as(first)}), got {checks.stored_as(pool)}"
                )
            if pool.shape != first.shape:
                raise ValueError(f"{name} must have the shape of {first_name} {tuple(first.shape)}, got {tuple(pool.shape)}")
        checks.head_dim(f"{first_name}.shape[3]", first.shape[3])
        checks.integer(f"{first_name}.shape[2] (page_size)", first.shape[2], 1)
        checks.tensor("page_table", self.page_table, "[batch, max_pages]", (torch.int32,))
        checks.tensor("seq_lens", self.seq_lens, "[batch]", (torch.int32,))
        checks.size("seq_lens", self.seq_lens, 0, self.page_table.shape[0], "the batch of page_table")
        for name, value in (("page_table", self.page_table), ("seq_lens", self.seq_lens)):
            checks.alike(name, value, first_name, first, dtype=False)
            if value.shape[-1] > 1 and value.stride(-1) != 1:  # kernels read them where they are
                raise ValueError(f"{name} must have stride 1 in its last dimension, got strides {value.stride()}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Says why there is no ``state_dict``."""
            why = owners.NO_STATE_DICT if name in ("state_dict", "load_state_dict") else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}")

    def to(self, device: torch.device | str) -> Self:
        """Gives the cache with all of its tensors on another device; those already there are shared, not copied. A page table
        that two caches share is copied for each."""
        device = named_devices.usable("device", device)
        return type(self)(**{name: value.to(device) for name, value in vars(self).items()})

    @property
    def _pool(self) -> Tensor | Stored:
        pool: Tensor | Stored = getattr(self, self.names[0])
        return pool

    @property
    def batch(self) -> int:
        return self.page_table.shape[0]

    @property
    def num_pages(self) -> int:
        return self._pool.shape[0]

    @property
    def num_heads(self) -> int:
        return self._pool.shape[1]

    @property
    def page_size(self) -> int:
        return self._pool.shape[2]

    @property
    def head_dim(self) -> int:
        return self._pool.shape[3]

    @property
    def format(self) -> str:
        return checks.format_of(self._pool)

    @property
    def dtype(self) -> torch.dtype:
        """The elements have this dtype or, in a low-precision format, the codes."""
        return self._pool.dtype

    @property
    def device(self) -> torch.device:
        return self._pool.device

    @property
    def requires_grad(self) -> bool:
        return any(pool.requires_grad for pool in self.pools().values())

    @property
    def capacity(self) -> int:
        """The page table can name so many keys for one sequence."""
        return self.page_table.shape[1] * self.page_size

    def layout(self, seqs: Sequences | Layout | None, total_q: int, device: torch.device, check: bool = False) -> Layout:
        """Checks the lengths of a call that reads this cache. On a CPU the page ids in use are always checked, on a GPU only
        when `check` is True (kernels never follow an id outside the pool)."""
        if self.device != device:
            raise ValueError(f"the paged cache must be on the device of the queries ({device}), got {self.device}")
        if isinstance(starts := getattr(seqs, "cu_seqlens_k", None), Tensor) and starts.numel() - 1 != self.batch:
            raise ValueError(f"seqs.cu_seqlens_k must have batch + 1 entries ({self.batch + 1}), got {starts.numel()}")
        if check or device.type == "cpu":
            value_checks.in_range("seq_lens", self.seq_lens, 0, self.capacity + 1)
        resolved = layout(seqs, total_q, None, device, self.seq_lens, self.capacity, check)
        if check or device.type == "cpu":
            owners.check_pages(self, resolved.k_lens())
        return resolved

    def check_pages(self, lens: Tensor) -> None:
        """Raises unless every page exists that holds one of the first `lens` keys, int32 or int64 ``[batch]``."""
        checks.tensor("lens", lens, "[batch]", (torch.int32, torch.int64))
        checks.size("lens", lens, 0, self.batch, "the batch of page_table")
        value_checks.none("lens", lens > self.capacity, lens, f"at most {self.capacity}, the keys that page_table has room for")
        owners.check_pages(self, lens)

    def slots(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Gives the row, int64, of the token at `position` of `sequence` in a pool seen as ``[num_pages * page_size]`` rows.
        Both are int32 or int64 tensors; on a CPU they must lie inside the page table, which a traced graph does not check."""
        value_checks.indices("sequence", sequence, self.batch)
        value_checks.indices("position", position, self.capacity)
        return owners.slots(self, sequence, position)
