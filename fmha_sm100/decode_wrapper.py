# SPDX-License-Identifier: MIT
"""Paged decode under the public names: dense, and sparse with a selection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha_sm100 import operands
from fmha_sm100.decode_schedule import DecodeAttentionSchedule, decode_schedule
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
    if tuple(q2k_indices.shape[:2]) == (num_kv_heads, total_q):
        return q2k_indices.transpose(0, 1)
    if tuple(q2k_indices.shape[:2]) != (total_q, num_kv_heads):
        raise ValueError(
            f"q2k_indices must have shape [num_kv_heads, total_q, topk] = [{num_kv_heads}, {total_q}, topk] or the first two "
            f"exchanged, got {tuple(q2k_indices.shape)}"
        )
    return q2k_indices


class SparseDecodePagedAttentionWrapper:
    """`sparse_decode_atten_func` in two steps: `plan` once a step or once for many, `run` once a layer.

    blk_kv: keys of a block of the selection. causal: as in `sparse_decode_atten_func`.

    The plan keeps the tensors it was given, and `run` reads them when its kernels run: lengths, page table and selection may be
    updated in place between runs, also between replays of a captured run. `run` reads nothing on the host.

    The same as the public class: names, order, defaults, results, schedule attributes. Better: a selection is honoured; no
    limit on the batch; lengths below seqlen_q and any remainder of a page; planning does not wait for the GPU. The attributes
    of the schedule (`split_kv`, `cta_tile_q`, `request_indices`, ... of `DecodeAttentionSchedule`) follow the public rules and
    are made when first read, from the lengths of that moment (a host sync); our kernels split their work by themselves.
    """

    def __init__(self, *, blk_kv: int = 128, causal: bool = True) -> None:
        self.blk_kv = checks.integer("blk_kv", blk_kv, 16, 256)
        self.causal = bool(causal)
        self._plan: dict[str, Any] | None = None
        self._rules: dict[str, Any] = {}
        self._heads: tuple[int | None, int | None, int | None] = (None, None, None)
        self._schedule: DecodeAttentionSchedule | None = None

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
        """Takes the lengths, as `sparse_decode_atten_func` does; returns itself. num_qo_heads, num_kv_heads: when given, what
        `run` must be called with. head_dim: the same where it is not 128, the default, which allows any. enable_cuda_graph,
        max_grid_size, fixed_split_size (pages), disable_split_kv: shape the schedule's attributes only."""
        checks.tensor("page_table", page_table, "[batch, max_pages]", (torch.int32,))
        checks.tensor("seqused_k", seqused_k, "[batch]", (torch.int32, torch.int64))
        checks.size("seqused_k", seqused_k, 0, page_table.shape[0], "the batch of page_table")
        checks.alike("seqused_k", seqused_k, "page_table", page_table, dtype=False)
        checks.integer("seqlen_q", seqlen_q, 1)
        checks.integer("max_seqlen_k", max_seqlen_k, 0)
        for name, count in (("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if count is not None:
                checks.integer(name, count, 1)
        for name, size in (("max_grid_size", max_grid_size), ("fixed_split_size", fixed_split_size)):
            if size is not None:
                checks.integer(name, size, 1)
        if q2k_indices is not None:
            checks.tensor("q2k_indices", q2k_indices, "[num_kv_heads, batch * seqlen_q, topk]", (torch.int32,))
        self._plan = {
            "page_table": page_table,
            "seqused_k": seqused_k,
            "seqlen_q": seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "q2k_indices": q2k_indices,
        }
        self._heads = (num_qo_heads, num_kv_heads, None if head_dim == 128 else head_dim)
        self._rules = {
            "enable_cuda_graph": enable_cuda_graph,
            "max_grid_size": max_grid_size,
            "fixed_split_size": fixed_split_size,
            "disable_split_kv": disable_split_kv,
        }
        self._schedule = None
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
        """One layer; arguments and results as in `sparse_decode_atten_func`."""
        plan = self._planned()
        if isinstance(q, Tensor) and q.dim() == 3 and isinstance(k, Tensor) and k.dim() == 4:
            given = (q.shape[1], k.shape[1], q.shape[2])
            for name, count, planned in zip(("num_qo_heads", "num_kv_heads", "head_dim"), given, self._heads, strict=True):
                if planned is not None and count != planned:
                    raise ValueError(f"{name} must be {planned}, as planned, got {count}")
        return sparse_decode_atten_func(
            *(q, k, v),
            **plan,
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
    def schedule(self) -> DecodeAttentionSchedule:
        """The public kernels' split of this plan's work. Reads the lengths on the host when first asked for."""
        plan = self._planned()
        if self._schedule is None:
            heads, kv_heads, _ = self._heads
            group = heads // kv_heads if heads and kv_heads and heads % kv_heads == 0 else 1
            self._schedule = decode_schedule(
                plan["seqused_k"], self.blk_kv, plan["seqlen_q"], group, kv_heads or 1, plan["max_seqlen_k"], **self._rules
            )
        return self._schedule

    def _planned(self) -> dict[str, Any]:
        if self._plan is None:
            raise RuntimeError("plan() must be called before run() and before the schedule is read")
        return self._plan

    def __getattr__(self, name: str) -> Any:
        plan = self.__dict__.get("_plan") or {}
        if name in plan:
            return plan[name]
        if name in DecodeAttentionSchedule.__dataclass_fields__:
            return getattr(self.schedule, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
