# SPDX-License-Identifier: MIT
"""Stored keys and values as 16-bit numbers, for calls whose queries read every block many times.

KV-outer converts a block once for hundreds of queries, a union tile for a handful: there the conversion costs more than the
bytes that it saves. So where many queries are to come and some tile stays together, all keys are converted once for the union
kernel, which costs a few percent of the call. KV-outer reads the codes, and so does Hopper's own union kernel, which takes E4M3
keys (gluon_sm90_union.py). Codes times group scales are exact in 16 bits; the float32 factors stay outside, as in the kernels
that read codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.runtime.integers import ceil_div, next_power_of_two
from openmsa.runtime.launch import launch_kernel
from openmsa.sparse_attention.triton_keys import PAGES, TYPES, Keys, key_place, load_codes, numbers
from openmsa.types import Layout

MIN_READERS = 64  # queries that read a block on average; then expanding costs less than a tenth of the call
ROWS = 64  # of a tile
PROGRAMS = 512  # a head: enough to fill the largest GPU, few enough to end at once where nothing is wanted


def expands(keys: Keys, query_dtype: torch.dtype, readers: float, workspace_bytes: int) -> bool:
    """Whether all keys are converted first: for queries of 16 bits, many readers, and copies within the bound. A factor that
    goes by page has no place in them."""
    if keys.stored is None or query_dtype not in (torch.float16, torch.bfloat16) or readers < MIN_READERS:
        return False
    modes = keys.scale_modes()
    copies = 2 * 2 * keys.total * keys.heads * keys.stored[0].shape[-1]
    return PAGES not in (modes["K_SCALE"], modes["V_SCALE"]) and copies <= workspace_bytes


@triton.jit(do_not_specialize=["batch", "row_tiles", "total", "num_pages"])
def expand_rows(
    k,  # codes, and bytes of NVFP4 group scales or None
    v,
    k_groups,
    v_groups,
    k_out,  # [heads, total, DIM], contiguous
    v_out,
    wanted,  # int32 [1]: 0: nothing is written
    cu_k,
    page_table,
    batch,
    row_tiles,
    total,
    num_heads,
    num_pages,
    stride_k_page,
    stride_k_h,
    stride_k_row,
    stride_k_dim,
    stride_v_page,
    stride_v_h,
    stride_v_row,
    stride_v_dim,
    stride_kg_page,
    stride_kg_h,
    stride_kg_row,
    stride_kg_dim,
    stride_vg_page,
    stride_vg_h,
    stride_vg_row,
    stride_vg_dim,
    stride_table_b,
    stride_table_p,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Grid (programs, heads); they share the tiles, ROWS neighbouring keys of a sequence and `row_tiles` a sequence."""
    if tl.load(wanted) == 0:
        return
    i_h = tl.program_id(1).to(tl.int64)
    k += i_h * stride_k_h
    v += i_h * stride_v_h
    if FORMAT == 3 and not SWIZZLED:
        k_groups += i_h * stride_kg_h
        v_groups += i_h * stride_vg_h
    k_out += i_h * total * DIM
    v_out += i_h * total * DIM
    for i_tile in range(tl.program_id(0), batch * row_tiles, tl.num_programs(0)):
        i_b, first = i_tile // row_tiles, i_tile % row_tiles * ROWS
        k_begin = tl.load(cu_k + i_b)
        k_len = tl.load(cu_k + i_b + 1) - k_begin
        if first < k_len:
            o_key, o_d = first + tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
            m_key = o_key < k_len
            table_row = page_table
            if PAGE_SIZE > 0:
                table_row += i_b.to(tl.int64) * stride_table_b
            page, row = key_place(o_key, m_key, k_begin, table_row, num_pages, stride_table_p, PAGE_SIZE)
            b_k, b_gk = load_codes(
                k, k_groups, page, row, m_key, i_h, num_heads, stride_k_page, stride_k_row, stride_k_dim,
                stride_kg_page, stride_kg_row, stride_kg_dim, FORMAT, SWIZZLED, DIM, DIM_PADDED, PAGE_SIZE, True,
            )  # fmt: skip
            b_v, b_gv = load_codes(
                v, v_groups, page, row, m_key, i_h, num_heads, stride_v_page, stride_v_row, stride_v_dim,
                stride_vg_page, stride_vg_row, stride_vg_dim, FORMAT, SWIZZLED, DIM, DIM_PADDED, PAGE_SIZE, True,
            )  # fmt: skip
            o_out = (k_begin + o_key).to(tl.int64)
            m_out = (m_key & (o_out < total))[:, None] & (o_d < DIM)[None, :]
            o_out = (o_out * DIM)[:, None] + o_d[None, :]
            tl.store(k_out + o_out, numbers(b_k, b_gk, FORMAT, TYPE), mask=m_out)
            tl.store(v_out + o_out, numbers(b_v, b_gv, FORMAT, TYPE), mask=m_out)


def copies_of(keys: Keys, dtype: torch.dtype) -> Keys:
    """Room for the same keys, packed, as numbers of a 16-bit dtype; sizes follow from bounds. A head's keys lie together."""
    assert keys.stored is not None
    shape = (keys.heads, keys.total, keys.stored[0].shape[-1])
    k, v = (torch.empty(shape, dtype=dtype, device=keys.k.device).transpose(0, 1) for _ in "kv")
    return keys._replace(k=k, v=v, page_size=0, num_pages=1, table=None, by_row=True, expanded=True)


def expand(keys: Keys, copies: Keys, seqs: Layout, wanted: Tensor) -> None:
    """Fills the copies unless `wanted` (int32 [1], on the device) is 0. One launch, no host sync."""
    dim, modes = copies.k.shape[-1], keys.scale_modes()
    row_tiles = ceil_div(min(seqs.max_seqlen_k, keys.total), ROWS)
    (_, _, _, k_groups, *kg_strides), (_, _, _, v_groups, *vg_strides) = keys.scales_of(0), keys.scales_of(1)
    launch_kernel(
        expand_rows,
        (min(seqs.batch * row_tiles, PROGRAMS), keys.heads),
        keys.k,
        keys.v,
        k_groups,
        v_groups,
        copies.k,
        copies.v,
        wanted,
        seqs.cu_seqlens_k,
        keys.table,
        seqs.batch,
        row_tiles,
        keys.total,
        keys.heads,
        keys.num_pages,
        *keys.strides(keys.k),
        *keys.strides(keys.v),
        *kg_strides,
        *vg_strides,
        *keys.table_strides,
        ROWS=ROWS,
        DIM=dim,
        DIM_PADDED=next_power_of_two(dim),
        PAGE_SIZE=keys.page_size,
        FORMAT=modes["FORMAT"],
        SWIZZLED=modes["SWIZZLED"],
        TYPE=TYPES[copies.k.dtype],
        num_warps=4,
    )
