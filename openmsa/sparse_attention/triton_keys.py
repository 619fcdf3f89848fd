# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""The Triton prefill kernels read keys and values here, packed or paged, plain or in formats.

A stored number is code * scale of its group * factor. Codes and scales of groups become exact 16-bit numbers where a tile is
loaded; factors (float32: of the tensor, a head or a page; NVFP4's global scale) multiply logits and outputs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.kv_cache.triton_numbers import NVFP4, e2m1_pair, e4m3, swizzled_byte
from openmsa.primitives.codes import e4m3_numbers
from openmsa.primitives.operands import PAGE_FACTOR, PLAIN
from openmsa.primitives.rows import TYPES, Form, tma_tiles
from openmsa.sparse_attention.triton_config import Keys, PrefillConfig, padded_dim

Descriptors = tuple[TensorDescriptor | None, TensorDescriptor | None]
"""These are TMA descriptors of keys and of values, both None where tiles are read by address."""

SMALLEST_SCALE = tl.constexpr(1e-37)
"""A softmax scale of 0 becomes this number, too small to matter, so that masked logits, -inf times the scale, stay -inf."""


class Products(NamedTuple):
    """Says in which types tiles are multiplied; it is a constant of the kernels that attend.

    qk:        type of queries and keys.
    v:         type of weights and values.
    in_range:  whether bfloat16 queries are brought into float16's range first (`in_range`).
    """

    qk: Any  # a Triton dtype
    v: Any
    in_range: bool


class RowTile(NamedTuple):
    """Says how (query, head) rows are tiled; it is a constant of the kernels that attend.

    group:          query heads of a key head.
    heads, parts:   heads of the group in a tile, a power of two, and tiles that cover the group.
    tokens:         queries of a tile.
    dim, dim_pad:   elements of a head, and of a tile's row.
    """

    group: int
    heads: int
    parts: int
    tokens: int
    dim: int
    dim_pad: int


class KeyCut(NamedTuple):
    """Says how keys are cut into tiles; it is a constant of the kernels that attend.

    block:      keys of a block.
    keys:       keys of a tile; a block takes one or more.
    page_size:  keys of a page, 0 where keys are packed.
    by_row:     whether tiles lie in neighbouring rows: no block crosses pages, and tiles fill it.
    """

    block: int
    keys: int
    page_size: int
    by_row: bool


def descriptors(keys: Keys, config: PrefillConfig, block_size: int) -> Descriptors:
    """Returns descriptors of the boxes that a step of the union kernel reads, None where it may not or cannot read them."""
    if not config.union_tma or not keys.steps_by_row(config, block_size) or keys.k.form.split > 1:
        return None, None
    columns = padded_dim(keys.k.dim, keys.dtype)
    k, v = (tma_tiles(view.rows.data, config.union_keys, columns) for view in (keys.k, keys.v))
    return (None, None) if k is None or v is None else (k, v)


class HeadRows(NamedTuple):
    """Holds keys or values of one head inside a kernel: the `KeyRows` of all heads, and where this head's data and scales
    begin."""

    rows: Any
    data: Any
    scales: Any


@functools.cache
def products(q: torch.dtype, k: torch.dtype, k_form: Form, v_form: Form, union: bool) -> Products:
    """Chooses the types in which the union kernel or KV-outer multiplies. q, k: dtypes in memory (uint8: codes).

    Codes are multiplied as float16, which holds them exactly, or as they are where queries and keys are e4m3 and the GPU has
    the type. The union kernel converts keys in every step, where float16 costs a quarter of bfloat16, and brings its queries
    into range once; KV-outer converts keys once and takes the queries as they come. Factors that go by page may lie far apart,
    so that weights times factors need bfloat16.
    """
    if k_form.format == PLAIN:
        qk_type = v_type = TYPES[k]
    else:
        plain = q in (torch.float16, torch.bfloat16, torch.float32)
        float8 = q == k == torch.float8_e4m3fn
        as_is = q == torch.float32 or (plain and not union)
        qk_type = tl.float8e4nv if float8 else TYPES[q] if as_is else tl.float16
        v_type = tl.bfloat16 if v_form.factor == PAGE_FACTOR else tl.float16
    return Products(qk_type, v_type, union and q == torch.bfloat16 and qk_type == tl.float16)


@triton.jit
def key_place(
    position,  # int32 [n]: positions of keys of one sequence
    m_key,
    first_row,  # packed row of the sequence's first key
    table_row,  # the sequence's row of the page table
    num_pages,
    s_table_page,
    PAGE_SIZE: tl.constexpr,  # 0: packed keys
):
    """Returns the page of each key and its row in it, int64 [n] each; a page id outside the pool is replaced by one inside.
    Packed keys are one page."""
    if PAGE_SIZE > 0:
        page = tl.load(table_row + position // PAGE_SIZE * s_table_page, mask=m_key, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
        row = (position % PAGE_SIZE).to(tl.int64)
    else:
        row = (first_row + position).to(tl.int64)
        page = row * 0
    return page, row


@triton.jit
def row_place(row, PAGE_SIZE: tl.constexpr):
    """Returns the page of a key and its row in it, int64, from its row in the packed tensor, or in the pool taken as num_pages
    * PAGE_SIZE rows."""
    if PAGE_SIZE > 0:
        page, row = (row // PAGE_SIZE).to(tl.int64), (row % PAGE_SIZE).to(tl.int64)
    else:
        row = row.to(tl.int64)
        page = row * 0
    return page, row


@triton.jit
def head_start(rows, i_h, FORM: tl.constexpr):
    """Returns where the data and the scales of head i_h begin, for `HeadRows`. Scales in the 128x4 layout lie by row number, so
    they begin where those of all heads do; 0 stands for none."""
    i_h = i_h.to(tl.int64)
    if FORM.format != NVFP4:
        return rows.data + i_h * rows.s_head, 0
    elif FORM.swizzled:
        return rows.data + i_h * rows.s_head, rows.scales
    else:
        return rows.data + i_h * rows.s_head, rows.scales + i_h * rows.s_scales_head


@triton.jit
def factor_at(rows, i_h, page, BY_PAGE: tl.constexpr):
    """Returns where the factor of a head lies; with BY_PAGE, where those of the head's pages lie (int64, one or several)."""
    p_factor = rows.factor + i_h * rows.s_factor_head
    if BY_PAGE:
        p_factor += page * rows.s_factor_page
    return p_factor


@triton.jit
def converted(x, TYPE: tl.constexpr):
    """Converts plain numbers, or e4m3 codes (float8, or bytes where the GPU has no such type), to TYPE."""
    if x.dtype == tl.uint8:
        x = e4m3(x)
    elif x.dtype == tl.float8e4nv:
        x = e4m3_numbers(x, TYPE)
    return x.to(TYPE)


@triton.jit
def load_codes(
    head,  # HeadRows
    page,  # int64 [n] or scalar
    row,  # int64 [n]
    m_key,
    i_h,
    num_heads,
    FORM: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,  # False: every key exists
):
    """Loads keys as they are stored, for `numbers`: [n, DIM_PAD], or half as many bytes and [n, DIM_PAD // 16] scales of
    groups."""
    rows = head.rows
    o_row = page * rows.s_page + row * rows.s_row
    if FORM.format == NVFP4:
        o_b, o_g = tl.arange(0, DIM_PAD // 2), tl.arange(0, DIM_PAD // 16)
        m_b = m_key[:, None] & (o_b < DIM // 2)[None, :]
        b_x = tl.load(head.data + o_row[:, None] + o_b[None, :] * rows.s_dim, mask=m_b, other=0)
        if FORM.swizzled:
            number = (page * num_heads + i_h) * PAGE_SIZE + row if PAGE_SIZE > 0 else row * num_heads + i_h
            o_s = swizzled_byte(number[:, None], o_g[None, :], DIM // 16)
        else:
            o_s = (page * rows.s_scales_page + row * rows.s_scales_row)[:, None] + o_g[None, :] * rows.s_scales_group
        b_g = tl.load(head.scales + o_s, mask=m_key[:, None] & (o_g < DIM // 16)[None, :], other=0)
    else:
        o_d = tl.arange(0, DIM_PAD)
        p_x = head.data + o_row[:, None] + o_d[None, :] * rows.s_dim
        if MASKED:
            b_x = tl.load(p_x, mask=m_key[:, None] & (o_d < DIM)[None, :], other=0.0)
        elif DIM == DIM_PAD:
            b_x = tl.load(p_x)
        else:
            b_x = tl.load(p_x, mask=(o_d < DIM)[None, :], other=0.0)
        b_g = 0
    return b_x, b_g


@triton.jit
def numbers(b_x, b_g, FORM: tl.constexpr, TYPE: tl.constexpr):
    """Converts what `load_codes` returned to numbers [n, DIM_PAD] without their factor."""
    if FORM.format == NVFP4:
        low, high = e2m1_pair(b_x)
        n: tl.constexpr = b_x.shape[0]
        groups: tl.constexpr = b_g.shape[1]
        b_x = tl.reshape(tl.join(low, high), [n, groups, 16]) * e4m3(b_g)[:, :, None]
        b_x = tl.reshape(b_x, [n, groups * 16])
    return converted(b_x, TYPE)
