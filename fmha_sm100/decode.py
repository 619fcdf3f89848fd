# SPDX-License-Identifier: MIT
"""Paged decode under the public names: dense, and sparse with a selection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha_sm100 import operands
from fmha_sm100.operands import Scale
from openmsa import dense_attention, sparse_attention
from openmsa.kv_cache.stored import out_dtype, wide_dtype
from openmsa.runtime import checks


def sparse_decode_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor | None = None,
    *,
    page_table: Tensor,
    seqused_k: Tensor,
    seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    schedule: Any = None,
    O_partial: Tensor | None = None,
    LSE_partial: Tensor | None = None,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest `seqlen_q` tokens of each sequence over its paged keys.

    q:            ``[batch * seqlen_q, num_q_heads, head_dim]``, the tokens of a sequence next to each other; any float dtype or
                  float8_e4m3fn; any strides.
    k, v:         pools ``[num_pages, num_kv_heads, page_size, head_dim]``, q's dtype or float8_e4m3fn; any strides.
    q2k_indices:  None: every key. int32 ``[num_kv_heads, batch * seqlen_q, topk]``, as `build_k2q_csr` takes it, or ``[batch *
                  seqlen_q, num_kv_heads, topk]`` (where both fit, the first): only the blocks of `blk_kv` keys that it names,
                  in any order; -1 anywhere.
    page_table:   int32 ``[batch, max_pages]``. seqused_k: ``[batch]``, keys of each sequence with the new tokens; 0 is allowed.
                  Both are read when the kernels run.
    causal:       token i of a sequence sees the keys up to ``seqused_k - seqlen_q + i``; False: all of them.
    q_scale, k_scale, v_scale:  as in `sparse_atten_func`.
    out, lse:     buffers for the results; lse is written with `return_softmax_lse`.
    schedule, O_partial, LSE_partial:  accepted; our kernels split their own work and hold their own partial results.

    Returns out in q's dtype (bfloat16 for e4m3), and with `return_softmax_lse` lse float32 ``[batch * seqlen_q, num_q_heads]``,
    natural logarithm. A token with nothing to read gives 0 and -inf.

    The same as the public function: names, order, shapes, results. Better: `q2k_indices` is honoured (the public function
    refuses it); any device, dtype, group size, head dim and page size; scales; `causal=False`; lengths below seqlen_q.
    """
    operands.check_operands(q, k, v, "head_dim", True, operands.QUERIES)
    operands.flags(causal=causal, return_softmax_lse=return_softmax_lse)
    checks.integer("seqlen_q", seqlen_q, 1)
    checks.integer("max_seqlen_k", max_seqlen_k, 0)
    checks.integer("blk_kv", blk_kv, 16, 256)
    checks.tensor("page_table", page_table, "[batch, max_pages]", (torch.int32,))
    batch = page_table.shape[0]
    checks.size("q", q, 0, batch * seqlen_q, f"batch {batch} of page_table times seqlen_q {seqlen_q}")
    query, q_factor = operands.stored("q", q, q_scale)
    keys, k_factor = operands.stored("k", k, k_scale)
    stored_v, v_factor = operands.stored("v", v, v_scale)
    values, out_factor = operands.scaled(stored_v, v_factor)
    if out is not None:
        operands.check_out("out", out, tuple(q.shape), out_dtype(query), q.device)
    if lse is not None:
        operands.check_out("lse", lse, tuple(q.shape[:2]), wide_dtype(query), q.device)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else checks.scale("softmax_scale", softmax_scale)
    scale *= q_factor * k_factor
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    cache = operands.paged(keys, values, page_table, seqused_k, cu_q, seqlen_q, max_seqlen_k, causal)
    if q2k_indices is None:
        result: Any = dense_attention(
            query, cache.k, None, cache.seqs, softmax_scale=scale, block_size=blk_kv, return_lse=return_softmax_lse
        )
    else:
        blocks = token_major(q2k_indices, q.shape[0], k.shape[1])
        result = sparse_attention(
            *(query, cache.k, None, blocks, cache.seqs),
            block_size=blk_kv,
            softmax_scale=scale,
            return_lse=return_softmax_lse,
        )
    if not return_softmax_lse:
        return operands.write_out(out, result, out_factor)
    return operands.write_out(out, result[0], out_factor), operands.write_out(lse, result[1])


def token_major(q2k_indices: Tensor, total_q: int, num_kv_heads: int) -> Tensor:
    """A selection in either order of its first two dimensions as ``[total_q, num_kv_heads, topk]``, a view."""
    checks.tensor("q2k_indices", q2k_indices, "[num_kv_heads, total_q, topk]", (torch.int32,))
    checks.integer("q2k_indices.shape[2] (topk)", q2k_indices.shape[2], 1, 64)
    if tuple(q2k_indices.shape[:2]) == (num_kv_heads, total_q):
        return q2k_indices.transpose(0, 1)
    if tuple(q2k_indices.shape[:2]) != (total_q, num_kv_heads):
        raise ValueError(
            f"q2k_indices must have shape [num_kv_heads, total_q, topk] = [{num_kv_heads}, {total_q}, topk] or the first two "
            f"exchanged, got {tuple(q2k_indices.shape)}"
        )
    return q2k_indices
