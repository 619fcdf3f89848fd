# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This kernel turns a selection into work: union lists of neighbouring queries, and the query list of each block.

A tile is `TOKENS` neighbouring queries of one sequence. Tile i belongs to the last sequence b with
``cu_q[b] // TOKENS + b <= i``, so tiles need no list of their own (some are empty). Blocks are numbered the same way over
all sequences: block j of sequence b is bucket ``cu_k[b] // BLOCK + b + j``.

A tile of which each head's union is small keeps its union list (ids ascending, membership bits); for the others each
(query, slot) is an entry in its block's list, but where the merge attends to the tile's home block (`home_of`). Lists of
KV-outer belong to a segment, (query chunk, KV head), so that every size is bounded on the host: counts give offsets, and these
entries and items, an item being up to `ITEM` queries of one block.
The order within a list depends on timing; no result does, as the slot in the query's own row says where a partial goes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.primitives.operands import Bounds, QueryRows, Selection
from openmsa.primitives.softmax import Result
from openmsa.runtime.devices import facts
from openmsa.runtime.kinds import rounded
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two, zeros
from openmsa.sparse_attention.few_lists import FewLists, few_entries, few_sizes
from openmsa.sparse_attention.triton_config import (
    FEW_READERS,
    Keys,
    PrefillConfig,
    all_together,
    few_queries,
    few_union_limit,
    hopper_outer_serves,
    padded_dim,
    union_limit,
)
from openmsa.sparse_attention.triton_keys import Descriptors, RowTile
from openmsa.types import Layout

NO_REST, FEW, KV_OUTER, OUTER_BUT_HOME = (tl.constexpr(i) for i in range(4))
"""They say where tiles go that do not stay together; for the last, the merge attends to their home blocks."""
TILE_FIELDS = tl.constexpr(4)
"""A tile is its first token, number of tokens, sequence, position of the first token."""
SIZE_FIELDS = tl.constexpr(2)
"""The sizes of a union list are its blocks (-1: the tile does not stay together), and those that all its queries see whole."""
ITEM_FIELDS = tl.constexpr(4)
"""An item is its begin and end in the entries, sequence, block (-1 - block: some query of its list sees only a part of it)."""
HOME_BIT = tl.constexpr(62)
"""This bit of a query's slots says that it reads the home block of its tile, which the merge attends to."""
HOME_TOKENS = 8  # The merge attends to home blocks in tiles of so many queries.
OFFSETS_STEP = 128
"""The last program of a segment makes the offsets of so many buckets at a time."""
LINE = tl.constexpr(32)
"""A line of the cache holds so many int32 numbers. Atomic operations on one line follow each other."""
LISTED_STEP = tl.constexpr(64)
"""Union lists are counted in steps of so many."""
MOST_SPREAD = 16384
"""The counts of a segment are spread over at most so many numbers, which its last program reads."""
ALIGNED = 4
"""Lists begin at multiples of so many elements, so that their addresses are always of one alignment."""


class UnionLists(NamedTuple):
    """Holds the tiles, and the union lists of those that stay together; int32.

    tiles:      [num_tiles, TILE_FIELDS].
    sizes:      [num_tiles, key heads, SIZE_FIELDS].
    ids:        [num_tiles, key heads, capacity], block ids, ascending.
    rows:       the same shape: first key row of the block in k, where blocks do not cross pages.
    bits:       the same shape: bit i says that token i of the tile selected it.
    listed:     [1], number of lists up to the last tile that stays together, be it empty, and perhaps a few more; 0 where none
                does. None where no kernel reads it.
    """

    tiles: Tensor
    sizes: Tensor
    ids: Tensor
    rows: Tensor
    bits: Tensor
    listed: Tensor | None


