# SPDX-License-Identifier: MIT
"""This room holds caches for keys, values and index keys, and the formats in which they are stored.

A pool holds fixed-size pages, ``[num_pages, heads, page_size, dim]``. A page table, int32 ``[batch, max_pages]``, names the
physical page of each logical page of each sequence, in any order; pages may be shared between sequences, and -1 marks an
entry not yet assigned. Who owns the table (an engine, or you) decides which pages a sequence gets; the caches only read it.

A format is the type of an argument: a plain tensor (float32, float16 or bfloat16), or one of the classes below, each in a file
that says its byte layout and how it quantises, dequantises and appends. It stands wherever a tensor of rows stands, packed or a
pool.
"""

from openmsa.kv_cache.certified import CertifiedKeys
from openmsa.kv_cache.e4m3 import E4M3
from openmsa.kv_cache.int8 import Int8
from openmsa.kv_cache.mxfp4 import MXFP4
from openmsa.kv_cache.nvfp4 import NVFP4
from openmsa.kv_cache.paged import PagedIndexKeys, PagedKV
from openmsa.kv_cache.stored import Stored

__all__ = ["E4M3", "MXFP4", "NVFP4", "CertifiedKeys", "Int8", "PagedIndexKeys", "PagedKV", "Stored"]
