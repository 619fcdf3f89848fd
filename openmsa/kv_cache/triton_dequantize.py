# SPDX-License-Identifier: MIT
"""All rows of a format as numbers, one launch: what `dequantize` runs on a GPU; bit for bit what PyTorch gives."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.kv_cache.stored import Stored
from openmsa.kv_cache.triton_append import ELEMENTS, constexprs_of, tensors_of
from openmsa.kv_cache.triton_numbers import E4M3, INT8, NVFP4, e2m1_pair, e4m3, e8m0
from openmsa.kv_cache.triton_write import group_offsets
from openmsa.runtime.integers import ceil_div, next_power_of_two
from openmsa.runtime.launch import launch_kernel


@triton.jit(do_not_specialize=["total", "heads", "page_size"])
def read_kernel(
    out,  # [num_pages, heads, page_size, dim], contiguous
    data,
    scale,
    global_scale,
    s_data_p,
    s_data_h,
    s_data_t,
    s_data_d,
    s_scale_p,
    s_scale_h,
    s_scale_t,
    s_scale_g,
    total,  # rows
    heads,
    page_size,
    FORMAT: tl.constexpr,
    SWIZZLED: tl.constexpr,  # scales in the 128x4 layout
    DIM: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two
    GROUP: tl.constexpr,  # elements that share a scale, where two share a byte
    ROWS: tl.constexpr,
):
    """One program: ROWS rows."""
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < total
    page, head, row = i_row // page_size // heads, i_row // page_size % heads, i_row % page_size
    p_data = data + page * s_data_p + head * s_data_h + row * s_data_t
    o_scale = page * s_scale_p + head * s_scale_h + row * s_scale_t
    if GROUP == 1:
        o_dim = tl.arange(0, PADDED)
        m_data = m_row[:, None] & (o_dim < DIM)
        codes = tl.load(p_data[:, None] + o_dim.to(tl.int64) * s_data_d, mask=m_data, other=0)
        x = e4m3(codes).to(tl.float32) if FORMAT == E4M3 else codes.to(tl.float32)
        if scale is not None:
            unit = tl.load(scale + o_scale, mask=m_row, other=0)
            if FORMAT == INT8:
                unit = (unit.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            x *= unit[:, None]
        tl.store(out + i_row[:, None] * DIM + o_dim, x.to(out.dtype.element_ty), mask=m_data)
    else:
        NUM: tl.constexpr = PADDED // GROUP
        o_group = tl.arange(0, NUM)
        m_group = m_row[:, None] & (o_group < DIM // GROUP)
        o_pair = o_group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)  # [NUM, GROUP // 2] bytes of a row
        m_pair = m_row[:, None, None] & (o_pair < DIM // 2)
        codes = tl.load(p_data[:, None, None] + o_pair.to(tl.int64) * s_data_d, mask=m_pair, other=0)
        offsets = group_offsets(page, head, row, heads, page_size, o_scale, o_group, s_scale_g, SWIZZLED, DIM // GROUP)
        units = tl.load(scale + offsets, mask=m_group, other=0)
        units = e4m3(units).to(tl.float32) if FORMAT == NVFP4 else e8m0(units)
        low, high = e2m1_pair(codes)
        low, high = low.to(tl.float32) * units[:, :, None], high.to(tl.float32) * units[:, :, None]
        if global_scale is not None:
            whole = tl.load(global_scale)
            low, high = low * whole, high * whole
        p_out = out + i_row[:, None, None] * DIM + 2 * o_pair
        tl.store(p_out, low.to(out.dtype.element_ty), mask=m_pair)
        tl.store(p_out + 1, high.to(out.dtype.element_ty), mask=m_pair)


def dequantize(stored: Stored, dtype: torch.dtype) -> Tensor:
    """The rows of a packed tensor or a pool, contiguous; dtype: float32, float16 or bfloat16."""
    out = torch.empty(stored.shape, dtype=dtype, device=stored.device)
    if not out.numel():
        return out
    dim, heads = out.shape[-1], out.shape[1]
    rows = max(1, ELEMENTS // next_power_of_two(dim))
    runtime = tensors_of(stored) | {"out": out, "heads": heads, "page_size": out.shape[2] if out.dim() == 4 else 1}
    runtime["total"] = total = out.numel() // dim
    launch_kernel(
        read_kernel,
        (ceil_div(total, rows),),
        *(runtime[name] for name in read_kernel.arg_names if name in runtime),
        **constexprs_of(stored.format, getattr(stored, "layout", "linear"), dim),
        ROWS=rows,
        num_warps=2,
    )
    return out
