# SPDX-License-Identifier: MIT
"""Kernels that turn a selection into work: union lists of neighbouring queries, and the query list of each block.

A tile is `TOKENS` neighbouring queries of one sequence. Tile i belongs to the last sequence b with
``cu_q[b] // TOKENS + b <= i``, so tiles need no list of their own (some are empty). Blocks are numbered the same way over
all sequences: block j of sequence b is bucket ``cu_k[b] // BLOCK + b + j``.

A tile of which each head's union is small keeps its union list (ids ascending, membership bits); for the others each
(query, slot) is an entry in its block's list. Lists of KV-outer belong to a segment, (query chunk, KV head), so that every
size is bounded on the host: counts -> offsets -> entries and items, an item being up to `ITEM` queries of one block. Those
for few queries (`triton_few`) have room for every query of a sequence and are written at once.
Their order within a list depends on timing; no result does, as the slot in the query's own row says where a partial goes.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_REST, KV_OUTER, FEW = (tl.constexpr(i) for i in range(3))  # where tiles go that do not stay together
TILE_FIELDS = 4  # first token, number of tokens, sequence, position of the first token
ITEM_FIELDS = 4  # begin and end in the entries, sequence, block (-1 - block: some query of its list sees a part of it)

_LENGTHS = ["batch", "search_steps", "num_buckets", "chunk_tiles", "chunk_entries", "item_bound", "num_pages"]
_LENGTHS += ["max_blocks", "union_limit", "capacity", "room"]


@triton.jit
def _either(id_a, bits_a, id_b, bits_b):
    """Scan step over sorted ids: the members seen so far of the run that ends here."""
    return id_b, tl.where(id_a == id_b, bits_a | bits_b, bits_b)


@triton.jit
def sequence_of_tile(cu_q, i_tile, batch, search_steps, TOKENS: tl.constexpr):
    """The sequence of a tile, numbered as above."""
    low = i_tile * 0
    high = low + batch - 1
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        reached = tl.load(cu_q + middle) // TOKENS + middle <= i_tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def position_of_token_zero(q_offset, i_b, q_begin, q_end, k_len):
    """What is to be added to the numbers of packed queries of a sequence for their positions. q_offset None: they are the last
    of the keys."""
    return k_len - q_end if q_offset is None else tl.load(q_offset + i_b) - q_begin


@triton.jit(do_not_specialize=_LENGTHS)
def tile_lists(
    blocks,  # int32 [total_q, heads or 1, TOPK], any strides
    cu_q,
    cu_k,
    q_offset,
    page_table,  # int32 [batch, max_pages] or None
    tiles,  # int32 [num_tiles, TILE_FIELDS], written
    union_sizes,  # int32 [num_tiles, kv_heads, 2], written: blocks (-1: the tile is KV-outer's), fully visible ones
    union_ids,  # int32 [num_tiles, kv_heads, capacity], written: block ids, ascending
    union_rows,  # the same shape: first key row of the block in k, where blocks do not cross pages
    union_bits,  # the same shape: bit i: token i of the tile selected it
    has_union,  # int32 [1], zero: 1 where some tile stays together, be it empty, written; or None
    counts,  # int32 [chunks, kv_heads, num_buckets], zero: queries a block, written
    partly,  # the same shape, zero: not 0 where some query does not see all of it; FEW: then the most keys one sees; written
    ranks,  # KV_OUTER: int32 [total_q, kv_heads, TOPK], written: place in the block's list, -1: nothing to read
    entries,  # FEW: int32 [kv_heads, num_buckets, room], written: token * TOPK + slot
    slots,  # FEW: int64 [total_q, kv_heads], written: bit i: slot i has a partial
    stride_blocks_t,
    stride_blocks_h,
    stride_blocks_k,
    stride_table_b,
    stride_table_p,
    num_kv_heads,
    batch,
    search_steps,
    num_buckets,
    chunk_tiles,
    num_pages,
    max_blocks,  # of a sequence; nothing is listed past them, whatever the lengths say
    union_limit,
    capacity,
    room,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,  # TOPK rounded up to a power of two
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: flat keys, or pages that blocks may cross
    REST: tl.constexpr,  # NO_REST, KV_OUTER or FEW
):
    """One program a (tile, KV head): its union list, or its queries' places in the lists of their blocks."""
    i_tile = tl.program_id(0) // num_kv_heads
    i_h = tl.program_id(0) % num_kv_heads
    i_b = sequence_of_tile(cu_q, i_tile, batch, search_steps, TOKENS)
    q_begin, q_end = tl.load(cu_q + i_b), tl.load(cu_q + i_b + 1)
    k_begin, k_end = tl.load(cu_k + i_b), tl.load(cu_k + i_b + 1)
    first = tl.minimum(q_begin + (i_tile - q_begin // TOKENS - i_b) * TOKENS, q_end)
    tokens = tl.minimum(q_end - first, TOKENS)
    position = first + position_of_token_zero(q_offset, i_b, q_begin, q_end, k_end - k_begin)
    if i_h == 0:
        p_tile = tiles + i_tile * 4
        tl.store(p_tile, first)
        tl.store(p_tile + 1, tokens)
        tl.store(p_tile + 2, i_b)
        tl.store(p_tile + 3, position)

    o_t, o_s = tl.arange(0, TOKENS), tl.arange(0, SLOTS)
    last_key = tl.minimum(position + o_t, k_end - k_begin - 1)  # [TOKENS]
    visible = tl.minimum(tl.where(last_key >= 0, last_key // BLOCK + 1, 0), max_blocks)
    row = (first + o_t).to(tl.int64)
    m_slot = (o_t < tokens)[:, None] & (o_s < TOPK)[None, :]
    p_ids = blocks + row[:, None] * stride_blocks_t + i_h * stride_blocks_h + o_s[None, :] * stride_blocks_k
    b_ids = tl.load(p_ids, mask=m_slot, other=-1)  # [TOKENS, SLOTS]
    m_read = (b_ids >= 0) & (b_ids < visible[:, None])

    # Sorted by block, then token: each block's run ends where the next id differs.
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

    last_common = tl.min(tl.where(o_t < tokens, last_key, NOTHING), 0)
    whole = tl.sum((m_end & (ids * BLOCK + BLOCK - 1 <= last_common)).to(tl.int32), 0)
    o_list = (i_tile * num_kv_heads + i_h).to(tl.int64)
    is_union = size <= union_limit
    tl.store(union_sizes + o_list * 2, tl.where(is_union, size, -1))
    tl.store(union_sizes + o_list * 2 + 1, whole)
    if is_union:
        if has_union is not None:  # thousands of programs would write to one address
            tl.store(has_union, 1, mask=(tokens > 0) & (tl.load(has_union) == 0))
        o_entry = o_list * capacity + place
        tl.store(union_ids + o_entry, ids, mask=m_end)
        tl.store(union_bits + o_entry, bits, mask=m_end)
        if PAGE_SIZE > 0:
            page = tl.load(page_table + i_b * stride_table_b + (ids * BLOCK // PAGE_SIZE) * stride_table_p, mask=m_end, other=0)
            page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
            tl.store(union_rows + o_entry, page * PAGE_SIZE + ids * BLOCK % PAGE_SIZE, mask=m_end)
        else:
            tl.store(union_rows + o_entry, k_begin + ids * BLOCK, mask=m_end)
    elif REST == KV_OUTER:
        i_segment = (i_tile // chunk_tiles * num_kv_heads + i_h).to(tl.int64)
        o_b = i_segment * num_buckets + k_begin // BLOCK + i_b + b_ids
        rank = tl.atomic_add(counts + o_b, 1, mask=m_read, sem="relaxed")
        m_part = m_read & (b_ids * BLOCK + BLOCK - 1 > last_key[:, None])
        tl.store(partly + o_b, tl.full(o_b.shape, 1, tl.int32), mask=m_part)
        p_ranks = ranks + (row[:, None] * num_kv_heads + i_h) * TOPK + o_s[None, :]
        tl.store(p_ranks, tl.where(m_read, rank, -1), mask=m_slot)
    elif REST == FEW:
        o_b = i_h * num_buckets + k_begin // BLOCK + i_b + tl.where(m_read, b_ids, 0)
        rank = tl.atomic_add(counts + o_b, 1, mask=m_read, sem="relaxed")
        m_read &= rank < room  # ids are distinct; were they not, nothing is written past the list
        tl.store(entries + o_b.to(tl.int64) * room + rank, (first + o_t)[:, None] * TOPK + o_s[None, :], mask=m_read)
        first_last = tl.minimum(position - first + q_begin, k_end - k_begin - 1)  # the last key that every query sees
        seen = tl.minimum(last_key[:, None] - b_ids * BLOCK + 1, BLOCK)
        m_part = m_read & (b_ids * BLOCK + BLOCK - 1 > first_last)
        tl.atomic_max(partly + o_b, seen, mask=m_part, sem="relaxed")
        filled = tl.sum(m_read.to(tl.int64) << o_s[None, :].to(tl.int64), 1)
        tl.store(slots + row * num_kv_heads + i_h, filled, mask=o_t < tokens)


@triton.jit(do_not_specialize=_LENGTHS)
def bucket_offsets(
    counts,  # int32 [segments, num_buckets]
    entry_offsets,  # the same shape, written: where a block's list starts in its segment
    item_offsets,  # the same shape, written: where its items start
    num_items,  # int32 [segments], written
    num_buckets,
    ITEM: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program a segment: prefix sums over its blocks."""
    i_segment = tl.program_id(0)
    entries, items = 0, 0
    for start in range(0, num_buckets, STEP):
        o_b = start + tl.arange(0, STEP)
        m_b = o_b < num_buckets
        o_b = i_segment.to(tl.int64) * num_buckets + o_b
        b_count = tl.load(counts + o_b, mask=m_b, other=0)
        b_items = (b_count + ITEM - 1) // ITEM
        tl.store(entry_offsets + o_b, entries + tl.cumsum(b_count, 0) - b_count, mask=m_b)
        tl.store(item_offsets + o_b, items + tl.cumsum(b_items, 0) - b_items, mask=m_b)
        entries += tl.sum(b_count, 0)
        items += tl.sum(b_items, 0)
    tl.store(num_items + i_segment, items)


@triton.jit(do_not_specialize=_LENGTHS)
def fill_lists(
    blocks,
    cu_k,
    tiles,
    union_sizes,
    ranks,
    counts,
    partly,
    entry_offsets,
    item_offsets,
    entries,  # int32 [segments, chunk_entries], written: token * TOPK + slot
    items,  # int32 [segments, item_bound, ITEM_FIELDS], written
    slots,  # int64 [total_q, kv_heads], written for KV-outer tiles: bit i: slot i has a partial
    stride_blocks_t,
    stride_blocks_h,
    stride_blocks_k,
    num_kv_heads,
    num_buckets,
    chunk_tiles,
    chunk_entries,
    item_bound,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM: tl.constexpr,
):
    """One program a (tile, KV head): writes the entries of a KV-outer tile, and the items that begin with them."""
    i_tile = tl.program_id(0) // num_kv_heads
    i_h = tl.program_id(0) % num_kv_heads
    if tl.load(union_sizes + (i_tile * num_kv_heads + i_h) * 2) >= 0:
        return
    p_tile = tiles + i_tile * 4
    first, tokens, i_b = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    o_t, o_s = tl.arange(0, TOKENS), tl.arange(0, SLOTS)
    row = (first + o_t).to(tl.int64)
    m_slot = (o_t < tokens)[:, None] & (o_s < TOPK)[None, :]
    rank = tl.load(ranks + (row[:, None] * num_kv_heads + i_h) * TOPK + o_s[None, :], mask=m_slot, other=-1)
    m_read = rank >= 0  # [TOKENS, SLOTS]
    p_ids = blocks + row[:, None] * stride_blocks_t + i_h * stride_blocks_h + o_s[None, :] * stride_blocks_k
    b_ids = tl.load(p_ids, mask=m_read, other=0)

    i_segment = (i_tile // chunk_tiles * num_kv_heads + i_h).to(tl.int64)
    o_b = i_segment * num_buckets + tl.load(cu_k + i_b) // BLOCK + i_b + b_ids
    begin = tl.load(entry_offsets + o_b, mask=m_read, other=0)
    here = begin + rank
    token = (first + o_t)[:, None]
    tl.store(entries + i_segment * chunk_entries + here, token * TOPK + o_s[None, :], mask=m_read)
    m_item = m_read & (rank % ITEM == 0)
    end = begin + tl.load(counts + o_b, mask=m_item, other=0)
    i_item = tl.load(item_offsets + o_b, mask=m_item, other=0) + rank // ITEM
    p_item = items + (i_segment * item_bound + i_item) * 4
    tl.store(p_item, here, mask=m_item)
    tl.store(p_item + 1, tl.minimum(here + ITEM, end), mask=m_item)
    tl.store(p_item + 2, tl.zeros_like(b_ids) + i_b, mask=m_item)
    is_partly = tl.load(partly + o_b, mask=m_item, other=0) != 0
    tl.store(p_item + 3, tl.where(is_partly, -1 - b_ids, b_ids), mask=m_item)
    filled = tl.sum(m_read.to(tl.int64) << o_s[None, :].to(tl.int64), 1)
    tl.store(slots + row * num_kv_heads + i_h, filled, mask=o_t < tokens)
