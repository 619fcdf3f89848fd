# SPDX-License-Identifier: MIT
"""vLLM's sparse layer rotates queries, writes both caches, calls its indexer with the index queries and then its attention with
the queries. `OpenMSAIndexer` hands the index queries on; `OpenMSAAttention` runs the decode rows and the tokens behind them in
their plans, selection and all, straight into the layer's output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerImpl
from vllm.models.minimax_m3.common.sparse_attention import MiniMaxM3SparseImpl

from openmsa import E4M3, PagedIndexKeys, PagedKV
from openmsa.integrations.sizes import LayerSizes
from openmsa.integrations.vllm.backend import DecodeRows, OpenMSAIndexBackend, Prompts, Step
from openmsa.integrations.vllm.sizes import E4M3_NAMES


class Handed(NamedTuple):
    """Holds what the indexer hands to the attention of its layer."""

    index_q: Tensor  # [tokens, index_heads, index_dim], of the index cache's dtype
    blocks: Tensor | None  # int32 [tokens behind the decode rows, index_heads, topk], where the caches' page tables differ


def _placed(cache: Any, rows: DecodeRows) -> Any:
    """Puts a step's table and lengths into a layer's paged cache. Making a cache anew checks what vLLM keeps the same, which
    takes the host as long as all the rest of a layer."""
    cache.page_table, cache.seq_lens = rows.page_table, rows.seq_lens
    return cache


def _rows(values: Tensor) -> Tensor | E4M3:
    return E4M3(values) if values.dtype == torch.float8_e4m3fn else values


class OpenMSAIndexer(MiniMaxM3IndexerImpl):
    """Hands a layer's index queries on. It takes over the index cache of the implementation that vLLM's constructor made."""

    indexer_backend_cls = OpenMSAIndexBackend

    def __init__(self, made: Any, layer_name: str, sizes: LayerSizes) -> None:
        nn.Module.__init__(self)  # vLLM's own would make and register a second index cache.
        self.index_cache = made.index_cache
        self.num_index_heads, self.index_head_dim = sizes.index_heads, sizes.index_dim
        self.topk_blocks, self.block_size = sizes.topk, sizes.block_size
        self.init_blocks, self.local_blocks, self.score_type = sizes.init_blocks, sizes.local_blocks, made.score_type
        self.layer_name = layer_name
        self._handed: Handed | None = None
        self._bound: Tensor | None = None
        self._pool: Tensor | E4M3
        self._paged: PagedIndexKeys | None = None

    @property
    def pool(self) -> Tensor | E4M3:
        """Returns the index keys ``[num_pages, 1, page_size, index_dim]``; vLLM binds them without the dimension of heads. The
        view is made when vLLM binds another tensor."""
        bound = self.index_cache.kv_cache
        if self._bound is not bound:
            self._bound, self._paged = bound, None
            self._pool = _rows(bound.unsqueeze(1) if bound.dim() == 3 else bound)
        return self._pool

    def paged(self, rows: DecodeRows) -> PagedIndexKeys:
        """Returns the index keys of a step's decode rows."""
        pool = self.pool
        if self._paged is None:
            self._paged = PagedIndexKeys(pool, rows.page_table, rows.seq_lens)
        return _placed(self._paged, rows)

    def forward(self, index_query: Tensor) -> tuple[None, None]:
        """Takes index queries ``[tokens, index_heads * index_dim]`` of the index cache's dtype. Blocks stay in the plan."""
        step = Step.current(self.layer_name)
        if step is None:
            return None, None
        index_q = index_query.view(-1, self.num_index_heads, self.index_head_dim)
        blocks = None
        if step.prompts is not None and (own := self._apart(step.prompts)) is not None:
            first = step.num_decode_tokens
            blocks = own.plan.select(_rows(index_q[first : first + own.total_q]), self.pool)
        self._handed = Handed(index_q, blocks)
        return None, None

    def _apart(self, main: Prompts) -> Prompts | None:
        """Returns the prompts behind the index cache's own table; None where it is that of the main cache."""
        step = Step.current(self.index_cache.prefix)
        assert step is not None
        own = step.prompts
        assert own is not None
        return None if own.page_table.data_ptr() == main.page_table.data_ptr() else own

    def take(self) -> Handed:
        """Returns what the last `forward` left for the attention of its layer, once."""
        handed, self._handed = self._handed, None
        if handed is None:
            raise RuntimeError(f"the indexer of {self.layer_name} must run before its attention")
        return handed


class OpenMSAAttention(MiniMaxM3SparseImpl):
    """Attends to the blocks that the layer's `OpenMSAIndexer` selected."""

    def __init__(self, sizes: LayerSizes, kv_cache_dtype: str) -> None:
        super().__init__(
            sizes.num_q_heads,
            sizes.head_dim,
            sizes.softmax_scale,
            sizes.num_kv_heads,
            kv_cache_dtype=kv_cache_dtype,
            topk_blocks=sizes.topk,
            sparse_block_size=sizes.block_size,
        )
        self._bound: Tensor | None = None
        self._k: Tensor | E4M3
        self._v: Tensor | E4M3
        self._paged: PagedKV | None = None

    def forward(
        self, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, *, query_fp8: Tensor | None = None
    ) -> Tensor:
        """Writes ``[tokens, num_q_heads * head_dim]`` to `output`; rows that pad a graph's batch stay as they are.

        query_fp8: queries in E4M3, which vLLM (0.33) makes only for implementations that ask for them; this one does not.
        """
        if query_fp8 is not None:
            raise NotImplementedError("query_fp8 must be None: queries are read in the dtype of the model")
        step = Step.current(layer.layer_name)
        if step is None:
            return output
        handed = layer.indexer.impl.take()
        if self._bound is not kv_cache:
            self._bind(layer, kv_cache)
        q, out = (x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        first = step.num_decode_tokens
        if step.decode_rows is not None:
            self._decode(layer, step, q[:first], _rows(handed.index_q[:first]), out[:first])
        if step.prompts is not None:
            rows, plan = slice(first, first + step.prompts.total_q), step.prompts.plan
            if handed.blocks is None:
                index_q = _rows(handed.index_q[rows])
                plan.run(q[rows], self._k, self._v, index_q, layer.indexer.impl.pool, out=out[rows])
            else:
                plan.attend(q[rows], self._k, self._v, handed.blocks, out=out[rows])
        return output

    def _decode(self, layer: Any, step: Step, q: Tensor, index_q: Tensor | E4M3, out: Tensor) -> None:
        """Runs the decode rows of a step, `q` and `out` ``[rows, num_q_heads, head_dim]``, selection and all."""
        indexer, rows = layer.indexer.impl, step.decode_rows
        index_step = Step.current(indexer.index_cache.prefix)
        assert rows is not None
        assert rows.plan is not None
        assert index_step is not None
        assert index_step.decode_rows is not None
        if self._paged is None:
            self._paged = PagedKV(self._k, self._v, rows.page_table, rows.seq_lens)
        rows.plan.run(q, _placed(self._paged, rows), index_q, indexer.paged(index_step.decode_rows), out=out)

    def _bind(self, layer: Any, kv_cache: Tensor) -> None:
        """Makes the views of a layer's cache ``[num_pages, num_kv_heads, page_size, 2 * head_dim]``, once it is bound."""
        self._bound, self._paged = kv_cache, None
        k, v = kv_cache.split(self.head_size, dim=-1)
        stored = self.kv_cache_dtype in E4M3_NAMES
        self._k, self._v = (E4M3(k, layer._k_scale), E4M3(v, layer._v_scale)) if stored else (k, v)
