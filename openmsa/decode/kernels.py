# SPDX-License-Identifier: MIT
"""This module holds a plan's kernels and buffers. A layer takes one launch for few sequences, three for many, five with
certified index keys, or in a CUDA graph ten in two parts."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.block_scores.triton_route import launch as launch_scores
from openmsa.block_topk import triton_certified
from openmsa.block_topk.triton_topk import MAX_BLOCKS, launch_topk
from openmsa.decode import triton_layer, two_parts
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_layer import ATTEND, EVERY, MERGE, SCORE, Step, Words
from openmsa.decode.two_parts import Buffers, InTurn, Part, Side, TwoParts, selection
from openmsa.inputs import exact_keys
from openmsa.kv_cache import E4M3, CertifiedKeys, PagedIndexKeys, PagedKV
from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.primitives.rows import KeyTiles
from openmsa.primitives.scoring import Lengths
from openmsa.primitives.softmax import Partials
from openmsa.primitives.tiles import Tile
from openmsa.runtime import devices
from openmsa.runtime.launch import ceil_div
from openmsa.runtime.tape import computes
from openmsa.sparse_attention import triton_decode
from openmsa.sparse_attention.triton_decode_walk import refuse

FORMATS = ("plain", "e4m3", "nvfp4")
"""The kernels read keys and values in these formats."""
BOUNDS_PAY = 64 << 20
"""Exact index keys beside `CertifiedKeys`, up to so many bytes, are read without bounds first, which is as fast on an H200."""


class Kernels:
    """Holds the kernels of a plan and their buffers for up to `max_batch` sequences. A run never waits for the device. It
    allocates nothing, except where `TwoParts.serve` loads kernels outside of a graph."""

    def __init__(
        self, sizes: Sizes, max_batch: int, max_pages: int, dtype: torch.dtype, device: torch.device, certified: bool = True
    ) -> None:
        if sizes.num_blocks > MAX_BLOCKS:
            raise NotImplementedError(
                f"max_pages * page_size / block_size must be at most {MAX_BLOCKS} on {device}, got {sizes.num_blocks}"
            )
        self.sizes, facts = sizes, devices.facts(device)
        self.one_launch = [triton_layer.configure(batch, sizes, facts) for batch in range(1, max_batch + 1)]
        self.attend = {form: [_attend(b + 1, sizes, facts, form) for b in range(max_batch)] for form in FORMATS}
        self.interpreted = device.type != "cuda"
        self.pdl = devices.has_pdl(device)
        self._allocate(max_batch, max_pages * sizes.page_size, dtype, device, certified)
        if not self.interpreted:
            torch.cuda.current_stream(device).synchronize()  # The counters are written before any stream runs the plan.

    def _allocate(self, max_batch: int, capacity: int, dtype: torch.dtype, device: torch.device, certified: bool) -> None:
        sizes, tokens = self.sizes, max_batch * self.sizes.new_tokens
        self.partials = self._partials(max_batch, dtype, device)
        self.certified = _certified(max_batch, capacity, sizes, device) if certified else None
        self.parts: TwoParts | None = None
        if self.certified is not None and any(self._pays(batch, capacity) for batch in range(2, max_batch + 1)):
            rest = max_batch - two_parts.first_part(max_batch)
            second = Buffers(_bounds(rest, sizes, device), self._partials(rest, dtype, device))
            self.parts = TwoParts(second, self.attend, InTurn() if self.interpreted else Side(device))
        self.scores = torch.empty(scores_held(tokens, capacity, sizes), dtype=torch.float32, device=device)
        self.cu_seqlens_q = torch.arange(max_batch + 1, dtype=torch.int32, device=device) * sizes.new_tokens
        small = {(i + 1) * sizes.new_tokens: c for i, c in enumerate(self.one_launch) if c}
        splits = max((n * c.attend.splits for n, c in small.items() if c.merging), default=0) * sizes.num_q_heads
        scores = max(small, default=0) * sizes.index_heads * sizes.num_blocks
        self.words = Words.allocate(scores, splits, sizes.head_dim, device) if small else None

    def _partials(self, max_batch: int, dtype: torch.dtype, device: torch.device) -> Partials:
        """Allocates what attention needs for steps of up to `max_batch` sequences."""
        sizes = self.sizes
        rows, parts = triton_decode.row_tiles(sizes.num_q_heads // sizes.num_kv_heads, sizes.head_dim)
        heads = sizes.num_kv_heads * parts
        plain = self.attend["plain"][:max_batch]  # Stored rows are split as plain ones.
        splits = [(i + 1) * sizes.new_tokens * c.splits for i, c in enumerate(plain) if c.splits > 1]
        programs, most = max_batch * sizes.new_tokens * heads, max(splits, default=0) * heads
        return Partials.allocate(programs, most, rows, sizes.head_dim, dtype, device)

    def refuse(self, q: Tensor | E4M3, kv: PagedKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys) -> str | None:
        """Says why the kernels cannot read these formats; returns None where they can."""
        if index_keys.format == "certified" and not isinstance(index_q, Tensor):
            return f"index_q must be plain ({index_keys.dtype}) beside certified index keys, got {index_q.format}"
        return refuse(q, kv, None, self.sizes.block_size)

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
        """Runs one layer; the arguments are taken as checked."""
        config, keys = self.one_launch[kv.batch - 1], index_keys.keys
        plain = isinstance(q, Tensor) and isinstance(kv.k, Tensor) and isinstance(index_q, Tensor)
        if config is None or self.words is None or not (plain and isinstance(keys, (Tensor, CertifiedKeys))):
            self._stages(Step(q, kv, index_q, index_keys, softmax_scale, blocks, out, lse))
            return
        exact = exact_keys(index_keys) if isinstance(keys, CertifiedKeys) else index_keys
        assert isinstance(exact, PagedIndexKeys)
        step = Step(q, kv, index_q, exact, softmax_scale, blocks, out, lse)
        for kind in (SCORE, ATTEND, MERGE) if self.interpreted else (EVERY,):
            triton_layer.launch(config, self.sizes, self.words, step, pdl=self.pdl, kind=kind.value)

    def _stages(self, step: Step) -> None:
        """Runs one layer with a launch or more a stage."""
        sizes, batch, capacity = self.sizes, step.kv.batch, step.index_keys.capacity
        certified, starts = self.bounds_that_pay(batch, capacity), self.cu_seqlens_q[: batch + 1]
        if certified is not None and self.parts is not None and self._pays(batch, capacity):
            due = step.index_keys.format == "certified" and self.parts.due(step.kv, step.index_keys)
            plain = isinstance(step.q, Tensor) and isinstance(step.index_q, Tensor)
            if due and plain and self.parts.serve(Part(step, starts, sizes, Buffers(certified, self.partials))):
                return
        self.select(step.index_q, step.index_keys, step.blocks)
        triton_decode.launch(
            *(self.attend[step.kv.format][batch - 1], self.partials, step.q, step.kv, None, step.blocks, step.kv.seq_lens),
            *(sizes.new_tokens, sizes.block_size, step.softmax_scale, step.out, step.lse, self.pdl),
        )

    def select(self, index_q: Tensor | E4M3, index_keys: PagedIndexKeys, blocks: Tensor) -> None:
        """Selects the blocks of a step, with a launch or more a stage; the arguments are taken as checked."""
        certified = self.bounds_that_pay(index_keys.batch, index_keys.capacity)
        starts = self.cu_seqlens_q[: index_keys.batch + 1]
        select(index_q, index_keys, starts, self.sizes, self.scores, certified, blocks)

    def bounds_that_pay(self, batch: int, capacity: int) -> triton_certified.Workspace | None:
        """Returns the buffers of bounds where certified keys of so many sequences are read as bounds first."""
        return self.certified if _exact_bytes(batch, capacity, self.sizes) > BOUNDS_PAY else None

    def _pays(self, batch: int, capacity: int) -> bool:
        """Tells whether certified keys of so many sequences, of `capacity` keys each, are served in two parts."""
        unsplit = self.attend["plain"][batch - 1].splits == 1
        return batch > 1 and unsplit and _exact_bytes(batch, capacity, self.sizes) >= two_parts.LEAST_BYTES


def scores_held(tokens: int, capacity: int, sizes: Sizes) -> int:
    """Returns how many float32 elements `select` needs for so many new tokens and `capacity` keys a sequence."""
    return tokens * sizes.index_heads * ceil_div(capacity, sizes.block_size) + tokens


def select(
    index_q: Tensor | E4M3,
    index_keys: PagedIndexKeys,
    starts: Tensor,
    sizes: Sizes,
    held: Tensor,
    certified: triton_certified.Workspace | None,
    out: Tensor,
) -> None:
    """Selects the blocks that each new token reads, as `openmsa.select_blocks` does, in two launches, or four with bounds. The
    arguments are taken as checked. It never allocates and never waits, and all lengths are read on the device when it runs.

    starts:     int32 ``[batch + 1]``: where each sequence's new tokens start; it has at most sizes.new_tokens of them.
    held:       float32, contiguous, at least `scores_held` elements, whose content after the call is undefined.
    certified:  buffers with which `CertifiedKeys` are read as bounds first, for the same selection; `held` is then left alone.
    out:        int32 ``[total_q, index_heads, topk]``, contiguous, which receives the ids.
    """
    (total_q, heads, _), num_blocks = index_q.shape, ceil_div(index_keys.capacity, sizes.block_size)
    if total_q == 0 or num_blocks == 0:
        computes("the selection of queries that see nothing")
        out.fill_(-1)
        return
    if certified is not None and isinstance(index_keys.keys, CertifiedKeys):
        assert isinstance(index_q, Tensor)
        bounds_first = selection(index_q, index_keys, starts, sizes, certified)
        bounds_first.run(sizes.init_blocks, sizes.local_blocks, out)
        return
    count = total_q * heads * num_blocks
    scores = held[:count].view(total_q, heads, num_blocks).transpose(0, 1)
    visible = held[count : count + total_q].view(torch.int32)
    device, tile, pdl = devices.facts(index_q.device), Tile.of(sizes.block_size), devices.has_pdl(index_q.device)
    lengths = Lengths(starts, None, index_keys.seq_lens, None, sizes.new_tokens, index_keys.capacity)
    keys = KeyTiles.of_pool(index_keys.keys, index_keys.page_table, tile, device)
    launch_scores(index_q, keys, tile, lengths, scores, visible, device, pdl=pdl)
    launch_topk(scores, visible, sizes.init_blocks, sizes.local_blocks, out, pdl=pdl)


def _exact_bytes(batch: int, capacity: int, sizes: Sizes) -> int:
    """Returns how many bytes the 16-bit index keys of so many sequences take, of `capacity` keys each."""
    return batch * sizes.index_key_heads * capacity * sizes.index_dim * 2


def _certified(max_batch: int, capacity: int, sizes: Sizes, device: torch.device) -> triton_certified.Workspace | None:
    """Allocates buffers of bounds for steps of up to `max_batch` sequences; None where bounds never come first."""
    rows, walks = sizes.new_tokens * sizes.index_heads // sizes.index_key_heads, max_batch * sizes.index_key_heads
    free, all_rows = sizes.topk - sizes.init_blocks - sizes.local_blocks, max_batch * sizes.new_tokens * sizes.index_heads
    can = triton_certified.certifies(rows, sizes.num_blocks, free, all_rows, walks, sizes.block_size)
    return _bounds(max_batch, sizes, device) if can and _exact_bytes(max_batch, capacity, sizes) > BOUNDS_PAY else None


def _bounds(max_batch: int, sizes: Sizes, device: torch.device) -> triton_certified.Workspace:
    """Allocates buffers of bounds for steps of up to `max_batch` sequences."""
    heads, key_heads, new = sizes.index_heads, sizes.index_key_heads, sizes.new_tokens
    walks, blocks = (new * heads // key_heads, max_batch * key_heads), (sizes.num_blocks, sizes.block_size)
    return triton_certified.Workspace.allocate(max_batch * new, heads, *walks, *blocks, device)


def _attend(batch: int, sizes: Sizes, facts: devices.Device, form: str) -> triton_decode.Config:
    """Chooses how a launch of attention alone is cut for so many sequences."""
    group = sizes.num_q_heads // sizes.num_kv_heads
    shape = (sizes.num_kv_heads, group, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size)
    return triton_decode.configure(batch * sizes.new_tokens, *shape, facts, FORMAT_IDS[form])
