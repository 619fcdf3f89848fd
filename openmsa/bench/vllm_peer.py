# SPDX-License-Identifier: MIT
"""The sparse peer is vLLM's public Triton kernels for MiniMax-M3, where a copy of them stands in a folder.

The folder (`.peers` unless told otherwise) holds the package `vllm.vllm_m3`; it is not part of this project. Those kernels know
pages of 128 keys, keys and values side by side, one index key head and CUDA.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from openmsa.bench.inputs import Inputs
from openmsa.kv_cache import E4M3

CHUNK = 16384  # queries that an engine would prefill at a time


def absent(device: torch.device, folder: Path) -> str | None:
    """Says why these kernels cannot be measured here, a sentence; None if they can."""
    if device.type != "cuda":
        return "vLLM's kernels need a GPU"
    if not (folder / "vllm" / "vllm_m3").is_dir():
        return f"no copy of vLLM's kernels in {folder}"
    return None


def load(folder: Path) -> ModuleType:
    """Imports the kernels from this folder, which goes in front of all others that hold a package named vllm."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("vllm.vllm_m3")


class Peer:
    """A peer makes vLLM's calls on the tensors of a workload; nothing runs before a call that it made is called.

    e4m3: index queries and all caches have that format, keys and values a scale each; these kernels take none for the index.
    """

    def __init__(self, x: Inputs, folder: Path, e4m3: bool = False) -> None:
        self.kernels, self.x, self.w, pages = load(folder), x, x.workload, x.pages()
        assert pages.pool is not None
        assert isinstance(pages.index.keys, Tensor)
        self.pool, self.index = pages.pool, pages.index.keys[:, 0]  # [num_pages, 128, index_dim]
        self.index_q = x.index_q
        self.scales: dict[str, Any] = {}
        if e4m3:
            k, v = (E4M3.quantize(half, per="tensor") for half in self.pool.chunk(2, -1))
            self.pool, self.scales = torch.cat((k.data, v.data), -1), {"k_scale": k.scale, "v_scale": v.scale}
            self.index, self.index_q = (E4M3.quantize(rows).data for rows in (self.index, self.index_q))
        self.table, self.lens = pages.kv.page_table, pages.kv.seq_lens
        self.out = torch.empty_like(x.q)
        self._made: dict[int, tuple[Tensor, ...]] = {}

    @property
    def everything(self) -> slice:
        """Returns the slice of all queries of the one sequence."""
        return slice(0, self.w.q_len)

    def lengths(self, rows: slice) -> tuple[Tensor, ...]:
        """Returns cu_seqlens_q, seq_lens and prefix_lens of the queries `rows` of the one sequence, which are made once."""
        if rows.start not in self._made:
            prefix, count = self.w.context - self.w.q_len + rows.start, rows.stop - rows.start
            values = [0, count], [prefix + count], [prefix]
            self._made[rows.start] = tuple(torch.tensor(v, dtype=torch.int32, device=self.x.device) for v in values)
        return self._made[rows.start]

    def scores(self, rows: slice) -> partial[Tensor]:
        """Makes the call that scores blocks for the queries `rows`."""
        count, keys = rows.stop - rows.start, self.w.context - self.w.q_len + rows.stop
        arguments = self.index_q[rows], self.index, self.table, *self.lengths(rows), count, keys, self.w.num_kv_heads
        return partial(self.kernels.minimax_m3_index_score, *arguments)

    def topk(self, scores: Tensor, rows: slice) -> partial[Tensor]:
        """Makes the call that selects block ids ``[num_kv_heads, queries, topk]`` from given scores."""
        cu, _, before = self.lengths(rows)
        return partial(self.kernels.minimax_m3_index_topk, scores, cu, before, rows.stop - rows.start, self.w.topk, 0, 1)

    def attend(self, rows: slice, ids: Tensor) -> partial[None]:
        """Makes the call of attention of the queries `rows` over the blocks `ids`, into `out`."""
        tensors = self.x.q[rows], self.pool, ids, self.table, *self.lengths(rows)
        numbers = rows.stop - rows.start, self.w.num_kv_heads, self.w.head_dim**-0.5
        return partial(self.kernels.minimax_m3_sparse_attn, *tensors, *numbers, self.out[rows], **self.scales)

    def decode_select(self) -> partial[Tensor]:
        """Makes the call that selects block ids ``[num_kv_heads, batch, topk]`` for one new token a sequence."""
        tensors = self.index_q, self.index, self.table, self.lens
        numbers = self.w.context, self.w.topk, 0, 1, self.w.num_kv_heads, 1, 1
        return partial(self.kernels.minimax_m3_index_decode, *tensors, *numbers)

    def decode_attend(self, ids: Tensor) -> partial[None]:
        """Makes the call of attention of one new token a sequence over the blocks `ids`, into `out`."""
        tensors = self.x.q, self.pool, ids, self.table, self.lens
        numbers = self.w.num_kv_heads, self.w.head_dim**-0.5
        return partial(self.kernels.minimax_m3_sparse_attn_decode, *tensors, *numbers, self.out, 1, **self.scales)


def scores(x: Inputs, folder: Path, e4m3: bool = False) -> Callable[[], Any]:
    """Makes the call that scores all queries at once."""
    peer = Peer(x, folder, e4m3)
    return peer.scores(peer.everything)


def topk(x: Inputs, folder: Path) -> Callable[[], Any]:
    """Makes the call of top-k over scores made beforehand."""
    peer = Peer(x, folder)
    return peer.topk(peer.scores(peer.everything)(), peer.everything)


def select(x: Inputs, folder: Path, e4m3: bool = False) -> Callable[[], Any]:
    """Makes the call of scoring and top-k."""
    peer = Peer(x, folder, e4m3)
    if x.workload.kind == "decode":
        return peer.decode_select()
    score = peer.scores(peer.everything)
    return lambda: peer.topk(score(), peer.everything)()


def attend(x: Inputs, folder: Path, kind: str, e4m3: bool = False) -> Callable[[], Any]:
    """Makes the call of attention over the same random or clustered selection that our rows read."""
    peer, ids = Peer(x, folder, e4m3), x.selection(kind).transpose(0, 1).contiguous()  # [num_kv_heads, total_q, topk]
    return peer.decode_attend(ids) if x.workload.kind == "decode" else peer.attend(peer.everything, ids)


def path(x: Inputs, folder: Path, e4m3: bool = False) -> Callable[[], Any]:
    """Makes the call of scoring, top-k and attention over chunks of queries, as an engine prefills."""
    peer, w = Peer(x, folder, e4m3), x.workload
    if w.kind == "decode":
        choose = peer.decode_select()
        return lambda: peer.decode_attend(choose())()
    chunks = [slice(start, min(start + CHUNK, w.q_len)) for start in range(0, w.q_len, CHUNK)]
    for rows in chunks:
        peer.lengths(rows)

    def run() -> None:
        for rows in chunks:
            peer.attend(rows, peer.topk(peer.scores(rows)(), rows)())()

    return run
