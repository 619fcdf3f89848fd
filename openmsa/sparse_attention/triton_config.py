# SPDX-License-Identifier: MIT
"""What the prefill kernels are given to read is described here, and pure functions choose the shapes of their tiles."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.triton_numbers import LEAST_SUM
from openmsa.primitives.operands import PAGE_FACTOR, PLAIN, KeyRows, PageTable
from openmsa.primitives.rows import Form, KeyView
from openmsa.runtime.launch import next_power_of_two
from openmsa.types import Layout

SHARED_BYTES = {8: 163 << 10, 9: 227 << 10, 10: 227 << 10, 12: 99 << 10}  # a program's shared memory, by major capability
MAX_HEADS = 64  # A program takes at most so many heads of one group; wider groups are split.
HOPPER_UNION_GAIN = 1.0  # the `union_gain` of Hopper's kernel for plain keys
SHORT_ITEM_ROUNDS = 20  # With fewer items a multiprocessor, Hopper's own KV-outer takes items of half as many queries.
MAX_UNION_TOKENS = 32  # A tile has at most so many queries: membership is a bit of an int32.


@dataclass(frozen=True)
class PrefillConfig:
    """Says how the queries of one call are tiled.

    heads:         query heads of one group in a tile, a power of two; a wider group takes several programs.
    union_tokens:  neighbouring queries of a union tile.
    union_keys:    keys a step of the union kernel (a block takes one or more steps).
    union_tma:     whether K and V of fully visible blocks come through the bulk copy engine, where their layout allows it.
    union_gain:    how many times a gathered step (its queries read, its partials written and read again) outweighs a union
                   step of as many keys and rows.
    outer_tokens:  gathered queries a step of the KV-outer kernel.
    outer_keys:    keys that a KV-outer program holds; a wider block takes several programs and partials.
    outer_item:    queries of one block that a KV-outer program walks; more are split across programs.
    few_hold:      whether queries are loaded once a unit, not once a step: only where products read them from shared memory,
                   since registers have no room for them.
    few_buckets:   blocks whose lists one program cuts into units.
    few_programs:  programs a multiprocessor that share the units.
    """

    heads: int
    union_tokens: int
    union_keys: int
    union_warps: int
    union_stages: int
    union_tma: bool
    union_gain: float
    outer_tokens: int
    outer_keys: int
    outer_warps: int
    outer_item: int
    few_hold: bool
    few_buckets: int
    few_programs: int
    combine_tokens: int
    combine_warps: int


class Factors(NamedTuple):
    """Holds float32 factors of the keys and of the values of each head, None where there are none; heads share one if its
    stride is 0."""

    k: Tensor | None
    s_k_head: int
    v: Tensor | None
    s_v_head: int


class Keys(NamedTuple):
    """Holds K and V, laid out alike, as the kernels take them."""

    k: KeyView
    v: KeyView
    heads: int
    dtype: torch.dtype  # that of keys in memory; codes of e4m3 may be bytes
    total: int  # a bound on the keys of all sequences together
    by_row: bool  # whether no block crosses pages

    @classmethod
    def of(cls, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, seqs: Layout, block_size: int, native: bool) -> Keys:
        """Describes the k and v of a call. native: whether the GPU has a type for e4m3 codes; otherwise they are bytes."""
        if isinstance(k, PagedKV):
            pools, table = (k.k, k.v), k.page_table
            total, by_row = seqs.batch * min(seqs.max_seqlen_k, k.capacity), k.page_size % block_size == 0
        else:
            assert v is not None
            pools, table, total, by_row = (k, v), None, k.shape[0], True
        k_view, v_view = [KeyView.of(x, table, native, items=False, words=1) for x in pools]
        return cls(k_view, v_view, k_view.heads, k_view.rows.data.dtype, total, by_row)

    def num_buckets(self, seqs: Layout, block_size: int) -> int:
        """Returns a bound on the blocks of all sequences together, as they are numbered."""
        return -(-self.total // block_size) + seqs.batch - 1

    @property
    def page_size(self) -> int:
        """Returns the keys of a page, 0 where keys are packed."""
        return self.k.page_size

    @property
    def stored(self) -> bool:
        """Tells whether keys are codes of a format."""
        return self.k.form.format != PLAIN

    @property
    def factors_by_page(self) -> bool:
        """Tells whether the keys, or the values, of each page are multiplied by a factor of that page."""
        return PAGE_FACTOR in (self.k.form.factor, self.v.form.factor)

    @property
    def operands(self) -> tuple[KeyRows, KeyRows, PageTable]:
        """Returns keys, values and the table of their pages as operands of a kernel."""
        return self.k.rows, self.v.rows, self.k.table

    @property
    def forms(self) -> dict[str, Form]:
        """Returns the constants that tell a kernel how keys and values are stored."""
        return {"K_FORM": self.k.form, "V_FORM": self.v.form}

    def steps_by_row(self, config: PrefillConfig, block_size: int) -> bool:
        """Tells whether a step of the union kernel reads neighbouring rows."""
        return self.by_row and block_size % config.union_keys == 0

    @property
    def factors(self) -> Factors:
        """Returns the factors of heads, or of all keys and all values."""
        k, v = self.k.rows, self.v.rows
        return Factors(k.factor, k.s_factor_head, v.factor, v.s_factor_head)


def padded_dim(head_dim: int, keys: torch.dtype) -> int:
    """Returns the elements of a row of a tile, at least as many as a product takes. keys: the dtype in memory; uint8 stands for
    two elements a byte, or for E4M3 codes."""
    least = {torch.float8_e4m3fn: 32, torch.uint8: LEAST_SUM}.get(keys, 16)
    return max(next_power_of_two(head_dim), least)


@functools.lru_cache(256)
def prefill_config(
    head_dim: int,
    group: int,
    block_size: int,
    major: int,
    element_bytes: int = 2,
    stored: bool = False,
    four_bits: bool = False,
) -> PrefillConfig:
    """Chooses the tiles of a call. They are tuned for 16 heads a group, head dim 128 and blocks of 128 on compute capability 9;
    elsewhere they follow from the sizes of memory.

    major: the major compute capability. stored: whether keys are in a cache format, whose conversion takes registers.
    four_bits: whether that format has two elements a byte.
    """
    dim = next_power_of_two(head_dim)
    shared = SHARED_BYTES.get(major, 99 << 10)
    heads = min(next_power_of_two(group), MAX_HEADS)
    keys = max(LEAST_SUM if four_bits else 16, next_power_of_two(block_size))
    roomy = shared >= 160 << 10

    wide = dim * element_bytes > 256
    union_rows = 64
    union_tokens = max(1, min(MAX_UNION_TOKENS, union_rows // heads))
    full = union_tokens * heads >= 64  # With one head, 32 queries fill half of a tile's 64 rows.
    union_keys = min(keys, 64 if full and (roomy or not (wide or stored)) else 32)
    union_warps = 8 if wide else 4 if full else 2

    outer_rows = 64 if roomy or not wide else 32
    outer_keys = min(keys, 64 if wide else 128)
    hopper = major == 9 and not stored and (head_dim, block_size, element_bytes) == (128, 128, 2)  # It has its own kernel.
    return PrefillConfig(
        heads=heads,
        union_tokens=union_tokens,
        union_keys=union_keys,
        union_warps=union_warps,
        union_stages=3 if roomy and not wide else 2,
        union_tma=major >= 9,
        union_gain=1.85,
        outer_tokens=max(1, outer_rows // heads),
        outer_keys=outer_keys,
        outer_warps=8 if wide else 4,
        outer_item=256 if hopper else 512,
        few_hold=major in (9, 10),
        few_buckets=32,
        few_programs=2,
        combine_tokens=max(1, min(16 // heads, union_tokens)),
        combine_warps=4,
    )


def plain_hopper_config(config: PrefillConfig, lists: int, readers: float, num_sms: int) -> PrefillConfig:
    """Returns the config of a call whose union tiles go to Hopper's kernel for plain keys: they have 128 rows, and a step takes
    less time. Where KV-outer has few items, they are halved, so that none is waited for. lists: blocks times key heads."""
    is_short = lists * math.ceil(readers / config.outer_item) < SHORT_ITEM_ROUNDS * num_sms
    item = config.outer_item // 2 if is_short else config.outer_item
    return replace(config, union_tokens=128 // config.heads, union_gain=HOPPER_UNION_GAIN, outer_item=item)


def hopper_outer_serves(group: int, head_dim: int) -> bool:
    """Tells whether Hopper's own KV-outer serves plain keys in blocks of 128, with so many query heads to a key head."""
    return group in (8, 16, 32, 64) and head_dim == 128


