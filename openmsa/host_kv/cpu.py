# SPDX-License-Identifier: MIT
"""This module brings chosen blocks into the slots of a block cache in plain PyTorch; it says what the kernels do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openmsa.host_kv.block_cache import planes
from openmsa.kv_cache import owners

if TYPE_CHECKING:
    from openmsa.host_kv.cache import HostKV


def bring(kv: HostKV, blocks: Tensor, new_tokens: int) -> tuple[Tensor, Tensor]:
    """Brings the chosen blocks of a step into slots, and returns each token's and KV head's own short sequence: the slots of
    its blocks, int32 ``[tokens * heads, topk]``, and how many keys it sees there, int32 ``[tokens * heads]``.

    blocks:  int32 ``[tokens, heads or 1, topk]``, ids counted from the start of the token's sequence, ascending, then -1.
    """
    block, rows, table, lens = wanted(kv, blocks, new_tokens)
    cache, chosen = kv.cache, block[block >= 0]
    now = int(cache.counts[0]) + 1
    order = cache.order[(now - 1) % 2].long()
    # 1. Slots that hold chosen blocks are used now.
    slot = cache.slot_of[chosen]
    cache.used[slot[slot >= 0].long()] = now
    # 2. Blocks that no slot holds, each once, replace those of the slots unused for the longest time.
    missed = torch.tensor(list(dict.fromkeys(chosen[slot < 0].tolist())), dtype=torch.int64, device="cpu")
    taken = order[cache.used[order] != now][: len(missed)]
    left = cache.held[taken]
    cache.slot_of[left[left >= 0].long()] = -1
    cache.held[taken], cache.slot_of[missed] = missed.int(), taken.int()
    cache.filled[taken], cache.used[taken] = 0, now
    # 3. Rows that a slot lacks are fetched.
    slot = cache.slot_of[chosen].long()
    fetched = 0
    for number, at, stop in zip(chosen.tolist(), slot.tolist(), rows[block >= 0].tolist(), strict=True):
        first = int(cache.filled[at])
        if first < stop:
            for host, here in zip(planes(kv.k, kv.v), planes(cache.k, cache.v), strict=True):
                size = (kv.block_size, host.shape[-1])
                here.view(-1, *size)[at, first:stop] = host.view(-1, *size)[number, first:stop]
            cache.filled[at], fetched = stop, fetched + stop - first
    # 4. Slots of this step go behind the others.
    used = cache.used[order] == now
    cache.order[now % 2] = torch.cat((order[~used], order[used])).int()
    cache.counts += torch.tensor([1, len(chosen), len(missed), fetched], device="cpu")
    table[block >= 0] = slot.int()
    return table, lens


def wanted(kv: HostKV, blocks: Tensor, new_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns for each token's and KV head's chosen blocks, ``[tokens * heads, topk]``: their numbers, -1 for none, and how
    many rows their sequence has written there; then the results of `bring`, no slots yet."""
    topk, heads, size = blocks.shape[2], kv.num_heads, kv.block_size
    ids = blocks.expand(-1, heads, -1).flatten(0, 1).long()  # [tokens * heads, topk]
    row = torch.arange(ids.shape[0], device="cpu")
    token, head = row // heads, row % heads
    sequence = token // new_tokens
    held = kv.seq_lens[sequence].long()
    stop = held.clamp(max=kv.capacity)
    sees = torch.minimum(stop, held - new_tokens + token % new_tokens + 1).clamp(min=0)
    there = (ids >= 0) & (ids * size < sees[:, None])
    count, last = there.sum(1), torch.where(there, ids, -1).amax(1)
    lens = torch.where(count > 0, (count - 1) * size + (sees - last * size).clamp(max=size), 0)
    per_page, ids = kv.page_size // size, ids.clamp(min=0)
    page = kv.page_table[sequence[:, None], torch.where(there, ids // per_page, 0)]
    there &= (page >= 0) & (page < kv.num_pages)
    number = (page.long() * heads + head[:, None]) * per_page + ids % per_page
    rows = (stop[:, None] - ids * size).clamp(max=size)
    return torch.where(there, number, -1), rows, torch.full((len(row), topk), -1, dtype=torch.int32, device="cpu"), lens.int()


def outdate(kv: HostKV, total: int, cu_seqlens: Tensor | None) -> None:
    """Makes slots forget the rows where `total` new tokens are about to be written, and those behind them in their block."""
    sequence, position, _ = owners.places(kv, total, cu_seqlens)
    row = kv.slots(sequence, position)
    page, row = row // kv.page_size, row % kv.page_size
    heads = torch.arange(kv.num_heads, device="cpu")
    number = (page[:, None] * kv.num_heads + heads) * (kv.page_size // kv.block_size) + (row // kv.block_size)[:, None]
    slot = kv.cache.slot_of[number]
    first = (row % kv.block_size)[:, None].expand_as(slot)[slot >= 0]
    kv.cache.filled.scatter_reduce_(0, slot[slot >= 0].long(), first.int(), "amin")
