# SPDX-License-Identifier: MIT
"""vLLM's sparse layer rotates queries, writes both caches, calls its indexer with the index queries and then its attention with
the queries. `OpenMSAIndexer` selects blocks for the tokens behind the decode rows and hands the index queries on;
`OpenMSAAttention` runs the decode rows, selection and all, in their plan and attends the others to their blocks, straight into
the layer's output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerImpl
from vllm.models.minimax_m3.common.sparse_attention import MiniMaxM3SparseImpl

from openmsa import E4M3, PagedIndexKeys, PagedKV
from openmsa.integrations.vllm.backend import OpenMSAIndexBackend, Prompts, Step
from openmsa.integrations.vllm.sizes import E4M3_NAMES, LayerSizes


class Handed(NamedTuple):
    """Holds what the indexer hands to the attention of its layer."""

    index_q: Tensor | E4M3  # [tokens, index_heads, index_dim]
    blocks: Tensor | None  # int32 [tokens behind the decode rows, index_heads, topk]


class Pools(NamedTuple):
    """Holds the pools of a main cache, views of vLLM's tensor ``[num_pages, num_kv_heads, page_size, 2 * head_dim]``."""

    of: Tensor
    k: Tensor | E4M3
    v: Tensor | E4M3


class OpenMSAIndexer(MiniMaxM3IndexerImpl):
    """Selects the blocks of a layer. It takes over the index cache of the implementation that vLLM's constructor made."""

    indexer_backend_cls = OpenMSAIndexBackend

    def __init__(self, made: Any, layer_name: str, sizes: LayerSizes) -> None:
        nn.Module.__init__(self)  # vLLM's own would make and register a second index cache.
        self.index_cache = made.index_cache
        self.num_index_heads, self.index_head_dim = sizes.index_heads, sizes.index_dim
        self.topk_blocks, self.block_size = sizes.topk, sizes.block_size
        self.init_blocks, self.local_blocks, self.score_type = sizes.init_blocks, sizes.local_blocks, made.score_type
        self.layer_name = layer_name
        self._handed: Handed | None = None
        self._pool: tuple[Tensor, Tensor | E4M3] | None = None

    @property
    def pool(self) -> Tensor | E4M3:
        """Returns the index keys ``[num_pages, 1, page_size, index_dim]``; vLLM binds them without the dimension of heads. The
        view is made when vLLM binds another tensor."""
        bound = self.index_cache.kv_cache
        if self._pool is None or self._pool[0] is not bound:
            keys = bound.unsqueeze(1) if bound.dim() == 3 else bound
            self._pool = bound, E4M3(keys) if self.index_cache.dtype == torch.float8_e4m3fn else keys
        return self._pool[1]

    def forward(self, index_query: Tensor) -> tuple[None, None]:
        """Takes index queries ``[tokens, index_heads * index_dim]`` of the index cache's dtype. Blocks stay in the plan."""
        step = Step.current(self.layer_name)
        if step is None:
            return None, None
        rows = index_query.view(-1, self.num_index_heads, self.index_head_dim)
        index_q = E4M3(rows) if rows.dtype == torch.float8_e4m3fn else rows
        blocks = None
        if step.prompts is not None:
            first = step.num_decode_tokens
            own = self._prompts(step.prompts)
            blocks = own.plan.select(index_q[first : first + own.total_q], self.pool)
        self._handed = Handed(index_q, blocks)
        return None, None

    def _prompts(self, main: Prompts) -> Prompts:
        """Returns the prompts behind the index cache's table, which are those of the main cache where the tables are one."""
        step = Step.current(self.index_cache.prefix)
        assert step is not None
        own = step.prompts
        assert own is not None
        return main if own.page_table.data_ptr() == main.page_table.data_ptr() else own

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
        self._pools: Pools | None = None

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
        handed, pools = layer.indexer.impl.take(), self._pools_of(layer, kv_cache)
        q, out = (x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        first = step.num_decode_tokens
        if step.decode_rows is not None:
            self._decode(layer, step, pools, q[:first], handed.index_q[:first], out[:first])
        if step.prompts is not None:
            assert handed.blocks is not None
            rows = slice(first, first + step.prompts.total_q)
            step.prompts.plan.attend(q[rows], pools.k, pools.v, handed.blocks, out=out[rows])
        return output

    def _decode(self, layer: Any, step: Step, pools: Pools, q: Tensor, index_q: Tensor | E4M3, out: Tensor) -> None:
        """Runs the decode rows of a step, `q` and `out` ``[rows, num_q_heads, head_dim]``, selection and all."""
        indexer, rows = layer.indexer.impl, step.decode_rows
        index_step = Step.current(indexer.index_cache.prefix)
        assert rows is not None
        assert rows.plan is not None
        assert index_step is not None
        assert index_step.decode_rows is not None
        index_rows = index_step.decode_rows
        kv = PagedKV(pools.k, pools.v, rows.page_table, rows.seq_lens)
        keys = PagedIndexKeys(indexer.pool, index_rows.page_table, index_rows.seq_lens)
        rows.plan.run(q, kv, index_q, keys, out=out)

    def _pools_of(self, layer: Any, kv_cache: Tensor) -> Pools:
        """Returns the views of a layer's cache, which are made when vLLM binds another tensor."""
        if self._pools is None or self._pools.of is not kv_cache:
            k, v = kv_cache.split(self.head_size, dim=-1)
            if self.kv_cache_dtype in E4M3_NAMES:
                self._pools = Pools(kv_cache, E4M3(k, layer._k_scale), E4M3(v, layer._v_scale))
            else:
                self._pools = Pools(kv_cache, k, v)
        return self._pools
