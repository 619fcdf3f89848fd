# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Several new tokens of a sequence, which mostly select the same blocks, read every block once here.

A program serves up to eight tokens of one sequence and one KV head: their query heads are the rows of its tile. It makes the
list of all blocks that these tokens selected, each once, with a bit for each token that did, and walks the list; rows of the
other tokens leave a block out. All rows are multiplied with every block of the list, so tokens that differ much, whose list is
long, are left to the kernel of `openmsa.sparse_attention.triton_decode`, which runs after this one and finds a flag. Where the
launch is split, the programs of a row tile take every `splits`-th block of the list, leave partials, and the last one merges
them, as there. Queries, keys and values are plain, 16 bits wide, keys and values in pages that hold whole blocks.

The constexprs SHAPE and CUT of the kernel are a `Shape` and a `Config` of this module. BM and BN are rows and keys of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.kv_cache import PagedKV, Stored
from openmsa.primitives.codes import padded
from openmsa.primitives.operands import Bounds, PageTable, Selection
from openmsa.primitives.results import finish
from openmsa.primitives.rows import key_rows, output_rows, query_rows
from openmsa.primitives.softmax import UNSPLIT, Partials
from openmsa.runtime import devices
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two
from openmsa.sparse_attention.triton_decode import Served
from openmsa.sparse_attention.triton_decode_walk import Shape, fetch_pages, pick

MAX_ROWS = 128
"""A program has at most so many rows, tokens x query heads of a group."""
MAX_LISTED = 128
"""A program compares so many selected blocks with each other, tokens x topk."""


class Config(NamedTuple):
    """Says how the work is cut; it is the constexpr CUT of the kernel.

    tokens:  tokens of a program, a power of two. rows: tokens x query heads of a group, padded. keys: keys of a tile.
    splits:  programs that share the blocks of the tokens of a program. most: blocks of the longest list that is served.
    """

    tokens: int
    rows: int
    keys: int
    splits: int
    most: int
    num_warps: int
    num_stages: int


