# SPDX-License-Identifier: MIT
"""This module holds the kernels and buffers of a `HostDecodePlan`."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.decode.kernels import Kernels
from openmsa.host_kv import triton_fetch
from openmsa.host_kv.cache import HostKV
from openmsa.kv_cache import E4M3, PagedIndexKeys, PagedKV
from openmsa.runtime.kinds import computes
from openmsa.sparse_attention import triton_decode


class HostKernels:
    """Runs a step in stages: selection, the block cache, attention. A token and KV head become a sequence of their own, whose
    keys are those of the chosen blocks, so that attention over slots is that of `DecodePlan`, bit for bit unless new tokens
    share the reading of blocks there or blocks are taken best first (`PlanMemory.best`)."""

    def __init__(self, resident: Kernels, q: Tensor) -> None:
        """Takes the kernels of a `DecodePlan` of the same fields, and memory for the queries of the largest step."""
        sizes = resident.sizes
        resident.words = resident.handed = resident.parts = self.parts = None
        self.resident, self.q = resident, q
        self.step = triton_fetch.Step.allocate(q.shape[0] * sizes.num_kv_heads, sizes.topk, q.device)
        self.places = torch.arange(sizes.topk, dtype=torch.int32, device=q.device)

    def _short(self, kv: HostKV, lines: int) -> PagedKV:
        """Returns the chosen blocks of so many tokens and KV heads, a sequence each, whose pages are slots."""
        return PagedKV(kv.cache.k, kv.cache.v, self.step.table[:lines], self.step.lens[:lines])

    def refuse(self, q: Tensor, kv: HostKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys) -> str | None:
        """Says why the kernels cannot read these formats; returns None where they can."""
        return self.resident.refuse(q, self._short(kv, 0), index_q, index_keys)

    def take_back(self) -> None:
        """Does what `PlanMemory.take_back` does."""
        self.resident.take_back()

    def run(
        self,
        q: Tensor,
        kv: HostKV,
        index_q: Tensor | E4M3,
        index_keys: PagedIndexKeys,
        softmax_scale: float,
        blocks: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Runs one layer; the arguments are taken as checked."""
        config = self.resident.attend[kv.format][kv.batch - 1]
        self.resident.select(index_q, index_keys, blocks)
        (tokens, num_q_heads, dim), sizes = q.shape, self.resident.sizes
        triton_fetch.bring(kv, blocks, sizes.new_tokens, self.step)
        lines, group = tokens * sizes.num_kv_heads, num_q_heads // sizes.num_kv_heads
        result = out
        if not _in_a_row(q):
            computes("queries next to each other")
            q = self.q[:tokens].copy_(q)
        if not _in_a_row(out):  # A program writes rows of `out` when no other reads the same rows of `q`.
            computes("the result in its place")
            out = self.q[:tokens]
        short = self._short(kv, lines)
        triton_decode.launch(
            *(config, self.resident.partials),
            q.view(lines, group, dim),
            short,
            None,
            self.places.expand(lines, 1, -1),
            short.seq_lens,
            1,
            sizes.block_size,
            softmax_scale,
            out.view(lines, group, dim),
            lse.view(lines, group),
        )
        if out is not result:
            result.copy_(out)


def _in_a_row(rows: Tensor) -> bool:
    """Tells whether the heads of all tokens lie one stride apart."""
    return rows.stride(0) == rows.shape[1] * rows.stride(1)
