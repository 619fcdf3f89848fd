# SPDX-License-Identifier: MIT
"""What paged caches hold is made here, appended to and gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openmsa.kv_cache import owners
from openmsa.kv_cache.certified import CertifiedKeys
from openmsa.kv_cache.e4m3 import E4M3
from openmsa.kv_cache.int8 import Int8
from openmsa.kv_cache.mxfp4 import MXFP4
from openmsa.kv_cache.nvfp4 import NVFP4
from openmsa.kv_cache.rows import PLAIN_DTYPES, check_values, rows_of
from openmsa.kv_cache.stored import Stored, check_dtype
from openmsa.runtime import checks, value_checks
from openmsa.runtime.dispatch import has_triton
from openmsa.runtime.lengths import starts_of
from openmsa.types import INT32_MAX, starts

if TYPE_CHECKING:
    from openmsa.kv_cache.page_table import Paged

FORMATS: dict[str, type[Stored]] = {f.format: f for f in (E4M3, Int8, NVFP4, MXFP4, CertifiedKeys)}


def check_sizes(page_table: Tensor, num_pages: int, **sizes: int) -> None:
    """Checks what `allocate` takes: a page table, and sizes of its pools."""
    checks.tensor("page_table", page_table, "[batch, max_pages]", (torch.int32,))
    checks.integer("num_pages", num_pages, 0, INT32_MAX)
    for name, value in sizes.items():
        checks.integer(name, value, 1, INT32_MAX)


def allocated(
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


def gather(cache: Paged, lens: Tensor | None, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Gives the first `lens` keys of each sequence, packed ``[total, heads, dim]``, of each pool, and where sequences start, as
    `PagedKV.gather` describes it."""
    value_checks.has_values("the cache", cache)
    check_dtype(dtype)
    lens = cache.seq_lens if lens is None else lens
    checks.tensor("lens", lens, "[batch]", (torch.int32, torch.int64))
    checks.size("lens", lens, 0, cache.batch, "the batch of page_table")
    value_checks.in_range("lens", lens, 0, cache.capacity + 1)
    cache.check_pages(lens)
    cu = starts_of(lens)
    sequence = torch.repeat_interleave(torch.arange(lens.numel(), device=lens.device), lens, output_size=int(cu[-1]))
    position = torch.arange(sequence.numel(), device=lens.device) - cu[sequence]
    slot = owners.slots(cache, sequence, position)
    index = (slot // cache.page_size, slice(None), slot % cache.page_size)
    return [rows_of(pool, *index, dtype=dtype) for pool in cache.pools().values()], cu  # [total, heads, dim]


def append(
    cache: Paged,
    new: dict[str, Tensor],
    cu_seqlens: Tensor | None,
    check: bool,
    before: Callable[[int, Tensor | None], None] | None = None,
) -> None:
    """Writes new tokens after each sequence's keys, as `PagedKV.append` describes it.

    new:     rows for each pool by its name.
    before:  called with the number of new tokens and checked `cu_seqlens` when the checks are done and nothing is written.
    """
    checks.flag("check", check)
    value_checks.has_values("the cache", cache)
    total = check_new(cache, new, check)
    owners.check_pools(cache)
    on_gpu = cache.device.type == "cuda" and has_triton()
    if cu_seqlens is None:
        if cache.batch == 0 or total % cache.batch:
            raise ValueError(
                f"{next(iter(new))}.shape[0] must be a multiple of the batch ({cache.batch}) when cu_seqlens is None, "
                f"got {total}"
            )
    else:
        read = "the number of new tokens" if check or not on_gpu else ""
        cu_seqlens = starts("cu_seqlens", cu_seqlens, cache.device, total, read)
        if cu_seqlens.numel() - 1 != cache.batch:
            raise ValueError(f"cu_seqlens must have batch + 1 entries ({cache.batch + 1}), got {cu_seqlens.numel()}")
    if check or not on_gpu:
        sequence, position, lens = owners.places(cache, total, cu_seqlens)
    owners.claim_lengths(cache)
    if before is not None:
        before(total, cu_seqlens)
    if on_gpu:
        from openmsa.kv_cache import triton_store

        triton_store.append(cache.pools(), new, cache.page_table, cache.seq_lens, cu_seqlens)
        return
    slot = owners.slots(cache, sequence, position)
    for name, rows in new.items():
        pool, index = cache.pools()[name], (slot // cache.page_size, slice(None), slot % cache.page_size)
        if isinstance(pool, Stored):
            pool.write_checked(index, rows.detach())
        else:
            pool[index] = rows.detach().to(pool.dtype)
    cache.seq_lens.copy_(lens)


def check_new(cache: Paged, new: dict[str, Tensor], check: bool) -> int:
    """Checks the new tokens and counts them."""
    first_name, first = next(iter(new.items()))
    for name, rows in new.items():
        checks.tensor(name, rows, "[total_new, heads, dim]")
        checks.size(name, rows, 1, cache.num_heads, "the heads of the cache")
        checks.size(name, rows, 2, cache.head_dim, "the dim of the cache")
        checks.size(name, rows, 0, first.shape[0], f"the tokens of {first_name}")
        if rows.device != cache.device:
            raise ValueError(f"{name} must be on the device of the cache ({cache.device}), got {rows.device}")
        if check:
            check_values(name, rows)
    return first.shape[0]
