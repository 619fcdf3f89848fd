# SPDX-License-Identifier: MIT
"""`ContextDecodePlan` runs decode steps over caches whose pages are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from openmsa.block_scores import STAGE as SCORING
from openmsa.block_topk import SCORES_STAGE
from openmsa.block_topk.given_scores import TopkCall
from openmsa.inputs import check_counts, check_scoring
from openmsa.kv_cache import PagedIndexKeys, PagedKV, Stored
from openmsa.kv_cache.results import check_apart, check_places
from openmsa.kv_cache.rows import QUERY_FORMATS
from openmsa.parallel.exchange import Choice, Collectives
from openmsa.parallel.ranks import Ranks
from openmsa.parallel.shards import PageStripes
from openmsa.parallel.symmetric import Symmetric, refuse
from openmsa.plan import AttentionPlan
from openmsa.runtime import checks
from openmsa.runtime.kinds import tensors_in
from openmsa.sparse_attention import check_sparse
from openmsa.types import INT32_MAX, Layout, out_dtype, wide_dtype

if TYPE_CHECKING:
    from openmsa.parallel.chain import Chain

EXCHANGES = ("auto", "symmetric", "collective")
MAX_NEW_TOKENS = 16


@dataclass(kw_only=True, eq=False)
class ContextDecodePlan:
    """Scores index keys, selects blocks and attends for the newest tokens of sequences whose pages are spread over ranks, as
    `PageStripes` says. It is made once and serves all layers and steps of one batch; every rank of the group makes the same
    calls, with the same queries.

    seq_lens:       int32 ``[batch]``, keys of each whole sequence, new ones included; the same on all ranks.
    page_table:     int32 ``[batch, max_pages]``, this rank's pages: page p of a sequence stands in column ``p // ranks`` of
                    rank ``p % ranks``. Keys are written where ``PageStripes.held`` puts them, before a layer runs.
    page_size:      keys of a page, a multiple of block_size.
    group:          a process group, a `DeviceMesh` of one dimension, or None for the default group.
    new_tokens:     queries of each sequence, 1 to 16, the last of its positions; with several of them local_blocks is at least
                    1.
    topk, block_size, init_blocks, local_blocks, softmax_scale:  as in `msa_attention`.
    exchange:       "symmetric": kernels write into the memory of the other ranks, GPUs of one host and a group of nccl, for
                    `attend` with float16, bfloat16 and `E4M3` queries.
                    "collective": `all_gather`, on every backend. "auto": "symmetric" where it can serve; `exchange` then says
                    what was chosen.
    timeout:        seconds that kernels of "symmetric" wait for another rank before they end with an error of the GPU;
                    collectives end with the group's timeout.

    A layer takes one exchange of candidates, a score and an id for each of topk blocks of a row, and one of partial results.
    The selection is that of one rank, bit for bit; results are those of one rank but for the rounding of partial results to the
    dtype of outputs.

    Change `seq_lens` and `page_table` in place and call `refresh` between steps. On a GPU nothing waits on the host: steps,
    with `refresh` in front, can be captured in a CUDA graph after a layer of their kind has run once. Use one plan a stream.
    No gradients are computed. Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    """

    seq_lens: Tensor
    page_table: Tensor
    page_size: int
    group: dist.ProcessGroup | DeviceMesh | None = None
    new_tokens: int = 1
    topk: int = 16
    block_size: int = 128
    init_blocks: int = 0
    local_blocks: int = 1
    softmax_scale: float | None = None
    exchange: str = "auto"
    timeout: float = 60.0
    impl: str = "auto"
    _mine: Tensor | None = field(init=False, repr=False, default=None)
    _chain: Chain | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._check()
        self._ranks = Ranks.of(self.group)
        self._stripes = PageStripes(self._ranks.size, self.page_size)
        self._device, batch, new = self.seq_lens.device, self.seq_lens.shape[0], self.new_tokens
        self._choice = Choice(self.topk, self.init_blocks, self.local_blocks, self.page_size // self.block_size)
        reason = refuse(self._ranks, self._device, self.topk)
        if self.exchange == "symmetric" and reason is not None:
            raise NotImplementedError(f"exchange='symmetric' cannot serve: {reason}")
        symmetric = self.exchange != "collective" and reason is None
        self._exchange = Symmetric(self._ranks, self._device, self.timeout) if symmetric else Collectives(self._ranks)
        self.exchange, self.total_q = self._exchange.name, batch * new
        # Lengths are kept where kernels read them; `refresh` writes them.
        int32: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        self._new = torch.arange(new, **int32) - (new - 1)
        self._lens, self._cu_k = torch.zeros(batch, **int32), torch.zeros(batch + 1, **int32)
        self._token_lens, self._visible, self._visible_here = (torch.zeros(self.total_q, **int32) for _ in range(3))
        self._table = self.page_table if new == 1 else self.page_table.repeat_interleave(new, 0)
        self._measure()
        starts = torch.arange(batch + 1, **int32) * new
        # Several queries see all keys of the rank: a block of which some are too new for a query is the query's own, which is
        # selected whatever its score, or one that it does not see.
        offset, capacity = None if new == 1 else self._lens, self.page_table.shape[1] * self.page_size
        self._layout = Layout(starts, self._cu_k, new, capacity, offset, new)
        self._attention = AttentionPlan(
            cu_seqlens_q=torch.arange(self.total_q + 1, **int32),
            total_q=self.total_q,
            max_seqlen_q=1,
            max_seqlen_k=capacity,
            page_table=self._table,
            seq_lens=self._token_lens,
            page_size=self.page_size,
            topk=self.topk,
            block_size=self.block_size,
            softmax_scale=self.softmax_scale,
            impl=self.impl,
        )
        if isinstance(self._exchange, Symmetric) and self.impl == "auto":
            from openmsa.parallel.chain import Chain

            self._chain = Chain(self._exchange, self._token_lens, self.block_size)

    def _check(self) -> None:
        checks.tensor("seq_lens", self.seq_lens, "[batch]", (torch.int32,))
        checks.tensor("page_table", self.page_table, "[batch, max_pages]", (torch.int32,))
        checks.alike("page_table", self.page_table, "seq_lens", self.seq_lens)
        checks.size("page_table", self.page_table, 0, self.seq_lens.shape[0], "the sequences of seq_lens")
        checks.integer("page_table.shape[1]", self.page_table.shape[1], 1)
        checks.integer("new_tokens", self.new_tokens, 1, MAX_NEW_TOKENS)
        check_counts(self.topk, self.block_size, self.init_blocks, self.local_blocks)
        checks.divides("block_size", self.block_size, "page_size", checks.integer("page_size", self.page_size, 1, INT32_MAX))
        if self.new_tokens > 1 and self.local_blocks < 1:
            raise NotImplementedError(f"local_blocks must be at least 1 with several new_tokens, got {self.local_blocks}")
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange must be one of {', '.join(map(repr, EXCHANGES))}, got {self.exchange!r}")
        if checks.scale("timeout", self.timeout) <= 0:
            raise ValueError(f"timeout must be positive, got {self.timeout}")

    def refresh(self) -> None:
        """Follows changes that were made in place to `seq_lens` and `page_table`. On a GPU it launches a few small kernels and
        never waits."""
        self._measure()
        self._attention.refresh()

    def _measure(self) -> None:
        rank, block = self._ranks.rank, self.block_size
        self._lens.copy_(self._stripes.held(self.seq_lens, rank))
        self._cu_k[1:].copy_(self._lens.cumsum(0))
        seen = (self.seq_lens[:, None] + self._new).clamp(min=0).flatten()
        self._token_lens.copy_(self._stripes.held(seen, rank))
        self._visible.copy_((seen + (block - 1)) // block)
        self._visible_here.copy_((self._token_lens + (block - 1)) // block)
        if self.new_tokens > 1:
            self._table.copy_(self.page_table.repeat_interleave(self.new_tokens, 0))

    def select(self, index_q: Tensor | Stored, index_k: Tensor | Stored) -> Tensor:
        """Selects the blocks that each query of a layer reads.

        index_q:  ``[batch * new_tokens, index_heads, index_dim]``, as in `select_blocks`, the same on all ranks.
        index_k:  this rank's pool of index keys, ``[num_pages, index_key_heads, page_size, index_dim]``, in any format. Of
                  `CertifiedKeys` the exact keys are read and the int8 ones left alone: other formats read fewer bytes.

        Returns int32 ``[batch * new_tokens, index_heads, topk]``, ids counted in the whole sequence, the same on all ranks.
        """
        for name, value in (("index_q", index_q), ("index_k", index_k)):
            checks.no_gradient(name, value, "blocks are selected, which has no derivative")
        keys = PagedIndexKeys(index_k, self.page_table, self._lens)
        call = check_scoring(index_q, keys, self._layout, self.block_size, False)
        checks.size("index_q", index_q, 0, self.total_q, "batch * new_tokens of the plan")
        checks.size("index_k", index_k, 2, self.page_size, "page_size of the plan")
        with torch.no_grad():
            if self._chain is not None and self._chain.selects(keys, call):
                bounds = self._chain.bounds(keys, call, self._choice)
                if bounds is not None:
                    blocks, self._mine = self._chain.select_certified(bounds, self._visible, self._choice)
                else:
                    blocks, self._mine = self._chain.select(call, self._visible_here, self._visible, self._choice)
                return blocks
            scores = SCORING.run(self.impl, call)
            ids = SCORES_STAGE.run(self.impl, TopkCall(scores, self.topk, self._visible_here, 0, 0))
            blocks, self._mine = self._exchange.choose(scores, ids, self._visible, self._choice)
        return blocks

    def attend(
        self,
        q: Tensor | Stored,
        k: Tensor | Stored,
        v: Tensor | Stored,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attends to the blocks of the latest `select`.

        q:         ``[batch * new_tokens, num_q_heads, head_dim]``, as in `sparse_attention`, the same on all ranks.
        k, v:      this rank's pools, ``[num_pages, num_kv_heads, page_size, head_dim]``.
        out, lse:  where to write, contiguous, ``[batch * new_tokens, num_q_heads, head_dim]`` in q's dtype (bfloat16 for
                   `E4M3`) and float32 ``[batch * new_tokens, num_q_heads]`` (float64 for float64 queries); None: out is made,
                   lse is dropped.

        Returns `out`, the same on all ranks.
        """
        if self._mine is None:
            raise ValueError("select must run before attend, which reads its blocks, got none")
        checks.rows("q", q, "[batch * new_tokens, num_q_heads, head_dim]", QUERY_FORMATS)
        part = torch.empty(q.shape, dtype=out_dtype(q), device=self._device)
        part_lse = torch.empty(q.shape[:2], dtype=wide_dtype(q), device=self._device)
        for name, given in (("out", out), ("lse", lse)):
            checks.no_gradient(name, given, "it is written to")
        check_places(q, [*tensors_in(k, v), self._table, self._token_lens, self._mine], out, lse, in_place=q)
        out, lse = (torch.empty_like(x) if y is None else y for x, y in ((part, out), (part_lse, lse)))
        kv = PagedKV(k, v, self._table, self._token_lens)
        checks.size("k", k, 2, self.page_size, "page_size of the plan")
        if self._chain is not None and self._chain.attends(q, kv):
            scale = check_sparse(
                q, kv, None, self._mine, self._attention._layout, self.block_size, self.softmax_scale, True, False
            )[6]
            self._chain.attend(q, kv, self._mine, scale, out, lse)
            return out
        self._attention.attend(q, k, v, self._mine, out=part, lse=part_lse)
        self._exchange.merge(part, part_lse, out, lse)
        return out

    def run(
        self,
        q: Tensor | Stored,
        k: Tensor | Stored,
        v: Tensor | Stored,
        index_q: Tensor | Stored,
        index_k: Tensor | Stored,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Does what `select` and `attend` do, one after the other, for one layer; see there. Returns `out`."""
        self.select(index_q, index_k)
        for name, place in (("out", out), ("lse", lse)):
            if isinstance(place, Tensor):
                check_apart(name, place, list(tensors_in(index_k)))
        return self.attend(q, k, v, out=out, lse=lse)
