# SPDX-License-Identifier: MIT
"""This module holds the kernels and buffers of a `HostDecodePlan`.

In a CUDA graph, a step of many index keys is served as two halves of its sequences: blocks of the first are fetched on a stream
beside, while those of the second are chosen. Both have one block cache. Slots of the first half are the last used when the
second takes some, and there are slots for both, so that none of them is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.decode.kernels import Kernels, select
from openmsa.decode.memory import scores_held
from openmsa.decode.sizes import Sizes
from openmsa.decode.two_parts import InTurn, Side, like
from openmsa.host_kv import triton_fetch
from openmsa.host_kv.cache import HostKV
from openmsa.kv_cache import E4M3, PagedIndexKeys, PagedKV
from openmsa.runtime.tape import computes
from openmsa.sparse_attention import triton_decode

LEAST_BYTES = 128 << 20
"""From so many bytes of 16-bit index keys on, that page tables have room for, a step is served as two halves."""


class Layer(NamedTuple):
    """These are the checked arguments of one layer's step."""

    q: Tensor
    kv: HostKV
    index_q: Tensor | E4M3
    index_keys: PagedIndexKeys
    softmax_scale: float
    blocks: Tensor
    out: Tensor
    lse: Tensor

    def of(self, first: int, last: int, new_tokens: int) -> Layer:
        """Returns the step of sequences `first` up to `last` alone."""
        rows, some = slice(first * new_tokens, last * new_tokens), slice(first, last)
        keys = PagedIndexKeys(self.index_keys.keys, self.index_keys.page_table[some], self.index_keys.seq_lens[some])
        inputs = (self.q[rows], self.kv.sequences(first, last), self.index_q[rows], keys)
        return Layer(*inputs, self.softmax_scale, self.blocks[rows], self.out[rows], self.lse[rows])


class HostKernels:
    """Runs a step in stages: selection, the block cache, attention. A token and KV head become a sequence of their own, whose
    keys are those of the chosen blocks, so that attention over slots is that of `DecodePlan`, bit for bit."""

    def __init__(self, resident: Kernels, q: Tensor) -> None:
        """Takes the kernels of a `DecodePlan` of the same fields, and memory for the queries of the largest step."""
        sizes = resident.sizes
        resident.words, resident.parts = None, None
        self.resident, self.q = resident, q
        self.step = triton_fetch.Step.allocate(q.shape[0] * sizes.num_kv_heads, sizes.topk, q.device)
        self.places = torch.arange(sizes.topk, dtype=torch.int32, device=q.device)
        batch, capacity = q.shape[0] // sizes.new_tokens, sizes.num_blocks * sizes.block_size
        self.parts: Side | InTurn | None = None
        if batch > 1 and _index_bytes(batch, capacity, sizes) >= LEAST_BYTES:
            self.parts = InTurn() if resident.interpreted else Side(q.device)
            held = scores_held(batch // 2 * sizes.new_tokens, capacity, sizes)
            self.scores = torch.empty(held, dtype=torch.float32, device=q.device)
        self._loaded: set[tuple[int, str, int]] = set()

    def _short(self, kv: HostKV, lines: int) -> PagedKV:
        """Returns the chosen blocks of so many tokens and KV heads, a sequence each, whose pages are slots."""
        return PagedKV(kv.cache.k, kv.cache.v, self.step.table[:lines], self.step.lens[:lines])

    def refuse(self, q: Tensor, kv: HostKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys) -> str | None:
        """Says why the kernels cannot read these formats; returns None where they can."""
        return self.resident.refuse(q, self._short(kv, 0), index_q, index_keys)

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
        layer, config = Layer(q, kv, index_q, index_keys, softmax_scale, blocks, out, lse), self.resident.attend[kv.format]
        if self._halves(kv, index_keys):
            self._run_halves(layer, config[kv.batch - 1])
        else:
            self.resident.select(index_q, index_keys, blocks)
            self._attend(layer, config[kv.batch - 1])

    def _halves(self, kv: HostKV, index_keys: PagedIndexKeys) -> bool:
        """Tells whether a step is served as two halves: in graphs, and where a graph must find their kernels loaded."""
        batch, capacity = kv.batch, index_keys.capacity
        bounds = index_keys.format == "certified" and self.resident.bounds_that_pay(batch, capacity) is not None
        few = batch < 2 or _index_bytes(batch, capacity, self.resident.sizes) < LEAST_BYTES
        if self.parts is None or few or bounds:
            return False
        return self.parts.serves() or like(kv, index_keys) not in self._loaded

    def _run_halves(self, layer: Layer, config: triton_decode.Config) -> None:
        sizes, batch, resident = self.resident.sizes, layer.kv.batch, self.resident
        side = self.parts if self.parts is not None and self.parts.serves() else InTurn()
        cut = -(-batch // 2)
        first, second = layer.of(0, cut, sizes.new_tokens), layer.of(cut, batch, sizes.new_tokens)
        starts = resident.cu_seqlens_q
        select(first.index_q, first.index_keys, starts[: cut + 1], sizes, resident.scores, None, first.blocks)
        side.mark()
        try:
            with side.beside():
                self._attend(first, config)
            # The scores of the first half may still be read.
            select(second.index_q, second.index_keys, starts[: batch - cut + 1], sizes, self.scores, None, second.blocks)
        finally:
            side.join()
        self._attend(second, config)
        self._loaded.add(like(layer.kv, layer.index_keys))

    def _attend(self, layer: Layer, config: triton_decode.Config) -> None:
        """Brings the chosen blocks into slots and attends to them."""
        (tokens, num_q_heads, dim), sizes, kv = layer.q.shape, self.resident.sizes, layer.kv
        triton_fetch.bring(kv, layer.blocks, sizes.new_tokens, self.step)
        lines, group = tokens * sizes.num_kv_heads, num_q_heads // sizes.num_kv_heads
        q, out = layer.q, layer.out
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
            layer.softmax_scale,
            out.view(lines, group, dim),
            layer.lse.view(lines, group),
        )
        if out is not layer.out:
            layer.out.copy_(out)


def _index_bytes(batch: int, capacity: int, sizes: Sizes) -> int:
    """Returns how many bytes the 16-bit index keys of so many sequences take, of `capacity` keys each."""
    return batch * sizes.index_key_heads * capacity * sizes.index_dim * 2


def _in_a_row(rows: Tensor) -> bool:
    """Tells whether the heads of all tokens lie one stride apart."""
    return rows.stride(0) == rows.shape[1] * rows.stride(1)
