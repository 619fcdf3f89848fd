# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Rows are written in their format, and read as numbers, on a GPU by what `append`, `quantize` and `dequantize` run.

Every number is bit for bit what the format's own `write` and `rows` give in PyTorch. Nothing here waits for the device, and
`append` allocates nothing, so that a CUDA graph can hold it: pages, lengths and numbers of tokens are read when kernels run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.kv_cache.certified import CertifiedKeys
from openmsa.kv_cache.e4m3 import E4M3 as E4M3Rows
from openmsa.kv_cache.int8 import Int8
from openmsa.kv_cache.mxfp4 import MXFP4 as MXFP4Rows
from openmsa.kv_cache.nvfp4 import NVFP4 as NVFP4Rows
from openmsa.kv_cache.stored import Stored
from openmsa.kv_cache.triton_numbers import (
    E4M3,
    FORMAT_IDS,
    INT8,
    NVFP4,
    PLAIN,
    e2m1_code,
    e2m1_pair,
    e4m3,
    e4m3_code,
    e8m0,
    magnitude_bits,
    round_even,
    rounded_up,
    swizzled_byte,
)
from openmsa.runtime import checks
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two

GROUPS = {"nvfp4": 16, "mxfp4": 32}
"""So many elements share a scale in the formats of which two elements share a byte."""
ELEMENTS = 1024
"""A program, which has two warps, has so many elements."""
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: None}


class NewRows(NamedTuple):
    """New rows have the shape ``[num_pages, heads, page_size, dim]`` of a pool or, as tokens, ``[1, heads, total, dim]``."""

    data: Tensor
    s_page: int
    s_head: int
    s_row: int
    s_dim: int


class Beside(NamedTuple):
    """A format keeps this beside its codes: a number a row, page or head, or codes of the scales of groups; None where it keeps
    none. Strides go from page to page, head to head, row to row and group to group."""

    data: Tensor | None
    s_page: int = 0
    s_head: int = 0
    s_row: int = 0
    s_group: int = 0


class Pool(NamedTuple):
    """A pool is stored rows ``[num_pages, heads, page_size, dim]`` as the kernels take them, packed ones as pages of one row:
    elements or codes with their strides, their scales, the errors of int8 keys, and the scale of all groups."""

    data: Tensor
    s_page: int
    s_head: int
    s_row: int
    s_dim: int
    scales: Beside
    errors: Beside
    whole: Tensor | None


class Places(NamedTuple):
    """These say where new tokens go: the page table ``[batch, pages]``, keys held before ``[batch]``, and where each sequence's
    tokens start ``[batch + 1]``, None where each has as many. table is None where all rows of a pool are written."""

    table: Tensor | None
    s_sequence: int = 0
    s_page: int = 0
    seq_lens: Tensor | None = None
    s_lens: int = 0
    cu_seqlens: Tensor | None = None


