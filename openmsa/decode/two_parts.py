# SPDX-License-Identifier: MIT
"""This module runs a step with certified index keys in two parts, on two streams.

The kernels between bounds and attention wait for latency, while memory idles. So bounds of the first three quarters of the
sequences are read first; while those of the others are read, the first part's blocks are chosen and attended to. That is for
CUDA graphs: twice as many launches would keep the host of an eager caller busy for longer than the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openmsa.block_scores.triton_route import Lengths
from openmsa.block_topk.triton_certified import Selection, Workspace
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_layer import Step
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys, PagedKV
from openmsa.kv_cache.page_table import Paged
from openmsa.primitives.softmax import Partials
from openmsa.runtime import devices
from openmsa.runtime.launch import next_power_of_two
from openmsa.sparse_attention import triton_decode

LEAST_BYTES = 1 << 30
"""From so many bytes of exact index keys on, two parts pay on an H200 where attention is not split."""


def first_part(batch: int) -> int:
    """Returns how many sequences of a batch the first part serves."""
    return batch * 3 // 4


def selection(index_q: Tensor, index_keys: PagedIndexKeys, starts: Tensor, sizes: Sizes, bounds: Workspace) -> Selection:
    """Returns the selection of a step's blocks by way of bounds. starts: as in `openmsa.decode.kernels.select`."""
    assert isinstance(index_keys.keys, CertifiedKeys)
    lengths = Lengths(starts, None, index_keys.seq_lens, None, sizes.new_tokens, index_keys.capacity)
    return Selection(index_q, index_keys.keys, index_keys.page_table, lengths, sizes.block_size, bounds)


@dataclass(frozen=True)
class Buffers:
    """Holds the memory that bounds and attention need for one part at a time."""

    bounds: Workspace
    partials: Partials


@dataclass(frozen=True)
class Part:
    """Holds some sequences of a layer's step, and what serves them. starts: int32 [batch + 1], where new tokens start."""

    step: Step
    starts: Tensor
    sizes: Sizes
    buffers: Buffers

    def of(self, first: int, last: int, buffers: Buffers) -> Part:
        """Returns the part that is sequences `first` up to `last` alone, with buffers of its own."""
        step, kv, keys, new = self.step, self.step.kv, self.step.index_keys, self.sizes.new_tokens
        rows = slice(first * new, last * new)
        own = Step(
            q=step.q[rows],
            kv=PagedKV(kv.k, kv.v, kv.page_table[first:last], kv.seq_lens[first:last]),
            index_q=step.index_q[rows],
            index_keys=PagedIndexKeys(keys.keys, keys.page_table[first:last], keys.seq_lens[first:last]),
            softmax_scale=step.softmax_scale,
            blocks=step.blocks[rows],
            out=step.out[rows],
            lse=step.lse[rows],
        )
        return Part(own, self.starts[: last - first + 1], self.sizes, buffers)

    @property
    def selection(self) -> Selection:
        """Returns the selection of the part's blocks."""
        assert isinstance(self.step.index_q, Tensor)
        return selection(self.step.index_q, self.step.index_keys, self.starts, self.sizes, self.buffers.bounds)

    def finish(self, config: triton_decode.Config) -> None:
        """Selects blocks with the bounds, which are there, and attends to them."""
        step, sizes, pdl = self.step, self.sizes, devices.has_pdl(self.step.out.device)
        self.selection.select(sizes.init_blocks, sizes.local_blocks, step.blocks)
        triton_decode.launch(
            *(config, self.buffers.partials, step.q, step.kv, None, step.blocks, step.kv.seq_lens, sizes.new_tokens),
            *(sizes.block_size, step.softmax_scale, step.out, step.lse, pdl),
        )


class Side:
    """Holds a stream beside the caller's. Where both have kernels to start, its own go first: attention of the first part,
    whose bounds are done, before bounds of the second."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.ready, self.done = torch.cuda.Event(), torch.cuda.Event()

    def serves(self) -> bool:
        """Tells whether the caller is capturing a CUDA graph."""
        return devices.capturing(self.stream.device)

    def mark(self) -> None:
        """Marks the place: what runs `beside` follows all that was launched up to here."""
        self.ready.record(torch.cuda.current_stream(self.stream.device))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Sends the launches inside the context to this stream."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.ready)
            try:
                yield
            finally:
                self.done.record(self.stream)

    def join(self) -> None:
        """Lets what is launched from here on follow what ran `beside`."""
        torch.cuda.current_stream(self.stream.device).wait_event(self.done)


class InTurn:
    """Takes the place of `Side` in the interpreter, where every step is served as if for a graph."""

    def serves(self) -> bool:
        return True

    def mark(self) -> None:
        pass

    def beside(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    join = mark


class TwoParts:
    """Serves steps in two parts. second: buffers for the last quarter of the largest step; the first part takes those of the
    whole step. attend: how attention is cut, by format of keys and values, for 1, 2, ... sequences."""

    def __init__(self, second: Buffers, attend: dict[str, list[triton_decode.Config]], side: Side | InTurn) -> None:
        self.second, self.attend, self.side = second, attend, side
        self._loaded: set[tuple[int, str, int]] = set()

    def due(self, kv: PagedKV, index_keys: PagedIndexKeys) -> bool:
        """Tells whether a step on such caches has to go through `serve`."""
        return like(kv, index_keys) not in self._loaded or self.side.serves()

    def serve(self, whole: Part) -> bool:
        """Runs a layer's step in a CUDA graph. Outside of one it returns False and changes only the plan's own memory: the
        first of like steps there loads their kernels, which a graph must find loaded."""
        if self.side.serves():
            self._run(whole)
            return True
        out = whole.step.out  # It may be the memory of the queries, which the step that counts still has to read.
        scratch = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        self._run(replace(whole, step=whole.step._replace(out=scratch)))
        self._loaded.add(like(whole.step.kv, whole.step.index_keys))
        return False

    def _run(self, whole: Part) -> None:
        batch, configs = whole.step.kv.batch, self.attend[whole.step.kv.format]
        cut = first_part(batch)
        first, second = whole.of(0, cut, whole.buffers), whole.of(cut, batch, self.second)
        first.selection.bound()
        self.side.mark()
        second.selection.bound(follows=True)
        try:
            with self.side.beside():
                first.finish(configs[cut - 1])
            second.finish(configs[batch - cut - 1])
        finally:
            self.side.join()


def like(kv: Paged, index_keys: PagedIndexKeys) -> tuple[int, str, int]:
    """Returns a key that tells apart the kernels that steps of a plan take."""
    return kv.batch, kv.format, next_power_of_two(index_keys.capacity)
