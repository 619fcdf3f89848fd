# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Kernels bring chosen blocks from host memory into the slots of a block cache, as `openmsa.host_kv.cpu` says it.

One program looks the blocks up and gives slots to those that none holds; then many programs copy rows out of pinned memory,
which they read in place, while one of them puts the slots in their new order. Nothing waits for the host. The time is that of
the host link for what is fetched, and about ten microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.host_kv.block_cache import planes
from openmsa.kv_cache.triton_store import Places, locate
from openmsa.primitives.operands import PageTable, Selection
from openmsa.runtime import devices
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two

if TYPE_CHECKING:
    from openmsa.host_kv.cache import HostKV

ENTRIES = 1024
"""The looking program takes so many chosen blocks at a time."""
SLOTS = 2048
"""A program goes through so many slots at a time."""
PIECE = 2048
"""A program copies so many words of a plane at a time."""
RESIDENT = 4
"""At most so many copying programs are launched for a multiprocessor."""
FIRST = tl.constexpr(-(2**31))
"""``FIRST + entry`` stands in the place of a block's slot while the lowest entry that misses it is found."""


class Cached(NamedTuple):
    """These are the numbers of a `BlockCache`, as it describes them."""

    slot_of: Tensor
    held: Tensor
    filled: Tensor
    used: Tensor
    order: Tensor
    counts: Tensor


class Step(NamedTuple):
    """This is the memory of one step's lookup, int32. An entry is a chosen block: those of a token and KV head are one line of
    `entries`.

    table:    [lines, topk], the slot of each entry; -1 where there is none.
    lens:     [lines], the keys that the token sees in its chosen blocks.
    blocks:   [lines * topk padded], the block's number; -1 for none. rows: how many of its rows the sequence has written.
    missed:   [lines * topk padded], numbers of blocks that no slot holds.
    fetches:  [4, lines * topk padded], block, slot, first row and the row behind the last of what is fetched.
    pending:  [2], how many fetches there are, and how many slots the step uses.
    """

    table: Tensor
    lens: Tensor
    blocks: Tensor
    rows: Tensor
    missed: Tensor
    fetches: Tensor
    pending: Tensor

    @classmethod
    def allocate(cls, lines: int, topk: int, device: torch.device) -> Step:
        """Returns memory for so many tokens and KV heads."""
        entries = lines * next_power_of_two(topk)
        shapes = ((lines, topk), (lines,), (entries,), (entries,), (entries,), (4, entries), (2,))
        return cls(*(torch.full(shape, -1, dtype=torch.int32, device=device) for shape in shapes))


class Blocks(NamedTuple):
    """Holds the sizes that the kernels are compiled for: KV heads, chosen blocks of each, keys of a block and of a page."""

    heads: int
    topk: int
    topk_pad: int
    block: int
    page: int


