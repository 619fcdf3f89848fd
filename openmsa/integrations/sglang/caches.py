# SPDX-License-Identifier: MIT
"""SGLang's pools hold a row a token slot; a page is a run of `page_size` slots that SGLang's allocator gives to one request.
`LayerCaches` shows a layer's buffers as pools of pages, in place."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from openmsa import E4M3, PagedIndexKeys, PagedKV


def pages(slots: Tensor, page: int, scale: float | None) -> Tensor | E4M3:
    """Shows ``[slots, heads, dim]`` as ``[slots / page, heads, page, dim]``. scale: of E4M3 elements, None for 1.0."""
    count, heads, dim = slots.shape
    view = slots[: count // page * page].view(-1, page, heads, dim).transpose(1, 2)
    return E4M3(view, scale) if slots.dtype == torch.float8_e4m3fn else view


class LayerCaches:
    """Writes and shows the caches of sparse layers. SGLang is asked for a layer's buffers at each use, which is when it waits
    for those that it loads from the host; views of them are made once."""

    def __init__(self, pool: Any) -> None:
        self._pool, self._page = pool, pool.page_size
        self._scaled = "k_scale" in inspect.signature(pool.set_fused_kv_index_buffer).parameters  # 0.5.23
        self._views: dict[int, tuple[tuple[int, ...], PagedKV, PagedIndexKeys]] = {}

    def write(self, layer: Any, slots: Tensor, k: Tensor, v: Tensor, index_k: Tensor) -> None:
        """Has SGLang write new tokens: `k`, `v` ``[tokens, num_kv_heads, head_dim]``, `index_k` ``[tokens, 1, index_dim]``."""
        scales = (layer.k_scale_float, layer.v_scale_float, layer.idx_k_scale_float, None) if self._scaled else ()
        self._pool.set_fused_kv_index_buffer(layer, slots, k, v, index_k, None, *scales)

    def look(self, layer: Any, page_table: Tensor, seq_lens: Tensor) -> tuple[PagedKV, PagedIndexKeys]:
        """Returns a layer's caches behind a step's page table and lengths, in the same two objects each time."""
        k, v = self._pool.get_kv_buffer(layer.layer_id)
        index_k = self._pool.get_index_k_buffer(layer.layer_id)
        addresses = (k.data_ptr(), v.data_ptr(), index_k.data_ptr())
        held = self._views.get(layer.layer_id)
        if held is None or held[0] != addresses:
            names = ("k_scale_float", "v_scale_float", "idx_k_scale_float")
            scales = [getattr(layer, name) if self._scaled else None for name in names]
            views = [pages(x, self._page, scale) for x, scale in zip((k, v, index_k), scales, strict=True)]
            made = PagedKV(views[0], views[1], page_table, seq_lens), PagedIndexKeys(views[2], page_table, seq_lens)
            held = self._views[layer.layer_id] = (addresses, *made)
        for cache in held[1:]:  # Making them anew would check again what SGLang keeps the same.
            cache.page_table, cache.seq_lens = page_table, seq_lens
        return held[1], held[2]
