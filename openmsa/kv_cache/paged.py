# SPDX-License-Identifier: MIT
"""Paged caches are of two kinds, `PagedKV` and `PagedIndexKeys`: pools behind one page table, which know where tokens lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache import contents, owners
from openmsa.kv_cache.rows import INDEX_FORMATS, KEY_FORMATS, PLAIN_DTYPES, check_alike, check_rows, format_of, kind_of
from openmsa.kv_cache.stored import Stored
from openmsa.runtime import checks, devices
from openmsa.runtime.tracing import operator
from openmsa.types import Layout, Sequences, layout

if TYPE_CHECKING:
    from typing_extensions import Self

POOL = "[num_pages, heads, page_size, dim]"


class Paged:
    """A cache has one or more pools of one shape and format behind one page table."""

    page_table: Tensor  # int32 [batch, max_pages]
    seq_lens: Tensor  # int32 [batch]

    formats: ClassVar[tuple[str, ...]]
    """Its pools may be stored in these formats beside plain tensors."""

    def pools(self) -> Mapping[str, Tensor | Stored]:
        """Gives each pool by its argument name."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        pools = self.pools()
        first_name, first = next(iter(pools.items()))
        for name, pool in pools.items():
            check_rows(name, pool, POOL, self.formats, PLAIN_DTYPES)
            check_alike(name, pool, first_name, first)
            if kind_of(pool) != kind_of(first):
                raise TypeError(f"{name} must be stored as {first_name} ({kind_of(first)}), got {kind_of(pool)}")
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
        device = devices.usable("device", device)
        return type(self)(**{name: value.to(device) for name, value in vars(self).items()})

    @property
    def _pool(self) -> Tensor | Stored:
        return next(iter(self.pools().values()))

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
        return format_of(self._pool)

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
        if check or device.type == "cpu":
            checks.in_range("seq_lens", self.seq_lens, 0, self.capacity + 1)
        resolved = layout(seqs, total_q, None, device, self.seq_lens, self.capacity, check)
        if check or device.type == "cpu":
            self.check_pages(resolved.k_lens())
        return resolved

    def check_pages(self, lens: Tensor) -> None:
        """Raises unless every page exists that holds one of the first `lens` keys."""
        logical = torch.arange(self.page_table.shape[1], device=self.device)
        used = logical * self.page_size < lens[:, None]  # [batch, max_pages]
        bad = used & ((self.page_table < 0) | (self.page_table >= self.num_pages))
        if bool(bad.any()):
            b, page = bad.nonzero()[0].tolist()
            raise ValueError(
                f"page_table must name pages from 0 to {self.num_pages - 1} where a sequence has keys, "
                f"got {int(self.page_table[b, page])} at sequence {b}, logical page {page}"
            )

    def slots(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Gives the row, int64, of the token at `position` of `sequence` in a pool seen as ``[num_pages * page_size]`` rows."""
        page = self.page_table[sequence, position // self.page_size].long()
        return page * self.page_size + position % self.page_size


@dataclass(eq=False)
class PagedKV(Paged):
    """This cache holds keys and values in pages.

    k, v:        ``[num_pages, num_kv_heads, page_size, head_dim]``, float32, float16 or bfloat16, any strides; or both `E4M3`
                 or `NVFP4` pools of that logical shape, each with its own scales.
    page_table:  int32 ``[batch, max_pages]``, rows contiguous; physical page of each logical page; -1 where none is assigned.
    seq_lens:    int32 ``[batch]``, contiguous; keys held for each sequence; `append` advances it in place.

    A cache that appends owns its `seq_lens`: an append raises ValueError where those of another cache advance the same tensor.
    The page table may be shared with the layer's `PagedIndexKeys`. `to` moves a cache, and pickle and `torch.save` keep it;
    it belongs to a run and not to a model's weights, so it has no ``state_dict``. Two caches are equal only if they are one.
    """

    k: Tensor | Stored
    v: Tensor | Stored
    page_table: Tensor
    seq_lens: Tensor
    formats: ClassVar[tuple[str, ...]] = KEY_FORMATS

    @classmethod
    def allocate(
        cls,
        page_table: Tensor,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        format: str = "plain",
    ) -> PagedKV:
        """Makes empty pools (zeros) on the device of `page_table`: of `dtype`, or in a `format`, "e4m3" or "nvfp4", with scale
        1.0. For other scales and layouts, allocate the pools themselves: ``E4M3.allocate(shape, device, scale)``."""
        contents.check_sizes(page_table, num_pages, num_kv_heads=num_kv_heads, page_size=page_size, head_dim=head_dim)
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        k, v = (contents.allocated(format, cls.formats, shape, dtype, page_table.device) for _ in range(2))
        return cls(k, v, page_table, torch.zeros(page_table.shape[0], dtype=torch.int32, device=page_table.device))

    def pools(self) -> Mapping[str, Tensor | Stored]:
        return {"k": self.k, "v": self.v}

    @operator("openmsa::append_kv")
    def append(self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, check: bool = False) -> None:
        """Writes new tokens behind each sequence's keys and advances `seq_lens`.

        k, v: ``[total_new, num_kv_heads, head_dim]``, any float dtype, rounded to the cache's format. cu_seqlens: int32
        ``[batch + 1]``, the packed tokens of each sequence; None: the same number for each. The pages must be in the table
        already. On an error the cache is unchanged.

        check: on a CPU, also refuse NaN. On a GPU only then are values read, which waits for the device. Without it nothing is
        read on the host and nothing allocated, so that a CUDA graph can hold the call: a token at or past the end of
        `cu_seqlens`, past the page table's capacity or on a page outside the pool is not written, `seq_lens` stops at the
        capacity, and of tokens that share a place any one stays. (Without triton installed, checks and writes wait.)
        """
        contents.append(self, {"k": k, "v": v}, cu_seqlens, check)

    def gather(self, lens: Tensor | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Gives the first `lens` (int32 ``[batch]``; None: all) keys of each sequence: packed k, v ``[total_k, num_kv_heads,
        head_dim]`` and cu_seqlens int32 ``[batch + 1]``. Plain pools give their elements as they are, formats give numbers of
        `dtype`. On a GPU this syncs with the host."""
        (k, v), cu = contents.gather(self, lens, dtype)
        return k, v, cu


@dataclass(eq=False)
class PagedIndexKeys(Paged):
    """This cache holds index keys in pages as `PagedKV` holds keys, in one pool ``[num_pages, index_key_heads, page_size,
    index_dim]``: a tensor, `E4M3`, `Int8`, `NVFP4`, `MXFP4` or `CertifiedKeys`."""

    keys: Tensor | Stored
    page_table: Tensor
    seq_lens: Tensor
    formats: ClassVar[tuple[str, ...]] = INDEX_FORMATS

    @classmethod
    def allocate(
        cls,
        page_table: Tensor,
        num_pages: int,
        num_heads: int,
        page_size: int,
        index_dim: int,
        dtype: torch.dtype = torch.float32,
        format: str = "plain",
    ) -> PagedIndexKeys:
        """Makes an empty pool (zeros) on the device of `page_table`, as `PagedKV.allocate` does; "certified" holds int8 keys
        beside exact ones of `dtype`."""
        contents.check_sizes(page_table, num_pages, num_heads=num_heads, page_size=page_size, index_dim=index_dim)
        keys = contents.allocated(format, cls.formats, (num_pages, num_heads, page_size, index_dim), dtype, page_table.device)
        return cls(keys, page_table, torch.zeros(page_table.shape[0], dtype=torch.int32, device=page_table.device))

    def pools(self) -> Mapping[str, Tensor | Stored]:
        return {"keys": self.keys}

    @operator("openmsa::append_index_keys")
    def append(self, keys: Tensor, cu_seqlens: Tensor | None = None, *, check: bool = False) -> None:
        """Writes new index keys ``[total_new, index_key_heads, index_dim]`` as `PagedKV.append` writes keys."""
        contents.append(self, {"keys": keys}, cu_seqlens, check)

    def gather(self, lens: Tensor | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Gives packed index keys ``[total_k, index_key_heads, index_dim]`` and cu_seqlens, as `PagedKV.gather` does."""
        (keys,), cu = contents.gather(self, lens, dtype)
        return keys, cu
