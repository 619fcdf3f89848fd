# SPDX-License-Identifier: MIT
"""A plan's kernels and their buffers: one launch a layer for few sequences, three for many, five with certified index keys, or
in a CUDA graph ten in two parts."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.block_topk import triton_certified
from openmsa.block_topk.triton_decode import decode_select, decode_select_workspace
from openmsa.block_topk.triton_topk import MAX_BLOCKS
from openmsa.decode import triton_launch, two_parts
from openmsa.decode.triton_launch import Sizes, Step
from openmsa.decode.triton_layer import ATTEND, EVERY, MERGE, SCORE, Words
from openmsa.decode.two_parts import Buffers, InTurn, Part, Side, TwoParts
from openmsa.inputs import exact_keys
from openmsa.kv_cache import E4M3, PagedIndexKeys, PagedKV
from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.runtime import devices
from openmsa.sparse_attention import triton_decode

FORMATS = ("plain", "e4m3", "nvfp4")  # of keys and values
BOUNDS_PAY = 64 << 20
"""Bytes of exact index keys beside `CertifiedKeys`, at most, that are read without bounds first. Measured on an H200, sequences
x keys, time with bounds over time without: 8 x 8K 1.19, 1 x 128K 1.17; of so many bytes 32 x 8K 1.03, 8 x 32K 0.99; of more
64 x 8K 1.00, 32 x 32K 0.82, 1 x 1M 0.76."""


class Kernels:
    """Allocates for up to `max_batch` sequences; a run never waits for the device and allocates nothing, but outside of a graph
    for what `TwoParts.serve` loads."""

    def __init__(self, sizes: Sizes, max_batch: int, max_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        if sizes.num_blocks > MAX_BLOCKS:
            raise NotImplementedError(
                f"max_pages * page_size / block_size must be at most {MAX_BLOCKS} on {device}, got {sizes.num_blocks}"
            )
        self.sizes, facts = sizes, devices.facts(device)
        self.one_launch = [triton_launch.configure(batch, sizes, facts) for batch in range(1, max_batch + 1)]
        self.attend = {form: [_attend(b + 1, sizes, facts, form) for b in range(max_batch)] for form in FORMATS}
        self.interpreted = device.type != "cuda"
        self.pdl = devices.has_pdl(device)
        self._allocate(max_batch, max_pages * sizes.page_size, dtype, device)
        if not self.interpreted:
            torch.cuda.current_stream(device).synchronize()  # the counters are written before any stream runs the plan

    def _allocate(self, max_batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        sizes, tokens = self.sizes, max_batch * self.sizes.new_tokens
        self.partials = self._partials(max_batch, dtype, device)
        self.certified = _certified(max_batch, capacity, sizes, device)
        self.parts: TwoParts | None = None
        if self.certified is not None and any(self._pays(batch, capacity) for batch in range(2, max_batch + 1)):
            rest = max_batch - two_parts.first_part(max_batch)
            second = Buffers(_bounds(rest, sizes, device), self._partials(rest, dtype, device))
            self.parts = TwoParts(second, self.attend, InTurn() if self.interpreted else Side(device))
        scores = decode_select_workspace(tokens, sizes.index_heads, capacity, sizes.block_size)
        self.scores = torch.empty(scores, dtype=torch.float32, device=device)
        self.cu_seqlens_q = torch.arange(max_batch + 1, dtype=torch.int32, device=device) * sizes.new_tokens
        small = {(i + 1) * sizes.new_tokens: c for i, c in enumerate(self.one_launch) if c}
        split = max((n * c.attend.splits for n, c in small.items() if c.merging), default=0)
        self.words = (
            Words.allocate(max(small) * sizes.index_heads * sizes.num_blocks, split * sizes.num_q_heads, sizes.head_dim, device)
            if small
            else None
        )

    def _partials(self, max_batch: int, dtype: torch.dtype, device: torch.device) -> triton_decode.Partials:
        """Of attention to steps of up to so many sequences."""
        sizes = self.sizes
        rows, parts = triton_decode.row_tiles(sizes.num_q_heads // sizes.num_kv_heads, sizes.head_dim)
        heads = sizes.num_kv_heads * parts
        plain = self.attend["plain"][:max_batch]  # stored rows are split as plain ones
        splits = [(i + 1) * sizes.new_tokens * c.splits for i, c in enumerate(plain) if c.splits > 1]
        programs, most = max_batch * sizes.new_tokens * heads, max(splits, default=0) * heads
        return triton_decode.Partials.allocate(programs, most, rows, sizes.head_dim, dtype, device)

    def refuse(self, q: Tensor | E4M3, kv: PagedKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys) -> str | None:
        """Why the kernels cannot read these formats, or None."""
        if index_keys.format == "certified" and not isinstance(index_q, Tensor):
            return f"index_q must be plain ({index_keys.dtype}) beside certified index keys, got {index_q.format}"
        return triton_decode.refuse(q, kv, None, self.sizes.block_size)

    def run(
        self,
        q: Tensor | E4M3,
        kv: PagedKV,
        index_q: Tensor | E4M3,
        index_keys: PagedIndexKeys,
        softmax_scale: float,
        blocks: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """One layer; the arguments are taken as checked."""
        config = self.one_launch[kv.batch - 1]
        plain = kv.format == "plain" and index_keys.format in ("plain", "certified")
        if config is None or self.words is None or not (plain and isinstance(q, Tensor) and isinstance(index_q, Tensor)):
            self._stages(q, kv, index_q, index_keys, softmax_scale, blocks, out, lse)
            return
        exact = exact_keys(index_keys)
        assert isinstance(exact, PagedIndexKeys)
        for kind in (SCORE, ATTEND, MERGE) if self.interpreted else (EVERY,):
            step = Step(q, kv, index_q, exact, softmax_scale, blocks, out, lse)
            triton_launch.launch(config, self.sizes, self.words, step, pdl=self.pdl, kind=kind.value)

    def _stages(
        self,
        q: Tensor | E4M3,
        kv: PagedKV,
        index_q: Tensor | E4M3,
        index_keys: PagedIndexKeys,
        softmax_scale: float,
        blocks: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        sizes, config = self.sizes, self.attend[kv.format][kv.batch - 1]
        certified = self.certified if _exact_bytes(kv.batch, index_keys.capacity, sizes) > BOUNDS_PAY else None
        if certified is not None and self.parts is not None and self._pays(kv.batch, index_keys.capacity):
            due = index_keys.format == "certified" and self.parts.due(kv, index_keys)
            if due and isinstance(q, Tensor) and isinstance(index_q, Tensor):
                starts, buffers = self.cu_seqlens_q[: kv.batch + 1], Buffers(certified, self.partials)
                whole = Part(q, kv, index_q, index_keys, starts, softmax_scale, blocks, out, lse, sizes, buffers)
                if self.parts.serve(whole):
                    return
        decode_select(
            *(index_q, index_keys.keys, index_keys.page_table, index_keys.seq_lens, self.cu_seqlens_q[: kv.batch + 1]),
            max_seqlen_q=sizes.new_tokens,
            max_seqlen_k=index_keys.capacity,
            block_size=sizes.block_size,
            topk=sizes.topk,
            init_blocks=sizes.init_blocks,
            local_blocks=sizes.local_blocks,
            workspace=self.scores,
            certified=certified,
            out=blocks,
        )
        triton_decode.launch(
            *(config, self.partials, q, kv, None, blocks, kv.seq_lens, sizes.new_tokens, sizes.block_size),
            *(softmax_scale, out, lse, self.pdl),
        )

    def _pays(self, batch: int, capacity: int) -> bool:
        """Whether certified keys of so many sequences, of `capacity` keys each, are served in two parts."""
        unsplit = self.attend["plain"][batch - 1].splits == 1
        return batch > 1 and unsplit and _exact_bytes(batch, capacity, self.sizes) >= two_parts.LEAST_BYTES


def _exact_bytes(batch: int, capacity: int, sizes: Sizes) -> int:
    """Of 16-bit index keys of so many sequences, of `capacity` keys each."""
    return batch * sizes.index_key_heads * capacity * sizes.index_dim * 2


def _certified(max_batch: int, capacity: int, sizes: Sizes, device: torch.device) -> triton_certified.Workspace | None:
    """For steps of up to so many sequences; None where bounds never come first."""
    rows, walks = sizes.new_tokens * sizes.index_heads // sizes.index_key_heads, max_batch * sizes.index_key_heads
    free, all_rows = sizes.topk - sizes.init_blocks - sizes.local_blocks, max_batch * sizes.new_tokens * sizes.index_heads
    can = triton_certified.certifies(rows, sizes.num_blocks, free, all_rows, walks, sizes.block_size)
    return _bounds(max_batch, sizes, device) if can and _exact_bytes(max_batch, capacity, sizes) > BOUNDS_PAY else None


def _bounds(max_batch: int, sizes: Sizes, device: torch.device) -> triton_certified.Workspace:
    """For steps of up to so many sequences."""
    heads, key_heads, new = sizes.index_heads, sizes.index_key_heads, sizes.new_tokens
    walks, blocks = (new * heads // key_heads, max_batch * key_heads), (sizes.num_blocks, sizes.block_size)
    return triton_certified.Workspace.allocate(max_batch * new, heads, *walks, *blocks, device)


def _attend(batch: int, sizes: Sizes, facts: devices.Device, form: str) -> triton_decode.Config:
    group = sizes.num_q_heads // sizes.num_kv_heads
    shape = (sizes.num_kv_heads, group, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size)
    return triton_decode.configure(batch * sizes.new_tokens, *shape, facts, FORMAT_IDS[form])