class OuterLists(NamedTuple):
    """Says which queries read a block, for KV-outer; int32 where nothing else is said. A segment is a chunk of tiles and a key
    head.

    counts:         [segments, num_buckets, spread], queries a block in front, and nothing behind.
    partly:         [segments, num_buckets], not 0 where some query does not see all of the block.
    slots:          int64 [total_q, key heads], bit i says that slot i has a partial; HOME_BIT.
    ranks:          [total_q, key heads, topk], place in the block's list, -1: nothing to read, -2: the tile's home block.
    entries:        [segments, chunk.entries], token * topk + slot.
    entry_offsets:  [segments, num_buckets], where a block's list starts in its segment.
    item_offsets:   the same shape: where its items start.
    items:          [segments, chunk.items, ITEM_FIELDS].
    num_items:      [segments].
    num_entries:    [segments].
    num_visits:     [segments], blocks in the union lists of the segment together.
    done:           [segments, LINE], in front, programs that have counted.
    """

    counts: Tensor
    partly: Tensor
    slots: Tensor
    ranks: Tensor
    entries: Tensor
    entry_offsets: Tensor
    item_offsets: Tensor
    items: Tensor
    num_items: Tensor
    num_entries: Tensor
    num_visits: Tensor
    done: Tensor


class Lists(NamedTuple):
    """Holds the work of a call. Tiles that do not stay together go to KV-outer in one of its two forms; both are None where no
    tile can."""

    union: UnionLists
    outer: OuterLists | None
    few: FewLists | None


class Limits(NamedTuple):
    """Holds the bounds of lists.

    max_blocks:   blocks of a sequence; nothing is listed past them, whatever the lengths say.
    union_limit:  blocks of a tile that stays together; -1: no tile stays together.
    capacity:     entries of a union list.
    room:         entries of a block's list for few queries.
    """

    max_blocks: int
    union_limit: int
    capacity: int
    room: int


class Chunk(NamedTuple):
    """Holds the bounds of a chunk of tiles, whose partials are held at a time: tiles; entries and items of each key head."""

    tiles: int
    entries: int
    items: int


