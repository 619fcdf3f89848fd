# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Rows of queries become factors of products here: as they come, in parts where the items of keys hold several elements,
repeated where groups of elements have scales, brought into the range of float16, or as integers."""

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
def every_second(b_q):
    """Gives the elements of even and those of odd number, [rows, width / 2] each."""
    return tl.split(b_q.reshape(b_q.shape[0], b_q.shape[1] // 2, 2))


@triton.jit
def query_parts(b_q, SPLIT: tl.constexpr):
    """Splits rows of queries into a tuple of SPLIT parts; part n has every SPLIT-th element from the n-th on."""
    if SPLIT == 1:
        return (b_q,)
    elif SPLIT == 2:
        return every_second(b_q)
    else:
        even, odd = every_second(b_q)
        first, third = every_second(even)
        second, fourth = every_second(odd)
        return first, second, third, fourth


@triton.jit
def spread_rows(b_q, COLUMNS: tl.constexpr):
    """Puts rows of elements [rows, width] in every second of the first of COLUMNS, zero between and behind them: four rows then
    lie in four threads of a product, not in two."""
    ROWS: tl.constexpr = b_q.shape[0]
    WIDTH: tl.constexpr = b_q.shape[1]
    o_c = tl.arange(0, COLUMNS // ROWS).reshape(COLUMNS // (2 * ROWS), 1, 2, 1)
    return tl.where(o_c == 0, b_q[None, :, None, :], 0.0).to(b_q.dtype).reshape(COLUMNS, WIDTH)


@triton.jit
def group_rows(b_q, GROUPS: tl.constexpr):
    """Repeats rows of elements [rows, width] once for each group of them, zero elsewhere, [groups * rows, width], in the order
    [pairs of groups, rows, groups of a pair]: of four rows and more, a lane then has the products of all groups."""
    ROWS: tl.constexpr = b_q.shape[0]
    WIDTH: tl.constexpr = b_q.shape[1]
    PAIR: tl.constexpr = 2 if GROUPS > 1 else 1
    here = tl.arange(0, WIDTH)[None, :] // (WIDTH // GROUPS) == tl.arange(0, GROUPS)[:, None]
    here = here.reshape(GROUPS // PAIR, 1, PAIR, WIDTH)
    return tl.where(here, b_q[None, :, None, :], 0.0).to(b_q.dtype).reshape(GROUPS * ROWS, WIDTH)


@triton.jit
def raised(b_q):
    """Gives bf16 rows of queries as float16 times powers of two that bring their largest elements to 2**6, so that products
    with bare e2m1 numbers, whose unit is 2**-14, are of middling size; and, divided by 2**8, what undoes it: [rows, width] and
    [rows]. This is exact down to 2**-23 of a row's largest element; below, it is off by at most 2**-31 of it."""
    largest = tl.max(tl.abs(b_q.to(tl.float32)), 1)
    exponent = tl.minimum(tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127, -126), 127)
    step = 6 - exponent  # up to 132, so it is multiplied in as two factors
    up = b_q.to(tl.float32) * power_of_two(step // 2)[:, None] * power_of_two(step - step // 2)[:, None]
    return up.to(tl.float16), power_of_two(exponent)


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
def float16_rows(b_q):
    """Gives rows of queries in float16 times powers of two, bf16 ones `raised`; and what, times 2**8, makes scores of their
    products with e2m1 numbers times 2**-14."""
    if b_q.dtype == tl.bfloat16:
        return raised(b_q)
    else:
        return b_q, tl.full([b_q.shape[0]], 64.0, tl.float32)


@triton.jit
def grouped_parts(b_q, GROUPS: tl.constexpr, SPLIT: tl.constexpr):
    """Gives `query_parts` of `float16_rows` spread over the groups of FP4 keys, and what multiplies their scores in the end."""
    b_q, b_up = float16_rows(b_q)
    parts = query_parts(b_q, SPLIT)
    if SPLIT == 2:
        return (group_rows(parts[0], GROUPS), group_rows(parts[1], GROUPS)), b_up
    else:
        first, second = group_rows(parts[0], GROUPS), group_rows(parts[1], GROUPS)
        return (first, second, group_rows(parts[2], GROUPS), group_rows(parts[3], GROUPS)), b_up


@triton.jit
def power_of_two(exponent):
    """Gives 2**exponent in float32, of an exponent from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


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


@triton.jit
def fixed_point(b_q):
    """Expresses rows of 16-bit queries [rows, width] as integers times a unit. Returns int8 [2 * rows, width], the high and the
    low part of each row, with zeros behind them up to the 16 rows that Hopper's matrix unit is used for, and float32 [rows]:
    the unit, and bounds of the norms of the row and of what the integers lack. A row with NaN, infinity or elements from 2**111
    on becomes zeros and has an infinite norm."""
    x = b_q.to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    usable = largest < 2.0**111
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127, -100)
    exponent = tl.where(usable, exponent, 0)
    x = tl.where(usable[:, None], x, 0.0) * power_of_two(13 - exponent)[:, None]  # exact; at most 2**14 - 8 in magnitude
    n = tl.floor(x + 0.5)
    unit = power_of_two(exponent - 13)
    MARGIN: tl.constexpr = 1 + 1e-4  # covers float32 sums and roots; 4e-37 below covers lost subnormal squares
    norm = tl.sqrt(tl.sum(x * x, 1)) * unit * MARGIN + 4e-37
    rest = tl.sqrt(tl.sum((x - n) * (x - n), 1)) * unit * MARGIN + (norm * 2.0**-64 + 4e-37)
    whole = n.to(tl.int32)
    parts = tl.join((whole >> 7).to(tl.int8), (whole & 127).to(tl.int8)).permute(0, 2, 1)
    parts = parts.reshape(2 * x.shape[0], x.shape[1])
    if parts.shape[0] < 16:
        parts = tl.join(parts, tl.zeros_like(parts)).permute(2, 0, 1).reshape(2 * parts.shape[0], x.shape[1])
    return parts, unit, tl.where(usable, norm, float("inf")), rest
