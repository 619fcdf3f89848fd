# SPDX-License-Identifier: MIT
"""This module makes tensors and caches for calls that run under `openmsa.runtime.recording`.

A kind of rows is "bf16", "fp16" or "fp32", with "odd" behind it where TMA does not fit; "e4m3", with "tensor", "head" or "page"
for its scales; "int8", with "apart" for scales and errors in tensors of their own; "certified", with "apart" or "fp16";
"nvfp4", with "128x4" for swizzled scales; "mxfp4". Page 0 stands for packed rows. Pools are small: page tables name a page many
times.
"""

from __future__ import annotations

from typing import Any

import torch

from openmsa import PagedIndexKeys, PagedKV, Sequences
from openmsa.kv_cache import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8
from openmsa.runtime.recording import GPU

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGES = 35


def rows(kind: str, *shape: int) -> Any:
    """Makes rows of a kind: ``[total, heads, dim]``, or a pool ``[num_pages, heads, page_size, dim]``."""
    form, _, detail = kind.partition(" ")
    lead, dim = shape[:-1], shape[-1]
    if form in DTYPES:
        return empty((*lead, dim + 4 * (detail == "odd")), DTYPES[form])[..., :dim]
    if form == "e4m3":
        scales: dict[str, tuple[int, ...]] = {"head": (shape[1],), "page": shape[:2]}
        scale = ones(scales[detail]) if detail in scales else ones(()) if detail == "tensor" else None
        return E4M3(empty(shape, torch.uint8), scale)
    if form in ("int8", "certified"):
        pairs = empty((*lead, 2), torch.bfloat16).unbind(-1)
        apart = (empty(lead, torch.bfloat16), empty(lead, torch.bfloat16))
        codes = empty((*lead, dim + 4 * (detail == "odd")), torch.int8)[..., :dim]
        coarse = Int8(codes, *(apart if "apart" in detail else pairs))
        return coarse if form == "int8" else CertifiedKeys(coarse, empty(shape, DTYPES["fp16" if "fp16" in detail else "bf16"]))
    if form == "mxfp4":
        return MXFP4(empty((*lead, dim // 2), torch.uint8), empty((*lead, dim // 32), torch.uint8))
    groups, swizzled = dim // 16, detail == "128x4"
    total = torch.Size(lead).numel()
    scale = empty((-(-total // 128) * 128, -(-groups // 4) * 4) if swizzled else (*lead, groups), torch.uint8)
    return NVFP4(empty((*lead, dim // 2), torch.uint8), scale, ones(()), "128x4" if swizzled else "linear")


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor of the recorded GPU without values."""
    return torch.empty(shape, dtype=dtype, device=GPU)


def ones(shape: tuple[int, ...]) -> torch.Tensor:
    """Makes scales of 1."""
    return torch.ones(shape, device=GPU)


def lengths(batch: int, queries: int, keys: int, packed: bool) -> Sequences:
    """Returns the lengths of a batch of equal sequences; where keys are in pages, positions of first queries are given."""
    start = torch.arange(batch + 1, dtype=torch.int32, device=GPU)
    offset = None if packed else torch.full((batch,), keys - queries, dtype=torch.int32, device=GPU)
    return Sequences(start * queries, start * keys if packed else None, queries, keys, offset)


def paged(batch: int, keys: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a page table for so many keys a sequence, and the lengths of the sequences."""
    table = torch.zeros(batch, -(-keys // page), dtype=torch.int32, device=GPU)
    return table, torch.full((batch,), keys, dtype=torch.int32, device=GPU)


def kv(kind: str, batch: int, keys: int, heads: int, dim: int, page: int) -> tuple[Any, Any]:
    """Makes k and v of a call: packed rows, or a cache and None."""
    if not page:
        return rows(kind, batch * keys, heads, dim), rows(kind, batch * keys, heads, dim)
    pools = (rows(kind, PAGES, heads, page, dim) for _ in range(2))
    return PagedKV(*pools, *paged(batch, keys, page)), None


def index_keys(kind: str, batch: int, keys: int, heads: int, dim: int, page: int) -> Any:
    """Makes the index keys of a call: packed rows, or a cache."""
    if not page:
        return rows(kind, batch * keys, heads, dim)
    return PagedIndexKeys(rows(kind, PAGES, heads, page, dim), *paged(batch, keys, page))