class Cut(NamedTuple):
    """Kernels have compiled in what the format and the size of rows decide.

    format:    one of `FORMAT_IDS`.
    swizzled:  whether scales of groups lie in the 128x4 layout.
    dim:       elements of a row, padded to `dim_pad`, a power of two.
    group:     elements that share a scale, where two share a byte; else 1.
    rows:      rows of a program.
    """

    format: int
    swizzled: bool
    dim: int
    dim_pad: int
    group: int
    rows: int

    @classmethod
    def of(cls, pool: Tensor | Stored, dim: int) -> Cut:
        """Returns what is compiled in for a pool of plain rows, or of a format, of `dim` elements a row."""
        name, padded = checks.format_of(pool), next_power_of_two(dim)
        swizzled = getattr(pool, "layout", "linear") == "128x4"
        return cls(FORMAT_IDS[name], swizzled, dim, padded, GROUPS.get(name, 1), max(1, ELEMENTS // padded))


@triton.jit
def locate(token, m_token, places, batch, steps, each, num_pages, max_pages, page_size):
    """Finds page and row of new tokens, and whether they have a place: the token is in a sequence, its page in the pool."""
    if places.cu_seqlens is None:
        sequence = token // each
        start = sequence * each
    else:
        sequence = tl.zeros_like(token)  # how many sequences end at or before the token
        stop = tl.zeros_like(token) + batch
        for _ in range(steps):
            middle = (sequence + stop) // 2
            end = tl.load(places.cu_seqlens + 1 + middle, mask=m_token & (middle < stop), other=0)
            behind = (middle < stop) & (end <= token)
            stop = tl.where(behind | (sequence >= stop), stop, middle)
            sequence = tl.where(behind, middle + 1, sequence)
        start = tl.load(places.cu_seqlens + sequence, mask=m_token & (sequence < batch), other=0)
    m_place = m_token & (sequence < batch)
    position = tl.load(places.seq_lens + sequence * places.s_lens, mask=m_place, other=0) + token - start
    m_place &= (position >= 0) & (position // page_size < max_pages)
    p_page = places.table + sequence.to(tl.int64) * places.s_sequence
    page = tl.load(p_page + (position // page_size).to(tl.int64) * places.s_page, mask=m_place, other=-1)
    return page, position % page_size, m_place & (page >= 0) & (page < num_pages)


@triton.jit
def group_offsets(page, head, row, heads, page_size, o_scale, o_group, s_group, CUT: tl.constexpr):
    """Says where scales of groups lie, int64 [rows, groups]: from o_scale, the row's first, or in the 128x4 layout."""
    if CUT.swizzled:
        number = ((page * heads + head) * page_size + row)[:, None]
        offsets = swizzled_byte(number, o_group, CUT.dim // CUT.group)
    else:
        offsets = o_scale[:, None] + o_group * s_group
    return offsets


@triton.jit
def scale_of_group(bits, FORMAT: tl.constexpr, whole):
    """Returns the scale code (uint8), its number times the whole tensor's scale, and whether the group has a NaN, from the
    largest magnitude's bits."""
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


@triton.jit
def write_e4m3(p_out, x, m_new, scales, page, head, m_row, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Stores float32 rows [ROWS, PADDED] divided by their scale as E4M3 codes."""
    if scales.data is not None:
        p_scale = scales.data + page * scales.s_page + head * scales.s_head
        whole = tl.load(p_scale, mask=m_row, other=1.0)
        scaled = tl.div_rn(x, tl.broadcast_to(whole[:, None], [ROWS, PADDED]))
        x = tl.where((scaled != scaled) & (x == x), 0.0, scaled)
    tl.store(p_out, e4m3_code(x), mask=m_new)


@triton.jit
def write_int8(p_out, x, m_new, scales, errors, page, head, row, m_row, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Stores float32 rows [ROWS, PADDED] as int8 codes, the scale and the bound of the error of each."""
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
    p_unit = scales.data + page * scales.s_page + head * scales.s_head + row * scales.s_row
    tl.store(p_unit, tl.where(m_nan, 0x7FC0, unit_bits).to(tl.int16), mask=m_row)
    p_bound = errors.data + page * errors.s_page + head * errors.s_head + row * errors.s_row
    tl.store(p_bound, tl.where(m_nan, 0, rounded_up(bound)).to(tl.int16), mask=m_row)


COUNTS = ["total", "heads", "batch", "steps", "each", "num_pages", "max_pages", "page_size"]
"""Parameters of `write_kernel` that must not be compile keys."""


@triton.jit(do_not_specialize=COUNTS)
def write_kernel(
    new, pool, places, total, heads, batch, steps, each, num_pages, max_pages, page_size,
    CUT: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Stores new rows where their page lies: CUT.rows of them a program, a row being a token's one head.

    new:     `NewRows`: tokens where there is a page table.
    pool:    the `Pool` that they go to. places: `Places`.
    total:   tokens. steps: of the search for a token's sequence. each: tokens of a sequence where all have as many.
    ROUND:   the dtype that rows are rounded to first, or None.
    """
    ROWS: tl.constexpr = CUT.rows
    PADDED: tl.constexpr = CUT.dim_pad
    GROUP: tl.constexpr = CUT.group
    FORMAT: tl.constexpr = CUT.format
    # 1. Rows and their places are found.
    scales = pool.scales
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = (i_row // heads).to(tl.int32), (i_row % heads).to(tl.int32)
    m_row = i_row < total.to(tl.int64) * heads
    if places.table is None:
        page, row = token // page_size, token % page_size
        p_new = new.data + page.to(tl.int64) * new.s_page + row.to(tl.int64) * new.s_row + head.to(tl.int64) * new.s_head
    else:
        p_new = new.data + token.to(tl.int64) * new.s_row + head.to(tl.int64) * new.s_head
        page, row, m_row = locate(token, m_row, places, batch, steps, each, num_pages, max_pages, page_size)
    page, head, row = page.to(tl.int64), head.to(tl.int64), row.to(tl.int64)
    p_data = pool.data + page * pool.s_page + head * pool.s_head + row * pool.s_row

    if GROUP == 1:
        # 2. Formats of a code an element are written.
        o_dim = tl.arange(0, PADDED)
        m_new = m_row[:, None] & (o_dim < CUT.dim)
        x = tl.load(p_new[:, None] + o_dim.to(tl.int64) * new.s_dim, mask=m_new, other=0)
        if ROUND is not None:
            x = x.to(tl.float32).to(ROUND)
        p_out = p_data[:, None] + o_dim.to(tl.int64) * pool.s_dim
        if FORMAT == PLAIN:
            if pool.data.dtype.element_ty != tl.float64:
                x = x.to(tl.float32)
            tl.store(p_out, x.to(pool.data.dtype.element_ty), mask=m_new)
        elif FORMAT == E4M3:
            write_e4m3(p_out, x.to(tl.float32), m_new, scales, page, head, m_row, ROWS, PADDED)
        else:
            write_int8(p_out, x.to(tl.float32), m_new, scales, pool.errors, page, head, row, m_row, ROWS, PADDED)
    else:
        # 3. Formats of two codes a byte, with a scale a group, are written.
        NUM: tl.constexpr = PADDED // GROUP
        o_group = tl.arange(0, NUM)
        o_pair = o_group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)  # [NUM, GROUP // 2] bytes of a row
        m_group = m_row[:, None] & (o_group < CUT.dim // GROUP)
        m_new = m_row[:, None, None] & (o_pair < CUT.dim // 2)
        p_low = p_new[:, None, None] + (2 * o_pair).to(tl.int64) * new.s_dim
        low = tl.load(p_low, mask=m_new, other=0).to(tl.float32)
        high = tl.load(p_low + new.s_dim, mask=m_new, other=0).to(tl.float32)
        whole = tl.load(pool.whole) if pool.whole is not None else 1.0
        bits = tl.max(tl.maximum(magnitude_bits(low), magnitude_bits(high)), 2)  # [ROWS, NUM]
        code, unit, m_nan = scale_of_group(bits, FORMAT, tl.zeros([ROWS, NUM], tl.float32) + whole)
        unit = tl.broadcast_to(unit[:, :, None], [ROWS, NUM, GROUP // 2])
        m_some = (unit > 0) & ~m_nan[:, :, None]
        low = e2m1_code(tl.where(m_some, tl.div_rn(low, unit), 0.0))
        high = e2m1_code(tl.where(m_some, tl.div_rn(high, unit), 0.0))
        tl.store(p_data[:, None, None] + o_pair.to(tl.int64) * pool.s_dim, low | (high << 4), mask=m_new)
        o_scale = page * scales.s_page + head * scales.s_head + row * scales.s_row
        offsets = group_offsets(page, head, row, heads, page_size, o_scale, o_group, scales.s_group, CUT)
        tl.store(scales.data + offsets, code, mask=m_group)


@triton.jit(do_not_specialize=["batch", "each", "capacity"])
def advance_kernel(places, batch, each, capacity, BLOCK: tl.constexpr):
    """`seq_lens` grows by what was appended, up to the capacity."""
    i_batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_batch = i_batch < batch
    added = each
    if places.cu_seqlens is not None:
        first = tl.load(places.cu_seqlens + i_batch, mask=m_batch, other=0)
        added = tl.load(places.cu_seqlens + i_batch + 1, mask=m_batch, other=0) - first
    p_len = places.seq_lens + i_batch * places.s_lens
    held = tl.load(p_len, mask=m_batch, other=0)
    tl.store(p_len, tl.maximum(held, tl.minimum(held + added, capacity)), mask=m_batch)


@triton.jit(do_not_specialize=["total", "heads", "page_size"])
def read_kernel(out, pool, total, heads, page_size, CUT: tl.constexpr):
    """Writes the numbers of stored rows, CUT.rows of `total` a program, to out, contiguous [pages, heads, page_size, dim]."""
    ROWS: tl.constexpr = CUT.rows
    GROUP: tl.constexpr = CUT.group
    PADDED: tl.constexpr = CUT.dim_pad
    scales = pool.scales
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < total
    page, head, row = i_row // page_size // heads, i_row // page_size % heads, i_row % page_size
    p_data = pool.data + page * pool.s_page + head * pool.s_head + row * pool.s_row
    o_scale = page * scales.s_page + head * scales.s_head + row * scales.s_row
    if GROUP == 1:
        o_dim = tl.arange(0, PADDED)
        m_data = m_row[:, None] & (o_dim < CUT.dim)
        codes = tl.load(p_data[:, None] + o_dim.to(tl.int64) * pool.s_dim, mask=m_data, other=0)
        x = e4m3(codes).to(tl.float32) if CUT.format == E4M3 else codes.to(tl.float32)
        if scales.data is not None:
            unit = tl.load(scales.data + o_scale, mask=m_row, other=0)
            if CUT.format == INT8:
                unit = (unit.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            x *= unit[:, None]
        tl.store(out + i_row[:, None] * CUT.dim + o_dim, x.to(out.dtype.element_ty), mask=m_data)
    else:
        NUM: tl.constexpr = PADDED // GROUP
        o_group = tl.arange(0, NUM)
        m_group = m_row[:, None] & (o_group < CUT.dim // GROUP)
        o_pair = o_group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)  # [NUM, GROUP // 2] bytes of a row
        m_pair = m_row[:, None, None] & (o_pair < CUT.dim // 2)
        codes = tl.load(p_data[:, None, None] + o_pair.to(tl.int64) * pool.s_dim, mask=m_pair, other=0)
        offsets = group_offsets(page, head, row, heads, page_size, o_scale, o_group, scales.s_group, CUT)
        units = tl.load(scales.data + offsets, mask=m_group, other=0)
        units = e4m3(units).to(tl.float32) if CUT.format == NVFP4 else e8m0(units)
        low, high = e2m1_pair(codes)
        low, high = low.to(tl.float32) * units[:, :, None], high.to(tl.float32) * units[:, :, None]
        if pool.whole is not None:
            whole = tl.load(pool.whole)
            low, high = low * whole, high * whole
        p_out = out + i_row[:, None, None] * CUT.dim + 2 * o_pair
        tl.store(p_out, low.to(out.dtype.element_ty), mask=m_pair)
        tl.store(p_out + 1, high.to(out.dtype.element_ty), mask=m_pair)


def append(
    pools: Mapping[str, Tensor | Stored],
    new: dict[str, Tensor],
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor | None,
) -> None:
    """Writes each tensor of `new`, ``[total, heads, dim]``, into its pool after each sequence's keys, one launch each, then
    advances `seq_lens`.

    cu_seqlens: int32 ``[batch + 1]``, contiguous; None: the same number for each sequence. Tokens at or past its last entry,
    past the page table's capacity, or on a page outside the pool are not written; `seq_lens` stops at the capacity.
    """
    total, (batch, max_pages) = next(iter(new.values())).shape[0], page_table.shape
    if total == 0 or batch == 0:
        return
    each, page_size = total // batch, 0
    starts = None if cu_seqlens is None else cu_seqlens.contiguous()
    places = Places(page_table, page_table.stride(0), page_table.stride(1), seq_lens, seq_lens.stride(0), starts)
    for name, rows in new.items():
        page_size = pools[name].shape[2]
        _write(pools[name], rows.detach()[None].transpose(1, 2), places, total, (batch, batch.bit_length(), each), max_pages)
    capacity = max_pages * page_size
    launch_kernel(advance_kernel, (ceil_div(batch, 256),), places, batch, each, capacity, BLOCK=256, num_warps=2)


def quantize_into(stored: Tensor | Stored, values: Tensor) -> None:
    """Writes all rows: values of the logical shape of `stored`, ``[total, heads, dim]`` or a pool."""
    if values.numel() == 0:
        return
    values = values.detach()
    new = values if values.dim() == 4 else values.unsqueeze(2)
    _write(stored, new, Places(None), new.shape[0] * new.shape[2], (0, 0, 0), 0)


def _write(
    pool: Tensor | Stored,
    new: Tensor,
    places: Places,
    total: int,
    sequences: tuple[int, int, int],
    max_pages: int,
    round_to: Any = None,
) -> None:
    """Launches `write_kernel`. new: ``[num_pages or 1, heads, rows, dim]``. sequences: their number, steps of the search for
    one, and tokens of each."""
    if isinstance(pool, CertifiedKeys):
        _write(pool.exact, new, places, total, sequences, max_pages)
        _write(pool.coarse, new, places, total, sequences, max_pages, DTYPES[pool.exact.dtype])
        return
    heads, page_size = new.shape[1], pool.shape[2] if pool.dim() == 4 else 1
    cut = Cut.of(pool, new.shape[3])
    launch_kernel(
        write_kernel,
        (ceil_div(total * heads, cut.rows),),
        NewRows(new, new.stride(0), new.stride(1), new.stride(2), new.stride(3)),
        pool_of(pool),
        places,
        *(total, heads, *sequences, pool.shape[0], max_pages, page_size),
        CUT=cut,
        ROUND=round_to,
        num_warps=2,
    )


def dequantize(stored: Stored, dtype: torch.dtype) -> Tensor:
    """Returns the rows of a packed tensor or a pool, contiguous, by one launch; dtype: float32, float16 or bfloat16."""
    out = torch.empty(stored.shape, dtype=dtype, device=stored.device)
    if not out.numel():
        return out
    dim, heads = out.shape[-1], out.shape[1]
    total, page_size = out.numel() // dim, out.shape[2] if out.dim() == 4 else 1
    cut = Cut.of(stored, dim)
    grid = (ceil_div(total, cut.rows),)
    launch_kernel(read_kernel, grid, out, pool_of(stored), total, heads, page_size, CUT=cut, num_warps=2)
    return out


def pool_of(pool: Tensor | Stored) -> Pool:
    """Returns the tensors of plain rows or of a format, with their strides."""
    whole, scales, errors = None, Beside(None), Beside(None)
    data = pool.data if isinstance(pool, Stored) else pool
    if isinstance(pool, E4M3Rows):
        data, scales = data.view(torch.uint8), Beside(pool.scale, *pool.scale_strides)
    elif isinstance(pool, Int8):
        scale, error = pool.scale.view(torch.int16), pool.error.view(torch.int16)
        scales, errors = Beside(scale, *_strides(scale)), Beside(error, *_strides(error))
    elif isinstance(pool, NVFP4Rows):
        codes, whole = pool.scale.view(torch.uint8), pool.global_scale
        scales = Beside(codes) if pool.layout == "128x4" else Beside(codes, *_strides(codes[..., 0]), codes.stride(-1))
    elif isinstance(pool, MXFP4Rows):
        scales = Beside(pool.scale, *_strides(pool.scale[..., 0]), pool.scale.stride(-1))
    return Pool(data, *_strides(data[..., 0]), data.stride(-1), scales, errors, whole)


def _strides(rows: Tensor) -> tuple[int, int, int]:
    """Returns the strides of ``[num_pages, heads, page_size]``, or of packed rows, which are pages of one."""
    page, head, *row = rows.stride()
    return page, head, row[0] if row else 0
