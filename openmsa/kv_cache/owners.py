# SPDX-License-Identifier: MIT
"""An append writes only what its cache owns: places that no other element has, and lengths that no other cache advances."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from openmsa.kv_cache.stored import Stored
from openmsa.runtime import overlap, value_checks

if TYPE_CHECKING:
    from openmsa.kv_cache.page_table import Paged

NO_STATE_DICT = (
    ", as a cache belongs to a run and not to a model's weights: keep it by torch.save(cache, file) and "
    "torch.load(file, weights_only=False)"
)
APPENDED: WeakValueDictionary[int, Paged] = WeakValueDictionary()
"""The cache, as long as it lives, that appended last with its `seq_lens` at an address."""


def slots(cache: Paged, sequence: Tensor, position: Tensor) -> Tensor:
    """Does what `Paged.slots` does for places that are known to lie inside the page table."""
    page = cache.page_table[sequence, position // cache.page_size].long()
    return page * cache.page_size + position % cache.page_size


def check_pages(cache: Paged, lens: Tensor) -> None:
    """Does what `Paged.check_pages` does for lengths that are known to fit into the page table."""
    logical = torch.arange(cache.page_table.shape[1], device=cache.device)
    used = logical * cache.page_size < lens[:, None]  # [batch, max_pages]
    bad = used & ((cache.page_table < 0) | (cache.page_table >= cache.num_pages))
    value_checks.none("page_table", bad, cache.page_table, f"a page from 0 to {cache.num_pages - 1} where keys lie")


def check_pools(cache: Paged) -> None:
    """Raises ValueError unless each element that an append writes has a place of its own, in its pool and among the pools."""
    written: list[list[Tensor]] = []
    for name, pool in cache.pools().items():
        if isinstance(pool, Stored):
            pool.check_written(name)
            written.append([getattr(pool, own) for own in pool.own])
        else:
            overlap.check_written(name, pool)
            written.append([pool])
    if not all(overlap.interleaved(first, *others) for first, *others in zip(*written, strict=True) if others):
        first_name, name = cache.names
        raise ValueError(
            f"{name} must share no memory with {first_name}, as an append writes both, got pools that overlap at "
            f"{written[1][0].data_ptr():#x}"
        )


def claim_lengths(cache: Paged) -> None:
    """Raises ValueError where appends to other pools advance the same `seq_lens`, so that each would count the other's tokens.
    It reads addresses on the host only."""
    if torch.compiler.is_compiling() or not cache.batch:  # a traced tensor has no address, and an empty one shares it
        return
    address = cache.seq_lens.data_ptr()
    other = APPENDED.get(address)
    if other is cache:
        return
    if other is not None and other.seq_lens.data_ptr() == address and _addresses(other) != _addresses(cache):
        raise ValueError(
            f"seq_lens of {type(cache).__name__} must be its own, as append advances it, but a {type(other).__name__} with "
            "other pools has advanced the same tensor: give one of them seq_lens.clone()"
        )
    APPENDED[address] = cache


def _addresses(cache: Paged) -> list[int]:
    return [(pool.data if isinstance(pool, Stored) else pool).data_ptr() for pool in cache.pools().values()]


def places(cache: Paged, total: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the sequence and position of each new token, int64 ``[total]``, and the lengths with them; raises unless each
    has a place of its own. This reads tensors."""
    if cu_seqlens is None:
        cu_seqlens = torch.arange(cache.batch + 1, device=cache.device, dtype=torch.int32) * (total // cache.batch)
    value_checks.in_range("seq_lens", cache.seq_lens, 0, cache.capacity + 1)
    lens = cache.seq_lens + cu_seqlens.diff()
    token = torch.arange(total, device=cache.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token.int(), right=True)
    position = token - cu_seqlens[sequence] + cache.seq_lens[sequence]
    full = (lens > cache.capacity).nonzero().flatten()
    if full.numel():
        b = int(full[0])
        raise ValueError(
            f"page_table must have the capacity for the new keys ({cache.capacity} keys a sequence), "
            f"got {int(lens[b])} for sequence {b}"
        )
    check_pages(cache, lens)
    _check_private(cache, sequence, position)
    return sequence, position, lens


def _check_private(cache: Paged, sequence: Tensor, position: Tensor) -> None:
    """Raises ValueError when a new token (its `sequence` and `position`, int64 ``[total_new]``) would land on another new
    token or on a key that some sequence already has there: pages are shared for reading only. This reads tensors."""
    slot = slots(cache, sequence, position)
    if slot.unique().numel() != slot.numel():
        raise ValueError(
            "page_table must give appended tokens places of their own, got two sequences that would write the same place"
        )
    page, row = slot // cache.page_size, slot % cache.page_size  # [total_new]
    first_key = torch.arange(cache.page_table.shape[1], device=cache.device) * cache.page_size
    holds = torch.isin(cache.page_table, page.int()) & (first_key < cache.seq_lens[:, None])  # [batch, max_pages]
    owner, at = holds.nonzero(as_tuple=True)
    kept = cache.seq_lens[owner] - at * cache.page_size  # keys from the start of the page
    clash = (cache.page_table[owner, at][:, None] == page) & (row < kept[:, None])  # [pages that hold keys, total_new]
    if bool(clash.any()):
        first, token = clash.nonzero()[0].tolist()
        raise ValueError(
            f"page_table must not share a page that is written to: page {int(page[token])} of sequence "
            f"{int(sequence[token])} holds keys of sequence {int(owner[first])} at row {int(row[token])}"
        )
