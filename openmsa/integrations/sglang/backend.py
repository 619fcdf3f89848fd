# SPDX-License-Identifier: MIT
"""SGLang asks a backend for metadata once a step, and then runs it layer by layer. Decode batches, and verified drafts, are
served by a `DecodePlan`, whose buffers stay, so that a CUDA graph can hold the run. All other batches, prompts, chunks of
prompts and mixed ones, are served by an `AttentionPlan`, made once a step for all layers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.model_config import get_minimax_sparse_layer_ids
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from openmsa import AttentionPlan, DecodePlan
from openmsa.integrations.sglang.caches import LayerCaches
from openmsa.integrations.sglang.sizes import refusal, sizes_of, sparse_config, speculation

logger = logging.getLogger("sglang.srt.openmsa")


@dataclass(kw_only=True)
class Step:
    """Holds what all layers of a step share.

    plan:        who serves it. page_table: int32 ``[requests, max_pages]``. seq_lens: int32 ``[requests]``, new tokens counted.
    rows:        tokens that are computed; those behind them pad the batch.
    unseen:      tokens that SGLang's lengths do not count yet: all drafts of a verified request, otherwise none.
    """

    plan: AttentionPlan | DecodePlan
    page_table: Tensor
    seq_lens: Tensor
    rows: int
    unseen: int = 0


class OpenMSASparseBackend(AttentionBackend):
    """Serves the sparse layers of one of SGLang's model runners; SGLang's pair of backends brings it their calls alone."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if reason := refusal(runner):
            raise NotImplementedError(f"OpenMSA cannot serve the sparse layers of this server: {reason}")
        self.sizes = sizes_of(runner)
        self.dense_layer_ids, self.sparse_layer_ids = get_minimax_sparse_layer_ids(sparse_config(runner))
        self.kv_pool = self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.page_size = self.kv_pool.page_size
        self._first_slots = self.req_to_token_pool.req_to_token[:, :: self.page_size]  # of each page, a request a row
        self._dtype = runner.model_config.dtype
        self._drafts = speculation(runner).speculative_num_draft_tokens or 1
        self._caches = LayerCaches(self.kv_pool)
        self._plans: dict[tuple[int, int], DecodePlan] = {}
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._step: Step | None = None
        index = self.kv_pool.index_k_pool
        logger.info(
            "OpenMSA serves the %d sparse layers: prompts with AttentionPlan, decode with DecodePlan (Triton kernels; %d query "
            "and %d KV heads a rank, KV cache %s, index cache %s, pages of %d).",
            *(len(self.sparse_layer_ids), self.sizes.num_q_heads, self.sizes.num_kv_heads),
            *(self.kv_pool.main_pool.dtype, None if index is None else index.dtype, self.page_size),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes room for decode batches of `max_bs` requests, which graphs will hold."""
        self._room(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Returns the length of requests that pad a graph's batch, which backends of dense layers want to be positive."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepares the step, outside of graphs. For decode it reads no tensor and launches nothing."""
        mode, batch = forward_batch.forward_mode, forward_batch.seq_lens.shape[0]
        self._step = None
        if mode.is_idle() or batch == 0:
            return
        if mode.is_decode():
            self._step = self._decode(batch, 1, 0)
        elif mode.is_target_verify():
            new = int(getattr(forward_batch.spec_info, "draft_token_num", self._drafts))
            self._step = self._decode(batch, new, new)
        elif mode.is_extend():
            self._step = self._prompts(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Writes the page table and lengths of a decode step where its plan reads them. A graph holds this and repeats it, with
        what SGLang then has in its own buffers."""
        step = self._step
        if step is None or not isinstance(step.plan, DecodePlan):
            return
        self._fill(step.page_table, forward_batch.req_pool_indices)
        step.seq_lens.copy_(forward_batch.seq_lens)
        if step.unseen:
            step.seq_lens.add_(step.unseen)

    def _fill(self, page_table: Tensor, requests: Tensor) -> None:
        """Writes the pages of `requests`, rows of SGLang's table of slots. Behind a request's last page stands anything."""
        torch.index_select(self._first_slots, 0, requests, out=page_table)
        page_table.div_(self.page_size, rounding_mode="floor")

    def _room(self, batch: int) -> tuple[Tensor, Tensor]:
        """Returns a page table and lengths with room for a batch. Smaller ones stay, since graphs hold their addresses."""
        if not self._tables or self._tables[-1][1].shape[0] < batch:
            most = 1 << (batch - 1).bit_length()
            shape, options = (most, self._first_slots.shape[1]), {"dtype": torch.int32, "device": self._first_slots.device}
            self._tables.append((torch.zeros(shape, **options), torch.zeros(most, **options)))
        return self._tables[-1]

    def _decode(self, batch: int, new: int, unseen: int) -> Step:
        table, lengths = self._room(batch)
        most, max_pages = table.shape
        if (most, new) not in self._plans:
            self._plans[most, new] = self.sizes.decode(
                most=most, new_tokens=new, max_pages=max_pages, page=self.page_size, dtype=self._dtype, device=table.device
            )
        plan = self._plans[most, new]
        return Step(plan=plan, page_table=table[:batch], seq_lens=lengths[:batch], rows=batch * new, unseen=unseen)

    def _prompts(self, forward_batch: Any) -> Step:
        new = forward_batch.extend_seq_lens_cpu
        batch, pages = len(new), self._first_slots.shape[1]
        lengths = forward_batch.seq_lens[:batch].to(torch.int32)
        table = torch.empty(batch, pages, dtype=torch.int32, device=lengths.device)
        self._fill(table, forward_batch.req_pool_indices[:batch])
        starts = torch.zeros(batch + 1, dtype=torch.int32, device=lengths.device)
        torch.cumsum(forward_batch.extend_seq_lens[:batch], 0, dtype=torch.int32, out=starts[1:])
        known = forward_batch.seq_lens_cpu
        longest = pages * self.page_size if known is None else int(known[:batch].max())
        plan = self.sizes.prompts(
            starts, lengths, table, longest_q=max(new), longest_k=longest, total_q=sum(new), page=self.page_size
        )
        return Step(plan=plan, page_table=table, seq_lens=lengths, rows=sum(new))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        idx_q: Tensor,
        idx_k: Tensor,
        idx_v: Tensor | None = None,
    ) -> tuple[None, Tensor]:
        """Writes the caches of a layer, selects blocks and attends.

        q, k, v:  ``[tokens, heads, head_dim]``, any strides. idx_q, idx_k: ``[tokens, heads, index_dim]``.

        Returns None, since index values are not served, and ``[tokens, num_q_heads * head_dim]``, 0 for padding.
        """
        if idx_v is not None:
            raise NotImplementedError("idx_v must be None: layers with index values are not served")
        out = q.new_empty(q.shape[0], self.sizes.num_q_heads * self.sizes.head_dim)
        step = self._step
        if forward_batch.forward_mode.is_idle() or q.shape[0] == 0:
            return None, out.zero_()
        if step is None:
            raise NotImplementedError(f"OpenMSA cannot serve a batch of {forward_batch.forward_mode} without metadata for it")
        if save_kv_cache:
            self._caches.write(layer, forward_batch.out_cache_loc, k, v, idx_k)
        kv, index_keys = self._caches.look(layer, step.page_table, step.seq_lens)
        rows = slice(0, step.rows)
        shaped = out.view(-1, self.sizes.num_q_heads, self.sizes.head_dim)
        if isinstance(step.plan, DecodePlan):
            step.plan.run(q[rows], kv, idx_q[rows], index_keys, out=shaped[rows])
        elif q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "OpenMSA cannot serve prompts inside a CUDA graph: start the server with --cuda-graph-backend-prefill "
                "tc_piecewise or disabled"
            )
        else:
            step.plan.run(q[rows], kv.k, kv.v, idx_q[rows], index_keys.keys, out=shaped[rows])
        if q.shape[0] > step.rows:
            out[step.rows :].zero_()
        return None, out

    forward_decode = forward_extend = forward
