# SPDX-License-Identifier: MIT
"""This module has every public name around sparse attention, and defines the two functions that attend over a selection in CSR
form: `sparse_atten_func` and `sparse_atten_nvfp4_kv_func`."""

from __future__ import annotations

from openmsa.runtime import torch_version  # isort: skip # noqa: F401 - it says in a sentence where PyTorch is missing or old
from typing import Any

import torch
from torch import Tensor

from fmha_sm100 import operands
from fmha_sm100.csr_attention import Options, Result, SparseAttentionSchedule, attend
from fmha_sm100.decode import SparseDecodePagedAttentionWrapper, sparse_decode_atten_func
from fmha_sm100.fp4_indexer import (
    fp4_indexer_block_scores,
    fp4_indexer_mma_scale_shape,
    fp4_indexer_mma_scale_storage_shape,
    fp4_indexer_mma_scale_storage_stride,
    fp4_indexer_mma_scale_stride,
    fp4_indexer_reorder_scales_for_mma_cute,
)
from fmha_sm100.k2q import (
    SparseK2qCsrBuilderSm100,
    build_k2q_csr,
    build_k2q_csr_torch_reference,
    k2q_to_q2k,
    q2k_to_k2q,
)
from fmha_sm100.nvfp4_kv import (
    Nvfp4QuantizedTensor,
    dequantize_nvfp4_128x4_to_bf16,
    nvfp4_global_scale_from_amax,
    nvfp4_operand,
    nvfp4_scale_128x4_offset,
    quantize_bf16_to_nvfp4_128x4,
    quantize_kv_bf16_to_nvfp4_128x4,
    swizzle_nvfp4_scale_to_128x4,
)
from fmha_sm100.operands import Operands, Scale, check_operands, length
from fmha_sm100.schedules import DecodeAttentionSchedule
from openmsa.runtime import checks, dispatch

__all__ = [
    "DecodeAttentionSchedule",
    "Nvfp4QuantizedTensor",
    "SparseAttentionSchedule",
    "SparseDecodePagedAttentionWrapper",
    "SparseK2qCsrBuilderSm100",
    "build_k2q_csr",
    "build_k2q_csr_torch_reference",
    "dequantize_nvfp4_128x4_to_bf16",
    "fp4_indexer_block_scores",
    "fp4_indexer_mma_scale_shape",
    "fp4_indexer_mma_scale_storage_shape",
    "fp4_indexer_mma_scale_storage_stride",
    "fp4_indexer_mma_scale_stride",
    "fp4_indexer_reorder_scales_for_mma_cute",
    "k2q_to_q2k",
    "nvfp4_global_scale_from_amax",
    "nvfp4_scale_128x4_offset",
    "q2k_to_k2q",
    "quantize_bf16_to_nvfp4_128x4",
    "quantize_kv_bf16_to_nvfp4_128x4",
    "sparse_atten_func",
    "sparse_atten_nvfp4_kv_func",
    "sparse_decode_atten_func",
    "swizzle_nvfp4_scale_to_128x4",
]


@dispatch.operator("fmha_sm100::sparse_atten_func")
def sparse_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2q_row_ptr: Tensor,
    k2q_q_indices: Tensor,
    topK: int,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    return_softmax_lse: bool = False,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    schedule: Any = None,
    usable_SM_count: int = -1,
    qk_dtype: torch.dtype | None = None,
    pv_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    output_scale: Scale = None,
    enable_fp16_softmax: bool | None = None,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Result:
    """Computes softmax attention of every query over its selected blocks, given in the form of `build_k2q_csr`.

    q:               ``[total_q, num_q_heads, head_dim]``, bfloat16, float16, float32, float64 or float8_e4m3fn; any strides.
    k, v:            ``[total_k, num_kv_heads, head_dim]`` (total_k may exceed the keys in use) or, with `page_table`, pools
                     ``[num_pages, num_kv_heads, page_size, head_dim]``; q's dtype or float8_e4m3fn; any strides.
    k2q_row_ptr, k2q_q_indices, topK:  from `build_k2q_csr` with the same lengths and block size. Values that cannot come from
                     there raise ValueError on a CPU; on a GPU they are not read on the host, and a row's entries that name no
                     query of its sequence are skipped.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k:  the lengths that `build_k2q_csr` was given.
    causal:          query i of a sequence sees the keys up to ``k_len - q_len + i``; False: all keys of its blocks.
    page_table:      int32 ``[batch, max_pages]``. seqused_k: ``[batch]``, the keys of each sequence, with pages only; None:
                     from cu_seqlens_k.
    lse_temperature_scale, return_temperature_lse:  also the lse of the logits divided by this, with `return_softmax_lse`; any
                     temperature but 1 costs a second pass over the keys.
    out:             where to write, as the output; any strides.
    q_scale, k_scale, v_scale, output_scale:  numbers, or float32 tensors on the device: one element; for e4m3 operands also
                     ``[heads]`` and, with pages, ``[num_pages, heads or 1]``. The first three belong to their operand, the
                     last one multiplies the output.
    schedule, partial_dtype, usable_SM_count, qk_dtype, pv_dtype, enable_fp16_softmax:  accepted and not needed; all but the
                     last are checked. The kernels plan their own work, and products, weights and partial results are never
                     less precise than the operands' dtypes ask for.

    Returns out ``[total_q, num_q_heads, head_dim]`` in q's dtype (bfloat16 for e4m3 queries) | (out, lse) | (out, lse,
    temperature lse); lse float32 ``[total_q, num_q_heads]``, natural logarithm. A query with nothing to read: 0 and -inf.

    Names, order, defaults, shapes, return forms and bottom-right causal masks are those of the public function. Beyond it,
    this one takes any device, strides, page size, block size (16 to 256), group size and head dim (multiples of 16 to 256),
    topK from 1 to 64, scales for every format, `out`, and `causal=False` with pages. It needs no ``[topK, total_q, heads,
    dim]`` memory and gives gradients where `openmsa.sparse_attention` does. Every misuse raises ValueError, TypeError or
    NotImplementedError before any launch. On a GPU nothing is read on the host: the call can be captured in a CUDA graph.
    """
    check_operands(q, k, v, "head_dim", page_table is not None, operands.QUERIES)
    operands.chosen("qk_dtype", qk_dtype, operands.PRODUCTS)
    operands.chosen("pv_dtype", pv_dtype, operands.PRODUCTS)
    options = Options(
        k2q_row_ptr=k2q_row_ptr,
        k2q_q_indices=k2q_q_indices,
        topK=topK,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        blk_kv=blk_kv,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature_scale=lse_temperature_scale,
        return_temperature_lse=return_temperature_lse,
        return_softmax_lse=return_softmax_lse,
        partial_dtype=partial_dtype,
        page_table=page_table,
        seqused_k=seqused_k,
        schedule=schedule,
        usable_SM_count=usable_SM_count,
        out=out,
    )
    return attend(Operands.of(q, k, v, q_scale, k_scale, v_scale).scaled(output_scale), options)