class Planes(NamedTuple):
    """Holds what belongs to single rows, as words: keys, values and, in a format with scales of groups, the scales of both."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


@triton.jit
def find_blocks(chosen, table, seq_lens, cached, step, now, line, lines, tokens, num_pages, capacity, SIZES: tl.constexpr):
    """Finds the entries of lines [R]: stores numbers and rows of their blocks and the keys that each line sees, marks the slots
    that hold blocks, and blocks that none holds. Returns how many blocks were chosen, and slots marked for the first time."""
    BLOCK: tl.constexpr = SIZES.block
    PER: tl.constexpr = SIZES.page // SIZES.block
    o_j = tl.arange(0, SIZES.topk_pad)
    m_line = line < lines
    i_t, i_h = line // SIZES.heads, line % SIZES.heads
    i_b = i_t // tokens
    n_held = tl.load(seq_lens + i_b, mask=m_line, other=0)
    n_k = tl.minimum(n_held, capacity)
    sees = tl.maximum(tl.minimum(n_k, n_held - tokens + i_t % tokens + 1), 0)
    p_ids = chosen.ids + i_t.to(tl.int64) * chosen.s_token + i_h * chosen.s_head
    m_id = m_line[:, None] & (o_j < SIZES.topk)[None, :]
    b_id = tl.load(p_ids[:, None] + o_j[None, :] * chosen.s_slot, mask=m_id, other=-1)  # [R, topk_pad]
    m_there = (b_id >= 0) & (b_id * BLOCK < sees[:, None])
    n_there, last = tl.sum(m_there.to(tl.int32), 1), tl.max(tl.where(m_there, b_id, -1), 1)
    n_sees = tl.where(n_there > 0, (n_there - 1) * BLOCK + tl.minimum(sees - last * BLOCK, BLOCK), 0)
    tl.store(step.lens + line, n_sees, mask=m_line)

    p_page = table.ids + i_b.to(tl.int64)[:, None] * table.s_sequence + (b_id // PER) * table.s_page
    page = tl.load(p_page, mask=m_there, other=-1)
    m_there &= (page >= 0) & (page < num_pages)
    block = tl.where(m_there, (page * SIZES.heads + i_h[:, None]) * PER + b_id % PER, -1)
    o_e = line[:, None] * SIZES.topk_pad + o_j[None, :]
    tl.store(step.blocks + o_e, block, mask=m_line[:, None])
    tl.store(step.rows + o_e, tl.minimum(n_k[:, None] - b_id * BLOCK, BLOCK), mask=m_line[:, None])
    slot = tl.load(cached.slot_of + block, mask=m_there, other=-1, cache_modifier=".cg")
    m_hit = m_there & (slot >= 0)
    before = tl.atomic_xchg(cached.used + slot, now, mask=m_hit)
    tl.atomic_min(cached.slot_of + block, FIRST + o_e, mask=m_there & (slot < 0))
    n_new = tl.sum(tl.sum((m_hit & (before != now)).to(tl.int32), 1), 0)
    return tl.sum(tl.sum(m_there.to(tl.int32), 1), 0), n_new


@triton.jit
def list_misses(cached, step, n_entries, ENTRIES: tl.constexpr):
    """Lists the blocks that no slot holds, each once, in the order of their first entries; returns how many."""
    n_missed = 0
    for at in range(0, n_entries, ENTRIES):
        o_e = at + tl.arange(0, ENTRIES)
        block = tl.load(step.blocks + o_e, mask=o_e < n_entries, other=-1)
        mark = tl.load(cached.slot_of + block, mask=block >= 0, other=0, cache_modifier=".cg")
        m_first = (block >= 0) & (mark == FIRST + o_e)
        rank = n_missed + tl.cumsum(m_first.to(tl.int32), 0) - 1
        tl.store(step.missed + rank, block, mask=m_first)
        n_missed += tl.sum(m_first.to(tl.int32), 0)
    return n_missed


@triton.jit
def give_slots(cached, step, now, n_missed, n_slots, SLOTS: tl.constexpr):
    """Gives the missed blocks the slots that were not used for the longest time, which this step does not use."""
    p_order = cached.order + ((now - 1) % 2).to(tl.int64) * n_slots
    found, at = 0, 0
    while (found < n_missed) & (at < n_slots):
        o_s = at + tl.arange(0, SLOTS)
        slot = tl.load(p_order + o_s, mask=o_s < n_slots, other=0)
        m_idle = (o_s < n_slots) & (tl.load(cached.used + slot, cache_modifier=".cg") != now)
        rank = found + tl.cumsum(m_idle.to(tl.int32), 0) - 1
        m_taken = m_idle & (rank < n_missed)
        block = tl.load(step.missed + rank, mask=m_taken, other=0)
        left = tl.load(cached.held + slot, mask=m_taken, other=-1)
        tl.store(cached.slot_of + left, tl.full([SLOTS], -1, tl.int32), mask=m_taken & (left >= 0))
        tl.store(cached.slot_of + block, slot, mask=m_taken)
        tl.store(cached.held + slot, block, mask=m_taken)
        tl.store(cached.filled + slot, tl.zeros([SLOTS], tl.int32), mask=m_taken)
        tl.store(cached.used + slot, tl.zeros([SLOTS], tl.int32) + now, mask=m_taken)
        found += tl.sum(m_idle.to(tl.int32), 0)
        at += SLOTS


@triton.jit
def list_fetches(cached, step, n_entries, SIZES: tl.constexpr, ENTRIES: tl.constexpr):
    """Stores the slot of each entry, and lists the rows that slots lack. Returns how many fetches and rows these are."""
    n_fetches, n_rows = 0, tl.zeros([], tl.int64)
    for at in range(0, n_entries, ENTRIES):
        o_e = at + tl.arange(0, ENTRIES)
        block = tl.load(step.blocks + o_e, mask=o_e < n_entries, other=-1)
        rows = tl.load(step.rows + o_e, mask=block >= 0, other=0)
        slot = tl.load(cached.slot_of + block, mask=block >= 0, other=-1, cache_modifier=".cg")
        first = tl.atomic_max(cached.filled + slot, rows, mask=slot >= 0)  # Of entries of one block, each fetches other rows.
        m_due = (slot >= 0) & (first < rows)
        p_fetch = step.fetches + n_fetches + tl.cumsum(m_due.to(tl.int32), 0) - 1
        tl.store(p_fetch, block, mask=m_due)
        tl.store(p_fetch + n_entries, slot, mask=m_due)
        tl.store(p_fetch + 2 * n_entries, first, mask=m_due)
        tl.store(p_fetch + 3 * n_entries, rows, mask=m_due)
        n_fetches += tl.sum(m_due.to(tl.int32), 0)
        n_rows += tl.sum(tl.where(m_due, rows - first, 0), 0)
        i_j = o_e % SIZES.topk_pad
        p_slot = step.table + o_e // SIZES.topk_pad * SIZES.topk + i_j
        tl.store(p_slot, slot, mask=(o_e < n_entries) & (i_j < SIZES.topk))
    return n_fetches, n_rows


@triton.jit(do_not_specialize=["lines", "tokens", "num_pages", "capacity", "n_slots"])
def look_up_kernel(
    chosen, table, seq_lens, cached, step, lines, tokens, num_pages, capacity, n_slots,
    SIZES: tl.constexpr, ENTRIES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Gives a slot to each chosen block and lists what must be fetched; a launch has one program.

    chosen is `Selection`, table is `PageTable`, cached is `Cached`, step is `Step`. lines: tokens times KV heads, with `tokens`
    new ones a sequence. num_pages and capacity: pages of the pools, and keys that a row of the page table has room for."""
    LINES: tl.constexpr = ENTRIES // SIZES.topk_pad
    now = (tl.load(cached.counts) + 1).to(tl.int32)
    n_entries = lines * SIZES.topk_pad
    # 1. Blocks are looked up, and slots that hold them are used now.
    n_chosen, n_used = 0, 0
    for at in range(0, lines, LINES):
        n_there, n_new = find_blocks(
            chosen, table, seq_lens, cached, step, now, at + tl.arange(0, LINES), lines, tokens, num_pages, capacity, SIZES
        )
        n_chosen += n_there
        n_used += n_new
    tl.debug_barrier()
    # 2. Blocks that no slot holds take those that were not used for the longest time.
    n_missed = list_misses(cached, step, n_entries, ENTRIES)
    tl.debug_barrier()
    give_slots(cached, step, now, n_missed, n_slots, SLOTS)
    tl.debug_barrier()
    # 3. What slots lack is listed, and counted.
    n_fetches, n_rows = list_fetches(cached, step, n_entries, SIZES, ENTRIES)
    tl.store(step.pending, n_fetches)
    tl.store(step.pending + 1, n_used + n_missed)
    tl.store(cached.counts, tl.load(cached.counts) + 1)
    tl.store(cached.counts + 1, tl.load(cached.counts + 1) + n_chosen)
    tl.store(cached.counts + 2, tl.load(cached.counts + 2) + n_missed)
    tl.store(cached.counts + 3, tl.load(cached.counts + 3) + n_rows)


