# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Triton makes the lists of `readers` here without a sort: a bit of a matrix [lists, queries] says that a query reads a block,
and the place of a reader in its list is the number of bits before its own. Nothing depends on the order in which programs run.

The matrix has a bit for every pair of a list and a query, in words of 32 queries; a call whose matrix would take more than
`MOST_WORDS` words, which only lengths far beyond a chunk of queries need, is sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.primitives.operands import Bounds, Selection
from openmsa.primitives.readers import Readers, buckets_of, most_extra, readers
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two, zeros
from openmsa.types import Layout

MOST_WORDS = 1 << 27
WORD = tl.constexpr(32)
"""A word has the bits of so many queries."""
STEP = 1024
"""So many words of a list, or lists, are summed at a time."""


class Counts(NamedTuple):
    """Holds what is counted, int32.

    words:  [lists * words], the bits of each list.
    before: the same shape: readers of the list in the words before.
    totals: [lists], readers of each list.
    """

    words: Tensor
    before: Tensor
    totals: Tensor


def listed(blocks: Tensor, seqs: Layout, total_k: int, block_size: int, item: int) -> Readers:
    """Does what `readers` does. Slots of a query must name different blocks; entries after the last list are undefined."""
    total_q, heads, topk = blocks.shape
    num_buckets, device = buckets_of(total_k, seqs.batch, block_size), blocks.device
    num_lists, num_words = heads * num_buckets, ceil_div(total_q, WORD.value)
    if not blocks.numel() or not num_lists or num_lists * num_words > MOST_WORDS:
        return readers(blocks, seqs, total_k, block_size, item)

    def made(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    entries, words = heads * total_q * topk, num_lists * num_words
    counts = Counts(zeros(words, torch.int32, device), made(words), made(num_lists))
    most_items = most_extra(entries, item) + min(num_lists, entries)
    reads = torch.empty(blocks.shape, dtype=torch.bool, device=device)
    starts, item_starts, extra_starts = (made(num_lists + 1) for _ in range(3))
    of_items = (item_starts, extra_starts, made(most_items), made(num_buckets))
    found = Readers(made(entries), starts, *of_items, reads.view(torch.uint8))
    selection = Selection(blocks, *blocks.stride())
    bounds = Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset)
    lengths = (total_q, seqs.batch, num_buckets, num_words, topk)
    slots = min(next_power_of_two(topk), 64)
    launch_kernel(
        mark_readers, (num_words, heads), selection, bounds, counts, found, *lengths, BLOCK=block_size, SLOTS=slots, num_warps=4
    )
    launch_kernel(count_readers, (num_lists,), counts, num_words, STEP=STEP, num_warps=4)
    launch_kernel(bound_lists, (1,), counts, found, num_lists, item, STEP=STEP, num_warps=8)
    launch_kernel(
        place_readers,
        (num_words, heads),
        *(selection, bounds, counts, found, *lengths, most_items, num_lists),
        BLOCK=block_size,
        SLOTS=slots,
        num_warps=4,
    )
    return found._replace(reads=reads)


@triton.jit
def passed(p, o_x, count, BLOCK: tl.constexpr):
    """Returns how many of the first `count` numbers at p, which ascend, are at most o_x. BLOCK > 0: of first keys of
    sequences it takes the first buckets."""
    low = tl.zeros_like(o_x)
    high = low + count
    left = count
    while left > 0:
        middle = (low + high) // 2
        b_x = tl.load(p + middle, mask=low < high, other=2147483647)
        if BLOCK > 0:
            b_x = b_x // BLOCK + middle
        go = (low < high) & (b_x <= o_x)
        high = tl.where(go | (low >= high), high, middle)
        low = tl.where(go, middle + 1, low)
        left = left // 2
    return low


@triton.jit
def buckets_seen(bounds, o_t, total_q, batch, BLOCK: tl.constexpr):
    """Returns the first bucket of each query's sequence, and how many blocks of it the query sees."""
    m_t = o_t < total_q
    i_b = tl.minimum(passed(bounds.cu_q + 1, o_t, batch, 0), batch - 1)
    k_begin = tl.load(bounds.cu_k + i_b)
    k_len = tl.load(bounds.cu_k + i_b + 1) - k_begin
    if bounds.q_offset is None:
        position = k_len - tl.load(bounds.cu_q + i_b + 1) + o_t
    else:
        position = tl.load(bounds.q_offset + i_b) - tl.load(bounds.cu_q + i_b) + o_t
    last_key = tl.minimum(position, k_len - 1)
    return k_begin // BLOCK + i_b, tl.where(m_t & (last_key >= 0), last_key // BLOCK + 1, 0)


