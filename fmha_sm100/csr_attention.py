# SPDX-License-Identifier: MIT
"""Computes attention over a selection in the CSR form of `build_k2q_csr`. `sparse_atten_func` and `sparse_atten_nvfp4_kv_func`
share all of it, from the checks of their arguments to the forms of their result. The schedule beside a CSR says how the public
kernels split this work, exactly, for callers that read it (a backward pass, for example); the kernels here split their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fmha_sm100 import operands
from fmha_sm100.k2q_rows import Rows, by_heads, selection, sort_heads
from fmha_sm100.operands import Lengths, Operands
from openmsa import E4M3, PagedKV
from openmsa.runtime import checks, devices
from openmsa.sparse_attention import STAGE as SPARSE
from openmsa.sparse_attention.call import check_sparse
from openmsa.types import out_dtype, wide_dtype

TILE = 128
"""A query tile of the public kernels has so many (query token, head) rows."""

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


class SparseAttentionSchedule:
    """Cuts the rows of a CSR into work items: the third result of `build_k2q_csr`.

    Its tensors are made on the device, without a host sync, when they are first read, and describe the selection of the moment
    of building. While a CUDA graph is captured they are made at once, and every replay renews them.

    enabled:             True.
    scheduler_metadata:  int32 ``[work_capacity, 6]``, (kv head, row, first query of the row, queries, sequence, key block) of
                         each item, ordered by head and row; zeros behind the last.
    work_count:          int32 ``[1]``, how many items there are.
    qsplit_indices:      int32 ``[num_kv_heads, total_q * topk]``, as ``k2q_q_indices``, with the slot of the block among the
                         query's blocks in the upper 8 bits (24 bits for the query); -1 where unused.
    split_counts:        int32 ``[total_q, num_kv_heads]``, the blocks that each query reads.
    target_q_per_cta:    the most queries of an item: about two items a multiprocessor, in units of 128 (query, head) rows,
                         and no more than ``2 * topk * block_size``, so that a block that everyone reads is shared out.
    """

    enabled = True

    def __init__(self, row: Tensor, counts: Tensor, rows: Rows, group: int, block_size: int) -> None:
        """Takes the row of each entry, int32 ``[heads, total_q, topk]``, and the queries of each row, int32 ``[heads *
        num_rows]``. `group` is the query heads of a KV head."""
        self._row, self._counts, self._rows = row, counts, rows
        self._num_rows = counts.numel() // max(row.shape[0], 1)
        self.shape = (row.shape[1], row.shape[0])  # (total_q, num_kv_heads)
        self.target_q_per_cta = _target(row, block_size, group)
        if devices.capturing(row.device):
            _ = self.split_counts, self.qsplit_indices, self.work_count, self.scheduler_metadata

    @cached_property
    def _valid(self) -> Tensor:
        """Marks the entries that name a row, bool ``[heads, total_q, topk]``."""
        return self._row < self._num_rows

    @cached_property
    def split_counts(self) -> Tensor:
        return self._valid.sum(2, dtype=torch.int32).T.contiguous()

    @cached_property
    def qsplit_indices(self) -> Tensor:
        query = self._rows.of_tokens(self._row.shape[1])[1]

        def of_heads(row: Tensor) -> tuple[Tensor]:
            topk, valid = row.shape[2], row < self._num_rows
            ordered, entry = sort_heads(row.flatten(1), self._num_rows)
            slot = valid.cumsum(2, dtype=torch.int32).sub(1).flatten(1).gather(1, entry)
            return (torch.where(ordered < self._num_rows, query[entry // topk] | (slot << 24), -1),)

        with torch.inference_mode(False):
            return by_heads(of_heads, self._row)[0]

    @cached_property
    def _pieces(self) -> Tensor:
        """Counts the items of each row, int32 ``[heads * num_rows]``."""
        return (self._counts + self.target_q_per_cta - 1) // self.target_q_per_cta

    @cached_property
    def work_count(self) -> Tensor:
        return self._pieces.sum(dtype=torch.int32).view(1)

    @property
    def work_capacity(self) -> int:
        """Returns how many items `scheduler_metadata` has room for."""
        entries = self._row.numel()
        return min(self._row.shape[0] * self._num_rows, entries) + entries // self.target_q_per_cta

    @cached_property
    def scheduler_metadata(self) -> Tensor:
        if not self.work_capacity or not self._num_rows:
            return torch.zeros((self.work_capacity, 6), dtype=torch.int32, device=self._row.device)
        pieces, counts = self._pieces, self._counts
        ends = pieces.cumsum(0)
        item = torch.arange(self.work_capacity, device=ends.device)
        at = torch.searchsorted(ends, item, right=True).clamp_(max=counts.numel() - 1)
        first = (item - ends[at] + pieces[at]) * self.target_q_per_cta
        sequence, block = self._rows.of_rows(self._num_rows)
        row = at % self._num_rows
        queries = (counts[at] - first).clamp_(max=self.target_q_per_cta)
        fields = torch.stack((at // self._num_rows, row, first, queries, sequence[row], block[row]), 1)
        return torch.where((item < ends[-1])[:, None], fields, 0).to(torch.int32)


def _target(row: Tensor, block_size: int, group: int) -> int:
    """Returns `target_q_per_cta` for the row of each entry, int32 ``[heads, total_q, topk]``."""
    heads, total_q, topk = row.shape
    unit = max(TILE // group, 1)
    items = 2 * devices.facts(row.device).num_sms
    units = min(max(-(-total_q * topk * heads // (unit * items)), 1), 512)
    most = max(2 * topk * block_size, unit)
    return -(-min(units * unit, most) // unit) * unit


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