class Plan(NamedTuple):
    """Holds the sizes of one call, all known on the host."""

    group: int
    parts: int  # programs that share the heads of one group
    topk: int
    block_size: int
    total_q: int
    num_tiles: int
    limits: Limits
    rest: int  # where tiles go that do not stay together; NO_REST: no tile can select more blocks than the limit
    num_chunks: int
    chunk: Chunk
    num_buckets: int
    spread: int  # numbers from one block's count to the next one's
    cuts: int  # partials of a block
    partial_dtype: torch.dtype

    @classmethod
    def of(
        cls, queries: QueryRows, keys: Keys, topk: int, block_size: int, seqs: Layout, config: PrefillConfig, path: str,
        plain: bool, partial_dtype: torch.dtype, workspace_bytes: int, tuned: bool,
    ) -> Plan:  # fmt: skip
        """Computes the sizes from the arguments of the call. plain: whether neither queries nor keys are in a format. tuned:
        whether union tiles go to Hopper's own kernel."""
        total_q, (num_q_heads, head_dim) = seqs.launched(queries.data), queries.data.shape[1:]
        tokens, group = config.union_tokens, num_q_heads // keys.heads
        num_buckets = keys.num_buckets(seqs, block_size)
        most = min(tokens * topk, seqs.num_blocks(block_size))
        num_tiles = ceil_div(total_q, tokens) + seqs.batch - 1
        like_q = rounded(total_q)  # Like calls are served by the same kernels.
        readers = like_q * topk / num_buckets
        query_bytes = num_q_heads * topk * head_dim * partial_dtype.itemsize  # a query's partials, for each cut of a block
        may_be_few = path == "auto" and plain and like_q * query_bytes <= workspace_bytes
        few = path == "few" or (may_be_few and few_queries(like_q, head_dim, topk, keys.heads, num_buckets))
        cuts = 1 if few else ceil_div(block_size, config.outer_keys)
        num_chunks = 1 if few else ceil_div(num_tiles, max(1, workspace_bytes // (tokens * cuts * query_bytes)))
        chunk_tiles = ceil_div(num_tiles, num_chunks)
        entries = chunk_tiles * tokens * topk
        # The limit does not depend on the chunk: except for the form for few queries, the workspace must not change which
        # kernel serves a tile. Hopper's kernel walks a wide union in too few programs.
        if few:
            tiles = (ceil_div(like_q, tokens) + seqs.batch - 1) * keys.heads / facts(queries.data.device).num_sms
            limit = few_union_limit(config, topk, readers, tiles)
        else:
            limit = (few_union_limit if tuned and readers <= FEW_READERS else union_limit)(config, topk, readers)
            visible = seqs.num_blocks(block_size) - rounded(min(seqs.max_seqlen_q, total_q)) / block_size / 2
            if tuned and plain and all_together(config, topk, readers, visible, hopper_outer_serves(group, head_dim)):
                limit = most  # nothing is left for KV-outer
        limit = {"union": most, "outer": 0, "few": -1}.get(path, limit)
        return cls(
            group=group,
            parts=ceil_div(group, config.heads),
            topk=topk,
            block_size=block_size,
            total_q=total_q,
            num_tiles=num_tiles,
            limits=Limits(seqs.num_blocks(block_size), limit, max(1, min(limit, most)), min(seqs.max_seqlen_q, total_q)),
            rest=(NO_REST if limit >= most else FEW if few else KV_OUTER).value,
            num_chunks=ceil_div(num_tiles, chunk_tiles),
            chunk=Chunk(chunk_tiles, entries, entries // config.outer_item + min(num_buckets, entries)),
            num_buckets=num_buckets,
            spread=1 if few else max(1, min(LINE.value, MOST_SPREAD // next_power_of_two(num_buckets))),
            cuts=cuts,
            partial_dtype=partial_dtype,
        )


class PrefillCall(NamedTuple):
    """Holds one call with its lists, ready for the kernels that attend."""

    queries: QueryRows
    keys: Keys
    tma: Descriptors  # those of the keys
    bounds: Bounds
    plan: Plan
    config: PrefillConfig
    lists: Lists
    result: Result
    scale: float  # the absolute softmax scale times log2(e)
    negative: bool  # whether the softmax scale is negative

    def row_tile(self, tokens: int) -> RowTile:
        """Returns the rows of a tile of so many queries."""
        dim, plan = self.queries.data.shape[2], self.plan
        return RowTile(plan.group, self.config.heads, plan.parts, tokens, dim, padded_dim(dim, self.keys.dtype))


def build_lists(blocks: Tensor, bounds: Bounds, keys: Keys, plan: Plan, config: PrefillConfig, flag: bool) -> Lists:
    """Builds the lists of a call with one launch. The lists of KV-outer are counted only; `triton_outer.fill` fills them. flag:
    whether `listed` is needed."""
    tile_heads, segments, total_q = plan.num_tiles * keys.heads, plan.num_chunks * keys.heads, plan.total_q
    room = tile_heads * plan.limits.capacity
    union_sizes = (plan.num_tiles * TILE_FIELDS.value, tile_heads * SIZE_FIELDS.value, room, room, room)
    num_counts = segments * plan.num_buckets if plan.rest != NO_REST.value else 0
    listed: Tensor | None = None
    if num_counts or flag:
        lines = [segments, ceil_div(num_counts * plan.spread, LINE.value), ceil_div(num_counts, LINE.value), 1]
        zero = zeros(sum(lines) * LINE.value, torch.int32, blocks.device)
        done, counts, partly, listed = zero.split([n * LINE.value for n in lines])
        listed = listed[:1] if flag else None
    sizes: tuple[int, ...] = ()
    if plan.rest == FEW.value:
        sizes = few_sizes(keys.heads, plan.num_buckets, plan.limits.room, total_q * plan.topk, config.union_tokens)
    elif plan.rest >= KV_OUTER.value:
        sizes = (total_q * keys.heads * plan.topk, segments * plan.chunk.entries, num_counts, num_counts)
        sizes += (segments * plan.chunk.items * ITEM_FIELDS.value, segments, segments, segments)
    num_slots = 2 * total_q * keys.heads if sizes else 0  # two elements make an int64
    tiles, list_sizes, ids, rows, bits, slots, *others = _split(blocks, *union_sizes, num_slots, *sizes)
    rest = (counts, partly, slots.view(torch.int64), *others) if sizes else ()
    few = FewLists._make(rest) if plan.rest == FEW.value else None
    outer = OuterLists._make((*rest, done)) if plan.rest >= KV_OUTER.value else None
    lists = Lists(UnionLists(tiles, list_sizes, ids, rows, bits, listed), outer, few)
    _fill(lists, blocks, bounds, keys, plan, config)
    return lists


def _split(like: Tensor, *sizes: int) -> list[Tensor]:
    """Returns tensors of at least so many elements each, in one allocation, all aligned."""
    rooms = [size + -size % ALIGNED for size in sizes]
    return list(like.new_empty(sum(rooms)).split(rooms))


def selection_of(blocks: Tensor, plan: Plan, config: PrefillConfig) -> tuple[Selection, dict[str, int]]:
    """Returns what the kernels that read a tile's selection take: the selection, constants and number of warps."""
    selection = Selection(blocks, blocks.stride(0), blocks.stride(1) if blocks.shape[1] > 1 else 0, blocks.stride(2))
    tokens, slots = config.union_tokens, next_power_of_two(plan.topk)
    shape = {"TOPK": plan.topk, "SLOTS": slots, "TOKENS": tokens, "BLOCK": plan.block_size}
    return selection, shape | {"num_warps": min(8, max(1, tokens * slots // 256))}


def _fill(lists: Lists, blocks: Tensor, bounds: Bounds, keys: Keys, plan: Plan, config: PrefillConfig) -> None:
    batch = bounds.cu_q.numel() - 1
    selection, shape = selection_of(blocks, plan, config)
    launch_kernel(
        tile_lists,
        (plan.num_tiles * keys.heads,),
        selection,
        bounds,
        keys.k.table,
        lists.union,
        lists.few or lists.outer,
        *(keys.heads, batch, (batch - 1).bit_length()),
        *(plan.num_buckets, plan.spread, plan.chunk.tiles, keys.k.num_pages),
        *plan.limits,
        **shape,
        PAGE_SIZE=keys.page_size if keys.by_row else 0,
        REST=plan.rest,
        ITEM=config.outer_item,
        STEP=OFFSETS_STEP,
    )


_LENGTHS = ["batch", "search_steps", "num_buckets", "spread", "chunk_tiles", "chunk_entries", "item_bound", "num_pages"]
_LENGTHS += ["max_blocks", "union_limit", "capacity", "room"]


@triton.jit
def _either(id_a, bits_a, id_b, bits_b):
    """Combines two entries in a scan over sorted ids: the bits are the members so far of the run that ends here."""
    return id_b, tl.where(id_a == id_b, bits_a | bits_b, bits_b)


@triton.jit
def sequence_of(numbered, i, batch, search_steps, SIZE: tl.constexpr):
    """Finds the sequences of tiles of SIZE queries (numbered: cu_q) or of buckets of SIZE keys (cu_k); i is one number or
    several."""
    low = i * 0
    high = low + batch - 1
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        reached = tl.load(numbered + middle) // SIZE + middle <= i
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def position_of_token_zero(q_offset, i_b, q_begin, q_end, k_len):
    """Returns what is added to the numbers of a sequence's packed queries to give their positions. Without q_offset the queries
    are the last of the keys."""
    return k_len - q_end if q_offset is None else tl.load(q_offset + i_b) - q_begin


@triton.jit
def load_tile(tiles, i_tile):
    """Loads the first token, number of tokens, sequence and position of the first token of a tile."""
    p_tile = tiles + i_tile * TILE_FIELDS
    return tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2), tl.load(p_tile + 3)


@triton.jit
def selected_at(selection, row, i_h, SLOTS: tl.constexpr):
    """Returns where the block ids of these queries (int64 rows) lie, [rows, SLOTS]."""
    o_s = tl.arange(0, SLOTS)
    return selection.ids + row[:, None] * selection.s_token + i_h * selection.s_head + o_s[None, :] * selection.s_slot


@triton.jit
def home_of(position, k_len, max_blocks, BLOCK: tl.constexpr):
    """Returns the home block of a tile: the last one that its first query, at `position`, sees."""
    return tl.minimum(tl.maximum(tl.minimum(position, k_len - 1), 0) // BLOCK, max_blocks - 1)


@triton.jit(do_not_specialize=_LENGTHS)
def tile_lists(
    selection,  # Selection
    bounds,  # Bounds
    table,  # PageTable
    union,  # UnionLists, written; listed must be 0 before
    rest,  # OuterLists: counts, partly and done must be 0 before and are written, as are ranks, offsets and num_items; or
    # FewLists: entries and slots are written, too; or None: every tile stays together
    num_kv_heads, batch, search_steps, num_buckets, spread, chunk_tiles, num_pages, max_blocks, union_limit, capacity, room,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,  # TOPK rounded up to a power of two
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: packed keys, or pages that blocks may cross
    REST: tl.constexpr,  # NO_REST, FEW, KV_OUTER or OUTER_BUT_HOME
    ITEM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the union list of a tile and KV head, one a program, or its queries' places in the lists of their blocks."""
    # 1. The program finds its tile.
    i_tile = tl.program_id(0) // num_kv_heads
    i_h = tl.program_id(0) % num_kv_heads
    i_b = sequence_of(bounds.cu_q, i_tile, batch, search_steps, TOKENS)
    q_begin, q_end = tl.load(bounds.cu_q + i_b), tl.load(bounds.cu_q + i_b + 1)
    k_begin, k_end = tl.load(bounds.cu_k + i_b), tl.load(bounds.cu_k + i_b + 1)
    first = tl.minimum(q_begin + (i_tile - q_begin // TOKENS - i_b) * TOKENS, q_end)
    tokens = tl.minimum(q_end - first, TOKENS)
    position = first + position_of_token_zero(bounds.q_offset, i_b, q_begin, q_end, k_end - k_begin)
    if i_h == 0:
        p_tile = union.tiles + i_tile * TILE_FIELDS
        tl.store(p_tile, first)
        tl.store(p_tile + 1, tokens)
        tl.store(p_tile + 2, i_b)
        tl.store(p_tile + 3, position)

    # 2. It loads the blocks that the tile's queries selected and see.
    o_t, o_s = tl.arange(0, TOKENS), tl.arange(0, SLOTS)
    last_key = tl.minimum(position + o_t, k_end - k_begin - 1)  # [TOKENS]
    visible = tl.minimum(tl.where(last_key >= 0, last_key // BLOCK + 1, 0), max_blocks)
    row = (first + o_t).to(tl.int64)
    m_slot = (o_t < tokens)[:, None] & (o_s < TOPK)[None, :]
    b_ids = tl.load(selected_at(selection, row, i_h, SLOTS), mask=m_slot, other=-1)  # [TOKENS, SLOTS]
    m_read = (b_ids >= 0) & (b_ids < visible[:, None])

    # 3. It forms their union: sorted by block, then token, each block's run ends where the next id differs.
    NOTHING: tl.constexpr = 2147483647
    N: tl.constexpr = TOKENS * SLOTS
    keys = tl.where(m_read, b_ids * TOKENS + o_t[:, None], NOTHING)
    keys = tl.sort(tl.reshape(keys, [N]))
    o_n = tl.arange(0, N)
    ids = keys // TOKENS
    after = tl.gather(ids, tl.minimum(o_n + 1, N - 1), 0)
    m_end = (keys != NOTHING) & ((o_n == N - 1) | (after != ids))
    place = tl.cumsum(m_end.to(tl.int32), 0) - 1
    size = tl.sum(m_end.to(tl.int32), 0)
    _, bits = tl.associative_scan((ids, 1 << (keys % TOKENS)), 0, _either)

    # 4. It writes the list of a tile that stays together, or an entry in its block's list for each (query, slot).
    last_common = tl.min(tl.where(o_t < tokens, last_key, NOTHING), 0)
    whole = tl.sum((m_end & (ids * BLOCK + BLOCK - 1 <= last_common)).to(tl.int32), 0)
    o_list = (i_tile * num_kv_heads + i_h).to(tl.int64)
    is_union = size <= union_limit
    tl.store(union.sizes + o_list * SIZE_FIELDS, tl.where(is_union, size, -1))
    tl.store(union.sizes + o_list * SIZE_FIELDS + 1, whole)
    if is_union:
        if union.listed is not None:  # Steps keep thousands of programs from one address.
            listed = (i_tile * num_kv_heads + i_h) // LISTED_STEP * LISTED_STEP + LISTED_STEP
            tl.atomic_max(union.listed, listed, mask=(tokens > 0) & (tl.load(union.listed) < listed), sem="relaxed")
        o_entry = o_list * capacity + place
        tl.store(union.ids + o_entry, ids, mask=m_end)
        tl.store(union.bits + o_entry, bits, mask=m_end)
        if PAGE_SIZE > 0:
            p_page = table.ids + i_b * table.s_sequence + (ids * BLOCK // PAGE_SIZE) * table.s_page
            page = tl.minimum(tl.maximum(tl.load(p_page, mask=m_end, other=0), 0), num_pages - 1)
            tl.store(union.rows + o_entry, page * PAGE_SIZE + ids * BLOCK % PAGE_SIZE, mask=m_end)
        else:
            tl.store(union.rows + o_entry, k_begin + ids * BLOCK, mask=m_end)
    elif REST >= KV_OUTER:
        m_home = m_read & (b_ids == home_of(position, k_end - k_begin, max_blocks, BLOCK)) & (REST == OUTER_BUT_HOME)
        m_read = m_read & (m_home == 0)
        i_segment = (i_tile // chunk_tiles * num_kv_heads + i_h).to(tl.int64)
        o_b = i_segment * num_buckets + k_begin // BLOCK + i_b + b_ids
        rank = tl.atomic_add(rest.counts + o_b * spread, 1, mask=m_read, sem="relaxed")
        m_part = m_read & (b_ids * BLOCK + BLOCK - 1 > last_key[:, None])
        tl.store(rest.partly + o_b, tl.full(o_b.shape, 1, tl.int32), mask=m_part)
        p_ranks = rest.ranks + (row[:, None] * num_kv_heads + i_h) * TOPK + o_s[None, :]
        tl.store(p_ranks, tl.where(m_read, rank, tl.where(m_home, -2, -1)), mask=m_slot)
    elif REST == FEW:
        bucket, common = i_h * num_buckets + k_begin // BLOCK + i_b, tl.minimum(position - first + q_begin, k_end - k_begin - 1)
        few_entries(rest, b_ids, m_read, last_key, common, bucket, first, tokens, i_h, num_kv_heads, room, TOPK, BLOCK)

    # 5. The last program of a segment to come here knows that all have counted, and makes the offsets.
    if REST >= KV_OUTER:
        i_chunk, num_tiles = i_tile // chunk_tiles, tl.num_programs(0) // num_kv_heads
        i_segment, programs = i_chunk * num_kv_heads + i_h, tl.minimum(chunk_tiles, num_tiles - i_chunk * chunk_tiles)
        tl.debug_barrier()  # Every thread has counted before one thread says so.
        if tl.atomic_add(rest.done + i_segment * LINE, 1, sem="acq_rel") == programs - 1:
            p_sizes = union.sizes + (i_chunk * chunk_tiles * num_kv_heads + i_h) * SIZE_FIELDS
            segment_offsets(rest, i_segment, p_sizes, programs, num_kv_heads, num_buckets, spread, ITEM, STEP)


@triton.jit
def segment_offsets(
    outer, i_segment, sizes, num_tiles, num_kv_heads, num_buckets, spread, ITEM: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Computes prefix sums over the blocks of a segment, which other programs have counted: where their entries and items
    start. sizes: where those of the segment's union lists start, of which there are `num_tiles`."""
    entries, items, visits = 0, 0, 0
    for start in range(0, num_tiles, 8 * STEP):
        o_tile = start + tl.arange(0, 8 * STEP)
        p_size = sizes + o_tile * num_kv_heads * SIZE_FIELDS
        visits += tl.sum(tl.maximum(tl.load(p_size, mask=o_tile < num_tiles, other=0, cache_modifier=".cg"), 0), 0)
    for start in range(0, num_buckets, STEP):
        o_b = start + tl.arange(0, STEP)
        m_b = o_b < num_buckets
        o_b = i_segment.to(tl.int64) * num_buckets + o_b
        b_count = tl.load(outer.counts + o_b * spread, mask=m_b, other=0, cache_modifier=".cg")
        b_items = (b_count + ITEM - 1) // ITEM
        tl.store(outer.entry_offsets + o_b, entries + tl.cumsum(b_count, 0) - b_count, mask=m_b)
        tl.store(outer.item_offsets + o_b, items + tl.cumsum(b_items, 0) - b_items, mask=m_b)
        entries += tl.sum(b_count, 0)
        items += tl.sum(b_items, 0)
    tl.store(outer.num_items + i_segment, items)
    tl.store(outer.num_entries + i_segment, entries)
    tl.store(outer.num_visits + i_segment, visits)
