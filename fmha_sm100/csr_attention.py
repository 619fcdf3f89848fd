# SPDX-License-Identifier: MIT
"""Computes attention over a selection in the CSR form of `build_k2q_csr`. `sparse_atten_func` and `sparse_atten_nvfp4_kv_func`
share all of it, from the checks of their arguments to the forms of their result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmha_sm100 import operands
from fmha_sm100.k2q_rows import Rows, selection
from fmha_sm100.operands import Lengths, Operands
from fmha_sm100.schedules import SparseAttentionSchedule
from openmsa import E4M3, PagedKV
from openmsa.kv_cache.stored import out_dtype, wide_dtype
from openmsa.runtime import checks
from openmsa.sparse_attention import STAGE as SPARSE
from openmsa.sparse_attention import check_sparse

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Options:
    """This holds the arguments that do not depend on the formats of the operands; `sparse_atten_func` describes them."""

    k2q_row_ptr: Tensor
    k2q_q_indices: Tensor
    topK: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    blk_kv: int
    causal: bool
    softmax_scale: float | None
    lse_temperature_scale: float
    return_temperature_lse: bool
    return_softmax_lse: bool
    partial_dtype: torch.dtype
    page_table: Tensor | None
    seqused_k: Tensor | None
    schedule: Any
    usable_SM_count: int
    out: Tensor | None

    def check(self, q: Tensor, num_kv_heads: int) -> None:
        """Checks everything but the lengths; `q` holds the queries, or their codes."""
        operands.flags(
            causal=self.causal,
            return_softmax_lse=self.return_softmax_lse,
            return_temperature_lse=self.return_temperature_lse,
        )
        checks.integer("topK", self.topK, 1, 64)
        checks.integer("blk_kv", self.blk_kv, 16, 256)
        checks.integer("usable_SM_count", self.usable_SM_count, -1)
        checks.scale("lse_temperature_scale", self.lse_temperature_scale)
        if self.lse_temperature_scale <= 0:
            raise ValueError(f"lse_temperature_scale must be greater than 0, got {self.lse_temperature_scale}")
        if self.return_temperature_lse and not self.return_softmax_lse:
            raise ValueError("return_softmax_lse must be True with return_temperature_lse=True, got False")
        operands.chosen("partial_dtype", self.partial_dtype, operands.PARTIALS)
        if self.seqused_k is not None and self.page_table is None:
            raise ValueError("seqused_k must be None without page_table, got a tensor")
        for name, csr, shape in (
            ("k2q_row_ptr", self.k2q_row_ptr, "[num_kv_heads, total_rows + 1]"),
            ("k2q_q_indices", self.k2q_q_indices, "[num_kv_heads, total_q * topK]"),
        ):
            checks.tensor(name, csr, shape, (torch.int32,))
            checks.size(name, csr, 0, num_kv_heads, "num_kv_heads of k")
            checks.alike(name, csr, "q", q, dtype=False)
        if self.k2q_row_ptr.shape[1] < 1:
            raise ValueError("k2q_row_ptr.shape[1] must be total_rows + 1, got 0")
        if self.k2q_q_indices.shape[1] < q.shape[0] * self.topK:
            raise ValueError(
                f"k2q_q_indices.shape[1] must be at least total_q * topK ({q.shape[0]} * {self.topK}), "
                f"got {self.k2q_q_indices.shape[1]}"
            )
        self._check_schedule(q.shape[0], num_kv_heads)

    def _check_schedule(self, total_q: int, num_kv_heads: int) -> None:
        """Checks that a schedule, which nothing here reads, is one and was made for these queries and heads."""
        if self.schedule is None:
            return
        if not hasattr(self.schedule, "scheduler_metadata"):
            raise TypeError(f"schedule must come from build_k2q_csr or be None, got {type(self.schedule).__name__}")
        if isinstance(self.schedule, SparseAttentionSchedule):
            shape = self.schedule.shape
            if shape != (total_q, num_kv_heads):
                raise ValueError(f"schedule must be of this call's queries and heads {(total_q, num_kv_heads)}, got {shape}")


def attend(given: Operands, options: Options) -> Result:
    """Computes attention over the selection that `options` names and returns what `sparse_atten_func` returns."""
    q, k = given.q, given.k
    options.check(q.data if isinstance(q, E4M3) else q, k.shape[1])
    total_q, heads, head_dim = q.shape
    if options.out is not None:
        operands.check_out("out", options.out, (total_q, heads, head_dim), out_dtype(q), q.device)
    scale = head_dim**-0.5 if options.softmax_scale is None else checks.scale("softmax_scale", options.softmax_scale)
    cu_q, cu_k = operands.checked_starts(options.cu_seqlens_q, options.cu_seqlens_k, total_q, q.device)
    max_q = operands.given_longest("max_seqlen_q", options.max_seqlen_q, cu_q)
    max_k = operands.given_longest("max_seqlen_k", options.max_seqlen_k, cu_k)
    keys: operands.Rows | PagedKV
    values: operands.Rows | None
    lengths = Lengths(cu_q, max_q, max_k, options.causal)
    if options.page_table is None:
        keys, values, seqs = lengths.over_packed(k, given.v, cu_k)
    else:
        checks.tensor("page_table", options.page_table, "[batch, max_pages]", (torch.int32,))
        checks.size("page_table", options.page_table, 0, cu_q.numel() - 1, "the batch of cu_seqlens_q")
        lens = cu_k.diff() if options.seqused_k is None else options.seqused_k
        keys, seqs = lengths.over_pages(k, given.v, options.page_table, lens)
        values = None
    levels = -(-max_k // options.blk_kv)
    blocks = selection(
        *(options.k2q_row_ptr, options.k2q_q_indices, options.topK, total_q),
        lambda: Rows.of(cu_q, cu_k, options.blk_kv, levels),
        options.blk_kv,
    )

    def run(softmax_scale: float, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the output and the lse, which is empty where nobody asks for it."""
        scale = softmax_scale * given.logit_factor
        call = check_sparse(q, keys, values, blocks, seqs, options.blk_kv, scale, options.return_softmax_lse, check=False)
        result = SPARSE.run("auto", call.writing(out, None))
        if isinstance(result, Tensor):
            return result, result.new_empty(0, dtype=wide_dtype(q))
        return result

    result, lse = run(scale, operands.place(options.out, q, keys, values, blocks))
    result = operands.write_out(options.out, result, given.out_factor)
    if not options.return_softmax_lse:
        return result
    if not options.return_temperature_lse:
        return result, lse
    if math.isclose(options.lse_temperature_scale, 1.0, rel_tol=0, abs_tol=1e-12):
        return result, lse, lse
    return result, lse, run(scale / options.lse_temperature_scale)[1]
