# SPDX-License-Identifier: MIT
"""Paged decode under the public names, dense or over a selection, is one call, or is planned once and run once a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha_sm100.k2q_rows import token_major
from fmha_sm100.operands import QUERIES, Lengths, Operands, Scale, check_operands, check_results, flags, place, write_out
from fmha_sm100.schedules import UNPLANNED, DecodeAttentionSchedule, DecodeShape, SplitRules, decode_schedule
from openmsa.dense_attention import STAGE as DENSE
from openmsa.dense_attention import check_dense
from openmsa.runtime import checks, dispatch
from openmsa.sparse_attention import STAGE as SPARSE
from openmsa.sparse_attention.call import check_sparse
from openmsa.types import out_dtype


@dispatch.operator("fmha_sm100::sparse_decode_atten_func")
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
    """Computes attention of the newest `seqlen_q` tokens of each sequence over its paged keys.

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
    schedule, O_partial, LSE_partial:  accepted and not needed: the kernels split their own work and hold their own partial
                  results.

    Returns out in q's dtype (bfloat16 for e4m3), and with `return_softmax_lse` lse float32 ``[batch * seqlen_q, num_q_heads]``,
    natural logarithm. A token with nothing to read gives 0 and -inf.

    Names, order, shapes and results are those of the public function. Beyond it, this one honours `q2k_indices` (the public one
    refuses it) and takes any device, dtype, group size, head dim and page size, scales, `causal=False` and short lengths.
    """
    check_operands(q, k, v, "head_dim", True, QUERIES)
    flags(causal=causal, return_softmax_lse=return_softmax_lse)
    checks.integer("seqlen_q", seqlen_q, 1)
    checks.integer("max_seqlen_k", max_seqlen_k, 0)
    checks.integer("blk_kv", blk_kv, 16, 256)
    checks.tensor("page_table", page_table, "[batch, max_pages]", (torch.int32,))
    batch = page_table.shape[0]
    checks.size("q", q, 0, batch * seqlen_q, f"batch {batch} of page_table times seqlen_q {seqlen_q}")
    rows = Operands.of(q, k, v, q_scale, k_scale, v_scale).scaled()
    check_results(q, out_dtype(rows.q), out, lse)
    scale = rows.logit_factor * (q.shape[2] ** -0.5 if softmax_scale is None else checks.scale("softmax_scale", softmax_scale))
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    cache, seqs = Lengths(cu_q, seqlen_q, max_seqlen_k, causal).over_pages(rows.k, rows.v, page_table, seqused_k)
    read, asked = (q, cache, q2k_indices), bool(return_softmax_lse)
    places = place(out, *read, lse), place(lse, *read) if asked else None
    if q2k_indices is None:
        dense = check_dense(rows.q, cache, None, seqs, True, scale, blk_kv, True, asked, False, check=False)
        result = DENSE.run("auto", dense.writing(*places))
    else:
        blocks = token_major(q2k_indices, q.shape[0], k.shape[1])
        sparse = check_sparse(rows.q, cache, None, blocks, seqs, blk_kv, scale, asked, check=False)
        result = SPARSE.run("auto", sparse.writing(*places))
    if not return_softmax_lse:
        return write_out(out, result, rows.out_factor)
    return write_out(out, result[0], rows.out_factor), write_out(lse, result[1])


class SparseDecodePagedAttentionWrapper:
    """Does what `sparse_decode_atten_func` does in two steps: `plan` once a step or once for many, `run` once a layer. blk_kv
    is the keys of a block of the selection; causal is as in `sparse_decode_atten_func`.

    The plan keeps the tensors it was given, and `run` reads them when its kernels run: lengths, page table and selection may be
    updated in place between runs, also between replays of a captured run. `run` reads nothing on the host.

    Names, order, defaults, results and attributes are those of the public class: before `plan` they are None, False or 0.
    Beyond it, this one honours a selection, takes any batch, any length and any remainder of a page, and plans without waiting
    for the GPU. `decode_schedule` (a `DecodeAttentionSchedule`, whose fields are attributes here too) follows the public rules
    and is made when it or a field is first read, from the lengths of that moment (a host sync). So are `O_partial`, float32
    ``[partial_rows, num_qo_heads, head_dim]``, and `LSE_partial`, ``[partial_rows, num_qo_heads]``; None where nothing is cut.
    The kernels split their own work, hold their own partial results, and write to neither.
    """

    def __init__(self, *, blk_kv: int = 128, causal: bool = True) -> None:
        self.blk_kv = checks.integer("blk_kv", blk_kv, 16, 256)
        flags(causal=causal)
        self.causal = bool(causal)
        self.page_table: Tensor | None = None
        self.seqused_k: Tensor | None = None
        self.q2k_indices: Tensor | None = None
        self.is_sparse = False
        self.batch: int | None = None
        self.seqlen_q: int | None = None
        self.max_seqlen_k: int | None = None
        self.num_qo_heads: int | None = None
        self.num_kv_heads: int | None = None
        self.head_dim: int | None = None
        self._rules = SplitRules()
        self._schedule: DecodeAttentionSchedule | None = None
        self._partials: tuple[Tensor | None, Tensor | None] | None = None

    def plan(
        self,
        *,
        page_table: Tensor,
        seqused_k: Tensor,
        seqlen_q: int,
        max_seqlen_k: int,
        q2k_indices: Tensor | None = None,
        num_qo_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = 128,
        enable_cuda_graph: bool = False,
        max_grid_size: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> SparseDecodePagedAttentionWrapper:
        """Takes the lengths, as `sparse_decode_atten_func` does, and returns itself. `run` must be called with num_qo_heads and
        num_kv_heads where they are given, and with head_dim where it is not 128, the default, which allows any.
        enable_cuda_graph, max_grid_size, fixed_split_size (pages) and disable_split_kv shape the schedule's attributes only."""
        checks.tensor("page_table", page_table, "[batch, max_pages]", (torch.int32,))
        checks.tensor("seqused_k", seqused_k, "[batch]", (torch.int32, torch.int64))
        checks.size("seqused_k", seqused_k, 0, page_table.shape[0], "the batch of page_table")
        checks.alike("seqused_k", seqused_k, "page_table", page_table, dtype=False)
        flags(enable_cuda_graph=enable_cuda_graph, disable_split_kv=disable_split_kv)
        checks.integer("seqlen_q", seqlen_q, 1)
        checks.integer("max_seqlen_k", max_seqlen_k, 0)
        counts = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, count in (counts | {"max_grid_size": max_grid_size, "fixed_split_size": fixed_split_size}).items():
            if count is not None:
                checks.integer(name, count, 1)
        if num_qo_heads is not None and num_kv_heads is not None:
            checks.divides("num_kv_heads", num_kv_heads, "num_qo_heads", num_qo_heads)
        if q2k_indices is not None:
            checks.tensor("q2k_indices", q2k_indices, "[num_kv_heads, batch * seqlen_q, topk]", (torch.int32,))
        self.page_table, self.seqused_k, self.q2k_indices = page_table, seqused_k, q2k_indices
        self.is_sparse = q2k_indices is not None
        self.batch, self.seqlen_q, self.max_seqlen_k = page_table.shape[0], seqlen_q, max_seqlen_k
        self.num_qo_heads, self.num_kv_heads, self.head_dim = num_qo_heads, num_kv_heads, head_dim
        self._rules = SplitRules(enable_cuda_graph, max_grid_size, fixed_split_size, disable_split_kv)
        self._schedule = self._partials = None
        return self

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        return_softmax_lse: bool = False,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends for one layer; arguments and results are as in `sparse_decode_atten_func`."""
        if self.page_table is None or self.seqused_k is None or self.seqlen_q is None or self.max_seqlen_k is None:
            raise RuntimeError("plan() must be called before run()")
        if isinstance(q, Tensor) and q.dim() == 3 and isinstance(k, Tensor) and k.dim() == 4:
            self._check_heads(q.shape[1], k.shape[1], q.shape[2])
        return sparse_decode_atten_func(
            *(q, k, v, self.q2k_indices),
            page_table=self.page_table,
            seqused_k=self.seqused_k,
            seqlen_q=self.seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            blk_kv=self.blk_kv,
            causal=self.causal,
            softmax_scale=softmax_scale,
            return_softmax_lse=return_softmax_lse,
            out=out,
            lse=lse,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    @property
    def decode_schedule(self) -> DecodeAttentionSchedule | None:
        """Returns how the public kernels split this plan's work, for which the lengths are read on the host the first time."""
        if self._schedule is None and self.seqused_k is not None and self.seqlen_q is not None:
            heads, kv_heads = self.num_qo_heads or 1, self.num_kv_heads or 1
            shape = DecodeShape(self.blk_kv, self.seqlen_q, max(heads // kv_heads, 1), kv_heads, self.head_dim or 128)
            self._schedule = decode_schedule(self.seqused_k, shape, self._rules)
        return self._schedule

    @property
    def O_partial(self) -> Tensor | None:
        """Returns memory of the size that the public kernels keep partial outputs in."""
        return self._room()[0]

    @property
    def LSE_partial(self) -> Tensor | None:
        """Returns memory of the size that the public kernels keep the lse of partial outputs in."""
        return self._room()[1]

    def _room(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns `O_partial` and `LSE_partial`."""
        if self._partials is None and (schedule := self.decode_schedule) is not None:
            self._partials = schedule.partials(self.num_qo_heads, self.head_dim)
        return self._partials or (None, None)

    def _check_heads(self, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Checks that the operands of a run have the heads and the head dim that were planned."""
        planned_dim = None if self.head_dim == 128 else self.head_dim
        planned = (("num_qo_heads", self.num_qo_heads), ("num_kv_heads", self.num_kv_heads), ("head_dim", planned_dim))
        for (name, expected), count in zip(planned, (num_qo_heads, num_kv_heads, head_dim), strict=True):
            if expected is not None and count != expected:
                raise ValueError(f"{name} must be {expected}, as planned, got {count}")

    def __getattr__(self, name: str) -> Any:
        """Returns a field of the schedule; before `plan` False, 0 or None."""
        if name not in UNPLANNED:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        schedule = self.decode_schedule
        return UNPLANNED[name] if schedule is None else getattr(schedule, name)
