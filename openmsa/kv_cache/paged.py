# SPDX-License-Identifier: MIT
"""Paged caches are of two kinds, `PagedKV` and `PagedIndexKeys`: this file says what they hold and allocates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache.certified import CertifiedKeys
from openmsa.kv_cache.e4m3 import E4M3
from openmsa.kv_cache.int8 import Int8
from openmsa.kv_cache.mxfp4 import MXFP4
from openmsa.kv_cache.nvfp4 import NVFP4
from openmsa.kv_cache.pages import Paged
from openmsa.kv_cache.stored import INDEX_FORMATS, KEY_FORMATS, PLAIN_DTYPES, Stored
from openmsa.runtime import checks
from openmsa.runtime.tracing import operator

FORMATS: dict[str, type[Stored]] = {f.format: f for f in (E4M3, Int8, NVFP4, MXFP4, CertifiedKeys)}


def _check_sizes(page_table: Tensor, num_pages: int, **sizes: int) -> None:
    """Checks what `allocate` takes: a page table, and sizes of its pools."""
    checks.tensor("page_table", page_table, "[batch, max_pages]", (torch.int32,))
    checks.integer("num_pages", num_pages, 0)
    for name, value in sizes.items():
        checks.integer(name, value, 1)


def _allocate(
    format: str, allowed: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor | Stored:
    """Makes zeros of a logical shape, "plain" or in one of the `allowed` formats. dtype: that of plain elements."""
    if format == "plain":
        if dtype not in PLAIN_DTYPES:
            raise TypeError(f"dtype must be {' or '.join(map(str, PLAIN_DTYPES))}, got {dtype}")
        return torch.zeros(shape, dtype=dtype, device=device)
    if format not in allowed:
        raise ValueError(f"format must be 'plain' or one of {allowed}, got {format!r}")
    if format == "certified":
        return CertifiedKeys.allocate(shape, device, dtype)
    return FORMATS[format].allocate(shape, device)


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
        _check_sizes(page_table, num_pages, num_kv_heads=num_kv_heads, page_size=page_size, head_dim=head_dim)
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        k, v = (_allocate(format, cls.formats, shape, dtype, page_table.device) for _ in range(2))
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
        self._append({"k": k, "v": v}, cu_seqlens, check)

    def gather(self, lens: Tensor | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Gives the first `lens` (int32 ``[batch]``; None: all) keys of each sequence: packed k, v ``[total_k, num_kv_heads,
        head_dim]`` and cu_seqlens int32 ``[batch + 1]``. Plain pools give their elements as they are, formats give numbers of
        `dtype`. On a GPU this syncs with the host."""
        (k, v), cu = self._gather(lens, dtype)
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
        _check_sizes(page_table, num_pages, num_heads=num_heads, page_size=page_size, index_dim=index_dim)
        keys = _allocate(format, cls.formats, (num_pages, num_heads, page_size, index_dim), dtype, page_table.device)
        return cls(keys, page_table, torch.zeros(page_table.shape[0], dtype=torch.int32, device=page_table.device))

    def pools(self) -> Mapping[str, Tensor | Stored]:
        return {"keys": self.keys}

    @operator("openmsa::append_index_keys")
    def append(self, keys: Tensor, cu_seqlens: Tensor | None = None, *, check: bool = False) -> None:
        """Writes new index keys ``[total_new, index_key_heads, index_dim]`` as `PagedKV.append` writes keys."""
        self._append({"keys": keys}, cu_seqlens, check)

    def gather(self, lens: Tensor | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Gives packed index keys ``[total_k, index_key_heads, index_dim]`` and cu_seqlens, as `PagedKV.gather` does."""
        (keys,), cu = self._gather(lens, dtype)
        return keys, cu
