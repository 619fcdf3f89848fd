# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="index"
"""Programs score index queries with tiles of index keys and take the maxima of blocks: this file says which queries and keys a
sequence has, and how they become the factors of products. What formats of keys ask of queries stands in
`openmsa.primitives.query_parts`, how they are multiplied in `openmsa.primitives.stored_products`, and how a program walks tiles
is chosen in `openmsa.primitives.walks`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from openmsa.kv_cache import E4M3, Stored
from openmsa.primitives import operands
from openmsa.primitives.codes import e4m3_numbers, load_group_scales, load_scales, padded
from openmsa.primitives.query_parts import grouped_parts, query_parts, spread_rows, unspread
from openmsa.primitives.rows import FLAT, TYPES, KeyTiles, KeyView, Tile, block_maxima, load_keys, load_rows, times
from openmsa.primitives.stored_products import stored_products
from openmsa.primitives.walks import Kind


def kind_of(keys: KeyTiles, product: Any, tile: Tile) -> Kind:
    """Collects what the configuration of a call depends on. product: the Triton dtype of factors."""
    view, tma = keys.view, keys.tma is not None
    return Kind.of(view.dim, tile.tile, view.form.format, product, keys.paging.mode != FLAT, tma)


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
        GROUPS: tl.constexpr = padded(PRODUCT.dim // (16 if FORM.format == 3 else 32))
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
    s = times(b_q, b_k, None, SWAP) if FORMAT == 0 else stored_products(b_q, b_k, b_g, ROWS, FORM, TILE, PRODUCT)
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
