# SPDX-License-Identifier: MIT
"""Caches whose pages are spread over ranks are gathered for a step of prefill, new tokens included, and each rank keeps its
share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from openmsa.kv_cache import E4M3, NVFP4, PagedIndexKeys, PagedKV, Stored
from openmsa.parallel.ranks import Ranks, finished
from openmsa.parallel.shards import PageStripes, TokenShards


class Places(NamedTuple):
    """Says where a step's keys lie; all tensors are on the device.

    sent:     sequence and page, int64 ``[2, n]``, of each page with cached keys that this rank holds and sends.
    most:     pages that the rank with the most of them sends.
    pages:    pages of the gathered pool.
    table:    int32 ``[batch, pages of the longest sequence]``, the page table of the gathered pool.
    lens:     int32 ``[batch]``, keys of these pages before the step.
    starts:   int32 ``[batch + 1]``, where the new tokens of each sequence start.
    own:      int64, which of all new tokens this rank keeps; own_starts: int32 ``[batch + 1]``, the same by sequence.
    """

    sent: Tensor
    most: int
    pages: int
    table: Tensor
    lens: Tensor
    starts: Tensor
    own: Tensor
    own_starts: Tensor


def places(
    shards: TokenShards,
    cached: tuple[int, ...],
    page_size: int,
    rank: int,
    device: torch.device,
    skipped: tuple[int, ...] | None = None,
) -> Places:
    """Lays out the gathered pool: the cached pages of every rank, each padded to `most` pages, then pages for new tokens.
    skipped: how many first pages of each sequence are left out, so that positions count from their end; None: none."""
    skipped = (0,) * len(cached) if skipped is None else skipped
    key = (rank, cached, skipped, page_size, device)
    return shards.remember(key, lambda: _places(shards, cached, skipped, page_size, rank, device))


def _places(
    shards: TokenShards, cached: tuple[int, ...], skipped: tuple[int, ...], page_size: int, rank: int, device: torch.device
) -> Places:
    stripes, ranks = PageStripes(shards.ranks, page_size), shards.ranks
    filled = [-(-n // page_size) for n in cached]
    spans = [
        [(pages_of(s, r, ranks), pages_of(n, r, ranks)) for s, n in zip(skipped, filled, strict=True)] for r in range(ranks)
    ]
    held = [[stop - start for start, stop in of_rank] for of_rank in spans]
    most = max(map(sum, held))
    first = [list(accumulate(of_rank, initial=r * most)) for r, of_rank in enumerate(held)]
    free, own, sent = ranks * most, [torch.arange(0, device="cpu")], [torch.empty(2, 0, dtype=torch.int64, device="cpu")]
    k_lens = [old + new for old, new in zip(cached, shards.lengths, strict=True)]
    width = max((-(-n // page_size) - s for n, s in zip(k_lens, skipped, strict=True)), default=0)
    table = torch.full((len(cached), width), -1, dtype=torch.int32, device="cpu")
    starts = list(accumulate(shards.lengths, initial=0))
    for b, (old, k_len) in enumerate(zip(cached, k_lens, strict=True)):
        page, full = torch.arange(skipped[b], -(-k_len // page_size), device="cpu"), filled[b]
        origin = torch.tensor([first[r][b] - spans[r][b][0] for r in range(ranks)], device="cpu")
        table[b, : len(page)] = torch.where(page < full, origin[page % ranks] + page // ranks, free + page - full)
        free += -(-k_len // page_size) - full
        own.append(stripes.positions(old, k_len, rank) - old + starts[b])
        mine = torch.arange(*spans[rank][b], device="cpu")
        sent.append(torch.stack((torch.full_like(mine, b), mine)))
    own_starts = list(accumulate(map(len, own[1:]), initial=0))
    lens = [old - s * page_size for old, s in zip(cached, skipped, strict=True)]
    int32 = [torch.tensor(x, dtype=torch.int32, device="cpu").to(device) for x in (lens, starts, own_starts)]
    moved = torch.cat(sent, 1).to(device), table.to(device), torch.cat(own).to(device)
    return Places(moved[0], most, free, moved[1], int32[0], int32[1], moved[2], int32[2])


def pages_of(pages: int, rank: int, ranks: int) -> int:
    """Returns how many of the first `pages` pages of a sequence the rank holds."""
    return -(-max(pages - rank, 0) // ranks)


def refuse(cache: PagedKV | PagedIndexKeys) -> str | None:
    """Says why the pages of a cache cannot be sent, or None."""
    for pool in cache.pools().values():
        if isinstance(pool, E4M3) and pool.scale is not None and pool.scale.dim() == 2:
            return "its scales must belong to the tensor or to heads, got E4M3 scales of pages"
        if isinstance(pool, NVFP4) and pool.layout != "linear":
            return f"its scales must be linear, got layout {pool.layout!r}"
    return None


class Gathered:
    """Holds the cached pages of all ranks that are on their way, as a cache of the same kind and format."""

    def __init__(self, cache: PagedKV | PagedIndexKeys, where: Places, ranks: Ranks) -> None:
        self._works: list[dist.Work | None] = []
        self._kept: list[Tensor] = []  # what is sent, until it has arrived
        sent = cache.page_table[where.sent[0], where.sent[1]].long()

        def gathered(pool: Tensor) -> Tensor:
            everyone = pool.new_empty(where.pages, *pool.shape[1:])
            if where.most:
                mine = pool.new_empty(where.most, *pool.shape[1:])
                mine[: len(sent)] = pool[sent]
                self._kept.append(mine)
                self._works.append(ranks.all_gather(mine, everyone[: ranks.size * where.most]))
            return everyone

        pools: dict[str, Any] = {name: _mapped(pool, gathered) for name, pool in cache.pools().items()}
        self._cache = type(cache)(**pools, page_table=where.table, seq_lens=where.lens.clone())

    def wait(self) -> PagedKV | PagedIndexKeys:
        """Returns the cache after the end of the transfer; it has room for the new tokens."""
        for work in self._works:
            finished(work)
        self._kept.clear()
        return self._cache


def _mapped(pool: Tensor | Stored, change: Callable[[Tensor], Tensor]) -> Tensor | Stored:
    """Changes each tensor that has something for every page; scales of the tensor and of heads stay."""
    if isinstance(pool, Tensor):
        return change(pool)
    changed = copy.copy(pool)
    for name, value in vars(pool).items():
        if isinstance(value, Stored) or (isinstance(value, Tensor) and value.dim() > 1):
            object.__setattr__(changed, name, _mapped(value, change))
    return changed


def check_caches(kv: PagedKV, index_keys: PagedIndexKeys, shards: TokenShards, cached: tuple[int, ...], rank: int) -> None:
    """Checks this rank's shares of the caches; on a CPU also their lengths and pages."""
    for name, cache, kind in (("kv", kv, PagedKV), ("index_keys", index_keys, PagedIndexKeys)):
        if not isinstance(cache, kind):
            raise TypeError(f"{name} must be an openmsa.{kind.__name__}, got {type(cache).__name__}")
        if reason := refuse(cache):
            raise NotImplementedError(f"{name} cannot be spread over ranks: {reason}")
        if cache.batch != len(cached):
            raise ValueError(f"{name}.batch must be the number of sequences of shards ({len(cached)}), got {cache.batch}")
        stripes = PageStripes(shards.ranks, cache.page_size)
        after = [stripes.held(old + new, rank) for old, new in zip(cached, shards.lengths, strict=True)]
        if max(after, default=0) > cache.capacity:
            raise ValueError(f"{name}.page_table must have room for the rank's {max(after)} keys, got {cache.capacity}")
        expected = [stripes.held(old, rank) for old in cached]
        if cache.device.type == "cpu":
            if (got := cache.seq_lens.tolist()) != expected:
                raise ValueError(f"{name}.seq_lens must be the rank's share of cached {list(cached)}, {expected}, got {got}")
            cache.check_pages(torch.tensor(after, dtype=torch.int64, device="cpu"))
    if kv.page_size != index_keys.page_size:
        raise ValueError(f"index_keys.page_size must be that of kv ({kv.page_size}), got {index_keys.page_size}")