@triton.jit
def put_in_order(cached, n_used, n_slots, SLOTS: tl.constexpr):
    """Writes the order of slots after this step: those that it used go behind the others, each part as it was."""
    now = tl.load(cached.counts).to(tl.int32)
    p_old = cached.order + ((now - 1) % 2).to(tl.int64) * n_slots
    p_new = cached.order + (now % 2).to(tl.int64) * n_slots
    before = 0  # used slots so far
    for at in range(0, n_slots, SLOTS):
        o_s = at + tl.arange(0, SLOTS)
        m_s = o_s < n_slots
        slot = tl.load(p_old + o_s, mask=m_s, other=0)
        m_used = m_s & (tl.load(cached.used + slot) == now)
        rank = before + tl.cumsum(m_used.to(tl.int32), 0)
        tl.store(p_new + tl.where(m_used, n_slots - n_used + rank - 1, o_s - rank), slot, mask=m_s)
        before += tl.sum(m_used.to(tl.int32), 0)


@triton.jit
def load_words(p_host, block, o_w, first, stop, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Loads words o_w of a block out of host memory, and says which of them are of rows [first, stop)."""
    m_w = (o_w >= first * WORDS) & (o_w < stop * WORDS)
    return tl.load(p_host + block.to(tl.int64) * (BLOCK * WORDS) + o_w, mask=m_w), m_w


@triton.jit(do_not_specialize=["n_slots", "n_entries"])
def fetch_kernel(
    host, slots, cached, step, n_slots, n_entries,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, PIECE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Copies the listed rows from host memory to their slots, a piece of a block a turn; program 0 puts the slots in order.

    host and slots are `Planes`, whose rows of keys and values have WORDS words, and those of scales SCALES."""
    PARTS: tl.constexpr = (BLOCK * WORDS + PIECE - 1) // PIECE
    if tl.program_id(0) == 0:
        put_in_order(cached, tl.load(step.pending + 1), n_slots, SLOTS)
    else:
        n_pieces = tl.load(step.pending) * PARTS
        for i in range(tl.program_id(0) - 1, n_pieces, tl.num_programs(0) - 1):
            p_fetch = step.fetches + i // PARTS
            block, slot = tl.load(p_fetch), tl.load(p_fetch + n_entries).to(tl.int64)
            first, stop = tl.load(p_fetch + 2 * n_entries), tl.load(p_fetch + 3 * n_entries)
            o_w = (i % PARTS) * PIECE + tl.arange(0, PIECE)
            b_k, m_w = load_words(host.k, block, o_w, first, stop, WORDS, BLOCK)
            b_v, _ = load_words(host.v, block, o_w, first, stop, WORDS, BLOCK)
            if SCALES:
                b_ks, m_s = load_words(host.k_scales, block, o_w, first, stop, SCALES, BLOCK)
                b_vs, _ = load_words(host.v_scales, block, o_w, first, stop, SCALES, BLOCK)
                tl.store(slots.k_scales + slot * (BLOCK * SCALES) + o_w, b_ks, mask=m_s)
                tl.store(slots.v_scales + slot * (BLOCK * SCALES) + o_w, b_vs, mask=m_s)
            tl.store(slots.k + slot * (BLOCK * WORDS) + o_w, b_k, mask=m_w)
            tl.store(slots.v + slot * (BLOCK * WORDS) + o_w, b_v, mask=m_w)


@triton.jit(do_not_specialize=["total", "batch", "steps", "each", "num_pages", "max_pages"])
def outdate_kernel(
    cached, places, total, batch, steps, each, num_pages, max_pages,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Makes slots forget the rows where `total` new tokens are about to be written, and those behind them in their block.
    places is `Places`, batch, steps and each are as in `openmsa.kv_cache.triton_store.write_kernel`."""
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = i_row // HEADS, i_row % HEADS
    page, row, m_row = locate(token, token < total, places, batch, steps, each, num_pages, max_pages, PAGE)
    block = (page * HEADS + head) * (PAGE // BLOCK) + row // BLOCK
    slot = tl.load(cached.slot_of + block, mask=m_row, other=-1)
    tl.atomic_min(cached.filled + slot, row % BLOCK, mask=slot >= 0)


def cached_of(kv: HostKV) -> Cached:
    """Returns the numbers of a block cache as kernels take them."""
    c = kv.cache
    return Cached(c.slot_of, c.held, c.filled, c.used, c.order, c.counts)


def in_words(kv: HostKV) -> tuple[Planes, Planes, int, int]:
    """Returns host memory and slots in words, and how many words a row of keys, and of their scales, has."""
    host, here = planes(kv.k, kv.v), planes(kv.cache.k, kv.cache.v)
    sizes = [plane.shape[-1] * plane.element_size() for plane in host]
    word = next(d for d in (torch.int32, torch.int16, torch.uint8) if all(n % d.itemsize == 0 for n in sizes))
    views = [[plane.view(torch.uint8).view(word) for plane in tensors] for tensors in (host, here)]
    if len(host) == 2:
        return Planes(*views[0]), Planes(*views[1]), views[0][0].shape[-1], 0
    k, k_scales, v, v_scales = (list(pair) for pair in zip(*views, strict=True))
    both = [Planes(k[i], v[i], k_scales[i], v_scales[i]) for i in range(2)]
    return both[0], both[1], k[0].shape[-1], k_scales[0].shape[-1]


def bring(kv: HostKV, blocks: Tensor, new_tokens: int, step: Step) -> None:
    """Brings the chosen blocks into slots in two launches: ``step.table`` and ``step.lens`` are then what
    `openmsa.host_kv.cpu.bring` returns."""
    lines, topk = blocks.shape[0] * kv.num_heads, blocks.shape[2]
    topk_pad, (s_token, s_head, s_slot) = next_power_of_two(topk), blocks.stride()
    cached, entries = cached_of(kv), lines * topk_pad
    launch_kernel(
        look_up_kernel,
        (1,),
        Selection(blocks, s_token, s_head if blocks.shape[1] > 1 else 0, s_slot),
        PageTable(kv.page_table, *kv.page_table.stride()),
        kv.seq_lens,
        cached,
        step,
        *(lines, new_tokens, kv.num_pages, kv.capacity, kv.cache.count),
        SIZES=Blocks(kv.num_heads, topk, topk_pad, kv.block_size, kv.page_size),
        ENTRIES=ENTRIES,
        SLOTS=SLOTS,
        num_warps=8,
    )
    host, slots, words, scales = in_words(kv)
    pieces = entries * ceil_div(kv.block_size * words, PIECE)
    programs = min(pieces, RESIDENT * devices.facts(kv.device).num_sms)
    launch_kernel(
        fetch_kernel,
        (1 + programs,),
        *(host, slots, cached, step, kv.cache.count, entries),
        BLOCK=kv.block_size,
        WORDS=words,
        SCALES=scales,
        PIECE=PIECE,
        SLOTS=SLOTS,
        num_warps=4,
    )


def outdate(kv: HostKV, total: int, cu_seqlens: Tensor | None) -> None:
    """Makes slots forget rows, as `openmsa.host_kv.cpu.outdate` does, in one launch."""
    if total == 0 or kv.batch == 0:
        return
    table, starts = kv.page_table, None if cu_seqlens is None else cu_seqlens.contiguous()
    places = Places(table, table.stride(0), table.stride(1), kv.seq_lens, kv.seq_lens.stride(0), starts)
    launch_kernel(
        outdate_kernel,
        (ceil_div(total * kv.num_heads, 128),),
        *(cached_of(kv), places, total, kv.batch, kv.batch.bit_length(), total // kv.batch, kv.num_pages, table.shape[1]),
        HEADS=kv.num_heads,
        BLOCK=kv.block_size,
        PAGE=kv.page_size,
        ROWS=128,
        num_warps=2,
    )
