# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Rows of queries become factors of products here; what formats of keys ask of them stands in
`openmsa.primitives.query_parts`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.kv_cache import E4M3, Stored
from openmsa.primitives import operands
from openmsa.primitives.codes import e4m3_numbers
from openmsa.primitives.operands import QueryRows
from openmsa.primitives.query_parts import grouped_parts, query_parts, spread_rows
from openmsa.primitives.rows import TYPES, KeyView


def query_rows(index_q: Tensor | Stored, native: bool) -> QueryRows:
    """Bundles queries ``[total_q, heads, dim]`` for kernels. native: whether the GPU knows e4m3; else its codes are bytes."""
    if isinstance(index_q, E4M3):
        data = index_q.data if native else index_q.data.view(torch.uint8)
        s_token, s_head, s_dim = data.stride()
        return QueryRows(data, s_token, s_head, s_dim, index_q.scale, index_q.scale_strides[1])
    assert isinstance(index_q, Tensor)
    s_token, s_head, s_dim = index_q.stride()
    return QueryRows(index_q, s_token, s_head, s_dim)


def product_type(index_q: Tensor | Stored, keys: KeyView) -> Any:
    """Gives the Triton dtype of both factors of products of queries and keys: e4m3 on the matrix unit where it knows them, for
    e4m3 times e4m3; every other pair has 16 bits, in which both are exact."""
    if not isinstance(index_q, E4M3):
        return TYPES[index_q.dtype]
    if keys.form.format == operands.E4M3:
        return tl.float8e4nv if keys.form.native else tl.float16
    return TYPES[keys.rows.data.dtype] if keys.form.format == operands.PLAIN else tl.bfloat16


@triton.jit
def load_rows(q, i_row, q_len, i_h, s_token, s_head, s_dim, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Loads index queries of rows i_row (query i_row // GROUP, head i_h + i_row % GROUP), [rows, DIM_PAD], zero past q_len."""
    o_d = tl.arange(0, DIM_PAD)
    p_q = q + (i_row // GROUP).to(tl.int64) * s_token + (i_h + i_row % GROUP) * s_head
    m_q = (i_row // GROUP < q_len)[:, None] & (o_d < DIM)[None, :]
    return tl.load(p_q[:, None] + (o_d * s_dim)[None, :], mask=m_q, other=0.0)


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
def in_range(b_q, scale):
    """Gives bfloat16 rows times powers of two, so that float16 holds them exactly (but for what is 2**30 times smaller than the
    largest of its row), and the scale of each row divided by them."""
    largest = tl.max(tl.abs(b_q.to(tl.float32)), 1)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    power = tl.minimum(268 - exponent, 187)  # the largest comes between 2**14 and 2**15, or is multiplied by 2**60
    factor = (power << 23).to(tl.float32, bitcast=True)
    scale = tl.maximum(scale * ((254 - power) << 23).to(tl.float32, bitcast=True), 1e-37)
    return b_q.to(tl.float32) * factor[:, None], scale


@triton.jit
def query_numbers(b_q, PRODUCT: tl.constexpr):
    """Gives rows of queries as factors of type PRODUCT."""
    if b_q.dtype == tl.uint8:
        return e4m3_numbers(b_q, PRODUCT)
    else:
        return b_q.to(PRODUCT)


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
