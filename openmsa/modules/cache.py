# SPDX-License-Identifier: MIT
"""`MSACache` holds keys, values and index keys of all layers in pages, for generation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.kv_cache import PagedIndexKeys, PagedKV, contents
from openmsa.modules.config import MSAConfig
from openmsa.runtime import checks, named_devices, value_checks
from openmsa.runtime.kinds import tensors_in
from openmsa.types import INT32_MAX, Sequences


@dataclass(eq=False)
class LayerCache:
    """Is what one layer reads and appends to.

    kv:     the layer's keys and values.
    index:  its index keys; None in a dense layer.
    seqs:   lengths of the step that `MSACache.extend` began: its queries are the new tokens.
    begun:  whether the step waits for this layer to append.
    """

    kv: PagedKV
    index: PagedIndexKeys | None
    seqs: Sequences
    begun: bool = False

    def append(self, k: Tensor, v: Tensor, index_k: Tensor | None = None) -> None:
        """Appends what the step's tokens give: k and v ``[total_new, num_kv_heads, head_dim]``, index_k ``[total_new,
        index_key_heads, index_dim]``, which a dense layer lacks. On an error the cache is unchanged."""
        if self.index is not None and index_k is None:
            raise ValueError("index_k must be given, as this layer's cache holds index keys, got None")
        if not self.begun:
            raise ValueError("a layer must append once in each step that MSACache.extend began, got one more append")
        if self.index is not None and index_k is not None:
            contents.check_new(self.index, {"index_k": index_k}, False)
            checks.size("index_k", index_k, 0, k.shape[0], "the tokens of k")
        self.kv.append(k, v, self.seqs.cu_seqlens_q)
        if self.index is not None and index_k is not None:
            self.index.append(index_k, self.seqs.cu_seqlens_q)
        self.begun = False


class MSACache:
    """Holds the caches of all layers for a batch of sequences of any lengths. They grow as tokens come.

        cache = MSACache(len(layers), 2, num_kv_heads, head_dim, config)
        cache.extend([700, 30])             # the prompts of two sequences, or the first chunks of them
        cos, sin = rotary(cache.positions)
        for layer, held in zip(layers, cache.layers, strict=True):
            hidden = layer(hidden, cos, sin, cache=held)
        cache.extend([1, 1])                # the next token of each

    num_layers, batch, num_kv_heads, head_dim:  sizes.
    config:          gives the heads and elements of index keys; None: no layer has any.
    dense_layers:    numbers of the layers without index keys.
    page_size:       keys a page; a multiple of the block size keeps each block in one page.
    dtype, device:   of keys and values.
    kv_format:       "plain", "e4m3" or "nvfp4", as in `PagedKV.allocate`.
    index_format:    "plain", "e4m3", "int8", "nvfp4", "mxfp4" or "certified", as in `PagedIndexKeys.allocate`.

    All layers share one page table. Where a step does not fit, they grow by at least an eighth and a page a sequence, one cache
    after the other, each by a copy of its pages: `reserve` at the start saves that.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        config: MSAConfig | None = None,
        *,
        dense_layers: Collection[int] = (),
        page_size: int = 128,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_format: str = "plain",
        index_format: str = "plain",
    ) -> None:
        checks.integer("num_layers", num_layers, 1)
        checks.integer("batch", batch, 0)
        checks.integer("page_size", page_size, 1)
        if config is not None and not isinstance(config, MSAConfig):
            raise TypeError(f"config must be an openmsa.modules.MSAConfig or None, got {type(config).__name__}")
        if not isinstance(dense_layers, Collection):
            raise TypeError(f"dense_layers must be a list of ints, got {type(dense_layers).__name__}")
        for layer in dense_layers:
            checks.integer("dense_layers", layer, 0, num_layers - 1)
        device = named_devices.usable("device", device)
        table = torch.full((batch, 0), -1, dtype=torch.int32, device=device)
        self.page_size, self.lengths, self._starts = page_size, [0] * batch, [0] * batch
        self._table, self._assigned, self._num_pages = table, [0] * batch, 0  # pages of each sequence, and those of the pools
        self.layers: list[LayerCache] = []
        nothing = Sequences.from_lengths([0] * batch, [0] * batch, device)
        for layer in range(num_layers):
            kv = PagedKV.allocate(table, 0, num_kv_heads, page_size, head_dim, dtype, kv_format)
            index = None
            if config is not None and layer not in dense_layers:
                sizes = (config.index_n_key_heads, page_size, config.index_head_dim)
                index = PagedIndexKeys.allocate(table, 0, *sizes, dtype, index_format)
            self.layers.append(LayerCache(kv, index, nothing))

    def extend(self, new_tokens: Sequence[int]) -> Sequences:
        """Begins a step: makes room for so many new tokens of each sequence, and returns the step's lengths. Each layer then
        appends once. Sequences may have no new token."""
        value_checks.lengths("new_tokens", new_tokens, INT32_MAX - sum(self.lengths))
        if len(new_tokens) != len(self.lengths):
            raise ValueError(f"new_tokens must have one entry a sequence ({len(self.lengths)}), got {len(new_tokens)}")
        if self.lengths != self._starts and any(waiting := [layer.begun for layer in self.layers]):
            raise ValueError(
                f"new_tokens must not be given before every layer has appended the step before, got one that has not: layer "
                f"{waiting.index(True)}; a cache whose forward has failed is not used again"
            )
        lengths = [held + number for held, number in zip(self.lengths, new_tokens, strict=True)]
        self._assign(lengths)
        self._starts, self.lengths = self.lengths, lengths
        made = Sequences.from_lengths(list(new_tokens), lengths, self._table.device)
        # The caches say how many keys there are, which each layer's append changes.
        seqs = Sequences(made.cu_seqlens_q, None, made.max_seqlen_q, made.max_seqlen_k)
        for layer in self.layers:
            layer.seqs, layer.begun = seqs, True
        return seqs

    @property
    def positions(self) -> Tensor:
        """Returns the position of each new token of the step, int64 ``[total_new]``."""
        spans = [torch.arange(start, stop, device="cpu") for start, stop in zip(self._starts, self.lengths, strict=True)]
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *spans]).to(self._table.device)

    def reserve(self, tokens: int) -> None:
        """Makes room for so many tokens of each sequence in all, so that the cache does not grow before."""
        pages = -(-checks.integer("tokens", tokens, 0) // self.page_size)
        self._grow(len(self.lengths) * pages, pages)

    @property
    def room(self) -> int:
        """Returns how many tokens of all sequences together the pages have places for, those that hold one included."""
        return self._num_pages * self.page_size

    def memory(self) -> int:
        """Returns the bytes that all pools, the page table and the lengths take, whether or not their places are filled."""
        held = [x for cache in self._caches() for x in (*tensors_in(*cache.pools().values()), cache.seq_lens)]
        return sum(x.numel() * x.element_size() for x in (*held, self._table))

    def _assign(self, lengths: list[int]) -> None:
        """Gives each sequence the pages that so many tokens take."""
        wanted = [-(-length // self.page_size) for length in lengths]
        used, total = sum(self._assigned), sum(wanted)
        width = max(wanted, default=0)
        pages, columns = self._num_pages, self._table.shape[1]
        if total > pages:
            pages = max(total, pages + max(len(lengths), pages // 8))
        if width > columns:
            columns = max(width, columns * 9 // 8)
        if (pages, columns) != (self._num_pages, self._table.shape[1]):
            self._grow(pages, columns)
        for b, (have, pages) in enumerate(zip(self._assigned, wanted, strict=True)):
            if pages > have:
                self._table[b, have:pages] = torch.arange(used, used + pages - have, dtype=torch.int32, device="cpu")
                used += pages - have
        self._assigned = wanted

    def _grow(self, num_pages: int, width: int) -> None:
        """Widens the page table and the pools to at least these numbers of pages."""
        num_pages, width = max(num_pages, self._num_pages), max(width, self._table.shape[1])
        self._table = torch.nn.functional.pad(self._table, (0, width - self._table.shape[1]), value=-1)
        for cache in self._caches():
            cache.page_table = self._table
            if num_pages > self._num_pages:
                _enlarge(cache, num_pages)
        self._num_pages = num_pages

    def _caches(self) -> list[PagedKV | PagedIndexKeys]:
        return [cache for layer in self.layers for cache in (layer.kv, layer.index) if cache is not None]


def _enlarge(cache: PagedKV | PagedIndexKeys, num_pages: int) -> None:
    """Gives the cache pools of `num_pages` pages, of which the first are those it has and the others hold zeros."""
    sizes = (cache.num_heads, cache.page_size, cache.head_dim)
    larger = type(cache).allocate(cache.page_table, num_pages, *sizes, cache.dtype, cache.format)
    for (name, old), new in zip(cache.pools().items(), larger.pools().values(), strict=True):
        for few, many in zip(tensors_in(old), tensors_in(new), strict=True):  # codes and scales, all with pages first
            number = few.shape[0]
            codes = few.dtype == torch.float8_e4m3fn
            (many.view(torch.uint8) if codes else many)[:number] = few.view(torch.uint8) if codes else few
        setattr(cache, name, new)
