# SPDX-License-Identifier: MIT
"""Computes block scores from FP4 index queries and paged FP4 index keys, under the public names, over `openmsa.block_scores`.

Scales come in two layouts. In "public" they lie beside their rows. In "preordered_mma" they lie in 128x4 tiles (see
`openmsa.NVFP4`): contiguous storage ``[L, ceil(mn / 128), ceil(groups / 4), 32, 4, 4]`` indexed by (matrix, row // 128,
group // 4, row % 32, row % 128 // 32, group % 4), or its view ``[32, 4, ceil(mn / 128), 4, ceil(groups / 4), L]``. A matrix is
one head of the queries (mn = total_q) or one head of a page of the keys (mn = page_size).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fmha_sm100 import operands
from fmha_sm100.nvfp4_kv import to_tiles
from fmha_sm100.operands import checked_starts, given_longest
from fmha_sm100.plan_rows import table_of_sequences
from openmsa import MXFP4, NVFP4, PagedIndexKeys, Sequences, block_scores
from openmsa.kv_cache import mxfp4, nvfp4
from openmsa.runtime import checks, dispatch

BLOCK = 128
PACKED = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
LAYOUTS = ("preordered_mma", "public")
MMA_VIEW, MMA_STORAGE = (3, 4, 1, 5, 2, 0), (5, 2, 4, 0, 1, 3)
"""These orders of the dimensions make the view of scales in 128x4 tiles from their storage, and the storage from the view."""

Shape6 = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class _Format:
    """This tells the two FP4 formats apart."""

    group: int  # the elements that share a scale
    dtype: torch.dtype  # the dtype of scales, whose bytes may also come as uint8


_FORMATS = {
    "mxfp4": _Format(mxfp4.GROUP, torch.float8_e8m0fnu),
    "nvfp4": _Format(nvfp4.GROUP, torch.float8_e4m3fn),
}


@dispatch.operator("fmha_sm100::fp4_indexer_block_scores")
def fp4_indexer_block_scores(
    q_fp4: Tensor,
    k_fp4: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_page_offsets: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    kv_indices: Tensor,
    fp4_format: str,
    causal: bool = False,
    qo_offset: Tensor | int | None = None,
    scale_layout: str = "preordered_mma",
) -> Tensor:
    """Computes the maximum raw dot product of each index query with the visible keys of each block of 128.

    q_fp4:            ``[total_q, num_q_heads, dim // 2]``, two E2M1 codes a byte, low nibble first (uint8, int8 or
                      float4_e2m1fn_x2); any strides.
    k_fp4:            such codes in a pool ``[num_pages, num_k_heads, page_size, dim // 2]``; any strides. num_k_heads divides
                      num_q_heads.
    q_scale, k_scale: as `scale_layout` says. "public": ``[total_q, num_q_heads, groups]`` and ``[num_pages, num_k_heads,
                      page_size, groups]``; "preordered_mma": `fp4_indexer_mma_scale_shape` of (total_q, num_q_heads) and of
                      (page_size, num_pages * num_k_heads), the view that `fp4_indexer_reorder_scales_for_mma_cute` returns,
                      or the `..._storage_shape` of either, for keys also as ``[num_pages, num_k_heads, 1, ...]`` with any
                      page stride. uint8 codes, or float8_e8m0fnu ("mxfp4", groups of 32), or float8_e4m3fn ("nvfp4",
                      groups of 16).
    cu_seqlens_q, cu_seqlens_k, cu_page_offsets:  int32 or int64 ``[batch + 1]``; the last says where each sequence's pages
                      start in `kv_indices`, int32, the physical pages one after the other.
    causal:           query i of a sequence sees the keys up to ``qo_offset + i``; qo_offset: an int, ``[batch]``, or None for
                      ``k_len - q_len``. False: all keys, and qo_offset must be None.

    Returns float32 ``[num_q_heads, ceil(max_seqlen_k / 128), total_q]``; not scaled, no global scale; -inf where a block
    holds no visible key; NaN products count as -inf.

    Names, order, defaults, layouts and result are those of the public function. Beyond it, this one takes any device, strides,
    head counts and page sizes, and dims that are multiples of the group up to 256. Queries are read as bfloat16 (float32 on a
    CPU), which holds their numbers exactly. Keys stay packed; MXFP4 key scales in "preordered_mma" are copied on each call.
    """
    spec = _spec(fp4_format)
    operands.chosen("scale_layout", scale_layout, LAYOUTS)
    operands.flags(causal=causal)
    checks.tensor("q_fp4", q_fp4, "[total_q, num_q_heads, dim // 2]", PACKED)
    checks.tensor("k_fp4", k_fp4, "[num_pages, num_k_heads, page_size, dim // 2]", PACKED)
    checks.size("k_fp4", k_fp4, 3, q_fp4.shape[2], "dim // 2 of q_fp4")
    tensors = {
        **{"k_fp4": k_fp4, "q_scale": q_scale, "k_scale": k_scale},
        **{"kv_indices": kv_indices, "cu_page_offsets": cu_page_offsets},
    }
    checks.tensor("kv_indices", kv_indices, "[pages of all sequences]", (torch.int32,))
    for name in ("q_scale", "k_scale"):
        if not isinstance(tensors[name], Tensor) or tensors[name].dtype not in (torch.uint8, spec.dtype):
            raise TypeError(f"{name} must be uint8 or {spec.dtype}, got {getattr(tensors[name], 'dtype', type(tensors[name]))}")
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            checks.alike(name, tensor, "q_fp4", q_fp4, dtype=False)
    if q_fp4.shape[2] * 2 % spec.group:
        raise ValueError(f"q_fp4.shape[2] must be a multiple of {spec.group // 2} bytes in {fp4_format}, got {q_fp4.shape[2]}")
    if not causal and qo_offset is not None:
        raise ValueError(f"qo_offset must be None with causal=False, got {type(qo_offset).__name__}")
    total_q, page_size = q_fp4.shape[0], k_fp4.shape[2]
    cu_q, cu_k = checked_starts(cu_seqlens_q, cu_seqlens_k, total_q, q_fp4.device)
    max_q, max_k = given_longest("max_seqlen_q", max_seqlen_q, cu_q), given_longest("max_seqlen_k", max_seqlen_k, cu_k)
    queries = _queries(q_fp4, q_scale, spec, scale_layout)
    table = table_of_sequences(kv_indices, cu_page_offsets, cu_k, -(-max_k // page_size), k_fp4)
    keys = PagedIndexKeys(_keys(k_fp4, k_scale, spec, scale_layout), table, cu_k.diff())
    seqs = Sequences(cu_q, None, max_q, max_k, _offset(qo_offset, causal, cu_k))
    scores = block_scores(queries, keys, seqs, block_size=BLOCK)  # [num_q_heads, total_q, blocks]
    return scores.transpose(1, 2).contiguous()


def fp4_indexer_mma_scale_shape(mn: int, l: int, *, fp4_format: str) -> Shape6:  # noqa: E741 (the public name)
    """Returns the shape ``(32, 4, ceil(mn / 128), 4, ceil(groups / 4), l)`` that the matrix unit sees, for dim 128."""
    matrices, tiles, columns, *_ = fp4_indexer_mma_scale_storage_shape(mn, l, fp4_format=fp4_format)
    return 32, 4, tiles, 4, columns, matrices


def fp4_indexer_mma_scale_stride(mn: int, l: int, *, fp4_format: str) -> Shape6:  # noqa: E741
    """Returns the strides, in elements, that the dimensions of `fp4_indexer_mma_scale_shape` have in the storage."""
    matrix, tile, column, low, high, one = fp4_indexer_mma_scale_storage_stride(mn, l, fp4_format=fp4_format)
    return low, high, tile, one, column, matrix


def fp4_indexer_mma_scale_storage_shape(mn: int, l: int, *, fp4_format: str) -> Shape6:  # noqa: E741
    """Returns the shape in which the scales are stored: ``(l, ceil(mn / 128), ceil(groups / 4), 32, 4, 4)``, for dim 128."""
    checks.integer("mn", mn, 0)
    checks.integer("l", l, 0)
    return _storage_shape(mn, l, 128 // _spec(fp4_format).group)


def fp4_indexer_mma_scale_storage_stride(mn: int, l: int, *, fp4_format: str) -> Shape6:  # noqa: E741
    """Returns the strides, in elements, of contiguous storage of `fp4_indexer_mma_scale_storage_shape`."""
    _, tiles, columns, *_ = fp4_indexer_mma_scale_storage_shape(mn, l, fp4_format=fp4_format)
    return 512 * tiles * columns, 512 * columns, 512, 16, 4, 1


def fp4_indexer_reorder_scales_for_mma_cute(q_scale: Tensor, k_scale: Tensor, *, fp4_format: str) -> tuple[Tensor, Tensor]:
    """Lays scales in the layout "public" out as "preordered_mma", with zeros in the padding; runs on any device. Returns views
    of `fp4_indexer_mma_scale_shape`, with the strides of `fp4_indexer_mma_scale_stride`."""
    spec = _spec(fp4_format)
    for name, scale, shape in (
        ("q_scale", q_scale, "[total_q, num_q_heads, groups]"),
        ("k_scale", k_scale, "[num_pages, num_k_heads, page_size, groups]"),
    ):
        checks.tensor(name, scale, shape, (torch.uint8, spec.dtype))
    q = to_tiles(q_scale.view(torch.uint8).transpose(0, 1))
    k = to_tiles(k_scale.view(torch.uint8).flatten(0, 1))
    return q.view(q_scale.dtype).permute(MMA_VIEW), k.view(k_scale.dtype).permute(MMA_VIEW)


def _spec(fp4_format: str) -> _Format:
    """Returns the format of that public name."""
    if fp4_format not in _FORMATS:
        raise ValueError(f"fp4_format must be one of {', '.join(_FORMATS)}, got {fp4_format!r}")
    return _FORMATS[fp4_format]


def _storage_shape(rows: int, matrices: int, groups: int) -> Shape6:
    """Returns the shape of scales in the layout "preordered_mma"."""
    return matrices, -(-rows // 128), -(-groups // 4), 32, 4, 4


def _stored(name: str, scale: Tensor, rows: int, matrices: int, groups: int) -> Tensor:
    """Returns scales in the layout "preordered_mma", given as storage or as its view, as storage."""
    shape = _storage_shape(rows, matrices, groups)
    if scale.dim() == 7:  # the pages have a stride of their own
        scale = scale.flatten(0, 1)
    view = tuple(shape[d] for d in MMA_VIEW)
    if tuple(scale.shape) not in (shape, view):
        raise ValueError(
            f"{name} must have shape {view} or {shape} with scale_layout='preordered_mma', got {tuple(scale.shape)}"
        )
    return scale if tuple(scale.shape) == shape else scale.permute(MMA_STORAGE)


def _from_tiles(scale: Tensor, rows: int, groups: int) -> Tensor:
    """Returns a copy, uint8 ``[matrices, rows, groups]``, of scales in the storage of the layout "preordered_mma"."""
    matrices, tiles, columns, *_ = scale.shape
    by_row = scale.view(torch.uint8).permute(0, 1, 4, 3, 2, 5)  # [matrices, tile, row // 32, row % 32, columns, 4]
    return by_row.reshape(matrices, tiles * 128, columns * 4)[:, :rows, :groups]


def _beside(name: str, scale: Tensor, data: Tensor, groups: int) -> Tensor:
    """Checks the shape of scales in the layout "public", which lie beside the rows of `data`, and returns them."""
    expected = (*data.shape[:-1], groups)
    if tuple(scale.shape) != expected:
        raise ValueError(f"{name} must have shape {expected} with scale_layout='public', got {tuple(scale.shape)}")
    return scale


def _queries(data: Tensor, scale: Tensor, spec: _Format, layout: str) -> Tensor:
    """Returns the numbers of the queries, ``[total_q, num_q_heads, dim]`` in bfloat16, or float32 on a CPU."""
    groups = data.shape[2] * 2 // spec.group
    if layout == "public":
        rows = _beside("q_scale", scale, data, groups)
    else:
        stored = _stored("q_scale", scale, data.shape[0], data.shape[1], groups)
        rows = _from_tiles(stored, data.shape[0], groups).transpose(0, 1)
    numbers = (NVFP4 if spec.group == nvfp4.GROUP else MXFP4)(data.view(torch.uint8), rows)
    return numbers.dequantize(torch.float32 if data.device.type == "cpu" else torch.bfloat16)


def _keys(data: Tensor, scale: Tensor, spec: _Format, layout: str) -> NVFP4 | MXFP4:
    """Returns the pool of keys in the format of `openmsa`, with tiled scales as they are where it takes those."""
    pages, heads, page_size, half = data.shape
    groups = half * 2 // spec.group
    codes = data.view(torch.uint8)
    if layout == "public":
        rows = _beside("k_scale", scale, data, groups)
        return NVFP4(codes, rows) if spec.group == nvfp4.GROUP else MXFP4(codes, rows)
    scale = _stored("k_scale", scale, page_size, pages * heads, groups)
    if spec.group == nvfp4.GROUP and page_size % 128 == 0 and scale.is_contiguous():
        return NVFP4(codes, scale.reshape(-1, scale.shape[2] * 4), None, "128x4")
    rows = _from_tiles(scale, page_size, groups).unflatten(0, (pages, heads))
    return NVFP4(codes, rows) if spec.group == nvfp4.GROUP else MXFP4(codes, rows)


def _offset(qo_offset: Tensor | int | None, causal: bool, cu_k: Tensor) -> Tensor | None:
    """Returns ``[batch]``, the position of each sequence's first query; None where the queries are the last of their keys."""
    if not causal:
        return cu_k.diff()
    if qo_offset is None:
        return None
    if isinstance(qo_offset, Tensor):
        checks.tensor("qo_offset", qo_offset, "[batch]", (torch.int32, torch.int64))
        checks.size("qo_offset", qo_offset, 0, cu_k.numel() - 1, "the batch of cu_seqlens_q")
        return qo_offset
    return torch.full_like(cu_k[1:], checks.integer("qo_offset", qo_offset, -(2**31), 2**31 - 1))