@dispatch.operator("fmha_sm100::sparse_atten_nvfp4_kv_func")
def sparse_atten_nvfp4_kv_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale_128x4: Tensor,
    v_scale_128x4: Tensor,
    k_global_scale: Scale,
    v_global_scale: Scale,
    k2q_row_ptr: Tensor,
    k2q_q_indices: Tensor,
    topK: int,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    return_softmax_lse: bool = False,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    schedule: Any = None,
    usable_SM_count: int = -1,
    out: Tensor | None = None,
    output_scale: Scale = None,
    enable_fp16_softmax: bool | None = None,
    q_scale: Scale = None,
    kv_layout: str = "legacy",
) -> Result:
    """Computes what `sparse_atten_func` computes, with K and V in NVFP4.

    k, v:          uint8 ``[total_k, num_kv_heads, head_dim // 2]`` or, with `page_table`, pools ``[num_pages, num_kv_heads,
                   page_size, head_dim // 2]``, two E2M1 codes a byte, low nibble first; any strides.
    k_scale_128x4, v_scale_128x4:  E4M3 codes (uint8 or float8_e4m3fn) of each 16 elements, laid out as `kv_layout` says:
                   "legacy": 128x4 tiles over the rows of k in C order, ``[rows rounded up to 128, groups rounded up to 4]`` or
                   more rows; "linear": ``[..., head_dim // 16]`` beside k, any strides; "vllm": as "linear" for K, and for V
                   with the scales of four neighbouring tokens next to each other (byte ``token // 4 * 4 * groups + group * 4 +
                   token % 4`` of a head of a page, with pages whose size is a multiple of 4; flat: the same with heads between
                   the groups of four tokens). `fmha_sm100.nvfp4_kv.nvfp4_head_slot_views` gives such views of vLLM's cache.
                   "vllm" reads V's scales from a copy of the pages in `page_table`, made on each call.
    k_global_scale, v_global_scale:  a number, one float32 element on the device, or None (1.0).

    A number is e2m1 * scale * global scale. Other arguments are as in `sparse_atten_func`; q_scale is the queries' own.

    Names, order, layouts and result are those of the public function. Beyond it, this one takes what `sparse_atten_func` adds
    and `kv_layout` "linear", and applies both global scales in every result.
    """
    check_operands(q, k, v, "head_dim // 2", page_table is not None, (torch.uint8,))
    options = Options(
        k2q_row_ptr=k2q_row_ptr,
        k2q_q_indices=k2q_q_indices,
        topK=topK,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        blk_kv=blk_kv,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature_scale=lse_temperature_scale,
        return_temperature_lse=return_temperature_lse,
        return_softmax_lse=return_softmax_lse,
        partial_dtype=partial_dtype,
        page_table=page_table,
        seqused_k=seqused_k,
        schedule=schedule,
        usable_SM_count=usable_SM_count,
        out=out,
    )
    query, q_factor = operands.stored("q", q, q_scale)
    keys = nvfp4_operand("k", k, k_scale_128x4, k_global_scale, kv_layout)
    pages = None
    if page_table is not None:
        checks.tensor("page_table", page_table, "[batch, max_pages]", (torch.int32,))
        pages = page_table[:, : -(-length("max_seqlen_k", max_seqlen_k) // max(k.shape[2], 1))]
    values = nvfp4_operand("v", v, v_scale_128x4, v_global_scale, kv_layout, pages)
    return attend(Operands(query, keys, values, q_factor, 1.0).scaled(output_scale), options)
