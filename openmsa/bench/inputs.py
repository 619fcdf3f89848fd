# SPDX-License-Identifier: MIT
"""A workload has these tensors: random inputs, flat and paged, and random and clustered selections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openmsa import E4M3, NVFP4, CertifiedKeys, PagedIndexKeys, PagedKV, Sequences
from openmsa.bench.cost import SPAN, SPARE
from openmsa.bench.recorded import recorded
from openmsa.bench.workloads import Workload
from openmsa.kv_cache import stored as formats

ROWS_AT_A_TIME = 1 << 27  # random numbers held while a selection is drawn


@dataclass(frozen=True)
class Pages:
    """The keys of a workload lie in shuffled pages of one block each.

    pool:  ``[num_pages, num_kv_heads, block_size, 2 * head_dim]``, keys and values side by side as GPU engines keep them; the
           pools of `kv` are views of it. On a CPU they are two tensors and `pool` is None.
    """

    kv: PagedKV
    index: PagedIndexKeys
    pool: Tensor | None


@dataclass(frozen=True)
class Stored:
    """These are operands in a low-precision form, as the public functions take them."""

    index_q: Tensor | formats.Stored
    k: Tensor | formats.Stored | PagedKV
    v: Tensor | formats.Stored | None
    index_k: formats.Stored | PagedIndexKeys


@dataclass
class Inputs:
    """One workload has these random tensors on one device, from a fixed seed; large ones that few rows need are made on demand.

    q, index_q:     ``[total_q, num_q_heads, head_dim]``, ``[total_q, num_kv_heads, index_dim]``.
    k, v, index_k:  ``[batch * context, num_kv_heads, head_dim]`` twice, ``[batch * context, 1, index_dim]``.
    chosen_forms:   which form of a peer was the fastest, remembered over the rounds.
    """

    workload: Workload
    device: torch.device
    seed: int = 0
    chosen_forms: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        w, self._generator = self.workload, torch.Generator(self.device).manual_seed(self.seed)
        total_k = w.batch * w.context
        self.q = self._normal(w.total_q, w.num_q_heads, w.head_dim)
        self.index_q = self._normal(w.total_q, w.num_kv_heads, w.index_dim)
        self.k = self._normal(total_k, w.num_kv_heads, w.head_dim)
        self.v = self._normal(total_k, w.num_kv_heads, w.head_dim)
        self.index_k = self._normal(total_k, 1, w.index_dim)
        self.seqs = self._sequences()
        self._selections: dict[str, Tensor] = {}

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=self.workload.dtype, device=self.device)

    def _sequences(self) -> Sequences:
        w = self.workload
        starts = torch.arange(w.batch + 1, dtype=torch.int32, device=self.device)
        offset = torch.full((w.batch,), w.context - w.q_len, dtype=torch.int32, device=self.device)
        return Sequences(starts * w.q_len, starts * w.context, w.q_len, w.context, offset)

    def pages(self) -> Pages:
        """Makes a fresh copy of the keys in shuffled pages. context must be a multiple of block_size."""
        w = self.workload
        if w.context % w.block_size:
            raise ValueError(f"context must be a multiple of block_size ({w.block_size}) for pages, got {w.context}")
        num_pages = w.batch * w.num_blocks
        table = torch.randperm(num_pages, generator=self._generator, device=self.device)
        shape, pool = (num_pages, w.num_kv_heads, w.block_size), None
        if self.device.type == "cuda":
            pool = self.q.new_empty(*shape, 2 * w.head_dim)
            k, v = pool.split(w.head_dim, dim=-1)
        else:
            k, v = (self.q.new_empty(*shape, w.head_dim) for _ in range(2))
        k[table] = self.k.unflatten(0, (num_pages, w.block_size)).transpose(1, 2)
        v[table] = self.v.unflatten(0, (num_pages, w.block_size)).transpose(1, 2)
        index = self.q.new_empty(num_pages, 1, w.block_size, w.index_dim)
        index[table] = self.index_k.unflatten(0, (num_pages, w.block_size)).transpose(1, 2)
        page_table = table.view(w.batch, w.num_blocks).int()
        lens = [torch.full((w.batch,), w.context, dtype=torch.int32, device=self.device) for _ in range(2)]
        return Pages(PagedKV(k, v, page_table, lens[0]), PagedIndexKeys(index, page_table, lens[1]), pool)

    def stored(self, form: str, paged: bool) -> Stored:
        """Makes the keys in one of the `openmsa.bench.cost.FORMS`, scales per tensor, and index queries to go with them."""
        if paged:
            pages = self.pages()
            table, lens = pages.kv.page_table, pages.kv.seq_lens
            k, v, index_k = pages.kv.k, pages.kv.v, pages.index.keys
        else:
            k, v, index_k = self.k, self.v, self.index_k
        assert isinstance(k, Tensor)
        assert isinstance(v, Tensor)
        assert isinstance(index_k, Tensor)
        keys: list[Any] = [k, v]
        if form == "certified":
            index: formats.Stored = CertifiedKeys.quantize(index_k)
        elif form == "e4m3":
            *keys, index = (E4M3.quantize(x, per="tensor") for x in (k, v, index_k))
        else:
            *keys, index = (NVFP4.quantize(x) for x in (k, v, index_k))
        index_q = E4M3.quantize(self.index_q, per="tensor") if form == "e4m3" else self.index_q
        if paged:
            return Stored(index_q, PagedKV(keys[0], keys[1], table, lens), None, PagedIndexKeys(index, table, lens))
        return Stored(index_q, keys[0], keys[1], index)

    def selection(self, kind: str) -> Tensor:
        """Returns int32 ``[total_q, num_kv_heads, topk]``: distinct visible ids, each query's own block among them, -1 tail.

        kind: "random", independent for every query and head; or "clustered": each span of 64 queries draws topk + 8 blocks
        and each query keeps topk - 1 of them plus its own; or "recorded" (`openmsa.bench.recorded`).
        """
        w = self.workload
        if kind == "recorded" and kind not in self._selections:
            of_model = recorded(w.q_len, w.context, w.num_kv_heads, w.topk, w.block_size)
            self._selections[kind] = of_model.repeat(w.batch, 1, 1).to(self.device)
        if kind not in self._selections:
            draw: dict[str, Callable[[int, int], Tensor]] = {"random": self._random, "clustered": self._clustered}
            step = max(SPAN, ROWS_AT_A_TIME // (w.num_kv_heads * w.num_blocks) // SPAN * SPAN)
            parts = [draw[kind](start, min(start + step, w.q_len)) for _ in range(w.batch) for start in range(0, w.q_len, step)]
            self._selections[kind] = torch.cat(parts)
        return self._selections[kind]

    def _own_blocks(self, start: int, stop: int) -> Tensor:
        """Returns the block of each query from `start` to `stop` of a sequence, int64 [stop - start]."""
        w = self.workload
        return torch.arange(w.context - w.q_len + start, w.context - w.q_len + stop, device=self.device) // w.block_size

    def _draw(self, below: Tensor, count: int) -> Tensor:
        """Draws distinct random ids under `below`, int64 [num_kv_heads, len(below), count], -1 where there are too few."""
        w = self.workload
        chance = torch.rand(w.num_kv_heads, below.numel(), w.num_blocks, generator=self._generator, device=self.device)
        chance.masked_fill_(torch.arange(w.num_blocks, device=self.device) >= below[:, None], -1)
        best, ids = chance.topk(min(count, w.num_blocks), dim=-1)
        ids = ids.masked_fill(best < 0, -1)
        return torch.nn.functional.pad(ids, (0, count - ids.shape[-1]), value=-1)

    def _with_own(self, others: Tensor, own: Tensor) -> Tensor:
        """Joins others [heads, queries, topk - 1] and own [queries] to int32 [queries, heads, topk], ascending, -1 tail."""
        ids = torch.cat((others, own.expand(others.shape[0], -1)[..., None]), dim=-1)
        last = torch.iinfo(torch.int64).max
        ids = ids.masked_fill(ids < 0, last).sort(dim=-1).values
        return ids.masked_fill(ids == last, -1).transpose(0, 1).int().contiguous()

    def _random(self, start: int, stop: int) -> Tensor:
        own = self._own_blocks(start, stop)
        return self._with_own(self._draw(own, self.workload.topk - 1), own)

    def _clustered(self, start: int, stop: int) -> Tensor:
        w, own = self.workload, self._own_blocks(start, stop)
        spans = self._draw(own[::SPAN], w.topk + SPARE)  # [heads, spans, topk + 8]: blocks before the span's first
        base = spans.repeat_interleave(SPAN, dim=1)[:, : own.numel()]  # [heads, queries, topk + 8]
        chance = torch.rand(base.shape, generator=self._generator, device=self.device).masked_fill_(base < 0, -1)
        return self._with_own(base.gather(2, chance.topk(w.topk - 1, dim=-1).indices), own)
