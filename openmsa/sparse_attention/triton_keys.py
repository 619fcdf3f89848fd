# SPDX-License-Identifier: MIT
"""Where keys lie and how they are stored, for the prefill kernels: packed tensors and paged pools, plain and in formats.

A stored number is code * group scale * factor. Codes and group scales are turned into exact 16-bit numbers where a tile is
loaded; factors (float32: of the tensor, a head or a page; NVFP4's global scale) multiply logits and outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.triton_numbers import FORMAT_IDS, NVFP4, e2m1_pair, e4m3
from openmsa.primitives.codes import e4m3_numbers
from openmsa.types import Layout

UNSCALED, WHOLE, PAGES = 0, 1, 2  # K_SCALE and V_SCALE: no factor; one for the tensor or a head; one for a page


@triton.jit
def key_place(
    position,  # int32 [n]: keys of one sequence
    m_key,
    first_row,  # packed row of the sequence's first key
    table_row,  # the sequence's row of the page table
    num_pages,
    stride_table_p,
    PAGE_SIZE: tl.constexpr,  # 0: packed keys
):
    """int64 [n] each: page and row in it; a page id outside the pool is replaced by one inside. Packed keys are one page."""
    if PAGE_SIZE > 0:
        page = tl.load(table_row + position // PAGE_SIZE * stride_table_p, mask=m_key, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
        row = (position % PAGE_SIZE).to(tl.int64)
    else:
        row = (first_row + position).to(tl.int64)
        page = row * 0
    return page, row


@triton.jit
def row_place(row, PAGE_SIZE: tl.constexpr):
    """int64 page and row in it of a key by its row in the packed tensor, or in the pool seen as num_pages * PAGE_SIZE rows."""
    if PAGE_SIZE > 0:
        page, row = (row // PAGE_SIZE).to(tl.int64), (row % PAGE_SIZE).to(tl.int64)
    else:
        row = row.to(tl.int64)
        page = row * 0
    return page, row


@triton.jit
def converted(x, TYPE: tl.constexpr):
    """Plain numbers, or E4M3 codes (as float8, or as bytes where the GPU has no such type), as TYPE."""
    if x.dtype == tl.uint8:
        x = e4m3(x)
    elif x.dtype == tl.float8e4nv:
        x = e4m3_numbers(x, TYPE)
    return x.to(TYPE)


@triton.jit
def group_scale_offsets(page, row, i_h, i_g, num_heads, PAGE_SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """Of NVFP4 scales in the 128x4 layout, int64."""
    number = (page * num_heads + i_h) * PAGE_SIZE + row if PAGE_SIZE > 0 else row * num_heads + i_h
    tile = (number // 128) * ((GROUPS + 3) // 4) + i_g // 4
    return tile * 512 + (number % 32) * 16 + (number % 128 // 32) * 4 + i_g % 4


@triton.jit
def load_codes(
    x,  # at head i_h
    groups,  # bytes of NVFP4 group scales (linear: at head i_h) or None
    page,  # int64 [n] or scalar
    row,  # int64 [n]
    m_key,
    i_h,
    num_heads,
    stride_page,
    stride_row,
    stride_dim,
    stride_g_page,
    stride_g_row,
    stride_g_dim,
    FORMAT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,  # False: every key exists
):
    """Keys as they are stored, for `numbers`: [n, DIM_PADDED], or half as many bytes and [n, DIM_PADDED // 16] group scales."""
    o_row = page * stride_page + row * stride_row
    if FORMAT == NVFP4:
        o_b, o_g = tl.arange(0, DIM_PADDED // 2), tl.arange(0, DIM_PADDED // 16)
        m_b = m_key[:, None] & (o_b < DIM // 2)[None, :]
        b_x = tl.load(x + o_row[:, None] + o_b[None, :] * stride_dim, mask=m_b, other=0)
        if SWIZZLED:
            o_s = group_scale_offsets(page[:, None], row[:, None], i_h, o_g[None, :], num_heads, PAGE_SIZE, DIM // 16)
        else:
            o_s = (page * stride_g_page + row * stride_g_row)[:, None] + o_g[None, :] * stride_g_dim
        b_g = tl.load(groups + o_s, mask=m_key[:, None] & (o_g < DIM // 16)[None, :], other=0)
    else:
        o_d = tl.arange(0, DIM_PADDED)
        p_x = x + o_row[:, None] + o_d[None, :] * stride_dim
        if MASKED:
            b_x = tl.load(p_x, mask=m_key[:, None] & (o_d < DIM)[None, :], other=0.0)
        elif DIM == DIM_PADDED:
            b_x = tl.load(p_x)
        else:
            b_x = tl.load(p_x, mask=(o_d < DIM)[None, :], other=0.0)
        b_g = 0
    return b_x, b_g


@triton.jit
def numbers(b_x, b_g, FORMAT: tl.constexpr, TYPE: tl.constexpr):
    """What `load_codes` returned as [n, DIM_PADDED] numbers without their factor."""
    if FORMAT == NVFP4:
        low, high = e2m1_pair(b_x)
        n: tl.constexpr = b_x.shape[0]
        groups: tl.constexpr = b_g.shape[1]
        b_x = tl.reshape(tl.join(low, high), [n, groups, 16]) * e4m3(b_g)[:, :, None]
        b_x = tl.reshape(b_x, [n, groups * 16])
    return converted(b_x, TYPE)


@triton.jit
def load_keys(
    x, groups, page, row, m_key, i_h, num_heads, stride_page, stride_row, stride_dim, stride_g_page, stride_g_row, stride_g_dim,
    FORMAT: tl.constexpr, SWIZZLED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TYPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Both of the above at once."""
    b_x, b_g = load_codes(
        x, groups, page, row, m_key, i_h, num_heads, stride_page, stride_row, stride_dim, stride_g_page, stride_g_row,
        stride_g_dim, FORMAT, SWIZZLED, DIM, DIM_PADDED, PAGE_SIZE, MASKED,
    )  # fmt: skip
    return numbers(b_x, b_g, FORMAT, TYPE)


@triton.jit
def whole_factor(factor, i_h, stride_h, SCALE: tl.constexpr):
    """The factor of a head, 1 where there is none or it goes by page."""
    value = tl.load(factor + i_h * stride_h) if SCALE == 1 else 1.0
    return value


TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float8_e4m3fn: tl.float8e4nv}


def formats(q: torch.dtype, k: torch.dtype, modes: dict[str, Any], union: bool) -> dict[str, Any]:
    """The constexprs that follow from how queries, keys and values are stored: `modes` (`Keys.scale_modes`) and in which types
    they are multiplied. q, k: of what the kernel reads (uint8: E4M3 or NVFP4 codes).

    Codes are multiplied as float16, which holds them exactly, or as they are where queries and keys are E4M3 and the GPU has
    the type. The union kernel converts keys in every step, where float16 costs a quarter of bfloat16, and brings its queries
    into range once; KV-outer converts keys once and takes the queries as they come. Factors that go by page may lie far apart,
    so that weights times factors need bfloat16.
    """
    if modes["FORMAT"] == 0:
        qk_type = v_type = TYPES[k]
    else:
        plain = q in (torch.float16, torch.bfloat16, torch.float32)
        float8 = q == k == torch.float8_e4m3fn
        as_is = q == torch.float32 or (plain and not union)
        qk_type = tl.float8e4nv if float8 else TYPES[q] if as_is else tl.float16
        v_type = tl.bfloat16 if modes["V_SCALE"] == PAGES else tl.float16
    in_range = {"IN_RANGE": q == torch.bfloat16 and qk_type == tl.float16} if union else {}
    return modes | in_range | {"QK_TYPE": qk_type, "V_TYPE": v_type}


class Queries(NamedTuple):
    """Queries, plain or E4M3, as the kernels take them."""

    data: Tensor  # [total_q, num_q_heads, head_dim]
    factor: Tensor | None  # float32
    factor_stride: int  # from head to head

    @classmethod
    def of(cls, q: Tensor | Stored, has_float8: bool) -> Queries:
        """has_float8: whether the GPU has a type for E4M3 codes; otherwise they are bytes."""
        if isinstance(q, Tensor):
            return cls(q, None, 0)
        data = q.data if has_float8 else q.data.view(torch.uint8)
        return cls(data, q.scale, q.scale_strides[1])  # type: ignore[attr-defined]


class Keys(NamedTuple):
    """K and V, packed or paged, as the kernels take them."""

    k: Tensor
    v: Tensor
    stored: tuple[Stored, Stored] | None
    heads: int
    total: int  # bound on the keys of all sequences together
    page_size: int  # 0: packed
    num_pages: int
    table: Tensor | None
    by_row: bool  # no block crosses pages
    expanded: bool = False  # k and v are codes times group scales as plain numbers; factors are those of `stored`

    @classmethod
    def of(
        cls, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, seqs: Layout, block_size: int, has_float8: bool
    ) -> Keys:
        """has_float8: as in `Queries.of`."""
        pools: Any = (k.k, k.v) if isinstance(k, PagedKV) else (k, v)
        data = [x if isinstance(x, Tensor) else x.data for x in pools]
        if not has_float8:
            data = [x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in data]
        stored = None if isinstance(pools[0], Tensor) else pools
        if isinstance(k, PagedKV):
            total = seqs.batch * min(seqs.max_seqlen_k, k.capacity)
            whole = k.page_size % block_size == 0
            return cls(*data, stored, k.num_heads, total, k.page_size, k.num_pages, k.page_table, whole)
        return cls(*data, stored, k.shape[1], k.shape[0], 0, 1, None, True)

    @property
    def format(self) -> int:
        """The constexpr FORMAT."""
        return FORMAT_IDS[self.stored[0].format] if self.stored and not self.expanded else 0

    @property
    def table_strides(self) -> tuple[int, int]:
        return (0, 0) if self.table is None else self.table.stride()  # type: ignore[return-value]

    def strides(self, x: Tensor) -> tuple[int, int, int, int]:
        """Of page, head, row and dim."""
        if self.page_size:
            return x.stride()  # type: ignore[return-value]
        return 0, x.stride(1), x.stride(0), x.stride(2)

    def scale_modes(self) -> dict[str, Any]:
        """The constexprs FORMAT, K_SCALE, V_SCALE and SWIZZLED."""
        factors = [self._factor(x) for x in self.stored or (None, None)]
        modes = [UNSCALED if f is None else PAGES if f.dim() == 2 else WHOLE for f in factors]
        swizzled = bool(self.stored) and getattr(self.stored[0], "layout", "") == "128x4"
        return {"FORMAT": self.format, "K_SCALE": modes[0], "V_SCALE": modes[1], "SWIZZLED": swizzled}

    @staticmethod
    def _factor(x: Stored | None) -> Tensor | None:
        if x is None:
            return None
        return x.global_scale if x.format == "nvfp4" else x.scale  # type: ignore[attr-defined]

    def scales(self) -> tuple[Any, ...]:
        """For K and for V: factor, its strides of page and head, group scales, their strides of page, head, row and group;
        None what is not there."""
        return (*self.scales_of(0), *self.scales_of(1))

    def scales_of(self, which: int) -> tuple[Any, ...]:
        """Of K (0) or V (1)."""
        if self.stored is None:
            return (None,) * 8
        x: Any = self.stored[which]
        factor, groups = self._factor(x), (None,) * 5
        strides = (0, 0) if factor is None or x.format == "nvfp4" else x.scale_strides
        if x.format == "nvfp4" and not self.expanded:
            codes = x.scale.view(torch.uint8)
            groups = (codes, 0, 0, 0, 0) if x.layout == "128x4" else (codes, *self.strides(codes))  # type: ignore[assignment]
        return (factor, *strides, *groups)

    def descriptor(self, x: Tensor, step: int, dim_padded: int) -> TensorDescriptor | None:
        """Of `x` as [pages, heads, rows, dim] in boxes of `step` rows; None where the copy engine cannot read it."""
        if self.page_size:
            shape, strides = x.shape, x.stride()
        else:
            (rows, heads, dim), (s_row, s_head, s_dim) = x.shape, x.stride()
            shape, strides = (1, heads, rows, dim), (0, s_head, s_row, s_dim)
        # The stride of a dimension of one is never used.
        outer = [16 if size == 1 else stride for stride, size in zip(strides[:3], shape[:3], strict=True)]
        unit = 16 // x.element_size()
        if strides[3] != 1 or dim_padded > 256 or x.data_ptr() % 16 or any(s <= 0 or s % unit for s in outer):
            return None
        if self.format == FORMAT_IDS["nvfp4"]:
            return None
        return TensorDescriptor(x, list(shape), [*outer, 1], [1, 1, step, dim_padded])
