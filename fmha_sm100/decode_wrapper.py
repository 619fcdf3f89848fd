# SPDX-License-Identifier: MIT
"""Paged decode in two steps under the public name: plan, then run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha_sm100.decode import sparse_decode_atten_func
from fmha_sm100.decode_schedule import DecodeAttentionSchedule, decode_schedule
from fmha_sm100.operands import Scale, flags
from openmsa.runtime import checks


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
        flags(causal=causal)
        self.causal = bool(causal)
        self.page_table: Tensor | None = None
        self.seqused_k: Tensor | None = None
        self.q2k_indices: Tensor | None = None
        self.seqlen_q = self.max_seqlen_k = 0
        self.num_qo_heads: int | None = None
        self.num_kv_heads: int | None = None
        self.head_dim: int | None = None
        self._rules: dict[str, Any] = {}
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
        flags(enable_cuda_graph=enable_cuda_graph, disable_split_kv=disable_split_kv)
        checks.integer("seqlen_q", seqlen_q, 1)
        checks.integer("max_seqlen_k", max_seqlen_k, 0)
        for name, count in (("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if count is not None:
                checks.integer(name, count, 1)
        if num_qo_heads is not None and num_kv_heads is not None:
            checks.divides("num_kv_heads", num_kv_heads, "num_qo_heads", num_qo_heads)
        for name, size in (("max_grid_size", max_grid_size), ("fixed_split_size", fixed_split_size)):
            if size is not None:
                checks.integer(name, size, 1)
        if q2k_indices is not None:
            checks.tensor("q2k_indices", q2k_indices, "[num_kv_heads, batch * seqlen_q, topk]", (torch.int32,))
        self.page_table, self.seqused_k, self.q2k_indices = page_table, seqused_k, q2k_indices
        self.seqlen_q, self.max_seqlen_k = seqlen_q, max_seqlen_k
        self.num_qo_heads, self.num_kv_heads, self.head_dim = num_qo_heads, num_kv_heads, head_dim
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
        page_table, seqused_k = self._planned()
        if isinstance(q, Tensor) and q.dim() == 3 and isinstance(k, Tensor) and k.dim() == 4:
            self._check_heads(q.shape[1], k.shape[1], q.shape[2])
        return sparse_decode_atten_func(
            *(q, k, v, self.q2k_indices),
            page_table=page_table,
            seqused_k=seqused_k,
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
    def batch(self) -> int:
        """Sequences of the plan."""
        return self._planned()[0].shape[0]

    @property
    def is_sparse(self) -> bool:
        """Whether the plan has a selection."""
        return self.q2k_indices is not None

    @property
    def schedule(self) -> DecodeAttentionSchedule:
        """The public kernels' split of this plan's work. Reads the lengths on the host when first asked for."""
        _, seqused_k = self._planned()
        if self._schedule is None:
            heads, kv_heads = self.num_qo_heads, self.num_kv_heads
            group = heads // kv_heads if heads and kv_heads and heads % kv_heads == 0 else 1
            self._schedule = decode_schedule(
                seqused_k, self.blk_kv, self.seqlen_q, group, kv_heads or 1, self.max_seqlen_k, **self._rules
            )
        return self._schedule

    def _planned(self) -> tuple[Tensor, Tensor]:
        if self.page_table is None or self.seqused_k is None:
            raise RuntimeError("plan() must be called before run() and before the schedule is read")
        return self.page_table, self.seqused_k

    def _check_heads(self, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None:
        planned_dim = None if self.head_dim == 128 else self.head_dim
        planned = (("num_qo_heads", self.num_qo_heads), ("num_kv_heads", self.num_kv_heads), ("head_dim", planned_dim))
        for (name, expected), count in zip(planned, (num_qo_heads, num_kv_heads, head_dim), strict=True):
            if expected is not None and count != expected:
                raise ValueError(f"{name} must be {expected}, as planned, got {count}")

    def __getattr__(self, name: str) -> Any:
        if name in DecodeAttentionSchedule.__dataclass_fields__:
            return getattr(self.schedule, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
