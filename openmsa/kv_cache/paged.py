# SPDX-License-Identifier: MIT
"""Paged caches are of two kinds, `PagedKV` and `PagedIndexKeys`; what they share is in `openmsa.kv_cache.page_table`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache import contents
from openmsa.kv_cache.page_table import Paged
from openmsa.kv_cache.rows import INDEX_FORMATS, KEY_FORMATS
from openmsa.kv_cache.stored import Stored
from openmsa.runtime.dispatch import operator


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
    names: ClassVar[tuple[str, ...]] = ("k", "v")
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

    @operator("openmsa::append_kv")
    def append(self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, check: bool = False) -> None:
        """Writes new tokens after each sequence's keys and advances `seq_lens`.

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
    names: ClassVar[tuple[str, ...]] = ("keys",)
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

    @operator("openmsa::append_index_keys")
    def append(self, keys: Tensor, cu_seqlens: Tensor | None = None, *, check: bool = False) -> None:
        """Writes new index keys ``[total_new, index_key_heads, index_dim]`` as `PagedKV.append` writes keys."""
        contents.append(self, {"keys": keys}, cu_seqlens, check)

    def gather(self, lens: Tensor | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Gives packed index keys ``[total_k, index_key_heads, index_dim]`` and cu_seqlens, as `PagedKV.gather` does."""
        (keys,), cu = contents.gather(self, lens, dtype)
        return keys, cu
