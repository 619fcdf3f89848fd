# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Formats of keys ask these forms of rows of queries: parts where the items of keys hold several elements, rows repeated where
groups of elements have scales or spread where they are few, and elements raised so that float16 holds products with FP4."""

from __future__ import annotations

import triton
import triton.language as tl


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
def side_by_side(parts):
    """Joins two or four tensors [rows, width] into one: parts in registers stay where they are, and one product is waited for,
    not one a part."""
    if len(parts) == 2:
        x = tl.join(parts[0], parts[1]).permute(0, 2, 1)
    else:
        x = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3])).permute(0, 3, 2, 1)
    return x.reshape(x.shape[0], len(parts) * x.shape[-1])


@triton.jit
def spread_rows(b_q, COLUMNS: tl.constexpr):
    """Puts rows of elements [rows, width] in every second of the first of COLUMNS, zero between and behind them: four rows then
    lie in four threads of a product, not in two."""
    ROWS: tl.constexpr = b_q.shape[0]
    WIDTH: tl.constexpr = b_q.shape[1]
    o_c = tl.arange(0, COLUMNS // ROWS).reshape(COLUMNS // (2 * ROWS), 1, 2, 1)
    return tl.where(o_c == 0, b_q[None, :, None, :], 0.0).to(b_q.dtype).reshape(COLUMNS, WIDTH)


@triton.jit
def unspread(s, ROWS: tl.constexpr):
    """Gives products of keys with `spread_rows`, [keys, rows]; what a thread has of other columns is dropped."""
    s = tl.split(s.reshape(s.shape[0], s.shape[1] // 2, 2))[0]
    if s.shape[1] > ROWS:
        s = tl.split(s.reshape(s.shape[0], 2, s.shape[1] // 2).permute(0, 2, 1))[0]
    return s


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
def power_of_two(exponent):
    """Gives 2**exponent in float32, of an exponent from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


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
def in_range(b_q, scale):
    """Gives bfloat16 rows times powers of two, so that float16 holds them exactly (but for what is 2**30 times smaller than the
    largest of its row), and the scale of each row divided by them."""
    largest = tl.max(tl.abs(b_q.to(tl.float32)), 1)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    power = tl.minimum(268 - exponent, 187)  # the largest comes between 2**14 and 2**15, or is multiplied by 2**60
    factor = (power << 23).to(tl.float32, bitcast=True)
    scale = tl.maximum(scale * ((254 - power) << 23).to(tl.float32, bitcast=True), 1e-37)
    return b_q.to(tl.float32) * factor[:, None], scale
