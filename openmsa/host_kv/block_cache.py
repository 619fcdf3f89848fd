# SPDX-License-Identifier: MIT
"""`BlockCache` is memory on the device for some blocks of a `HostKV`, and what lies where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.kv_cache import E4M3, NVFP4, Stored


class Statistics(NamedTuple):
    """Says what the steps of a `HostKV` found in its block cache.

    steps:   lookups that ran.
    blocks:  blocks that they chose, counted for each token and KV head.
    misses:  blocks that no slot held; one that several tokens or sequences chose in a step is counted once.
    bytes:   bytes of keys and values that were fetched from host memory, the new tokens' own among them.
    """

    steps: int
    blocks: int
    misses: int
    bytes: int

    @property
    def hit_rate(self) -> float:
        """Returns the share of the chosen blocks that were not fetched as a whole; 1 where nothing was chosen."""
        return 1 - self.misses / self.blocks if self.blocks else 1.0


class TooFewBlocks(ValueError):
    """Says that a block cache is too small for one step, which can choose `least` blocks. sizes: sequences, KV heads, topk and
    new tokens."""

    def __init__(self, least: int, sizes: tuple[int, int, int, int], got: int) -> None:
        self.least, self.sizes = least, "batch {}, {} KV heads, topk {}, {} new tokens".format(*sizes)
        super().__init__(
            f"cache_blocks must be at least the blocks that one step can choose ({least}: {self.sizes}), got {got}"
        )

    def in_bytes(self, layers: int, block: int, got: int) -> ValueError:
        """Returns the error for a budget of bytes that so many layers share, whose blocks take `block` bytes each."""
        return ValueError(
            f"cache_bytes must be at least {self.least * layers * block} ({layers} layers, {self.sizes}), got {got}"
        )


@dataclass(eq=False)
class BlockCache:
    """A block cache has slots, each for one block of one KV head. All numbers are int32 on its device, counts int64.

    A block is numbered by where it lies in the pools of host memory: ``(page * heads + head) * blocks a page + its place``. Two
    sequences that share a page share its blocks here too.

    k, v:     ``[slots, 1, block_size, head_dim]``, in the format of the pools.
    slot_of:  ``[blocks]``, the slot that holds each block of the pools; -1 where none does.
    held:     ``[slots]``, the block that each slot holds; -1 for none.
    filled:   ``[slots]``, how many of its block's first rows a slot holds; the others are fetched when a step reads them.
    used:     ``[slots]``, the number of the step that used the slot last.
    order:    ``[2, slots]``, in row ``step % 2`` the slots after that step, the one unused for the longest time first. Those
              of one step stand in the order that they had before.
    counts:   ``[4]``: steps, chosen blocks, misses, and rows that were fetched.
    """

    k: Tensor | Stored
    v: Tensor | Stored
    slot_of: Tensor
    held: Tensor
    filled: Tensor
    used: Tensor
    order: Tensor
    counts: Tensor

    @classmethod
    def allocate(cls, k: Tensor | Stored, v: Tensor | Stored, slots: int, block_size: int, device: torch.device) -> BlockCache:
        """Makes an empty block cache for blocks of the pools k and v, ``[num_pages, heads, page_size, head_dim]``."""
        blocks = k.shape[0] * k.shape[1] * (k.shape[2] // block_size)

        def numbers(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int32, device=device)

        return cls(
            k=_like(k, (slots, 1, block_size), device),
            v=_like(v, (slots, 1, block_size), device),
            slot_of=numbers(blocks, -1),
            held=numbers(slots, -1),
            filled=numbers(slots, 0),
            used=numbers(slots, 0),
            order=torch.arange(slots, dtype=torch.int32, device=device).repeat(2, 1),
            counts=torch.zeros(4, dtype=torch.int64, device=device),
        )

    @property
    def count(self) -> int:
        """Returns the number of slots."""
        return self.held.shape[0]

    def clear(self) -> None:
        """Forgets all blocks, without a wait for the device."""
        self.slot_of.fill_(-1)
        self.held.fill_(-1)
        self.filled.zero_()


def planes(k: Tensor | Stored, v: Tensor | Stored) -> list[Tensor]:
    """Returns the tensors that hold what belongs to single rows of k and v: elements or codes, and the scales of groups."""
    tensors: list[Tensor] = []
    for pool in (k, v):
        tensors.append(pool.data if isinstance(pool, Stored) else pool)
        if isinstance(pool, NVFP4):
            tensors.append(pool.scale)
    return tensors


def row_bytes(k: Tensor | Stored, v: Tensor | Stored) -> int:
    """Returns the bytes of one key and its value."""
    return sum(plane.shape[-1] * plane.element_size() for plane in planes(k, v))


def _like(pool: Tensor | Stored, lead: tuple[int, int, int], device: torch.device) -> Tensor | Stored:
    """Makes zeros ``[*lead, head_dim]`` in the format of a pool, with its scale of the whole tensor."""
    shape = (*lead, pool.shape[-1])
    if isinstance(pool, E4M3):
        return E4M3.allocate(shape, device, None if pool.scale is None else pool.scale.to(device))
    if isinstance(pool, NVFP4):
        return NVFP4.allocate(shape, device, None if pool.global_scale is None else pool.global_scale.to(device))
    assert isinstance(pool, Tensor)
    return torch.zeros(shape, dtype=pool.dtype, device=device)
