# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This kernel copies stored keys and values as 16-bit numbers, for calls whose queries read every block many times.

A call reads such keys once to copy them, at a small part of its cost, and then is a call on plain keys: its kernels convert
nothing, and each has a faster form for numbers than for codes. Codes times group scales are exact in 16 bits; the float32
factors of tensors and heads stay outside, as in the kernels that read codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openmsa.primitives.operands import E4M3, NVFP4, PLAIN
from openmsa.primitives.rows import NO_TABLE, TYPES, KeyView
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two
from openmsa.sparse_attention.triton_config import Keys
from openmsa.sparse_attention.triton_keys import HeadRows, head_start, key_place, load_codes, numbers
from openmsa.types import Layout

MIN_READERS = {E4M3: 40, NVFP4: 24}
"""Where more queries read a block on average, copies cost less than they save."""
ROWS = 64  # A tile has so many keys.
PROGRAMS = 512  # A head has so many programs, enough to fill a GPU.


def expands(keys: Keys, query_dtype: torch.dtype, readers: float, workspace_bytes: int) -> bool:
    """Tells whether stored keys are copied: where queries have 16 bits, many read a block, and copies fit the workspace. Copies
    have no place for factors of pages."""
    if query_dtype not in (torch.float16, torch.bfloat16) or readers <= MIN_READERS[keys.k.form.format]:
        return False
    return not keys.factors_by_page and 2 * query_dtype.itemsize * keys.total * keys.heads * keys.k.dim <= workspace_bytes


@triton.jit(do_not_specialize=["batch", "row_tiles", "total", "num_pages"])
def expand_rows(
    keys,  # KeyRows
    values,
    table,  # PageTable
    k_out,  # numbers [key heads, total, dim], written
    v_out,
    cu_k,
    batch,
    row_tiles,
    total,
    num_heads,
    num_pages,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Writes keys and values as numbers. In the grid (programs, heads) programs share the tiles of a head: ROWS neighbouring
    keys of a sequence each, `row_tiles` in a sequence."""
    i_h = tl.program_id(1).to(tl.int64)
    p_k, p_ks = head_start(keys, i_h, K_FORM)
    p_v, p_vs = head_start(values, i_h, V_FORM)
    k_head, v_head = HeadRows(keys, p_k, p_ks), HeadRows(values, p_v, p_vs)
    k_out += i_h * total * DIM
    v_out += i_h * total * DIM
    for i_tile in range(tl.program_id(0), batch * row_tiles, tl.num_programs(0)):
        i_b, first = i_tile // row_tiles, i_tile % row_tiles * ROWS
        k_begin = tl.load(cu_k + i_b)
        k_len = tl.load(cu_k + i_b + 1) - k_begin
        if first < k_len:
            o_key, o_d = first + tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
            m_key = o_key < k_len
            table_row = table.ids
            if PAGE_SIZE > 0:
                table_row += i_b.to(tl.int64) * table.s_sequence
            page, row = key_place(o_key, m_key, k_begin, table_row, num_pages, table.s_page, PAGE_SIZE)
            b_k, b_gk = load_codes(k_head, page, row, m_key, i_h, num_heads, K_FORM, DIM, DIM_PAD, PAGE_SIZE, True)
            b_v, b_gv = load_codes(v_head, page, row, m_key, i_h, num_heads, V_FORM, DIM, DIM_PAD, PAGE_SIZE, True)
            o_out = (k_begin + o_key).to(tl.int64)
            m_out = (m_key & (o_out < total))[:, None] & (o_d < DIM)[None, :]
            o_out = (o_out * DIM)[:, None] + o_d[None, :]
            tl.store(k_out + o_out, numbers(b_k, b_gk, K_FORM, TYPE), mask=m_out)
            tl.store(v_out + o_out, numbers(b_v, b_gv, V_FORM, TYPE), mask=m_out)


def _room(keys: Keys, view: KeyView, dtype: torch.dtype) -> KeyView:
    """Allocates room for the numbers of these keys or values."""
    pool = torch.empty((1, keys.heads, keys.total, view.dim), dtype=dtype, device=view.rows.data.device)
    s_page, s_head, s_row, s_dim = pool.stride()
    rows = view.rows._replace(data=pool, s_page=s_page, s_head=s_head, s_row=s_row, s_dim=s_dim, scales=None)
    form = view.form._replace(format=PLAIN, swizzled=False, split=1)
    return view._replace(rows=rows, form=form, table=NO_TABLE, num_pages=1, page_size=0, capacity=keys.total)


def expand(keys: Keys, dtype: torch.dtype, seqs: Layout) -> Keys:
    """Copies keys and values, packed, as numbers of a 16-bit dtype, in one launch and without host sync; sizes follow from
    bounds. A head's keys lie together, and factors stay what they are."""
    copies = Keys(_room(keys, keys.k, dtype), _room(keys, keys.v, dtype), keys.heads, dtype, keys.total, True)
    row_tiles = ceil_div(min(seqs.max_seqlen_k, keys.total), ROWS)
    launch_kernel(
        expand_rows,
        (min(seqs.batch * row_tiles, PROGRAMS), keys.heads),
        *keys.operands,
        copies.k.rows.data,
        copies.v.rows.data,
        seqs.cu_seqlens_k,
        seqs.batch,
        row_tiles,
        keys.total,
        keys.heads,
        keys.k.num_pages,
        ROWS=ROWS,
        DIM=keys.k.dim,
        DIM_PAD=next_power_of_two(keys.k.dim),
        PAGE_SIZE=keys.page_size,
        **keys.forms,
        TYPE=TYPES[dtype],
        num_warps=4,
    )
    return copies