def configure(
    batch: int, new_tokens: int, num_kv_heads: int, group: int, head_dim: int, topk: int, block_size: int, page_size: int,
    device: Device,
) -> Config | None:  # fmt: skip
    """Chooses tokens, tiles and splits; None where tokens cannot share programs, and where each token's program has a
    multiprocessor of its own anyway. It is a pure function. Walking a list of 3/8 of all selected blocks takes less time than
    reading the blocks apart (`docs/log/decode.md`)."""
    tokens = next_power_of_two(new_tokens)
    while tokens > 1 and (tokens * group > MAX_ROWS or tokens * next_power_of_two(topk) > MAX_LISTED):
        tokens //= 2
    filled = batch * new_tokens * num_kv_heads > device.num_sms
    if tokens == 1 or not filled or head_dim > 128 or block_size & -block_size < 32 or page_size % block_size:
        return None
    rows = max(16, next_power_of_two(tokens * group))
    keys = min(block_size & -block_size, 64)
    programs = max(batch * ceil_div(new_tokens, tokens) * num_kv_heads, 1)
    splits = max(1, min(device.num_sms // programs, tokens * topk // 4))
    tile_bytes = 4 * keys * next_power_of_two(head_dim)  # one tile of keys and one of values
    stages = min(3, (device.shared_bytes - 2 * rows * head_dim) // tile_bytes)
    return Config(tokens, rows, keys, splits, tokens * topk * 3 // 8, 8 if rows == 128 else 4, max(stages, 1))


@triton.jit
def visible(t, seen, capacity, BLOCK: tl.constexpr):
    """Returns how many blocks token t sees, where token 0 sees `seen` keys, as far as the page table has room."""
    return tl.cdiv(tl.maximum(tl.minimum(seen + t, capacity), 0), BLOCK)


@triton.jit
def listed(p_ids, s_token, s_slot, tokens, seen, capacity, T: tl.constexpr, SLOTS: tl.constexpr, SHAPE: tl.constexpr):
    """Returns the ids of blocks that T tokens selected, each once, with a bit for each token that did, and their number n; what
    stands from place n on means nothing. p_ids points at the first token's ids; only `tokens` tokens are there, and the first
    one sees `seen` keys. SLOTS is topk, padded to a power of two."""
    C: tl.constexpr = T * SLOTS
    o_c, o_s = tl.arange(0, C), tl.arange(0, SLOTS)
    o_t, o_slot = o_c // SLOTS, o_c % SLOTS
    b_id = tl.load(p_ids + o_t * s_token + o_slot * s_slot, mask=(o_slot < SHAPE.topk) & (o_t < tokens), other=-1)
    b_id = tl.where(b_id < visible(o_t, seen, capacity, SHAPE.block), b_id, -1)
    b_bits = tl.zeros([C], tl.int32)
    b_before = tl.zeros([C], tl.int32)
    for t in tl.static_range(T):
        b_other = tl.load(p_ids + t * s_token + o_s * s_slot, mask=(o_s < SHAPE.topk) & (t < tokens), other=-1)
        m_same = b_id[:, None] == b_other[None, :]
        m_same &= (b_other < visible(t, seen, capacity, SHAPE.block))[None, :]
        m_first = (t < o_t)[:, None] | ((t == o_t)[:, None] & (o_s[None, :] < o_slot[:, None]))
        b_bits |= tl.max(m_same.to(tl.int32), 1) << t
        b_before += tl.sum((m_same & m_first).to(tl.int32), 1)
    b_rank = tl.cumsum(((b_id >= 0) & (b_before == 0)).to(tl.int32), 0)
    b_at = tl.zeros([C], tl.int32)  # where the rank first exceeds o_c, by halving
    for i in tl.static_range(1, 8):
        if C >> i > 0:
            b_far = b_at + (C >> i)
            b_at = tl.where(tl.gather(b_rank, b_far - 1, 0) <= o_c, b_far, b_at)
    return tl.gather(b_id, b_at, 0), tl.gather(b_bits, b_at, 0), tl.max(b_rank, 0)


@triton.jit(do_not_specialize=["queries", "num_pages", "capacity"])
def sparse_decode_shared_kernel(
    q, k, v, blocks, table, bounds, out, partials, served, scale, queries, num_pages, capacity,
    SHAPE: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attends, and merges partials, in a grid of (sequences * parts of their tokens, KV heads, splits) programs.

    q is `QueryRows`, k and v are `KeyRows`, blocks is `Selection`, table is `PageTable`, bounds is `Bounds` with seq_lens
    alone, out is `Output`, and partials is `Partials`. served: int32, whether each row tile has been served here. A sequence
    has `queries` tokens, the last of its keys. num_pages and capacity count the pool's pages and the keys that a row of the
    page table has room for. PDL: the kernel may start before the one in front has ended, and waits for it."""
    T: tl.constexpr = CUT.tokens
    BM: tl.constexpr = CUT.rows
    BN: tl.constexpr = CUT.keys
    G: tl.constexpr = SHAPE.group
    D: tl.constexpr = SHAPE.dim
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    BLOCK: tl.constexpr = SHAPE.block
    PAGE: tl.constexpr = SHAPE.page
    PER: tl.constexpr = BLOCK // BN  # tiles of a block
    SLOTS: tl.constexpr = padded(SHAPE.topk)
    # 1. The program finds its sequence, tokens and head, and how many keys each token sees.
    parts = (queries + T - 1) // T
    i_b, i_t0 = tl.program_id(0) // parts, (tl.program_id(0) % parts) * T
    i_h, i_s = tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    seq_len = tl.load(bounds.seq_lens + i_b)
    o_r = tl.arange(0, BM)
    o_t = i_t0 + o_r // G  # token of each row
    m_r = (o_r < T * G) & (o_t < queries)
    b_seen = tl.minimum(seq_len - queries + o_t + 1, capacity)

    # 2. Queries are loaded and the page table is fetched, while the selection is being made.
    o_d = tl.arange(0, DIM_PAD)
    i_row = (i_b * queries + o_t).to(tl.int64)
    p_q = q.data + i_row * q.s_token + (i_h * G + o_r % G) * q.s_head
    b_q = tl.load(p_q[:, None] + o_d[None, :] * q.s_dim, mask=m_r[:, None] & (o_d[None, :] < D), other=0.0)
    p_table = table.ids + i_b.to(tl.int64) * table.s_sequence
    if PDL:
        fetch_pages(p_table, table.s_page, tl.cdiv(tl.maximum(tl.minimum(seq_len, capacity), 0), PAGE))
        gdc_wait()

    # 3. Blocks that the tokens selected are listed, each once, with a bit for each token, and with its page.
    p_ids = blocks.ids + (i_b * queries + i_t0).to(tl.int64) * blocks.s_token + i_h * blocks.s_head
    seen = seq_len - queries + i_t0 + 1
    b_list, b_bits, n = listed(p_ids, blocks.s_token, blocks.s_slot, queries - i_t0, seen, capacity, T, SLOTS, SHAPE)
    o_c = tl.arange(0, T * SLOTS)
    i_p = tl.program_id(0) * tl.num_programs(1) + i_h
    serves = n <= CUT.most
    tl.store(served + i_p, serves.to(tl.int32))  # All splits store the same.
    if not serves:
        return
    b_list = tl.where(o_c < n, b_list, 0)
    b_page = tl.load(p_table + b_list * BLOCK // PAGE * table.s_page, mask=o_c < n, other=-1)
    b_bits = tl.where((b_page >= 0) & (b_page < num_pages), b_bits, 0)
    b_page = tl.where(b_bits != 0, b_page, 0)
    b_list = tl.where(b_bits != 0, b_list, tl.cdiv(seq_len, BLOCK))  # Behind the last key nothing is read.

    # 4. The walk goes over this program's share of the list.
    p_k0, p_v0 = k.data + i_h.to(tl.int64) * k.s_head, v.data + i_h.to(tl.int64) * v.s_head
    o_n = tl.arange(0, BN)
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DIM_PAD], tl.float32)
    mine = tl.maximum((n - i_s + CUT.splits - 1) // CUT.splits, 0)
    for u in tl.range(0, mine * PER, num_stages=CUT.num_stages):
        place = i_s + u // PER * CUT.splits
        i_first = pick(b_list, place) * BLOCK + u % PER * BN
        i_page, bits = pick(b_page, place).to(tl.int64), pick(b_bits, place)
        i_in = (i_first % PAGE).to(tl.int64)
        m_n = o_n < seq_len - i_first
        m_nd = m_n[:, None] & (o_d[None, :] < D)
        p_k = p_k0 + (i_page * k.s_page + i_in * k.s_row)
        p_v = p_v0 + (i_page * v.s_page + i_in * v.s_row)
        b_k = tl.load(p_k + (o_n[:, None] * k.s_row + o_d[None, :] * k.s_dim), mask=m_nd, other=0.0)  # [BN, DIM_PAD]
        b_v = tl.load(p_v + (o_n[:, None] * v.s_row + o_d[None, :] * v.s_dim), mask=m_nd, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k)) * (scale * 1.4426950408889634)  # [BM, BN], base 2
        b_end = tl.where(((bits >> (o_r // G)) & 1) != 0, b_seen - i_first, 0)  # keys of the tile that each row reads
        b_s = tl.where(o_n[None, :] < b_end[:, None], b_s, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_old = tl.exp2(b_m - b_safe)
        b_z = b_z * b_old + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_old[:, None])
        b_m = b_m_new

    # 5. Outputs are stored, or a partial, which the last program of the row tile merges with the others.
    head, n_s = i_h * G + o_r % G, tl.num_programs(2)
    finish(out, partials, i_row, head, b_acc, b_m, b_z, i_p, i_s, n_s, CUT.splits, m_r, D, CUT.splits > 1)


class Shared(NamedTuple):
    """Holds the cuts for steps of 1, 2, ... sequences, None where tokens do not share, and what launches of the largest leave.

    served: int32, a flag for each row tile.
    """

    cuts: list[Config | None]
    partials: Partials
    served: Tensor

    @classmethod
    def allocate(
        cls,
        max_batch: int,
        shape: tuple[int, int, int, int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        shares: bool = True,
    ) -> Shared:
        """Allocates memory. shape: arguments of `configure` from new_tokens to page_size. shares: whether tokens may share."""
        (new_tokens, num_kv_heads, _, head_dim, *_), facts = shape, devices.facts(device)
        cuts = [configure(batch, *shape, facts) if shares else None for batch in range(1, max_batch + 1)]
        tiles = [(i + 1) * ceil_div(new_tokens, c.tokens) * num_kv_heads if c else 0 for i, c in enumerate(cuts)]
        split = [n * c.splits for n, c in zip(tiles, cuts, strict=True) if c and c.splits > 1]
        rows, most = max((c.rows for c in cuts if c), default=0), max(tiles, default=0)
        partials = Partials.allocate(most, max(split, default=0), rows, head_dim, dtype, device)
        return cls(cuts, partials, torch.empty(most, dtype=torch.int32, device=device))


def launch(
    config: Config,
    shared: Shared,
    q: Tensor | Stored,
    kv: PagedKV,
    blocks: Tensor,
    new_tokens: int,
    block_size: int,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    pdl: bool = False,
) -> Served:
    """Launches the kernel once, for exactly `new_tokens` tokens a sequence, and returns which of them it serves. pdl: as in
    `triton_decode.launch`."""
    assert isinstance(kv.k, Tensor)
    assert isinstance(kv.v, Tensor)
    num_pages, num_kv_heads, page_size, head_dim = kv.k.shape
    s_token, s_head, s_slot = blocks.stride()
    launch_kernel(
        sparse_decode_shared_kernel,
        (kv.batch * ceil_div(new_tokens, config.tokens), num_kv_heads, config.splits),
        query_rows(q, native=False),
        key_rows(kv.k),
        key_rows(kv.v),
        Selection(blocks, s_token, s_head if blocks.shape[1] > 1 else 0, s_slot),
        PageTable(kv.page_table, *kv.page_table.stride()),
        Bounds(None, None, kv.seq_lens, None),
        output_rows(out, lse),
        shared.partials if config.splits > 1 else UNSPLIT,
        shared.served,
        softmax_scale,
        *(new_tokens, num_pages, kv.page_table.shape[1] * page_size),
        SHAPE=Shape(q.shape[1] // num_kv_heads, head_dim, next_power_of_two(head_dim), blocks.shape[2], block_size, page_size),
        CUT=config,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return Served(shared.served, config.tokens)
