# SPDX-License-Identifier: MIT
"""The kernels of `triton_append`: rows rounded to a format and stored where their page lies, and lengths that grow."""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.kv_cache.triton_numbers import (
    E4M3,
    NVFP4,
    PLAIN,
    e2m1_code,
    e4m3,
    e4m3_code,
    e8m0,
    magnitude_bits,
    round_even,
    rounded_up,
    swizzled_byte,
)

COUNTS = ["total", "heads", "batch", "steps", "each", "num_pages", "max_pages", "page_size"]
"""Arguments of `write_kernel` that must not be compile keys."""


@triton.jit
def locate(
    token,
    m_token,
    page_table,
    seq_lens,
    cu_seqlens,
    s_lens,
    s_table_b,
    s_table_p,
    batch,
    steps,
    each,
    num_pages,
    max_pages,
    page_size,
):
    """Page and row of new tokens, and whether they have a place: the token belongs to a sequence, its page to the pool."""
    if cu_seqlens is None:
        sequence = token // each
        start = sequence * each
    else:
        sequence = tl.zeros_like(token)  # how many sequences end at or before the token
        stop = tl.zeros_like(token) + batch
        for _ in range(steps):
            middle = (sequence + stop) // 2
            end = tl.load(cu_seqlens + 1 + middle, mask=m_token & (middle < stop), other=0)
            behind = (middle < stop) & (end <= token)
            stop = tl.where(behind | (sequence >= stop), stop, middle)
            sequence = tl.where(behind, middle + 1, sequence)
        start = tl.load(cu_seqlens + sequence, mask=m_token & (sequence < batch), other=0)
    m_place = m_token & (sequence < batch)
    position = tl.load(seq_lens + sequence * s_lens, mask=m_place, other=0) + token - start
    m_place &= (position >= 0) & (position // page_size < max_pages)
    p_page = page_table + sequence.to(tl.int64) * s_table_b + (position // page_size).to(tl.int64) * s_table_p
    page = tl.load(p_page, mask=m_place, other=-1)
    return page, position % page_size, m_place & (page >= 0) & (page < num_pages)


@triton.jit
def group_offsets(page, head, row, heads, page_size, o_scale, o_group, s_scale_g, SWIZZLED: tl.constexpr, GROUPS: tl.constexpr):
    """Where the scales of groups lie, int64 [rows, groups]: from the row's linear offset, or in the 128x4 layout."""
    if SWIZZLED:
        place = ((page * heads + head) * page_size + row)[:, None]
        offsets = swizzled_byte(place, o_group, GROUPS)
    else:
        offsets = o_scale[:, None] + o_group * s_scale_g
    return offsets


@triton.jit
def scale_of_group(bits, FORMAT: tl.constexpr, whole):
    """Scale code (uint8), its number times the whole tensor's scale, and whether the group has a NaN, from the largest
    magnitude's bits."""
    m_nan = bits > 0x7F800000
    amax = tl.where(m_nan, 0, bits).to(tl.float32, bitcast=True)
    if FORMAT == NVFP4:
        code = e4m3_code(tl.div_rn(amax, whole * 6.0))
        unit = e4m3(code).to(tl.float32) * whole
        nan_code = 0x7F
    else:
        exponent = tl.minimum(amax.to(tl.int32, bitcast=True) >> 23, 254)
        code = tl.maximum(exponent - 2, 0).to(tl.uint8)
        unit = e8m0(code)
        nan_code = 255
    return tl.where(m_nan, nan_code, code).to(tl.uint8), unit, m_nan


@triton.jit(do_not_specialize=COUNTS)
def write_kernel(
    new,  # rows of a pool [num_pages, heads, page_size, dim] or, with a page table, tokens [total, heads, dim]
    data,
    scale,
    error,
    global_scale,
    page_table,
    seq_lens,
    cu_seqlens,
    s_new_p,
    s_new_t,
    s_new_h,
    s_new_d,
    s_data_p,
    s_data_h,
    s_data_t,
    s_data_d,
    s_scale_p,
    s_scale_h,
    s_scale_t,
    s_scale_g,
    s_error_p,
    s_error_h,
    s_error_t,
    s_lens,
    s_table_b,
    s_table_p,
    total,
    heads,
    batch,
    steps,
    each,
    num_pages,
    max_pages,
    page_size,
    FORMAT: tl.constexpr,
    SWIZZLED: tl.constexpr,  # scales in the 128x4 layout
    ROUND: tl.constexpr,  # rows are rounded to this dtype first
    DIM: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two
    GROUP: tl.constexpr,  # elements that share a scale, where two share a byte
    ROWS: tl.constexpr,
):
    """One program: ROWS rows, a row being a token's one head."""
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = (i_row // heads).to(tl.int32), (i_row % heads).to(tl.int32)
    m_row = i_row < total.to(tl.int64) * heads
    if page_table is None:
        page, row = token // page_size, token % page_size
        p_new = new + page.to(tl.int64) * s_new_p + row.to(tl.int64) * s_new_t + head.to(tl.int64) * s_new_h
    else:
        p_new = new + token.to(tl.int64) * s_new_t + head.to(tl.int64) * s_new_h
        page, row, m_row = locate(
            *(token, m_row, page_table, seq_lens, cu_seqlens, s_lens, s_table_b, s_table_p),
            *(batch, steps, each, num_pages, max_pages, page_size),
        )
    page, head, row = page.to(tl.int64), head.to(tl.int64), row.to(tl.int64)
    p_data = data + page * s_data_p + head * s_data_h + row * s_data_t

    if GROUP == 1:
        o_dim = tl.arange(0, PADDED)
        m_new = m_row[:, None] & (o_dim < DIM)
        x = tl.load(p_new[:, None] + o_dim.to(tl.int64) * s_new_d, mask=m_new, other=0)
        if ROUND is not None:
            x = x.to(tl.float32).to(ROUND)
        p_out = p_data[:, None] + o_dim.to(tl.int64) * s_data_d
        if FORMAT == PLAIN:
            if data.dtype.element_ty != tl.float64:
                x = x.to(tl.float32)
            tl.store(p_out, x.to(data.dtype.element_ty), mask=m_new)
        elif FORMAT == E4M3:
            x = x.to(tl.float32)
            if scale is not None:
                whole = tl.load(scale + page * s_scale_p + head * s_scale_h, mask=m_row, other=1.0)
                scaled = tl.div_rn(x, tl.broadcast_to(whole[:, None], [ROWS, PADDED]))
                x = tl.where((scaled != scaled) & (x == x), 0.0, scaled)
            tl.store(p_out, e4m3_code(x), mask=m_new)
        else:
            x = x.to(tl.float32)
            bits = tl.max(magnitude_bits(x), 1)
            m_nan = bits > 0x7F800000
            amax = tl.minimum(tl.where(m_nan, 0, bits), 0x7F000000).to(tl.float32, bitcast=True)
            unit_bits = rounded_up(tl.div_rn(amax, tl.full([ROWS], 127.49, tl.float32)))
            unit = (unit_bits << 16).to(tl.float32, bitcast=True)
            limit = 1.7014118346046923e38  # 2**127
            ratio = tl.div_rn(tl.minimum(tl.maximum(x, -limit), limit), tl.broadcast_to(unit[:, None], [ROWS, PADDED]))
            ratio = tl.where((unit > 0)[:, None] & m_new, ratio, 0.0)
            code = tl.minimum(tl.maximum(round_even(ratio), -127.0), 127.0)
            tl.store(p_out, code.to(tl.int8), mask=m_new)
            parts = tl.floor(tl.abs(ratio - code) * 262144.0).to(tl.int64) + 3  # in units of 2**-18
            parts = tl.where(m_new, parts, 0)
            norm = tl.sqrt_rn(tl.sum(parts * parts, 1).to(tl.float32)) * 3.814697265625e-06
            tiny = 1.1754943508222875e-38
            bound = tl.maximum(norm * unit * 1.00000095367431640625, tiny)
            bound = tl.where(unit > 0, bound, tl.where(amax > 0, tiny, 0.0))
            bound = tl.where(bits > 0x7F000000, float("inf"), bound)
            p_unit = scale + page * s_scale_p + head * s_scale_h + row * s_scale_t
            tl.store(p_unit, tl.where(m_nan, 0x7FC0, unit_bits).to(tl.int16), mask=m_row)
            p_bound = error + page * s_error_p + head * s_error_h + row * s_error_t
            tl.store(p_bound, tl.where(m_nan, 0, rounded_up(bound)).to(tl.int16), mask=m_row)
    else:
        NUM: tl.constexpr = PADDED // GROUP
        o_group = tl.arange(0, NUM)
        o_pair = o_group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)  # [NUM, GROUP // 2] bytes of a row
        m_group = m_row[:, None] & (o_group < DIM // GROUP)
        m_new = m_row[:, None, None] & (o_pair < DIM // 2)
        p_low = p_new[:, None, None] + (2 * o_pair).to(tl.int64) * s_new_d
        low = tl.load(p_low, mask=m_new, other=0).to(tl.float32)
        high = tl.load(p_low + s_new_d, mask=m_new, other=0).to(tl.float32)
        whole = tl.load(global_scale) if global_scale is not None else 1.0
        bits = tl.max(tl.maximum(magnitude_bits(low), magnitude_bits(high)), 2)  # [ROWS, NUM]
        code, unit, m_nan = scale_of_group(bits, FORMAT, tl.zeros([ROWS, NUM], tl.float32) + whole)
        unit = tl.broadcast_to(unit[:, :, None], [ROWS, NUM, GROUP // 2])
        m_some = (unit > 0) & ~m_nan[:, :, None]
        low = e2m1_code(tl.where(m_some, tl.div_rn(low, unit), 0.0))
        high = e2m1_code(tl.where(m_some, tl.div_rn(high, unit), 0.0))
        tl.store(p_data[:, None, None] + o_pair.to(tl.int64) * s_data_d, low | (high << 4), mask=m_new)
        o_scale = page * s_scale_p + head * s_scale_h + row * s_scale_t
        offsets = group_offsets(page, head, row, heads, page_size, o_scale, o_group, s_scale_g, SWIZZLED, DIM // GROUP)
        tl.store(scale + offsets, code, mask=m_group)


@triton.jit(do_not_specialize=["batch", "each", "capacity"])
def advance_kernel(seq_lens, cu_seqlens, s_lens, batch, each, capacity, BLOCK: tl.constexpr):
    """`seq_lens` grows by what was appended, up to the capacity."""
    i_batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_batch = i_batch < batch
    added = each
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + i_batch, mask=m_batch, other=0)
        added = tl.load(cu_seqlens + i_batch + 1, mask=m_batch, other=0) - first
    held = tl.load(seq_lens + i_batch * s_lens, mask=m_batch, other=0)
    tl.store(seq_lens + i_batch * s_lens, tl.maximum(held, tl.minimum(held + added, capacity)), mask=m_batch)
