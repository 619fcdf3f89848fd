# SPDX-License-Identifier: MIT
"""The named workloads say which shapes are measured, on which device, with which rows."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

K, M = 1 << 10, 1 << 20

PREFILL_ROWS = ("msa_attention", "block_scores", "select_blocks", "sparse_attention", "dense_attention", "sdpa")
DECODE_ROWS = ("msa_attention", "msa_attention/paged", *PREFILL_ROWS[1:])
GPU_PREFILL_ROWS = ("msa_attention", "msa_attention/paged", "msa_attention/e4m3", "dense_attention", "sdpa", "vllm_path")
GPU_CHUNK_ROWS = (
    *("msa_attention", "msa_attention/paged"),
    *("block_scores", "block_scores/paged", "select_blocks", "select_blocks/paged", "select_blocks_from_scores"),
    *("sparse_attention/random", "sparse_attention/clustered"),
    *("sparse_attention/paged/random", "sparse_attention/paged/clustered"),
    *("msa_attention/e4m3", "block_scores/e4m3", "select_blocks/e4m3", "select_blocks/e4m3/paged"),
    *("sparse_attention/e4m3/random", "sparse_attention/e4m3/clustered", "sparse_attention/e4m3/paged/random"),
    *("sparse_attention/nvfp4/random", "sparse_attention/nvfp4/clustered"),
    *("dense_attention", "sdpa"),
    *("vllm_path", "vllm_scores", "vllm_select", "vllm_topk", "vllm_attend/random", "vllm_attend/clustered"),
    *("vllm_path/e4m3", "vllm_scores/e4m3", "vllm_attend/e4m3/random", "vllm_attend/e4m3/clustered"),
)
GPU_RECORDED_ROWS = (
    "sparse_attention/random",
    "sparse_attention/clustered",
    "sparse_attention/recorded",
    "dense_attention",
    "sdpa",
)
GPU_DECODE_ROWS = (
    *("decode_plan", "msa_attention/paged", "block_scores/paged", "select_blocks/paged", "sparse_attention/paged/random"),
    *("decode_plan/e4m3", "select_blocks/e4m3/paged", "sparse_attention/e4m3/paged/random"),
    *("decode_plan/nvfp4", "select_blocks/nvfp4/paged", "sparse_attention/nvfp4/paged/random"),
    *("decode_plan/certified", "msa_attention/certified/paged", "select_blocks/certified/paged"),
    *("dense_attention/paged", "sdpa", "vllm_path", "vllm_select", "vllm_attend/random", "vllm_path/e4m3"),
)
GPU_RANK_PREFILL_ROWS = ("msa_attention/paged", "dense_attention", "sdpa", "vllm_path")
GPU_RANK_CHUNK_ROWS = (
    *("msa_attention/paged", "block_scores/paged", "select_blocks/paged"),
    *("sparse_attention/random", "sparse_attention/clustered"),
    *("sparse_attention/paged/random", "sparse_attention/paged/clustered"),
    *("sparse_attention/e4m3/random", "sparse_attention/nvfp4/random"),
    *("dense_attention", "sdpa", "vllm_path", "vllm_attend/random", "vllm_attend/clustered"),
)
GPU_RANK_DECODE_ROWS = ("decode_plan", "decode_plan/e4m3", "decode_plan/certified", "sdpa", "vllm_path", "vllm_path/e4m3")

LAYERS = 16
LAYER_ROWS = ("decode_plan", "vllm_path")
LAYER_TOKENS = 64 * K  # a batch of contexts holds at most so many keys: what a launch costs is then a large part of a layer
DECODE_TOKENS = 8 * M  # a batch of contexts holds at most so many keys: keys and values then fit three times


@dataclass(frozen=True)
class Workload:
    """A workload is one shape. The last `q_len` of the `context` positions of each of `batch` sequences are the queries.

    device:  "cpu" or "cuda", the kind of machine that it is meant for.
    modes:   "eager" (the call as a user makes it) and, on a GPU, "graph" (replayed from a CUDA graph) and "layers" (a layer's
             share of a graph of `LAYERS` layers, each on keys of its own, as a model's decode step is one; `LAYER_ROWS` only).
    rows:    what is measured on it: names of `openmsa.bench.rows.ROWS`. quick: those of them that a quick run measures.
    """

    name: str
    device: str
    q_len: int
    context: int
    rows: tuple[str, ...]
    batch: int = 1
    num_q_heads: int = 64
    num_kv_heads: int = 4
    head_dim: int = 128
    index_dim: int = 128
    block_size: int = 128
    topk: int = 16
    dtype: torch.dtype = torch.bfloat16
    modes: tuple[str, ...] = ("eager",)
    quick: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        if self.q_len == 1:
            return "decode"
        return "prefill" if self.q_len == self.context else "chunk"

    @property
    def total_q(self) -> int:
        return self.batch * self.q_len

    @property
    def num_blocks(self) -> int:
        return -(-self.context // self.block_size)

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads} heads x {self.head_dim}"
        blocks = f"{self.topk} blocks of {self.block_size}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x {self.q_len:,} queries on {self.context:,} keys, {heads}, {blocks}, {dtype}"


def _label(tokens: int) -> str:
    return f"{tokens // M}m" if tokens >= M else f"{tokens // K}k"


cpu_prefill = partial(Workload, device="cpu", dtype=torch.float32, num_q_heads=16, num_kv_heads=1, rows=PREFILL_ROWS)
cpu_decode = partial(Workload, device="cpu", dtype=torch.float32, q_len=1, rows=DECODE_ROWS)
BOTH = ("eager", "graph")
gpu_prefill = partial(Workload, device="cuda", rows=GPU_PREFILL_ROWS)
gpu_chunk = partial(Workload, device="cuda", rows=GPU_CHUNK_ROWS, modes=BOTH)
gpu_short = partial(gpu_chunk, context=128 * K)
gpu_decode = partial(Workload, device="cuda", q_len=1, rows=GPU_DECODE_ROWS, modes=BOTH)


def _rank(num_q_heads: int, num_kv_heads: int) -> Iterator[Workload]:
    """Yields the workloads of a rank with this share of a model's heads; 16/1 (MiniMax-M3 on four GPUs) has the most."""
    named = f"gpu-rank-{num_q_heads}-{num_kv_heads}"
    prefill, chunk, decode = (
        partial(kind, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads) for kind in (gpu_prefill, gpu_chunk, gpu_decode)
    )
    many = (num_q_heads, num_kv_heads) == (16, 1)
    yield chunk(f"{named}-chunk-16k-at-48k", q_len=16 * K, context=48 * K, rows=GPU_RANK_CHUNK_ROWS)
    for n in (8 * K, 32 * K, 128 * K) if many else (32 * K,):
        yield prefill(f"{named}-prefill-{_label(n)}", q_len=n, context=n, rows=GPU_RANK_PREFILL_ROWS, modes=BOTH)
    for batch, n in ((1, 128 * K), (8, 32 * K), (32, 8 * K), (32, 128 * K), (128, 8 * K)) if many else ((32, 32 * K),):
        yield decode(f"{named}-decode-b{batch}-{_label(n)}", batch=batch, context=n, rows=GPU_RANK_DECODE_ROWS)


WORKLOADS: tuple[Workload, ...] = (
    cpu_prefill("prefill-8k", q_len=8 * K, context=8 * K, quick=("msa_attention", "select_blocks", "sdpa")),
    cpu_prefill("prefill-32k", q_len=32 * K, context=32 * K),
    cpu_prefill("chunk-512-at-128k", q_len=512, context=128 * K),
    cpu_decode("decode-128k", context=128 * K, quick=("msa_attention", "msa_attention/paged", "select_blocks", "sdpa")),
    cpu_decode("decode-1m", context=M),
    cpu_prefill("bf16-prefill-32k", q_len=32 * K, context=32 * K, dtype=torch.bfloat16),
    cpu_decode("bf16-decode-1m", context=M, dtype=torch.bfloat16),
    *(gpu_chunk(f"gpu-chunk-16k-at-{_label(n)}", q_len=16 * K, context=n) for n in (32 * K, 128 * K, 512 * K, M)),
    gpu_prefill("gpu-recorded-16k", q_len=16 * K, context=16 * K, rows=GPU_RECORDED_ROWS, modes=BOTH),
    *(
        gpu_prefill(
            f"gpu-prefill-{_label(n)}",
            q_len=n,
            context=n,
            modes=BOTH if n <= 128 * K else ("eager",),
            quick=("msa_attention", "dense_attention", "sdpa") if n in (8 * K, 128 * K) else (),
        )
        for n in (8 * K << i for i in range(8))  # to 1M
    ),
    *(gpu_short(f"gpu-short-{n}-at-128k", q_len=n) for n in (256, 1700)),
    *(
        gpu_decode(
            f"gpu-decode-b{batch}-{_label(n)}",
            batch=batch,
            context=n,
            modes=(*BOTH, "layers") if batch * n <= LAYER_TOKENS else BOTH,
            quick=("decode_plan", "dense_attention/paged", "sdpa") if (batch, n) in ((1, 32 * K), (8, 128 * K)) else (),
        )
        for batch in (1, 8, 32, 64)
        for n in (8 * K, 32 * K, 128 * K, M)
        if batch * n <= DECODE_TOKENS
    ),
    *(w for heads in ((32, 2), (16, 1), (8, 1)) for w in _rank(*heads)),
)


Work = list[tuple[Workload, tuple[str, ...]]]


def quick(device: str) -> Work:
    """Returns the workloads for `device` and the rows of each that a quick run measures."""
    return [(w, w.quick) for w in WORKLOADS if w.device == device and w.quick]


def chosen(device: str, patterns: Iterable[str] = (), missing_ok: bool = False) -> Work:
    """Returns the workloads for `device` and the rows of each that match.

    patterns:  shell patterns for ``workload`` or ``workload/row``; none: everything. A pattern without wildcards also matches
               where it is a part of the workload's name.
    Raises ValueError when a pattern matches nothing on this device, unless missing_ok.
    """
    patterns = tuple(patterns) or ("*",)
    candidates = [w for w in WORKLOADS if w.device == device]
    picked: dict[str, set[str]] = {}
    for pattern in patterns:
        hits = {(w.name, row) for w in candidates for row in w.rows if _matches(pattern, w.name, row)}
        if not hits and not missing_ok:
            names = ", ".join(w.name for w in candidates) or "none"
            raise ValueError(f"match must name a workload for {device} ({names}) or one of its rows, got {pattern!r}")
        for name, row in hits:
            picked.setdefault(name, set()).add(row)
    return [(w, tuple(row for row in w.rows if row in picked[w.name])) for w in candidates if w.name in picked]


def _matches(pattern: str, name: str, row: str) -> bool:
    if not any(c in pattern for c in "*?[") and "/" not in pattern:
        return pattern in name
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f"{name}/{row}", pattern)