FEW_LIST_BYTES = 64 << 20  # The lists of the KV-outer form for few queries take at most so many bytes.
FEW_READERS = 12  # A block is read by at most so many queries on average where that form is the faster one;
FEW_ROWS = ((1024, 64), (2048, 24))  # by at most the second number where queries times key heads are at most the first.
APART_ABOVE = 0.8  # Where Hopper's own KV-outer serves, tiles go to it one by one from this part of `union_limit` on.
LONE_TILES = 1.4  # With fewer union tiles a multiprocessor, a program that walks a union is waited for by all others.


def few_queries(total_q: int, head_dim: int, topk: int, num_kv_heads: int, num_buckets: int) -> bool:
    """Tells whether tiles that do not stay together take the KV-outer form for few queries: their lists fit, and few queries on
    average read a block."""
    lists = total_q * num_kv_heads * num_buckets * 4
    readers = next((most for rows, most in FEW_ROWS if total_q * num_kv_heads <= rows), FEW_READERS)
    return head_dim <= 128 and lists <= FEW_LIST_BYTES and total_q * topk <= readers * num_buckets


def few_union_limit(config: PrefillConfig, topk: int, queries_per_block: float, tiles: float = math.inf) -> int:
    """Returns what `union_limit` returns, where blocks have few readers. Up to one query a block, and with fewer than
    `LONE_TILES` tiles a multiprocessor (`tiles`), no tile goes to the union kernel (-1); else a tile does whose union has at
    most three quarters of the blocks that its queries select."""
    return -1 if queries_per_block <= 1 or tiles < LONE_TILES else topk * config.union_tokens * 3 // 4


def union_limit(config: PrefillConfig, topk: int, queries_per_block: float) -> int:
    """Returns up to how many blocks the queries of a tile select together for the tile to go to the union kernel. To read a
    block costs a KV-outer program as much as 8 of the queries that read it."""
    gathered_steps = topk * config.union_tokens / config.outer_tokens
    return max(1, int(config.union_gain * gathered_steps * (1 + 8 / max(queries_per_block, 1e-3))))


def all_together(config: PrefillConfig, topk: int, readers: float, visible: float, own_outer: bool) -> bool:
    """Tells whether every tile of a call goes to the union kernel, whatever its queries select: a union has at most the blocks
    that they see, so that few tiles would gain by KV-outer, and a call without it has fewer launches and lists.

    readers:    queries that read a block on average.
    visible:    blocks that a tile sees on average.
    own_outer:  `hopper_outer_serves`, which is faster than Triton's KV-outer.
    """
    return visible <= (APART_ABOVE if own_outer else 1.0) * union_limit(config, topk, readers)
