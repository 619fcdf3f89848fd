# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="index"
"""Programs score index queries with tiles of index keys and take the maxima of blocks: this file says how one walks tiles,
how a context is cut, which rows a program serves, how queries and keys become the factors that it multiplies, and how maxima
are written. What formats of keys ask of queries stands in `openmsa.primitives.query_parts`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from openmsa.kv_cache import E4M3, Stored
from openmsa.primitives import operands
from openmsa.primitives.codes import (
    e2m1_parts,
    e4m3_numbers,
    fp4_unit,
    group_numbers,
    int8_parts,
    load_group_scales,
    load_scales,
)
from openmsa.primitives.operands import Bounds
from openmsa.primitives.query_parts import grouped_parts, query_parts, side_by_side, spread_rows, unspread
from openmsa.primitives.rows import FLAT, TYPES, KeyTiles, KeyView, Tile, block_maxima, load_keys, load_rows
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import next_power_of_two
from openmsa.types import Layout


class Kind(NamedTuple):
    """A configuration depends on these facts about tiles of keys.

    key_bytes:     bytes of a key as it is stored, and `factor_bytes` as a factor of the product; converted: they differ.
    groups:        groups of elements that have a scale, of FP4 keys; 0 of others. must_group: factors cannot hold the scales.
    indirect:      keys lie in pages, whose ids are read one stage ahead.
    lanes:         `openmsa.block_scores.triton_lanes` can read them, which its stage finds out.
    """

    dim: int
    tile: int
    key_bytes: int
    factor_bytes: int
    converted: bool
    groups: int
    must_group: bool
    indirect: bool
    tma: bool
    lanes: bool = False

    @classmethod
    @functools.lru_cache(256)
    def of(cls, dim: int, tile: int, format: int, product: Any, indirect: bool, tma: bool) -> Kind:
        """Derives the facts of keys. format: how keys are stored; product: the Triton dtype of factors."""
        padded, fp4 = next_power_of_two(dim), format >= operands.NVFP4
        key_bytes = padded // 2 if fp4 else padded * (2 if format == operands.PLAIN else 1)
        factor_bytes = padded * product.primitive_bitwidth // 8
        groups = next_power_of_two(dim // (16 if format == operands.NVFP4 else 32)) if fp4 else 0
        must_group = format == operands.MXFP4 and product == tl.float16
        return cls(dim, tile, key_bytes, factor_bytes, key_bytes != factor_bytes, groups, must_group, indirect, tma)

    @property
    def narrow(self) -> bool:
        """Says whether factors are bytes."""
        return self.factor_bytes == next_power_of_two(self.dim)


@dataclass(frozen=True)
class Config:
    """A configuration says how a scoring kernel runs.

    rows:           (query, head) rows of a program.
    swap:           keys are the left factor, not rows.
    hold:           rows stay in registers.
    num_stages:     stages of the walk over keys.
    resident:       programs that one multiprocessor holds at a time.
    grouped:        scales of FP4 keys multiply sums over groups of elements, not the elements.
    max_registers:  a thread has at most so many, so that more programs are resident.
    lanes:          keys that a program of the kernel of `triton_lanes` copies at a time; 0 for the other kernel.
    """

    rows: int
    swap: bool
    hold: bool
    num_warps: int
    num_stages: int
    resident: int
    grouped: bool = False
    max_registers: int | None = None
    lanes: int = 0


def tall_rows(device: Device, kind: Kind) -> tuple[int, bool]:
    """Gives the rows of a program where rows are the left factor, and whether they are held in registers. Rows of e4m3 are not:
    their layout in registers is not the one of a product's result, and is made anew for every tile. Beside keys that are
    converted there is no room for them."""
    wide = (device.arch == 90 or (device.arch == 100 and not kind.converted)) and kind.tma and kind.dim <= 128
    return 128 if wide else 64, device.arch == 90 and kind.tma and not kind.narrow and not kind.converted


def walk(device: Device, row_bytes: int, kind: Kind, swap: bool = False) -> tuple[int, int]:
    """Gives the stages of the walk, and resident programs a multiprocessor, that fit its shared memory beside the rows there.

    Keys of a byte an element and less take more buffers where rows are many; where rows are few (swap) three buffers and more
    programs stream faster than deeper ones."""
    deepest = 3 if kind.key_bytes > 128 or swap else 5
    held = 0 if swap or not kind.converted else kind.tile * kind.factor_bytes  # the tile that the product reads
    for resident, buffers in [(2, n) for n in range(deepest, 1, -1)] + [(1, n) for n in range(deepest, 0, -1)]:
        if resident * (row_bytes + held + buffers * kind.tile * kind.key_bytes + 1536) <= device.shared_bytes:
            break
    asynchronous = device.arch in (90, 100)  # the product reads the buffers itself, so it holds one
    ahead = max(buffers - asynchronous, 1)  # stages between a load and its use
    return ahead * (1 + kind.indirect) + 1, resident


@functools.lru_cache(4096)
def splits(programs: int, tiles: int, slots: int, least: int, step: int = 1) -> int:
    """Says into how many parts the walk over `tiles` key tiles is cut, each a multiple of `step` and at least `least`. Time is
    the number of rounds that `slots` places need, times a part's tiles and its start-up, worth two; the finest cut within 3 %
    of the least time is taken."""
    if not programs or programs >= 8 * slots:
        return 1
    most = max(1, min(tiles // least, 8 * slots // programs))
    cost = {n: -(-programs * n // slots) * (-(-tiles // (n * step)) * step + 2) for n in range(1, most + 1)}
    best = min(cost.values())
    return max(n for n, c in cost.items() if c <= 1.03 * best)


def kind_of(keys: KeyTiles, product: Any, tile: Tile) -> Kind:
    """Collects what the configuration of a call depends on. product: the Triton dtype of factors."""
    view, tma = keys.view, keys.tma is not None
    return Kind.of(view.dim, tile.tile, view.form.format, product, keys.paging.mode != FLAT, tma)


@dataclass(frozen=True)
class Lengths:
    """Sequences of a batch have these lengths: int32 tensors that kernels read when they run, and numbers that bound them."""

    cu_seqlens_q: Tensor  # [batch + 1]
    cu_seqlens_k: Tensor | None  # [batch + 1]; None: seq_lens
    seq_lens: Tensor | None  # [batch]
    q_offset: Tensor | None  # [batch], positions of first queries; None: the queries are the last of the keys
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, seqs: Layout) -> Lengths:
        return cls(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset, seqs.max_seqlen_q, seqs.max_seqlen_k)

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.numel() - 1

    @property
    def bounds(self) -> Bounds:
        """Bundles the tensors as kernels take them."""
        return Bounds(self.cu_seqlens_q, self.cu_seqlens_k, self.seq_lens, self.q_offset)


class Product(NamedTuple):
    """A product says how rows of queries are multiplied with a tile of keys; it is a constant of the scoring kernels.

    dtype:    the Triton dtype of both factors.
    dim:      elements of a row, and `dim_pad` to how many they are padded.
    rows:     (query, head) rows.
    swap:     keys are the left factor, not rows.
    grouped:  scales of groups multiply sums over groups, not elements.
    """

    dtype: Any
    dim: int
    dim_pad: int
    rows: int
    swap: bool
    grouped: bool


def product_type(index_q: Tensor | Stored, keys: KeyView) -> Any:
    """Gives the Triton dtype of both factors of products of queries and keys: e4m3 on the matrix unit where it knows them, for
    e4m3 times e4m3; every other pair has 16 bits, in which both are exact."""
    if not isinstance(index_q, E4M3):
        return TYPES[index_q.dtype]
    if keys.form.format == operands.E4M3:
        return tl.float8e4nv if keys.form.native else tl.float16
    return TYPES[keys.rows.data.dtype] if keys.form.format == operands.PLAIN else tl.bfloat16


@triton.jit
def sequence_bounds(bounds, i_s, capacity, max_keys):
    """Gives the first query, number of queries, first key, number of keys and position of the first query of sequence i_s."""
    q_start = tl.load(bounds.cu_q + i_s)
    q_len = tl.load(bounds.cu_q + i_s + 1) - q_start
    if bounds.cu_k is None:
        k_start = 0
        k_len = tl.load(bounds.seq_lens + i_s)
    else:
        k_start = tl.load(bounds.cu_k + i_s)
        k_len = tl.load(bounds.cu_k + i_s + 1) - k_start
    offset = k_len - q_len if bounds.q_offset is None else tl.load(bounds.q_offset + i_s)
    return q_start, q_len, k_start, tl.minimum(k_len, tl.minimum(capacity, max_keys)), offset


@triton.jit
def rows_of(i_m, q_len, k_len, offset, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Gives numbers of the (query, head) rows i_m * ROWS to (i_m + 1) * ROWS of a sequence, which of them exist (the first one
    does), and the last key that each sees, [ROWS] each; then how many keys all of them see, and how many any of them."""
    o_r = i_m * ROWS + tl.arange(0, ROWS)
    i_last = tl.minimum(offset + o_r // GROUP, k_len - 1)
    seen_by_all = tl.maximum(tl.minimum(offset + i_m * ROWS // GROUP, k_len - 1) + 1, 0)
    last_token = tl.minimum((i_m * ROWS + ROWS - 1) // GROUP, q_len - 1)
    seen_by_any = tl.maximum(tl.minimum(offset + last_token, k_len - 1) + 1, 0)
    return o_r, o_r < q_len * GROUP, i_last, seen_by_all, seen_by_any


@triton.jit
def store_visible(visible, q_start, o_r, m_row, i_last, chosen, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Writes how many blocks each query of `rows_of` sees, by the one program that is chosen."""
    p_v = visible + q_start + o_r // GROUP
    tl.store(p_v, tl.maximum(i_last + BLOCK, 0) // BLOCK, mask=m_row & (o_r % GROUP == 0) & chosen)


@triton.jit
def tiles_of(i_split, tiles_per_split, num_blocks, seen_by_all, seen_by_any, CUT: tl.constexpr):
    """Gives the first tile of a split, the first one behind it, the first that not all rows see whole, and the first that none
    sees."""
    first = i_split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(num_blocks, CUT.sub) * CUT.parts)
    i_full = tl.minimum(seen_by_all // (CUT.block * CUT.sub) * CUT.parts, last)
    i_end = tl.minimum(tl.cdiv(seen_by_any, CUT.block * CUT.sub) * CUT.parts, last)
    return first, last, i_full, i_end


@triton.jit
def query_numbers(b_q, PRODUCT: tl.constexpr):
    """Gives rows of queries as factors of type PRODUCT."""
    if b_q.dtype == tl.uint8:
        return e4m3_numbers(b_q, PRODUCT)
    else:
        return b_q.to(PRODUCT)


@triton.jit
def hold_rows(b_q, DIM_PAD: tl.constexpr):
    """Returns rows in the layout of a product: Hopper's matrix unit then takes them from registers instead of reading them
    from shared memory again for every tile, whose bandwidth is what limits the walk. The product with the identity is exact
    where rows are finite (NaN spreads over its row, whose products are NaN anyway) and only serves to set the layout."""
    o_d = tl.arange(0, DIM_PAD)
    same = tl.dot(b_q, (o_d[:, None] == o_d[None, :]).to(tl.float32).to(b_q.dtype)).to(b_q.dtype)
    if b_q.dtype.primitive_bitwidth == 8:
        return same
    else:
        return tl.where(same == b_q, same, b_q)


@triton.jit
def row_factors(q, keys, i_row, i_h, FORM: tl.constexpr, GROUP: tl.constexpr):
    """Gives what scales of tensors and heads multiply each row of scores by, the queries' times the keys'; None where there are
    none. i_h: the key head."""
    b_f = None
    if q.factor is not None or FORM.factor == 1:
        b_f = tl.full(i_row.shape, 1.0, tl.float32)
        if q.factor is not None:
            b_f *= tl.load(q.factor + (i_h * GROUP + i_row % GROUP) * q.s_factor_head)
        if FORM.factor == 1:
            b_f *= tl.load(keys.factor + i_h * keys.s_factor_head)
    return b_f


@triton.jit
def query_factors(
    q, q_start, q_len, o_r, i_h, GROUP: tl.constexpr, FORM: tl.constexpr, PRODUCT: tl.constexpr, HOLD: tl.constexpr
):  # fmt: skip
    """Gives rows o_r of a sequence's queries as factors of products with keys, a tuple of parts where the keys' items hold
    several elements. Where products are grouped, these are `grouped_parts`."""
    p_q = q.data + q_start.to(tl.int64) * q.s_token
    b_q = load_rows(
        p_q, o_r, q_len, i_h * GROUP, q.s_token, q.s_head, q.s_dim, GROUP, PRODUCT.dim, PRODUCT.dim_pad
    )  # fmt: skip
    b_q = query_numbers(b_q, PRODUCT.dtype)
    if PRODUCT.grouped:
        GROUPS: tl.constexpr = triton.next_power_of_2(PRODUCT.dim // (16 if FORM.format == 3 else 32))
        return grouped_parts(b_q, GROUPS, FORM.split)
    else:
        if PRODUCT.swap and PRODUCT.rows < 16:
            b_q = spread_rows(b_q, 16)
        if FORM.format >= 2:
            b_q = query_parts(b_q, FORM.split)
        if HOLD:
            b_q = hold_rows(b_q, PRODUCT.dim_pad)
        return b_q


@triton.jit
def times(b_q, b_k, s, SWAP: tl.constexpr):
    """Gives products of rows and keys [rows, keys], or with SWAP [keys, rows]; added to s unless that is None."""
    if SWAP:
        return tl.dot(b_k, b_q.T, s)
    else:
        return tl.dot(b_q, b_k.T, s)


@triton.jit
def score_tile(
    b_q, keys, tma, page_row, i_h, i_k, i_last, k_start, k_len, num_pages,
    FORM: tl.constexpr, PAGING: tl.constexpr, CUT: tl.constexpr, PRODUCT: tl.constexpr,
    BOUNDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Gives maxima of the blocks of one tile (`block_maxima`), scales of pages, keys and groups included. BOUNDED: some key may
    not exist; MASKED: some row does not see every key."""
    FORMAT: tl.constexpr = FORM.format
    TILE: tl.constexpr = CUT.tile
    SWAP: tl.constexpr = PRODUCT.swap
    TYPE: tl.constexpr = PRODUCT.dtype
    ROWS: tl.constexpr = i_last.shape[0]
    CUT_OFF: tl.constexpr = BOUNDED or CUT.keys < TILE  # some key of the tile may not exist
    # 1. Codes of the keys and their scales are loaded.
    b_k = load_keys(
        keys, tma, page_row, i_h, i_k, k_start, k_len, num_pages,
        PAGING, TILE, PRODUCT.dim // FORM.split, PRODUCT.dim_pad // FORM.split, CUT_OFF,
    )  # fmt: skip
    b_g = None
    if FORMAT >= 3:
        GROUPS: tl.constexpr = PRODUCT.dim // (16 if FORMAT == 3 else 32)
        b_g = load_group_scales(
            keys, page_row, i_h, i_k, k_start, k_len, num_pages, PAGING, TILE, GROUPS, FORM.swizzled, CUT_OFF
        )  # fmt: skip
    b_s = None
    if FORMAT == 2 or FORM.factor == 2:
        b_s = load_scales(keys, page_row, i_h, i_k, k_start, k_len, num_pages, FORM, PAGING, TILE, CUT_OFF)
    # 2. Keys become factors, and are multiplied with rows of queries.
    if FORMAT == 0:
        s = times(b_q, b_k, None, SWAP)
    elif FORMAT == 1:
        s = times(b_q, e4m3_numbers(b_k, TYPE), None, SWAP)
    elif FORMAT == 2:
        s = None
        parts = int8_parts(b_k, TYPE)
        if SWAP and len(parts) == 2:
            s = times(side_by_side(b_q), side_by_side(parts), None, True)
        else:
            for i in tl.static_range(len(parts)):
                s = times(b_q[i], parts[i], s, SWAP)
    elif PRODUCT.grouped:  # b_q has `grouped_parts`
        parts = e2m1_parts(b_k, tl.float16)
        s = times(side_by_side(b_q), side_by_side(parts), None, True)
        b_x = group_numbers(b_g, FORMAT, FORM.native)
        GROUPS_PAD: tl.constexpr = b_x.shape[1]
        PAIR: tl.constexpr = 2 if GROUPS_PAD > 1 else 1
        s = s.reshape(TILE, GROUPS_PAD // PAIR, ROWS, PAIR).permute(0, 2, 1, 3).reshape(TILE, ROWS, GROUPS_PAD)
        s = tl.sum(s * b_x[:, None, :], 2)
    else:
        parts = e2m1_parts(b_k, TYPE)
        unit, b_x = fp4_unit(b_k, b_g, FORMAT, TYPE, FORM.native)
        s = None
        for i in tl.static_range(len(parts)):
            s = times(b_q[i], parts[i] * unit * b_x, s, SWAP)
    if SWAP and s.shape[1] > ROWS:
        s = unspread(s, ROWS)
    # 3. Products become maxima of blocks.
    PAGE_SCALE: tl.constexpr = FORM.factor == 2 and PAGING.mode == 1  # one scale serves the tile
    if FORMAT == 2 or (FORM.factor == 2 and PAGING.mode != 1):
        s = s * (b_s[:, None] if SWAP else b_s[None, :])
    m = block_maxima(s, i_k, i_last, TILE, CUT.keys, CUT.sub, SWAP, MASKED)
    if PAGE_SCALE:
        m = m * b_s
    if PRODUCT.grouped:
        m *= 256.0  # see `raised`
    return m


@triton.jit
def scored(m, b_f):
    """Gives maxima [rows, blocks] as scores: times the factor of each row (None: 1), and NaN as -inf."""
    m = m if b_f is None else m * b_f[:, None]
    return tl.where(m > float("-inf"), m, float("-inf"))


@triton.jit
def store_maxima(p_s, m, b_f, i_t, num_blocks, s_sb, m_row, SUB: tl.constexpr, PARTS: tl.constexpr):
    """Writes the maxima of tile i_t as scores, NaN as -inf. p_s: address of block 0 of each row; b_f: factor of each row or
    None; s_sb: int64. The cache keeps what is written until its sector is full, however many keys stream through it."""
    if SUB == 1:
        m = m if b_f is None else m * b_f
        m = tl.where(m > float("-inf"), m, float("-inf"))
        tl.store(p_s + (i_t // PARTS) * s_sb, m, mask=m_row, eviction_policy="evict_last")
    else:
        o_b = i_t * SUB + tl.arange(0, SUB)
        tl.store(p_s[:, None] + (o_b * s_sb)[None, :], scored(m, b_f), mask=m_row[:, None] & (o_b < num_blocks)[None, :])


@triton.jit
def store_unseen(p_s, first, last, i_end, num_blocks, s_block, m_row, CUT: tl.constexpr):
    """Writes -inf as the scores of a split's blocks behind tile i_end. p_s: address of block 0 of each row."""
    unseen = tl.full([p_s.shape[0], 16], float("-inf"), tl.float32)
    stop = last // CUT.parts if CUT.sub == 1 else tl.minimum(last // CUT.parts * CUT.sub, num_blocks)
    for i_b in range(tl.maximum(first, i_end) // CUT.parts * CUT.sub, stop, 16):
        o_b = i_b + tl.arange(0, 16)
        tl.store(p_s[:, None] + (o_b * s_block)[None, :], unseen, mask=m_row[:, None] & (o_b < stop)[None, :])


RUNTIME_LENGTHS = ["num_blocks", "num_pages", "capacity", "max_keys", "tiles_per_split"]