@triton.jit
def bits_set(x):
    """Returns how many bits of int32 numbers are set."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


LENGTHS = ["total_q", "batch", "num_buckets", "num_words", "topk", "most_items", "num_lists", "item"]


@triton.jit(do_not_specialize=LENGTHS)
def mark_readers(
    selection,  # Selection
    bounds,  # Bounds
    counts,  # Counts, of which words are 0 and written
    found,  # Readers, of which reads are written, as bytes
    total_q,
    batch,
    num_buckets,
    num_words,
    topk,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Sets the bits of WORD queries and a head."""
    i_w, i_h = tl.program_id(0), tl.program_id(1)
    o_w = tl.arange(0, WORD)
    o_t = i_w * WORD + o_w
    bucket, visible = buckets_seen(bounds, o_t, total_q, batch, BLOCK)
    row = o_t.to(tl.int64)
    p_ids = selection.ids + row * selection.s_token + i_h * selection.s_head
    p_reads = found.reads + (row * tl.num_programs(1) + i_h) * topk
    for i in range(0, topk, SLOTS):
        o_s = i + tl.arange(0, SLOTS)
        m = (o_t < total_q)[:, None] & (o_s < topk)[None, :]
        b_ids = tl.load(p_ids[:, None] + o_s[None, :] * selection.s_slot, mask=m, other=-1)
        m_read = (b_ids >= 0) & (b_ids < visible[:, None])
        tl.store(p_reads[:, None] + o_s[None, :], m_read.to(tl.uint8), mask=m)
        i_list = (i_h * num_buckets + bucket[:, None] + tl.where(m_read, b_ids, 0)).to(tl.int64)
        bit = tl.full([WORD, SLOTS], 1, tl.int32) << o_w[:, None]
        tl.atomic_or(counts.words + i_list * num_words + i_w, bit, mask=m_read, sem="relaxed")


@triton.jit(do_not_specialize=LENGTHS)
def count_readers(
    counts,  # Counts, of which before and totals are written
    num_words,
    STEP: tl.constexpr,
):
    """Counts the bits of a list's words, and of those in front of each."""
    row = tl.program_id(0).to(tl.int64) * num_words
    total = 0
    for i in range(0, num_words, STEP):
        o_w = i + tl.arange(0, STEP)
        b_count = bits_set(tl.load(counts.words + row + o_w, mask=o_w < num_words, other=0))
        tl.store(counts.before + row + o_w, total + tl.cumsum(b_count, 0) - b_count, mask=o_w < num_words)
        total += tl.sum(b_count, 0)
    tl.store(counts.totals + tl.program_id(0), total)


@triton.jit(do_not_specialize=LENGTHS)
def bound_lists(
    counts,  # Counts
    found,  # Readers, of which starts, item_starts and extra_starts are written
    num_lists,
    item,
    STEP: tl.constexpr,
):
    """Finds where lists and their items start. One program does it."""
    entries, items, extra = 0, 0, 0
    for i in range(0, num_lists, STEP):
        o_l = i + tl.arange(0, STEP)
        m = o_l < num_lists
        b_total = tl.load(counts.totals + o_l, mask=m, other=0)
        b_items = (b_total + item - 1) // item
        b_extra = tl.maximum(b_items - 1, 0)
        tl.store(found.starts + o_l, entries + tl.cumsum(b_total, 0) - b_total, mask=m)
        tl.store(found.item_starts + o_l, items + tl.cumsum(b_items, 0) - b_items, mask=m)
        tl.store(found.extra_starts + o_l, extra + tl.cumsum(b_extra, 0) - b_extra, mask=m)
        entries += tl.sum(b_total, 0)
        items += tl.sum(b_items, 0)
        extra += tl.sum(b_extra, 0)
    tl.store(found.starts + num_lists, entries)
    tl.store(found.item_starts + num_lists, items)
    tl.store(found.extra_starts + num_lists, extra)


@triton.jit(do_not_specialize=LENGTHS)
def place_readers(
    selection,  # Selection
    bounds,  # Bounds
    counts,  # Counts
    found,  # Readers, of which entries, lists and sequences are written
    total_q,
    batch,
    num_buckets,
    num_words,
    topk,
    most_items,
    num_lists,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Writes WORD queries and a head into their lists; the programs also share the items and the buckets."""
    # 1. Each reader goes behind those of its list whose bits are in front of its own.
    i_w, i_h = tl.program_id(0), tl.program_id(1)
    o_w = tl.arange(0, WORD)
    o_t = i_w * WORD + o_w
    bucket, visible = buckets_seen(bounds, o_t, total_q, batch, BLOCK)
    p_ids = selection.ids + o_t.to(tl.int64) * selection.s_token + i_h * selection.s_head
    below = (tl.full([WORD, 1], 1, tl.int32) << o_w[:, None]) - 1
    for i in range(0, topk, SLOTS):
        o_s = i + tl.arange(0, SLOTS)
        m = (o_t < total_q)[:, None] & (o_s < topk)[None, :]
        b_ids = tl.load(p_ids[:, None] + o_s[None, :] * selection.s_slot, mask=m, other=-1)
        m_read = (b_ids >= 0) & (b_ids < visible[:, None])
        i_list = i_h * num_buckets + bucket[:, None] + tl.where(m_read, b_ids, 0)
        o_word = i_list.to(tl.int64) * num_words + i_w
        b_word = tl.load(counts.words + o_word, mask=m_read, other=0)
        b_place = tl.load(found.starts + i_list, mask=m_read, other=0) + tl.load(counts.before + o_word, mask=m_read, other=0)
        tl.store(found.entries + b_place + bits_set(b_word & below), o_t[:, None] * topk + o_s[None, :], mask=m_read)

    # 2. Items find their lists, and buckets their sequences.
    o_i = tl.arange(0, 256)
    first = (i_h * num_words + i_w) * 256
    for i in range(first, most_items, num_words * tl.num_programs(1) * 256):
        tl.store(found.lists + i + o_i, passed(found.item_starts + 1, i + o_i, num_lists, 0), mask=i + o_i < most_items)
    for i in range(first, num_buckets, num_words * tl.num_programs(1) * 256):
        tl.store(found.sequences + i + o_i, passed(bounds.cu_k, i + o_i, batch, BLOCK) - 1, mask=i + o_i < num_buckets)
