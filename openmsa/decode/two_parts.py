# SPDX-License-Identifier: MIT
"""A step with certified index keys in two parts, on two streams.

The kernels between bounds and attention wait for latency, some 15 microseconds in which memory idles. So bounds of the first
three quarters of the sequences are read first; while those of the others are, the first part's blocks are chosen and attended
to. That is for CUDA graphs: twice as many launches would keep the host of an eager caller busy for longer than the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openmsa.block_topk.triton_certified import Selection, Workspace
from openmsa.decode.triton_launch import Sizes
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys, PagedKV
from openmsa.primitives.scoring import Lengths
from openmsa.runtime import devices
from openmsa.runtime.integers import next_power_of_two
from openmsa.sparse_attention import triton_decode

LEAST_BYTES = 1 << 30
"""Of exact index keys, for which two parts pay where attention to the step is not split. Measured on an H200, sequences x keys,
time over that in one part: 32 x 128K 0.96; 64 x 64K, 64 x 128K and 128 x 32K 0.96 to 0.98; fewer bytes 32 x 64K 1.03,
32 x 32K 1.05; attention split 16 x 128K 1.03, 8 x 512K and 4 x 1M 1.02."""


def first_part(batch: int) -> int:
    """How many of so many sequences are the first part. Of 32, 24 are best; 22 and 26 cost 2 % more."""
    return batch * 3 // 4


@dataclass(frozen=True)
class Buffers:
    """Of one part at a time."""

    bounds: Workspace
    partials: triton_decode.Partials


@dataclass(frozen=True)
class Part:
    """Sequences of a layer's step, their tensors, and what serves them."""

    q: Tensor
    kv: PagedKV
    index_q: Tensor
    index_keys: PagedIndexKeys
    cu_seqlens_q: Tensor
    softmax_scale: float
    blocks: Tensor
    out: Tensor
    lse: Tensor
    sizes: Sizes
    buffers: Buffers

    def of(self, first: int, last: int, buffers: Buffers) -> Part:
        """The same of sequences `first` up to `last` alone."""
        kv, keys, new = self.kv, self.index_keys, self.sizes.new_tokens
        rows = slice(first * new, last * new)
        return Part(
            q=self.q[rows],
            kv=PagedKV(kv.k, kv.v, kv.page_table[first:last], kv.seq_lens[first:last]),
            index_q=self.index_q[rows],
            index_keys=PagedIndexKeys(keys.keys, keys.page_table[first:last], keys.seq_lens[first:last]),
            cu_seqlens_q=self.cu_seqlens_q[: last - first + 1],
            softmax_scale=self.softmax_scale,
            blocks=self.blocks[rows],
            out=self.out[rows],
            lse=self.lse[rows],
            sizes=self.sizes,
            buffers=buffers,
        )

    @property
    def selection(self) -> Selection:
        keys = self.index_keys
        assert isinstance(keys.keys, CertifiedKeys)
        lengths = Lengths(self.cu_seqlens_q, None, keys.seq_lens, None, self.sizes.new_tokens, keys.capacity)
        return Selection(self.index_q, keys.keys, keys.page_table, lengths, self.sizes.block_size, self.buffers.bounds)

    def finish(self, config: triton_decode.Config) -> None:
        """Selection with the bounds that are there, and attention."""
        sizes, pdl = self.sizes, devices.has_pdl(self.q.device)
        self.selection.select(sizes.init_blocks, sizes.local_blocks, self.blocks)
        triton_decode.launch(
            *(config, self.buffers.partials, self.q, self.kv, None, self.blocks, self.kv.seq_lens, sizes.new_tokens),
            *(sizes.block_size, self.softmax_scale, self.out, self.lse, pdl),
        )


class Side:
    """A stream beside the caller's. Its kernels go first, where both have some to start: attention of the first part, whose
    bounds are done, before bounds of the second."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.ready, self.done = torch.cuda.Event(), torch.cuda.Event()

    def serves(self) -> bool:
        """Whether the caller is making a CUDA graph."""
        return devices.capturing(self.stream.device)

    def mark(self) -> None:
        """What runs `beside` follows all that was launched up to here."""
        self.ready.record(torch.cuda.current_stream(self.stream.device))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.ready)
            try:
                yield
            finally:
                self.done.record(self.stream)

    def join(self) -> None:
        """What is launched from here on follows what ran `beside`."""
        torch.cuda.current_stream(self.stream.device).wait_event(self.done)


class InTurn:
    """In the place of `Side` in the interpreter, where every step is served, as if for a graph."""

    def serves(self) -> bool:
        return True

    def mark(self) -> None:
        pass

    def beside(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    join = mark


class TwoParts:
    """What serves steps in two parts. second: buffers for the last quarter of the largest step; the first part has those of the
    whole step. attend: how attention is cut, by format of keys and values, for 1, 2, ... sequences."""

    def __init__(self, second: Buffers, attend: dict[str, list[triton_decode.Config]], side: Side | InTurn) -> None:
        self.second, self.attend, self.side = second, attend, side
        self._loaded: set[tuple[int, str, int]] = set()

    def due(self, kv: PagedKV, index_keys: PagedIndexKeys) -> bool:
        """Whether a step on such caches has to go through `serve`."""
        return _like(kv, index_keys) not in self._loaded or self.side.serves()

    def serve(self, whole: Part) -> bool:
        """Runs a layer's step in a CUDA graph. Returns False outside of one, where nothing is changed but the plan's own
        memory: the first of like steps there loads their kernels, which a graph must find."""
        if self.side.serves():
            self._run(whole)
            return True
        out = whole.out  # may be the queries' memory, which the step that counts still has to read
        scratch = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        self._run(replace(whole, out=scratch))
        self._loaded.add(_like(whole.kv, whole.index_keys))
        return False

    def _run(self, whole: Part) -> None:
        batch, configs = whole.kv.batch, self.attend[whole.kv.format]
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


def _like(kv: PagedKV, index_keys: PagedIndexKeys) -> tuple[int, str, int]:
    """What tells apart the kernels that steps of a plan take."""
    return kv.batch, kv.format, next_power_of_two(index_keys.capacity)
