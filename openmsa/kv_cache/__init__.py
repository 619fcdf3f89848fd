# SPDX-License-Identifier: MIT
"""Paged caches for keys, values and index keys.

A pool holds fixed-size pages, ``[num_pages, heads, page_size, dim]``. A page table, int32 ``[batch, max_pages]``, names the
physical page of each logical page of each sequence, in any order; pages may be shared between sequences, and -1 marks an
entry not yet assigned. Who owns the table (an engine, or you) decides which pages a sequence gets; the caches only read it.

Formats today: float32, float16 and bfloat16 (`plain`). A quantised format is one more file of this folder: its byte layout,
how to quantise, dequantise and append.
"""

from openmsa.kv_cache.paged import PagedIndexKeys, PagedKV

__all__ = ["PagedIndexKeys", "PagedKV"]
